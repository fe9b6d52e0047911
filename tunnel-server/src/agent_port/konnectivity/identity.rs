//! Determines the node of an agent with a service account token, from the API server's review and not from the agent's
//! claim.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::metadata::MetadataMap;
use tunnel_runtime::NodeName;

use crate::caller::{BearerToken, Caller, Refusal, Reviewer, bearer_token, node_of_pod};
use crate::listener::until_withdrawn;
use crate::metrics::{Judgement, Permit};

const WANTED: &str =
    "a client certificate of this server's CA or a service account's token (authorization: Bearer) is needed";
/// Number of tokens that are judged again at a time: the API server has other questions to answer.
const JUDGED_AT_A_TIME: usize = 8;

/// Authentication of agents without a certificate, by service account tokens.
pub struct AgentTokens {
    /// None without an API server to ask.
    reviewer: Option<Reviewer>,
    /// The user whose tokens are accepted.
    user: String,
    /// Taken while a token is judged that an agent was let in by.
    judging: Semaphore,
}

impl AgentTokens {
    pub fn new(reviewer: Option<Reviewer>, user: String) -> Self {
        Self { reviewer, user, judging: Semaphore::new(JUDGED_AT_A_TIME) }
    }
}

/// The credential of an agent without a certificate.
pub(super) struct ByToken {
    tokens: Arc<AgentTokens>,
    token: BearerToken,
    /// The address that has shown it.
    agent: IpAddr,
    /// Its owner.
    caller: Caller,
    pub(super) node: NodeName,
}

impl ByToken {
    /// True if the token was good for a time that is over. The API server has verified what it says of that.
    pub(super) fn has_expired(&self) -> bool {
        expiry(self.token.secret()).is_some_and(|expiry| expiry <= SystemTime::now())
    }

    /// Waits until the token is no longer accepted; returns why.
    pub(super) async fn lapsed(self: Arc<Self>) -> String {
        let tokens = self.tokens.clone();
        until_withdrawn(self, &tokens.judging).await
    }
}

/// The time in a JSON Web Token (RFC 7519 §4.1.4) after which it is not accepted.
fn expiry(token: &str) -> Option<SystemTime> {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: serde_json::Value = serde_json::from_slice(&claims).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(claims["exp"].as_u64()?))
}

#[tonic::async_trait]
impl Permit for ByToken {
    async fn judge(&self) -> Judgement {
        let Some(reviewer) = &self.tokens.reviewer else { return Judgement::Holds };
        let caller = reviewer.caller_again(self.token.secret(), &self.caller, self.agent).await;
        match caller.and_then(|caller| node_of(&caller, &self.tokens.user).map_err(Refusal::Forbidden)) {
            Ok(node) if node == self.node => Judgement::Holds,
            Ok(node) => Judgement::Withdrawn(format!("it is a token of node {node} now")),
            Err(refusal) => refusal.judgement(true),
        }
    }
}

/// Takes the token in a call's metadata; the call came from `agent`.
///
/// # Errors
/// There is no token, it is invalid or another user's, or it names no node.
pub(super) async fn by_token(
    tokens: &Arc<AgentTokens>,
    metadata: &MetadataMap,
    agent: IpAddr,
) -> Result<ByToken, Status> {
    // A malformed one counts as none.
    let token = bearer_token(metadata.as_ref()).ok().flatten();
    let token = token.ok_or_else(|| Status::unauthenticated(WANTED))?;
    let Some(reviewer) = &tokens.reviewer else {
        let reason = "tokens are checked by a cluster's API server, which this server has not: use a client certificate";
        return Err(Status::unauthenticated(reason));
    };
    let caller = reviewer.caller_of_token(token, agent).await.map_err(|refusal| match refusal {
        Refusal::Unavailable(reason) => Status::unavailable(reason),
        other => Status::unauthenticated(other.to_string()),
    })?;
    let node = node_of(&caller, &tokens.user).map_err(Status::permission_denied)?;
    Ok(ByToken { tokens: tokens.clone(), token: BearerToken::new(token), agent, caller, node })
}

fn node_of(caller: &Caller, user: &str) -> Result<NodeName, String> {
    if caller.name != user {
        return Err(format!("{caller} is not {user}, whose tokens are taken here"));
    }
    node_of_pod(user, Some(&caller.extra))
}

#[cfg(test)]
mod tests {
    use postern_fake_kube::ApiServer;
    use serde_json::json;
    use tunnel_kube::ClientSettings;

    use super::*;
    use crate::caller::{Audiences, NODE_NAME, POD_NAME};

    const USER: &str = "system:serviceaccount:kube-system:konnectivity-agent";

    fn caller(name: &str, extra: &[(&str, &[&str])]) -> Caller {
        let extra = extra
            .iter()
            .map(|(key, values)| ((*key).to_owned(), values.iter().map(ToString::to_string).collect()));
        Caller { name: name.to_owned(), groups: Vec::new(), uid: None, extra: extra.collect() }
    }

    #[test]
    fn a_pods_token_names_its_node() {
        let bound = [(NODE_NAME, &["edge-1"][..]), (POD_NAME, &["konnectivity-agent-x"])];
        assert_eq!(node_of(&caller(USER, &bound), USER).unwrap().as_str(), "edge-1");
        for (caller, reason) in [
            (caller("system:serviceaccount:shop:konnectivity-agent", &bound), "whose tokens"),
            (caller(USER, &[]), "not bound"),
            // Made for the node, not for a pod on it.
            (caller(USER, &bound[..1]), "not bound"),
            (caller(USER, &bound[1..]), "not bound"),
            (caller(USER, &[bound[0], (POD_NAME, &["a", "b"])]), "not bound"),
            (caller(USER, &[(NODE_NAME, &["edge-1", "edge-2"]), bound[1]]), "2 values"),
            (caller(USER, &[(NODE_NAME, &["Edge 1"]), bound[1]]), USER),
        ] {
            let error = node_of(&caller, USER).unwrap_err();
            assert!(error.contains(reason), "{caller:?}: {error}");
        }
    }

    #[test]
    fn a_token_says_when_it_expires() {
        let token = |claims: &str| format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims));
        let second = |second| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(second));
        assert_eq!(expiry(&token(r#"{"exp":1700000000,"iss":"https://kubernetes"}"#)), second(1_700_000_000));
        for token in ["", "opaque", "a.b.c", &token("{}"), &token(r#"{"exp":-1}"#), &token(r#"{"exp":"1"}"#)]
        {
            assert_eq!(expiry(token), None, "{token}");
        }
        assert_eq!(expiry(&token(r#"{"exp":18446744073709551615}"#)), None);
    }

    async fn shown(server: &ApiServer) -> ByToken {
        let connected = tunnel_kube::connect(Some(&server.kubeconfig()), None, &ClientSettings::SERVER).await;
        let reviewer = Reviewer::new(connected.unwrap().0, Audiences::only("system:konnectivity-server"));
        ByToken {
            tokens: Arc::new(AgentTokens::new(Some(reviewer), USER.to_owned())),
            token: BearerToken::new("a-token"),
            agent: [10, 0, 0, 1].into(),
            caller: caller(USER, &[]),
            node: "edge-1".parse().unwrap(),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_token_is_judged_again_while_its_agent_is_attached() {
        let server = ApiServer::start();
        let say = |status: serde_json::Value| {
            server.review("tokenreviews", move |review| {
                let mut answer = review.clone();
                answer["status"] = status.clone();
                answer
            });
        };
        let of_node = |node: &str| {
            let extra = json!({NODE_NAME: [node], POD_NAME: ["konnectivity-agent-x"]});
            let audiences = ["system:konnectivity-server"];
            json!({"authenticated": true, "audiences": audiences, "user": {"username": USER, "extra": extra}})
        };
        say(of_node("edge-1"));
        let by_token = shown(&server).await;
        assert_eq!(by_token.judge().await, Judgement::Holds);
        // Each time it is asked, whatever was answered before.
        say(of_node("edge-2"));
        let judgement = by_token.judge().await;
        assert!(matches!(&judgement, Judgement::Withdrawn(why) if why.contains("edge-2")), "{judgement:?}");
        say(json!({"authenticated": false, "error": "it has expired"}));
        let judgement = by_token.judge().await;
        assert!(
            matches!(&judgement, Judgement::Refused(why) if why.contains("has expired")),
            "{judgement:?}"
        );
        server.down();
        let judgement = by_token.judge().await;
        assert!(matches!(judgement, Judgement::Unanswered(_)), "{judgement:?}");
    }
}

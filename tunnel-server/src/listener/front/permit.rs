//! A caller's right to a request, by the cluster's rules.

use std::net::IpAddr;
use std::sync::Arc;

use tunnel_runtime::NodeName;

use crate::caller::{Access, Refusal, Reviewer, Shown};
use crate::metrics::{Judgement, Permit};

/// The right by which a request was admitted.
pub(super) struct RequestPermit {
    /// `None` without a cluster, where a certificate is enough.
    pub(super) reviewer: Option<Arc<Reviewer>>,
    pub(super) shown: Shown,
    pub(super) client: IpAddr,
    pub(super) node: NodeName,
    /// One of these is needed.
    pub(super) accesses: Vec<Access>,
}

impl RequestPermit {
    async fn ask(&self) -> Result<(), Refusal> {
        let caller = match (&self.shown, &self.reviewer) {
            (Shown::Certificate(caller, certified), _) => {
                certified.check().map_err(Refusal::Unauthenticated)?;
                caller.clone()
            }
            (Shown::Token(token), Some(reviewer)) => {
                reviewer.caller_of_token(token.secret(), self.client).await?
            }
            _ => return Err(Refusal::no_identity()),
        };
        match &self.reviewer {
            Some(reviewer) => reviewer.allow(&caller, &self.accesses, &self.node).await,
            None => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl Permit for RequestPermit {
    fn asker(&self) -> Option<[u8; 32]> {
        self.reviewer.as_ref().map(|_| self.shown.digest())
    }

    async fn judge(&self) -> Judgement {
        match self.ask().await {
            Ok(()) => Judgement::Holds,
            Err(refusal) => refusal.judgement(self.reviewer.is_some()),
        }
    }
}

#[cfg(test)]
mod tests {
    use postern_fake_kube::ApiServer;
    use serde_json::{Value, json};
    use tunnel_kube::ClientSettings;

    use super::*;
    use crate::caller::{Audiences, BearerToken};

    /// Each reviewer remembers nothing yet, as after 30 s.
    async fn right(server: &ApiServer) -> RequestPermit {
        let kubeconfig = server.kubeconfig();
        let connected = tunnel_kube::connect(Some(&kubeconfig), None, &ClientSettings::SERVER).await;
        RequestPermit {
            reviewer: Some(Arc::new(Reviewer::new(
                connected.unwrap().0,
                Audiences::only("postern.internal"),
            ))),
            shown: Shown::Token(BearerToken::new("a-token")),
            client: [10, 0, 0, 1].into(),
            node: "edge-1".parse().unwrap(),
            accesses: vec![Access { verb: "create", subresource: "proxy" }],
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn it_ends_with_the_token_and_with_the_right_and_outlives_the_api_server() {
        let server = ApiServer::start();
        let say = |token: bool, access: bool| {
            let answer = move |review: &Value, status: Value| {
                let mut answer = review.clone();
                answer["status"] = status;
                answer
            };
            server.review("tokenreviews", move |review| {
                let audiences = ["postern.internal"];
                answer(
                    review,
                    json!({"authenticated": token, "user": {"username": "alice"}, "audiences": audiences}),
                )
            });
            server.review("subjectaccessreviews", move |review| {
                let known = review["spec"]["user"] == "alice";
                answer(review, json!({"allowed": known && access, "reason": "RBAC"}))
            });
        };
        say(true, true);
        assert_eq!(right(&server).await.judge().await, Judgement::Holds);
        say(false, true);
        let withdrawn = |judgement: Judgement, word: &str| {
            assert!(matches!(&judgement, Judgement::Refused(why) if why.contains(word)), "{judgement:?}");
        };
        withdrawn(right(&server).await.judge().await, "does not accept the bearer token");
        say(true, false);
        withdrawn(right(&server).await.judge().await, "alice cannot create nodes/proxy of edge-1");
        let silent = right(&server).await;
        server.down();
        let judgement = silent.judge().await;
        assert!(matches!(judgement, Judgement::Unanswered(_)), "{judgement:?}");
    }
}

//! Asks the API server who owns a token and what a caller may do. Answers are cached briefly.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Api;
use kube::api::PostParams;
use sha2::{Digest as _, Sha256};
use tunnel_kube::request;
use tunnel_runtime::NodeName;

use super::access::Access;
use super::audiences::Audiences;
use super::identity::{Caller, Refusal};
use super::questions::{Asker, Questions};
use crate::caller::answer_cache::VerdictCache;

/// Time for which a positive answer is cached. A deleted token or a withdrawn right still works here that long.
const YES: Duration = Duration::from_secs(30);
/// Time for which a negative answer is cached: a right that was just granted is asked for again soon.
const NO: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(4);

/// An action that a caller wants to perform.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Right {
    Node(Access, NodeName),
    /// The same action on every node.
    AllNodes(Access),
    /// GET of a path of this server itself.
    Path(&'static str),
}

/// Asks the API server about callers.
pub struct Reviewer {
    client: kube::Client,
    audiences: Audiences,
    /// Keyed by the token's hash: tokens themselves are not kept.
    tokens: VerdictCache<[u8; 32], Caller, String>,
    rights: VerdictCache<(Caller, Right), (), String>,
    questions: Arc<Questions>,
}

impl Reviewer {
    /// Tokens have to be for one of these audiences.
    pub fn new(client: kube::Client, audiences: Audiences) -> Self {
        Self {
            client,
            audiences,
            tokens: VerdictCache::new(YES, NO),
            rights: VerdictCache::new(YES, NO),
            questions: Arc::default(),
        }
    }

    /// Returns the turns at the API server, for code that asks it other questions about the same callers.
    pub(crate) fn questions(&self) -> Arc<Questions> {
        self.questions.clone()
    }

    /// Returns the owner of the token (TokenReview). A client at the address `source` has shown it.
    ///
    /// # Errors
    /// The token has no owner, or the API server does not answer.
    pub async fn caller_of_token(&self, token: &str, source: IpAddr) -> Result<Caller, Refusal> {
        let key: [u8; 32] = Sha256::digest(token).into();
        if let Some(known) = self.tokens.get(&key) {
            return known.map_err(Refusal::Unauthenticated);
        }
        let _turn = self.questions.turn(Asker::new(None, source)).await?;
        // Another request may have asked while this one waited.
        let answer = match self.tokens.get(&key) {
            Some(known) => known,
            None => {
                let answer = self.review_token(token).await?;
                self.tokens.put(key, answer.clone());
                answer
            }
        };
        answer.map_err(Refusal::Unauthenticated)
    }

    /// Asks about the token of a known caller, whatever was answered before.
    ///
    /// # Errors
    /// The token has no owner, or the API server does not answer.
    pub(crate) async fn caller_again(
        &self,
        token: &str,
        known: &Caller,
        source: IpAddr,
    ) -> Result<Caller, Refusal> {
        let _turn = self.questions.turn(Asker::new(Some(known), source)).await?;
        self.review_token(token).await?.map_err(Refusal::Unauthenticated)
    }

    async fn review_token(&self, token: &str) -> Result<Result<Caller, String>, Refusal> {
        let Audiences { own, api_server } = &self.audiences;
        if !own.is_empty() {
            let status = self.review_for(token, Some(own.clone())).await?;
            let named = status.audiences.as_deref().unwrap_or_default();
            // An authenticator that does not know audiences names none: the token is for the API server.
            let ours = own.iter().any(|own| named.contains(own)) || named.is_empty() && *api_server;
            match status.authenticated == Some(true) {
                true if ours => return Ok(owner(status)),
                true if !api_server => return Ok(Err(format!("the token is not for {}", own.join(" or ")))),
                false if !api_server => {
                    let refused = owner(status);
                    return Ok(refused.map_err(|why| format!("{why}; it has to be for {}", own.join(" or "))));
                }
                _ => {}
            }
        }
        Ok(owner(self.review_for(token, None).await?))
    }

    /// `audiences`: `None` for the API server's own.
    async fn review_for(
        &self,
        token: &str,
        audiences: Option<Vec<String>>,
    ) -> Result<TokenReviewStatus, Refusal> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences };
        let review = TokenReview { spec, ..TokenReview::default() };
        Ok(self.ask(review).await?.status.unwrap_or_default())
    }

    /// Checks that the caller may do one of these to the node (SubjectAccessReview). They are asked in turn.
    ///
    /// # Errors
    /// The caller may do none of them, or the API server does not answer.
    pub async fn allow(&self, caller: &Caller, accesses: &[Access], node: &NodeName) -> Result<(), Refusal> {
        self.allow_any(caller, accesses, |access| Right::Node(access, node.clone())).await
    }

    /// Checks that the caller may do one of these to the node of a pod. With `None`, the pod has no edge node; only
    /// callers that may do it to all nodes are told so. To others all pods look alike.
    ///
    /// # Errors
    /// The caller may do none of them, or the API server does not answer.
    pub async fn allow_at_pod(
        &self,
        caller: &Caller,
        accesses: &[Access],
        node: Option<&NodeName>,
    ) -> Result<(), Refusal> {
        let allowed = match node {
            Some(node) => self.allow(caller, accesses, node).await,
            None => self.allow_any(caller, accesses, Right::AllNodes).await,
        };
        allowed.map_err(|refusal| match refusal {
            Refusal::Forbidden(_) => {
                let wanted: Vec<_> = accesses.iter().map(in_words).collect();
                let wanted = wanted.join(" or ");
                Refusal::Forbidden(format!(
                    "{caller} cannot {wanted} of this pod's node, or there is no such pod on an edge node: who can {wanted} \
                     of all nodes is told more"
                ))
            }
            other => other,
        })
    }

    async fn allow_any(
        &self,
        caller: &Caller,
        accesses: &[Access],
        right: impl Fn(Access) -> Right,
    ) -> Result<(), Refusal> {
        let mut reasons = Vec::new();
        for access in accesses {
            match self.has(caller, right(access.clone())).await? {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(Refusal::Forbidden(reasons.join("; ")))
    }

    /// Checks that the caller may GET this path, a nonResourceURL (SubjectAccessReview).
    ///
    /// # Errors
    /// The caller may not, or the API server does not answer.
    pub async fn allow_path(&self, caller: &Caller, path: &'static str) -> Result<(), Refusal> {
        self.has(caller, Right::Path(path)).await?.map_err(Refusal::Forbidden)
    }

    async fn has(&self, caller: &Caller, right: Right) -> Result<Result<(), String>, Refusal> {
        let key = (caller.clone(), right);
        if let Some(known) = self.rights.get(&key) {
            return Ok(known);
        }
        let _turn = self.questions.turn(Asker::Known(caller.name.clone())).await?;
        // Another request may have asked while this one waited.
        if let Some(known) = self.rights.get(&key) {
            return Ok(known);
        }
        let answer = self.review_access(caller, &key.1).await?;
        self.rights.put(key, answer.clone());
        Ok(answer)
    }

    async fn review_access(&self, caller: &Caller, right: &Right) -> Result<Result<(), String>, Refusal> {
        let extra: BTreeMap<_, _> = caller.extra.clone();
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(caller.name.clone()),
                groups: Some(caller.groups.clone()),
                uid: caller.uid.clone(),
                extra: (!extra.is_empty()).then_some(extra),
                ..right.asked()
            },
            ..SubjectAccessReview::default()
        };
        let status = self.ask(review).await?.status.unwrap_or_default();
        if status.allowed && status.denied != Some(true) {
            return Ok(Ok(()));
        }
        let why = status.reason.filter(|reason| !reason.is_empty());
        Ok(Err(format!("{caller} cannot {right}{}", why.map(|why| format!(": {why}")).unwrap_or_default())))
    }

    async fn ask<K>(&self, review: K) -> Result<K, Refusal>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        let api = Api::<K>::all(self.client.clone());
        let (params, kind) = (PostParams::default(), K::kind(&()));
        request(DEADLINE, "creating", &kind, api.create(&params, &review)).await.map_err(|error| {
            Refusal::Unavailable(format!("failed to review the caller at the API server: {error}"))
        })
    }
}

/// Returns the owner of a reviewed token, or the reason for having none.
fn owner(status: TokenReviewStatus) -> Result<Caller, String> {
    let user = status.user.unwrap_or_default();
    match user.username.filter(|name| !name.is_empty()) {
        Some(name) if status.authenticated == Some(true) => Ok(Caller {
            name,
            groups: user.groups.unwrap_or_default(),
            uid: user.uid,
            extra: user.extra.unwrap_or_default(),
        }),
        _ => Err(match status.error.filter(|error| !error.is_empty()) {
            Some(error) => format!("the API server does not accept the bearer token: {error}"),
            None => "the API server does not accept the bearer token".to_owned(),
        }),
    }
}

/// Formats the access as in "get nodes/metrics".
fn in_words(Access { verb, subresource }: &Access) -> String {
    let verb = if verb.is_empty() { "use this method on" } else { *verb };
    format!("{verb} nodes/{subresource}")
}

/// Returns the question about a node, or about all nodes if there is no name, without the caller.
fn of_nodes(access: &Access, node: Option<&NodeName>) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        resource_attributes: Some(ResourceAttributes {
            verb: Some(access.verb.to_owned()),
            group: Some(String::new()),
            version: Some("v1".to_owned()),
            resource: Some("nodes".to_owned()),
            subresource: Some(access.subresource.to_owned()),
            name: node.map(ToString::to_string),
            ..ResourceAttributes::default()
        }),
        ..SubjectAccessReviewSpec::default()
    }
}

impl Right {
    /// Returns the question about this right, without the caller.
    fn asked(&self) -> SubjectAccessReviewSpec {
        match self {
            Self::Node(access, node) => of_nodes(access, Some(node)),
            Self::AllNodes(access) => of_nodes(access, None),
            Self::Path(path) => SubjectAccessReviewSpec {
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some((*path).to_owned()),
                    verb: Some("get".to_owned()),
                }),
                ..SubjectAccessReviewSpec::default()
            },
        }
    }
}

/// Formats the right as in "cannot get nodes/metrics of edge-1".
impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(access, node) => write!(f, "{} of {node}", in_words(access)),
            Self::AllNodes(access) => write!(f, "{} of all nodes", in_words(access)),
            Self::Path(path) => write!(f, "get the nonResourceURL {path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Instant;

    use http::Method;
    use postern_fake_kube::{ApiServer, Fault, eventually};
    use serde_json::{Value, json};
    use tokio::task::JoinSet;
    use tunnel_kube::ClientSettings;

    use super::*;
    use crate::caller::{DEFAULT_AUDIENCES, kubelet_accesses, parse_audiences};

    const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
    const RIGHTS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    /// Knows one token, whose user may read metrics of edge-1 and of this server, and do everything to edge-2.
    async fn reviewer() -> (ApiServer, Reviewer) {
        reviewer_for("api-server").await
    }

    async fn reviewer_for(audiences: &str) -> (ApiServer, Reviewer) {
        let server = ApiServer::start();
        server.review("tokenreviews", |review| {
            let mut answer = review.clone();
            // Of the API server's own audience if no other is asked for, as kube-apiserver does it.
            let asked = review["spec"]["audiences"].as_array().map_or(&[][..], Vec::as_slice);
            let user = json!({
                "username": "prometheus", "uid": "7", "groups": ["monitoring"],
                "extra": {"authentication.kubernetes.io/pod-name": ["p"]},
            });
            answer["status"] = match review["spec"]["token"].as_str() {
                Some("good") if asked.is_empty() => json!({"authenticated": true, "user": user}),
                Some("ours") if asked.contains(&json!("postern.internal")) => {
                    json!({"authenticated": true, "user": user, "audiences": ["postern.internal"]})
                }
                // Of an authenticator that does not know audiences.
                Some("unaware") => json!({"authenticated": true, "user": user}),
                Some("another's") => json!({"authenticated": true, "user": user, "audiences": ["elsewhere"]}),
                _ => json!({"authenticated": false, "error": "it has expired"}),
            };
            answer
        });
        server.review("subjectaccessreviews", |review| {
            let spec = &review["spec"];
            let known = spec["user"] == "prometheus"
                && spec["uid"] == "7"
                && spec["groups"] == json!(["monitoring"])
                && spec["extra"] == json!({"authentication.kubernetes.io/pod-name": ["p"]});
            let asked = &spec["resourceAttributes"];
            let plain = asked["resource"] == "nodes" && asked["version"] == "v1" && asked["group"] == "";
            let metrics = asked["subresource"] == "metrics" && asked["verb"] == "get";
            let of_node = plain && (asked["name"] == "edge-2" || asked["name"] == "edge-1" && metrics);
            let path = spec["nonResourceAttributes"] == json!({"path": "/metrics", "verb": "get"});
            let allowed = known && (of_node || path);
            let mut answer: Value = review.clone();
            answer["status"] = json!({"allowed": allowed, "reason": "RBAC"});
            answer
        });
        let kubeconfig = server.kubeconfig();
        let connected = tunnel_kube::connect(Some(&kubeconfig), None, &ClientSettings::SERVER).await;
        (server, Reviewer::new(connected.unwrap().0, parse_audiences(audiences).unwrap()))
    }

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_api_server_knows_whose_token_it_is() {
        let (server, reviewer) = reviewer().await;
        for _ in 0..3 {
            let caller = reviewer.caller_of_token("good", SOURCE).await.unwrap();
            assert_eq!(
                (caller.name.as_str(), &caller.groups[..]),
                ("prometheus", &["monitoring".to_owned()][..])
            );
            assert_eq!(caller.uid.as_deref(), Some("7"));
            let refused = reviewer.caller_of_token("bad", SOURCE).await.unwrap_err();
            assert!(
                matches!(&refused, Refusal::Unauthenticated(why) if why.contains("expired")),
                "{refused}"
            );
        }
        assert_eq!(server.requests("create", TOKENS), 2, "each is asked once");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_yes_is_remembered_for_30_s_and_a_no_for_5() {
        let (_server, reviewer) = reviewer().await;
        let before = Instant::now();
        let caller = reviewer.caller_of_token("good", SOURCE).await.unwrap();
        reviewer.caller_of_token("bad", SOURCE).await.unwrap_err();
        reviewer.allow_path(&caller, "/metrics").await.unwrap();
        reviewer.allow_path(&caller, "/status").await.unwrap_err();
        let after = Instant::now();
        let [yes, no] = ["good", "bad"].map(|token| -> [u8; 32] { Sha256::digest(token).into() });
        let [may, may_not] = ["/metrics", "/status"].map(|path| (caller.clone(), Right::Path(path)));
        let remembered = |at: Instant| {
            let (tokens, rights) = (&reviewer.tokens, &reviewer.rights);
            let tokens = [&yes, &no].map(|token| tokens.get_at(token, at).is_some());
            (tokens, [&may, &may_not].map(|right| rights.get_at(right, at).is_some()))
        };
        let [five, thirty] = [5, 30].map(Duration::from_secs);
        assert_eq!(remembered(before + five), ([true; 2], [true; 2]));
        assert_eq!(remembered(after + five), ([true, false], [true, false]));
        assert_eq!(remembered(before + thirty), ([true, false], [true, false]));
        assert_eq!(remembered(after + thirty), ([false; 2], [false; 2]));
    }

    /// A token that is shown here must be good for nothing else, where the operator wants that.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_token_is_for_one_of_the_audiences() {
        for (audiences, good, ours, unaware) in [
            (DEFAULT_AUDIENCES, true, true, true),
            ("postern.internal", false, true, false),
            ("other,postern.internal", false, true, false),
            ("other", false, false, false),
            ("api-server", true, false, true),
        ] {
            let (_server, reviewer) = reviewer_for(audiences).await;
            for (token, accepted) in [("good", good), ("ours", ours), ("unaware", unaware), ("bad", false)] {
                let found = reviewer.caller_of_token(token, SOURCE).await;
                assert_eq!(found.is_ok(), accepted, "{token} with {audiences}: {found:?}");
                if let Err(refused) = found {
                    assert!(matches!(refused, Refusal::Unauthenticated(_)), "{token}: {refused}");
                    let named = audiences.contains("api-server")
                        || refused.to_string().contains("for other")
                        || refused.to_string().contains("for postern.internal");
                    assert!(named, "{token} with {audiences}: {refused}");
                }
            }
            if !audiences.contains("api-server") {
                let refused = reviewer.caller_of_token("another's", SOURCE).await.unwrap_err();
                assert!(refused.to_string().starts_with("the token is not for "), "{refused}");
            }
        }
    }

    /// The own audience is asked about first: a token for it costs one question.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_token_for_the_own_audience_is_asked_about_once() {
        let (server, reviewer) = reviewer_for(DEFAULT_AUDIENCES).await;
        reviewer.caller_of_token("ours", SOURCE).await.unwrap();
        assert_eq!(server.requests("create", TOKENS), 1);
        reviewer.caller_of_token("good", SOURCE).await.unwrap();
        assert_eq!(server.requests("create", TOKENS), 3);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_clusters_rules_decide() {
        let (server, reviewer) = reviewer().await;
        let caller = reviewer.caller_of_token("good", SOURCE).await.unwrap();
        for (node_name, method, path, allowed) in [
            ("edge-1", Method::GET, "/metrics", true),
            ("edge-1", Method::GET, "/metrics/cadvisor", true),
            ("edge-1", Method::POST, "/metrics", false),
            ("edge-1", Method::GET, "/exec/a/b/c", false),
            ("edge-1", Method::GET, "/pods", false),
            ("edge-2", Method::POST, "/exec/a/b/c", true),
            ("edge-2", Method::GET, "/pods", true),
        ] {
            let accesses = kubelet_accesses(&method, path);
            let answer = reviewer.allow(&caller, &accesses, &node(node_name)).await;
            assert_eq!(answer.is_ok(), allowed, "{method} {path} at {node_name}: {answer:?}");
            if let Err(refused) = answer {
                let text = refused.to_string();
                assert!(matches!(refused, Refusal::Forbidden(_)), "{text}");
                assert!(text.contains("prometheus cannot") && text.contains("of edge-1: RBAC"), "{text}");
            }
        }
        let asked = server.requests("create", RIGHTS);
        reviewer.allow(&caller, &kubelet_accesses(&Method::GET, "/metrics"), &node("edge-1")).await.unwrap();
        assert_eq!(server.requests("create", RIGHTS), asked, "a yes is remembered");
    }

    /// Otherwise anybody with a token could find out which pods exist, and on which nodes.
    #[tokio::test(flavor = "multi_thread")]
    async fn who_may_not_learns_nothing_of_pods() {
        let (server, reviewer) = reviewer().await;
        server.review("subjectaccessreviews", |review| {
            let asked = &review["spec"]["resourceAttributes"];
            let proxy = asked["subresource"] == "proxy" && asked["verb"] == "get";
            let allowed = match review["spec"]["user"].as_str() {
                Some("admin") => proxy,
                Some("of edge-2") => proxy && asked["name"] == "edge-2",
                _ => false,
            };
            let mut answer: Value = review.clone();
            answer["status"] =
                json!({"allowed": allowed, "reason": format!("the rules for {}", asked["name"])});
            answer
        });
        let exec = kubelet_accesses(&Method::GET, "/exec/ns/web/c");
        let (one, two) = (node("edge-1"), node("edge-2"));
        let (reviewer, exec) = (&reviewer, &exec);
        let may = async |user: &str, node: Option<&NodeName>| {
            reviewer.allow_at_pod(&Caller::new(user.to_owned(), Vec::new()), exec, node).await
        };
        let refused = may("scraper", None).await.unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, Refusal::Forbidden(_)), "{text}");
        assert!(text.starts_with("scraper cannot get nodes/proxy of this pod's node"), "{text}");
        for node in [Some(&one), Some(&two)] {
            assert_eq!(may("scraper", node).await, Err(refused.clone()));
        }
        assert_eq!(may("of edge-2", Some(&two)).await, Ok(()));
        assert_eq!(may("of edge-2", Some(&one)).await, may("of edge-2", None).await);
        assert!(may("of edge-2", None).await.is_err());
        for node in [Some(&one), None] {
            assert_eq!(may("admin", node).await, Ok(()));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_path_is_a_right_of_its_own() {
        let (server, reviewer) = reviewer().await;
        let caller = reviewer.caller_of_token("good", SOURCE).await.unwrap();
        for _ in 0..3 {
            assert_eq!(reviewer.allow_path(&caller, "/metrics").await, Ok(()));
            let refused = reviewer.allow_path(&caller, "/status").await.unwrap_err();
            let reason = "prometheus cannot get the nonResourceURL /status: RBAC";
            assert_eq!(refused, Refusal::Forbidden(reason.to_owned()));
        }
        assert_eq!(server.requests("create", RIGHTS), 2, "each is asked once");
        let nobody = Caller::new("nobody".to_owned(), Vec::new());
        assert!(matches!(reviewer.allow_path(&nobody, "/metrics").await, Err(Refusal::Forbidden(_))));
    }

    /// New callers are not let in meanwhile, and known ones are.
    #[tokio::test(flavor = "multi_thread")]
    async fn while_the_api_server_is_away_nobody_new_is_let_in() {
        let (server, reviewer) = reviewer().await;
        let caller = reviewer.caller_of_token("good", SOURCE).await.unwrap();
        let metrics = kubelet_accesses(&Method::GET, "/metrics");
        reviewer.allow(&caller, &metrics, &node("edge-1")).await.unwrap();
        server.down();
        assert!(matches!(reviewer.caller_of_token("other", SOURCE).await, Err(Refusal::Unavailable(_))));
        assert!(matches!(
            reviewer.allow(&caller, &metrics, &node("edge-2")).await,
            Err(Refusal::Unavailable(_))
        ));
        assert_eq!(reviewer.caller_of_token("good", SOURCE).await, Ok(caller.clone()));
        assert_eq!(reviewer.allow(&caller, &metrics, &node("edge-1")).await, Ok(()));
    }

    /// The API server is slow, and an unauthenticated client shows tokens as fast as it can.
    #[tokio::test(flavor = "multi_thread")]
    async fn unknown_tokens_do_not_keep_others_waiting() {
        const JUNK: usize = 200;
        let (server, reviewer) = reviewer().await;
        let reviewer = Arc::new(reviewer);
        server.inject("create", "tokenreviews", Fault::Delay(Duration::from_secs(1)), usize::MAX);
        let mut junk = JoinSet::new();
        for number in 0..JUNK {
            let reviewer = reviewer.clone();
            junk.spawn(async move { reviewer.caller_of_token(&format!("junk {number}"), SOURCE).await });
        }
        let asked = || server.requests("create", TOKENS);
        eventually("the first questions of unauthenticated callers", || (asked() > 0).then_some(())).await;
        let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
        let caller = reviewer.caller_of_token("good", other).await.unwrap();
        assert_eq!(caller.name, "prometheus");
        // Questions that were there before it are not counted: the junk tokens are still asked for, a few at a time.
        assert!(asked() < JUNK / 2, "{} questions came before", asked());
        junk.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_question_that_many_have_is_asked_few_times() {
        let (server, reviewer) = reviewer().await;
        let reviewer = Arc::new(reviewer);
        server.inject("create", "*", Fault::Delay(Duration::from_millis(100)), usize::MAX);
        let mut callers = JoinSet::new();
        for _ in 0..200 {
            let reviewer = reviewer.clone();
            callers.spawn(async move {
                let caller = reviewer.caller_of_token("good", SOURCE).await?;
                reviewer.allow_path(&caller, "/metrics").await
            });
        }
        assert!(callers.join_all().await.iter().all(Result::is_ok));
        for path in [TOKENS, RIGHTS] {
            let asked = server.requests("create", path);
            assert!(asked <= 16, "{path} was asked {asked} times");
        }
    }
}

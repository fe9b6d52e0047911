use std::net::Ipv4Addr;

use http::Method;
use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;
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
        assert!(matches!(&refused, Refusal::Unauthenticated(why) if why.contains("expired")), "{refused}");
    }
    assert_eq!(server.requests("create", TOKENS), 2, "each is asked once");
}

#[tokio::test]
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
    tokio::time::pause();
    let remembered = async |at: Instant| {
        tokio::time::advance(at - Instant::now()).await;
        let (tokens, rights) = (&reviewer.tokens, &reviewer.rights);
        let tokens = [&yes, &no].map(|token| tokens.get(token).is_some());
        (tokens, [&may, &may_not].map(|right| rights.get(right).is_some()))
    };
    let ([five, thirty], short) = ([5, 30].map(Duration::from_secs), Duration::from_millis(1));
    assert_eq!(remembered(before + five - short).await, ([true; 2], [true; 2]));
    assert_eq!(remembered(after + five).await, ([true, false], [true, false]));
    assert_eq!(remembered(before + thirty - short).await, ([true, false], [true, false]));
    assert_eq!(remembered(after + thirty).await, ([false; 2], [false; 2]));
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
        answer["status"] = json!({"allowed": allowed, "reason": format!("the rules for {}", asked["name"])});
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
    assert!(matches!(reviewer.allow(&caller, &metrics, &node("edge-2")).await, Err(Refusal::Unavailable(_))));
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

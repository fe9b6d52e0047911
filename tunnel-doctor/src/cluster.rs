//! `doctor`'s checks of the API server: that it answers, the clock, and this client's permissions.

use std::time::{Duration, SystemTime};

use http::{Request, Response, StatusCode, header};
use jiff::fmt::rfc2822::DateTimeParser;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::client::Body;
use kube::{Api, Client};
use tunnel_kube::request;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::text::age;

use crate::{Checkup, Finding, Outcome, codes};

const DEADLINE: Duration = Duration::from_secs(15);
const API_SERVER: &str = "API server";
/// Allowed clock difference. Agents' certificates are backdated by the same time.
const SKEW: Duration = Duration::from_secs(300);

/// Verbs on a resource.
#[derive(Clone, Debug)]
pub struct Right {
    pub group: &'static str,
    /// With the subresource, as in `nodes/status`.
    pub resource: &'static str,
    pub verbs: &'static [&'static str],
    /// None means any object.
    pub name: Option<String>,
    namespaced: bool,
}

impl Right {
    /// Permission in the whole cluster.
    pub fn everywhere(group: &'static str, resource: &'static str, verbs: &'static [&'static str]) -> Self {
        Self { group, resource, verbs, name: None, namespaced: false }
    }

    /// Permission in the namespace of the objects.
    pub fn here(group: &'static str, resource: &'static str, verbs: &'static [&'static str]) -> Self {
        Self { namespaced: true, ..Self::everywhere(group, resource, verbs) }
    }

    /// Limits the permission to the object of this name.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..self }
    }

    fn shown(&self, verb: &str, namespace: &str) -> String {
        let group = if self.group.is_empty() { String::new() } else { format!(".{}", self.group) };
        let name = self.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        let place = if self.namespaced { format!(" in {namespace}") } else { String::new() };
        format!("{verb} {}{group}{name}{place}", self.resource)
    }

    fn review(&self, verb: &str, namespace: &str) -> SelfSubjectAccessReview {
        let (resource, subresource) = match self.resource.split_once('/') {
            Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
            None => (self.resource, None),
        };
        let attributes = ResourceAttributes {
            group: Some(self.group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource,
            verb: Some(verb.to_owned()),
            name: self.name.clone(),
            namespace: self.namespaced.then(|| namespace.to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        };
        SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() }
    }
}

/// Checks the API server of the client, and returns the client. `fix` says how there can be one.
pub async fn connected(
    checkup: &mut Checkup,
    connected: Result<(Client, String), ConfigError>,
    fix: &str,
) -> Option<(Client, String)> {
    match connected {
        Ok((client, namespace)) => {
            checkup.run(API_SERVER, &[], async || answers(&client).await).await;
            Some((client, namespace))
        }
        Err(error) => {
            checkup
                .add(API_SERVER, Finding::new(&codes::API_SERVER_UNREACHABLE, error.to_string(), fix).into());
            None
        }
    }
}

/// Checks that the API server answers and that its clock agrees with this host's.
async fn answers(client: &Client) -> Outcome {
    let unreachable = |reason: String| {
        let fix = "compare `kubectl get --raw /version` from this host, its routes, and a proxy or firewall on the way";
        Finding::new(&codes::API_SERVER_UNREACHABLE, reason, fix).into()
    };
    let Ok(get) = Request::get("/version").body(Body::empty()) else {
        return unreachable("the request cannot be made".to_owned());
    };
    let answer = match request(DEADLINE, "reading", "/version", client.send(get)).await {
        Ok(answer) => answer,
        Err(error) => return unreachable(error.reason),
    };
    if let Some(finding) = clock(&answer, SystemTime::now()) {
        return finding.into();
    }
    match answer.status() {
        // Anonymous requests may be refused, but the API server has answered.
        StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Outcome::fine("it answers"),
        status => unreachable(format!("/version answered {status}")),
    }
}

fn clock<B>(answer: &Response<B>, now: SystemTime) -> Option<Finding> {
    let date = answer.headers().get(header::DATE)?.to_str().ok()?;
    let there = SystemTime::from(DateTimeParser::new().parse_timestamp(date).ok()?);
    let (difference, word) = match there.duration_since(now) {
        Ok(ahead) => (ahead, "behind"),
        Err(error) => (error.duration(), "ahead of"),
    };
    (difference > SKEW).then(|| {
        let found =
            format!("this host's clock is {} {word} the API server's ({date})", age(difference.as_secs()));
        let fix = "timedatectl set-ntp true, on the host whose `date -u` is wrong";
        Finding::new(&codes::CLOCK_SKEW, found, fix)
    })
}

/// Checks this client's permissions by SelfSubjectAccessReview.
pub async fn rights(client: &Client, namespace: &str, wanted: &[Right], fix: &str) -> Outcome {
    let api = Api::<SelfSubjectAccessReview>::all(client.clone());
    let (params, mut asked, mut faults) = (PostParams::default(), 0, Vec::new());
    for right in wanted {
        for verb in right.verbs {
            let review = right.review(verb, namespace);
            let create = api.create(&params, &review);
            let answer = match request(DEADLINE, "creating", "SelfSubjectAccessReview", create).await {
                Ok(answer) => answer,
                Err(error) => return Outcome::Skipped(error.to_string()),
            };
            asked += 1;
            if !answer.status.is_some_and(|status| status.allowed) {
                let found = format!("may not {}", right.shown(verb, namespace));
                faults.push(Finding::new(&codes::API_RIGHT_MISSING, found, fix));
            }
        }
    }
    Outcome::of(faults, format!("all {asked} are given"))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::BodyExt as _;
    use postern_fake_kube::ApiServer;
    use serde_json::{Value, json};
    use tunnel_kube::{ClientSettings, connect};

    use super::*;

    fn codes_of(outcome: Outcome) -> Vec<(&'static str, String)> {
        match outcome {
            Outcome::Faults(findings) => {
                findings.into_iter().map(|finding| (finding.code, finding.found)).collect()
            }
            Outcome::Fine(_) => Vec::new(),
            Outcome::Skipped(reason) => vec![("skipped", reason)],
        }
    }

    #[tokio::test]
    async fn an_api_server_that_is_away_is_found() {
        let server = ApiServer::start();
        let (client, _) = connect(Some(&server.kubeconfig()), None, &ClientSettings::SERVER).await.unwrap();
        server.down();
        let found = codes_of(answers(&client).await);
        assert_eq!(found[0].0, "api-server-unreachable");
        assert!(found[0].1.contains("refused"), "{found:?}");
    }

    #[test]
    fn the_answers_date_shows_a_wrong_clock() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let answer = |date: &str| Response::builder().header("date", date).body(()).unwrap();
        for (date, expected) in [
            ("Fri, 15 Jan 2027 08:00:00 GMT", None),
            ("Fri, 15 Jan 2027 08:04:00 GMT", None),
            ("Fri, 15 Jan 2027 10:00:00 GMT", Some("2h0m behind")),
            ("Thu, 14 Jan 2027 08:00:00 GMT", Some("1d0h ahead of")),
            ("yesterday", None),
        ] {
            let finding = clock(&answer(date), now);
            assert_eq!(finding.is_some(), expected.is_some(), "{date}");
            if let (Some(finding), Some(expected)) = (finding, expected) {
                assert_eq!(finding.code, "clock-skew");
                assert!(finding.found.contains(expected), "{finding:?}");
            }
        }
    }

    /// A fake API server that answers access reviews with `allows`.
    fn reviewer(allows: fn(&Value) -> bool) -> Client {
        let service = tower::service_fn(move |request: Request<Body>| async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut review: Value = serde_json::from_slice(&body).unwrap();
            review["status"] = json!({"allowed": allows(&review["spec"]["resourceAttributes"])});
            Ok::<_, Infallible>(Response::new(Body::from(serde_json::to_vec(&review).unwrap())))
        });
        Client::new(service, "kube-system")
    }

    #[tokio::test]
    async fn each_missing_right_is_named() {
        let wanted = [
            Right::everywhere("", "nodes", &["list", "watch"]),
            Right::everywhere("certificates.k8s.io", "certificatesigningrequests/approval", &["update"]),
            Right::here("", "secrets", &["get", "update"]).named("tunnel-server-ca"),
        ];
        let some = reviewer(|asked| {
            let has = |key: &str, value: &str| asked[key] == value;
            assert_eq!(asked["namespace"].is_string(), has("resource", "secrets"), "{asked}");
            has("resource", "nodes")
                || has("resource", "certificatesigningrequests") && has("subresource", "approval")
                || has("name", "tunnel-server-ca") && has("verb", "get")
        });
        let found = codes_of(rights(&some, "kube-system", &wanted, "kubectl apply").await);
        let missing = "may not update secrets tunnel-server-ca in kube-system";
        assert_eq!(found, [("api-right-missing", missing.to_owned())]);
        let none = codes_of(rights(&reviewer(|_| false), "kube-system", &wanted, "kubectl apply").await);
        assert_eq!(none.len(), 5);
        let update = "may not update certificatesigningrequests/approval.certificates.k8s.io";
        assert!(none.iter().any(|(_, found)| found == update), "{none:?}");
        assert_eq!(codes_of(rights(&reviewer(|_| true), "kube-system", &wanted, "").await), []);
    }
}

//! This server's own answers, for requests that do not reach their node.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use serde_json::json;
use tunnel_link::outcome::OUTCOME_HEADER;

use super::body::Body;
use crate::listener::answer::Failure;

/// Challenges for a proxy's client without credentials (RFC 9110 section 15.5.8).
const CHALLENGES: [&str; 2] = [r#"Basic realm="postern", charset="UTF-8""#, r#"Bearer realm="postern""#];

/// Recipient of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// kubectl or another Kubernetes client, which reads a Status.
    Kubernetes,
    Person,
}

/// Returns the kind of recipient. `kubelet_path`: the path is one of the kubelet's for pods.
pub(super) fn reader(headers: &HeaderMap, kubelet_path: bool) -> Reader {
    let text =
        |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    let agents =
        ["kubectl/", "kube-apiserver/", "kubelet/", "kube-controller-manager/", "Kubernetes-Go-Client"];
    let of_kubernetes = agents.iter().any(|agent| text(header::USER_AGENT).starts_with(agent));
    let wants_json = text(header::ACCEPT).split(',').any(|kind| {
        let kind = kind.split(';').next().unwrap_or_default().trim();
        kind.eq_ignore_ascii_case("application/json") || kind.starts_with("application/vnd.kubernetes.")
    });
    if kubelet_path || of_kubernetes || wants_json { Reader::Kubernetes } else { Reader::Person }
}

/// Builds the answer.
pub(super) fn response(failure: &Failure, reader: Reader) -> Response<Body> {
    let Failure { status, reason, .. } = failure;
    let (kind, text) = match reader {
        Reader::Person => ("text/plain; charset=utf-8", format!("tunnel-server: {reason}\n")),
        Reader::Kubernetes => {
            let object = json!({
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Failure",
                "message": format!("tunnel-server: {reason}"),
                "reason": kubernetes_reason(*status),
                "code": status.as_u16(),
            });
            ("application/json", format!("{object}\n"))
        }
    };
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = *status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(OUTCOME_HEADER, HeaderValue::from_static(failure.outcome.as_str()));
    if *status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if *status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
        for challenge in CHALLENGES {
            response.headers_mut().append(header::PROXY_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
    }
    response
}

/// Returns the reason in terms of Kubernetes (metav1.StatusReason).
fn kubernetes_reason(status: StatusCode) -> &'static str {
    match status {
        StatusCode::BAD_REQUEST => "BadRequest",
        StatusCode::UNAUTHORIZED => "Unauthorized",
        StatusCode::FORBIDDEN => "Forbidden",
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
        StatusCode::GATEWAY_TIMEOUT => "Timeout",
        _ => "InternalError",
    }
}

#[cfg(test)]
mod tests {
    use tunnel_link::outcome::Outcome;

    use super::*;

    async fn text(failure: &Failure, reader: Reader) -> (StatusCode, String) {
        let response = response(failure, reader);
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn people_get_a_line_and_kubernetes_a_status() {
        let failure = Failure::of_outcome(Outcome::NoTunnel, "no tunnel to node edge-1 (last seen 4 s ago)");
        let (status, line) = text(&failure, Reader::Person).await;
        assert_eq!(
            (status, line.as_str()),
            (
                StatusCode::SERVICE_UNAVAILABLE,
                "tunnel-server: no tunnel to node edge-1 (last seen 4 s ago)\n"
            )
        );
        assert_eq!(response(&failure, Reader::Person).headers()[OUTCOME_HEADER], "no_tunnel");
        let (_, object) = text(&failure, Reader::Kubernetes).await;
        let object: serde_json::Value = serde_json::from_str(&object).unwrap();
        assert_eq!(
            (&object["kind"], &object["code"], &object["reason"]),
            (&json!("Status"), &json!(503), &json!("ServiceUnavailable"))
        );
        assert!(object["message"].as_str().unwrap().contains("last seen 4 s ago"));
    }

    #[test]
    fn clients_of_kubernetes_are_recognised() {
        let of = |name, value| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            reader(&headers, false)
        };
        assert_eq!(of(header::USER_AGENT, "kubectl/v1.34.0 (linux/amd64)"), Reader::Kubernetes);
        assert_eq!(of(header::ACCEPT, "application/json, */*"), Reader::Kubernetes);
        assert_eq!(
            of(header::ACCEPT, "application/vnd.kubernetes.protobuf,application/json"),
            Reader::Kubernetes
        );
        assert_eq!(of(header::ACCEPT, "*/*"), Reader::Person);
        assert_eq!(of(header::USER_AGENT, "curl/8"), Reader::Person);
        assert_eq!(reader(&HeaderMap::new(), true), Reader::Kubernetes);
    }
}

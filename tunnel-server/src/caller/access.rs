//! What a request asks for, in the words of the cluster's authoriser: a verb on a subresource of a Node.
//!
//! The mapping is the kubelet's (pkg/kubelet/server/auth.go), so that a caller may do through a door exactly what it may do at
//! the kubelet.

use http::Method;

/// A verb on a subresource of a Node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    pub verb: &'static str,
    pub subresource: &'static str,
}

/// What covers everything that has no subresource of its own.
const PROXY: &str = "proxy";

/// The kubelet's paths, each with everything below it.
const PATHS: &[(&str, &str)] = &[
    ("/stats", "stats"),
    ("/metrics", "metrics"),
    ("/logs", "log"),
    ("/spec", "spec"),
    ("/checkpoint", "checkpoint"),
];
/// Paths of which kubelets since 1.33 ask this first, and `proxy` only if it is not allowed. Of the last two some ask for this alone;
/// to whoever may `proxy`, which is more, they tell nothing new.
const FINE: &[(&str, &str)] = &[
    ("/healthz", "healthz"),
    ("/configz", "configz"),
    ("/pods", "pods"),
    ("/runningpods", "pods"),
    ("/statusz", "statusz"),
    ("/flagz", "configz"),
];

/// What a request to a kubelet asks for: any of these will do. `path` is decoded, and can be read in one way only.
pub fn kubelet_accesses(method: &Method, path: &str) -> Vec<Access> {
    let verb = verb(method);
    let of = |table: &[(&str, &'static str)]| {
        table.iter().find(|(root, _)| is_below(path, root)).map(|(_, subresource)| *subresource)
    };
    let subresources = match (of(PATHS), of(FINE)) {
        (Some(subresource), _) => vec![subresource],
        (None, Some(fine)) => vec![fine, PROXY],
        (None, None) => vec![PROXY],
    };
    subresources.into_iter().map(|subresource| Access { verb, subresource }).collect()
}

/// What a request to another port of a node asks for: its metrics, or anything. Paths mean nothing else there.
pub fn other_accesses(method: &Method, path: &str) -> Vec<Access> {
    let subresources: &[&'static str] =
        if is_below(path, "/metrics") { &["metrics", PROXY] } else { &[PROXY] };
    subresources.iter().map(|subresource| Access { verb: verb(method), subresource }).collect()
}

/// The kubelet knows no others: an empty verb is allowed to those only who may do everything.
fn verb(method: &Method) -> &'static str {
    match *method {
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

fn is_below(path: &str, root: &str) -> bool {
    path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubelet(method: &Method, path: &str) -> Vec<(&'static str, &'static str)> {
        kubelet_accesses(method, path).into_iter().map(|access| (access.verb, access.subresource)).collect()
    }

    /// The table of the Kubernetes documentation, "Kubelet authentication/authorization".
    #[test]
    fn paths_and_verbs_are_mapped_as_the_kubelet_does() {
        for (path, subresource) in [
            ("/stats", "stats"),
            ("/stats/summary", "stats"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics"),
            ("/logs/", "log"),
            ("/logs/syslog", "log"),
            ("/spec/", "spec"),
            ("/checkpoint/ns/pod/c", "checkpoint"),
            ("/exec/ns/pod/c", "proxy"),
            ("/containerLogs/ns/pod/c", "proxy"),
            ("/metricsx", "proxy"),
            ("/run/metrics", "proxy"),
            ("/", "proxy"),
        ] {
            assert_eq!(kubelet(&Method::GET, path), [("get", subresource)], "{path}");
        }
        assert_eq!(kubelet(&Method::GET, "/pods"), [("get", "pods"), ("get", "proxy")]);
        assert_eq!(kubelet(&Method::GET, "/healthz/ping"), [("get", "healthz"), ("get", "proxy")]);
        assert_eq!(kubelet(&Method::GET, "/statusz"), [("get", "statusz"), ("get", "proxy")]);
        assert_eq!(kubelet(&Method::GET, "/flagz"), [("get", "configz"), ("get", "proxy")]);
        for (method, verb) in [
            (Method::POST, "create"),
            (Method::PUT, "update"),
            (Method::PATCH, "patch"),
            (Method::DELETE, "delete"),
            (Method::HEAD, ""),
            (Method::OPTIONS, ""),
        ] {
            assert_eq!(kubelet(&method, "/exec/a/b/c"), [(verb, "proxy")], "{method}");
        }
    }

    #[test]
    fn other_ports_have_metrics_only() {
        let of = |path| {
            other_accesses(&Method::GET, path)
                .into_iter()
                .map(|access| access.subresource)
                .collect::<Vec<_>>()
        };
        assert_eq!(of("/metrics"), ["metrics", "proxy"]);
        assert_eq!(of("/logs/syslog"), ["proxy"]);
        assert_eq!(of("/stats"), ["proxy"]);
    }
}

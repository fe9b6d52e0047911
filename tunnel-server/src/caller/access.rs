//! The access that a request needs, in terms of the cluster's authoriser: a verb on a subresource of a Node.
//!
//! The mapping is the kubelet's (pkg/kubelet/server/auth.go), so that a caller may do here exactly what it may do at
//! the kubelet.

use http::Method;

/// A verb on a subresource of a Node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    pub verb: &'static str,
    pub subresource: &'static str,
}

/// The subresource of every path that has none of its own.
const PROXY: &str = "proxy";

/// The kubelet's paths and their subresources. Each includes all paths below it.
const PATHS: &[(&str, &str)] = &[
    ("/stats", "stats"),
    ("/metrics", "metrics"),
    ("/logs", "log"),
    ("/spec", "spec"),
    ("/checkpoint", "checkpoint"),
];
/// Paths for which kubelets since 1.33 ask for this subresource first, and for `proxy` if it is not allowed. For the
/// last two, some kubelets ask for this subresource alone; a caller with `proxy`, which is more, learns nothing new
/// from them.
const FINE: &[(&str, &str)] = &[
    ("/healthz", "healthz"),
    ("/configz", "configz"),
    ("/pods", "pods"),
    ("/runningpods", "pods"),
    ("/statusz", "statusz"),
    ("/flagz", "configz"),
];

/// Returns the accesses for a request to a kubelet; any one of them is enough. `path` is decoded and unambiguous.
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

/// Returns the accesses for a request to another port of a node: metrics, or anything. Other paths have no meaning
/// there. `switches`: another protocol may follow, in which nothing is checked.
pub fn other_accesses(method: &Method, path: &str, switches: bool) -> Vec<Access> {
    let reads = is_below(path, "/metrics") && !switches;
    let subresources: &[&'static str] = if reads { &["metrics", PROXY] } else { &[PROXY] };
    subresources.iter().map(|subresource| Access { verb: verb(method), subresource }).collect()
}

/// The kubelet knows no other verbs: an empty one is allowed only to callers that may do everything.
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

    /// The table in the Kubernetes documentation, "Kubelet authentication/authorization".
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
            other_accesses(&Method::GET, path, false)
                .into_iter()
                .map(|access| access.subresource)
                .collect::<Vec<_>>()
        };
        assert_eq!(of("/metrics"), ["metrics", "proxy"]);
        assert_eq!(of("/logs/syslog"), ["proxy"]);
        assert_eq!(of("/stats"), ["proxy"]);
        let switched = other_accesses(&Method::GET, "/metrics", true);
        assert_eq!(switched, [Access { verb: "get", subresource: "proxy" }]);
    }
}

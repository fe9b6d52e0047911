//! Parses the destination of a request: the node, and the target there.

use std::net::SocketAddr;

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Version, header};
use tunnel_runtime::text::printable;

use tunnel_routing::split_host;

use super::headers::wanted_upgrade;

/// Header that names the node instead of Host.
pub(super) const PROXY_HOST: &str = "x-tunnel-proxy-host";
/// Header with the target, instead of the node's own address and Host's port.
pub(super) const PROXY_DEST: &str = "x-tunnel-proxy-dest";
/// The kubelet's paths that are followed by a pod.
const POD_PATHS: &[&str] = &["exec", "attach", "portForward", "containerLogs"];

/// The destination that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTarget {
    /// From the request line or `:authority`, otherwise from Host.
    pub host: String,
    pub port: Option<u16>,
    /// From the header that replaces Host.
    pub named: Option<String>,
    /// From the header that replaces the node's own address.
    pub dest: Option<SocketAddr>,
    /// Namespace and name of the pod in a kubelet's path.
    pub pod: Option<(String, String)>,
    /// The path as the target will read it; an error if it is ambiguous.
    pub path: Result<String, String>,
    /// The protocols that may follow.
    pub upgrade: Option<HeaderValue>,
}

/// Parses the head of a request, without looking anything up.
///
/// # Errors
/// The head is malformed; the error says how.
pub fn parse_destination(head: &Parts) -> Result<RequestTarget, String> {
    let bare = head.uri.scheme().is_none() && head.uri.authority().is_some();
    if bare && head.method != Method::CONNECT {
        // RFC 9112 section 3.2.3.
        return Err("the request's target is an authority, which only CONNECT has".to_owned());
    }
    let line = head.uri.authority().map(|authority| authority.as_str().to_owned());
    let host = single(&head.headers, header::HOST.as_str())?;
    let authority = match (line, host) {
        // RFC 9113 section 8.3.1; in HTTP/1.1 the request line replaces Host (RFC 9112 section 3.2.2).
        (Some(line), Some(host)) if head.version == Version::HTTP_2 && !line.eq_ignore_ascii_case(&host) => {
            return Err(format!("Host {:?} is not the request's :authority", printable(&host, 100)));
        }
        (Some(line), _) => line,
        (None, Some(host)) => host,
        (None, None) => String::new(),
    };
    if authority.is_empty() {
        return Err("the request has no Host".to_owned());
    }
    let (host, port) = split_host(&authority)?;
    let named = single(&head.headers, PROXY_HOST)?.filter(|name| !name.is_empty());
    let named = named.map(|named| split_host(&named).map(|(host, _)| host.to_owned())).transpose()?;
    let dest = match single(&head.headers, PROXY_DEST)? {
        Some(dest) => {
            Some(dest.parse::<SocketAddr>().ok().filter(|dest| dest.port() != 0).ok_or_else(|| {
                format!("{PROXY_DEST}: {:?} is not an IP address and a port", printable(&dest, 100))
            })?)
        }
        None => None,
    };
    let path = decoded(head.uri.path());
    let pod = path.as_ref().ok().and_then(|path| pod_of(path));
    let upgrade = wanted_upgrade(head);
    Ok(RequestTarget { host: host.to_owned(), port, named, dest, pod, path, upgrade })
}

/// Returns the only value of a header.
fn single(headers: &HeaderMap, name: &str) -> Result<Option<String>, String> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => match value.to_str() {
            Ok(value) => Ok(Some(value.trim().to_owned())),
            Err(_) => Err(format!("the header {name} is not text")),
        },
        _ => Err(format!("duplicate header {name}")),
    }
}

/// Decodes the path as the target will read it. Refuses an ambiguous path, because the caller's rights are looked up by
/// it.
fn decoded(path: &str) -> Result<String, String> {
    let wrong = |reason: &str| format!("the path {:?} {reason}", printable(path, 100));
    let (mut bytes, mut rest) = (Vec::with_capacity(path.len()), path.as_bytes());
    while let [byte, tail @ ..] = rest {
        if *byte != b'%' {
            bytes.push(*byte);
            rest = tail;
            continue;
        }
        let [high, low, tail @ ..] = tail else { return Err(wrong("ends in an escape")) };
        let digits = [*high, *low];
        let value = std::str::from_utf8(&digits)
            .ok()
            .filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let value = value
            .and_then(|text| u8::from_str_radix(text, 16).ok())
            .ok_or_else(|| wrong("has a broken escape"))?;
        if matches!(value, b'/' | b'\\' | 0) {
            return Err(wrong("escapes a separator"));
        }
        bytes.push(value);
        rest = tail;
    }
    let path_text = String::from_utf8(bytes).map_err(|_| wrong("is not text"))?;
    let mut segments = path_text.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        if matches!(segment, "." | "..") || segment.is_empty() && !last {
            return Err(wrong("has empty segments or dots: it could be read as another one"));
        }
    }
    Ok(path_text)
}

fn pod_of(path: &str) -> Option<(String, String)> {
    let mut segments = path.strip_prefix('/')?.split('/');
    let kind = segments.next()?;
    let (namespace, name) = (segments.next()?, segments.next()?);
    let known = POD_PATHS.contains(&kind) && !namespace.is_empty() && !name.is_empty();
    known.then(|| (namespace.to_owned(), name.to_owned()))
}

#[cfg(test)]
mod tests {
    use http::Request;
    use proptest::prelude::*;

    use super::*;

    fn wanted(uri: &str, headers: &[(&str, &str)]) -> Result<RequestTarget, String> {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        parse_destination(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn host_and_headers_name_the_destination() {
        let plain = wanted("/metrics?x=1", &[("host", "edge-1:9100")]).unwrap();
        assert_eq!((plain.host.as_str(), plain.port), ("edge-1", Some(9100)));
        assert_eq!(plain.path.as_deref(), Ok("/metrics"));
        let line = wanted("http://EDGE-2:80/", &[("host", "edge-1:9100")]).unwrap();
        assert_eq!((line.host.as_str(), line.port), ("EDGE-2", Some(80)));
        let six = wanted("/", &[("host", "[fd00::1]:10250")]).unwrap();
        assert_eq!((six.host.as_str(), six.port), ("fd00::1", Some(10250)));
        let headers = [("host", "x"), (PROXY_HOST, "edge-1:1"), (PROXY_DEST, "10.0.0.1:80")];
        let by_header = wanted("/", &headers).unwrap();
        assert_eq!(by_header.named.as_deref(), Some("edge-1"));
        assert_eq!(by_header.dest, Some("10.0.0.1:80".parse().unwrap()));
    }

    #[test]
    fn only_connect_has_an_authority_for_a_target() {
        assert!(wanted("edge-1:9100", &[("host", "edge-1:9100")]).unwrap_err().contains("only CONNECT"));
        let connect = Request::connect("edge-1:9100").body(()).unwrap().into_parts().0;
        assert_eq!(parse_destination(&connect).unwrap().port, Some(9100));
    }

    #[test]
    fn kubelet_paths_name_a_pod() {
        let pod = |path: &str| wanted(path, &[("host", "x")]).unwrap().pod;
        for path in [
            "/exec/ns/web/c",
            "/attach/ns/web/uid/c",
            "/portForward/ns/web",
            "/containerLogs/ns/web/c?follow=1",
        ] {
            assert_eq!(pod(path), Some(("ns".to_owned(), "web".to_owned())), "{path}");
        }
        for path in
            ["/", "/exec", "/exec/ns", "/exec/ns/", "/run/ns/web/c", "/metrics/exec/ns/web", "/Exec/ns/web/c"]
        {
            assert_eq!(pod(path), None, "{path}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (uri, headers, reason) in [
            ("/", &[][..], "no Host"),
            ("/", &[("host", "a:1"), ("host", "b:1")], "duplicate header host"),
            ("/", &[("host", "edge-1:+9100")], "is not a host and a port"),
            ("/", &[("host", "edge-1:0")], "is not a host and a port"),
            ("/", &[("host", "edge-1:65536")], "is not a host and a port"),
            ("/", &[("host", "user@edge-1:80")], "is not a host and a port"),
            ("/", &[("host", ":80")], "is not a host and a port"),
            ("/", &[("host", "a:1"), (PROXY_DEST, "router:80")], "is not an IP address and a port"),
            ("/", &[("host", "a:1"), (PROXY_HOST, "b"), (PROXY_HOST, "c")], "duplicate header"),
        ] {
            let error = wanted(uri, headers).unwrap_err();
            assert!(error.contains(reason), "{uri} {headers:?}: {error}");
        }
    }

    #[test]
    fn a_path_that_could_be_read_as_another_is_refused() {
        for (path, reason) in [
            ("/metrics/../exec/a/b/c", "could be read as another"),
            ("/metrics/%2e%2e/exec/a/b/c", "could be read as another"),
            ("/metrics%2f..%2fexec", "escapes a separator"),
            ("//exec/a/b/c", "could be read as another"),
            ("/%zz", "broken escape"),
            ("/%+1", "broken escape"),
            ("/%4", "ends in an escape"),
        ] {
            let wanted = wanted(path, &[("host", "a:1")]).unwrap();
            let error = wanted.path.unwrap_err();
            assert!(error.contains(reason), "{path}: {error}");
            assert_eq!(wanted.pod, None, "{path}");
        }
        assert_eq!(wanted("/%6detrics", &[("host", "a:1")]).unwrap().path.as_deref(), Ok("/metrics"));
        assert_eq!(wanted("/logs/", &[("host", "a:1")]).unwrap().path.as_deref(), Ok("/logs/"));
    }

    #[test]
    fn in_http_2_host_must_be_the_authority() {
        let head = |host: &str| {
            let request = Request::builder().version(Version::HTTP_2).uri("https://edge-1:10250/pods");
            parse_destination(&request.header("host", host).body(()).unwrap().into_parts().0)
        };
        assert_eq!(head("edge-1:10250").unwrap().host, "edge-1");
        assert!(head("edge-2:10250").unwrap_err().contains(":authority"));
    }

    proptest! {
        #[test]
        fn a_path_is_never_read_as_another(path in "(/[a-z.%0-9]{0,6}){1,5}") {
            let Ok(request) = Request::builder().uri(&path).header("host", "a:1").body(()) else { return Ok(()) };
            if let Ok(read) = parse_destination(&request.into_parts().0).unwrap().path {
                prop_assert!(!read.split('/').any(|segment| matches!(segment, "." | "..")));
                prop_assert!(!read.contains("//"));
                prop_assert_eq!(read.matches('/').count(), path.matches('/').count());
            }
        }
    }
}

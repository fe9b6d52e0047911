//! Selects the headers to forward. Those that concern one connection only (RFC 9110 section 7.6.1) are left out.

use http::header::{self, HeaderName};
use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{HeaderMap, HeaderValue, Version};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
/// Prefix of the headers that are meant for this server.
const OWN: &str = "x-tunnel-proxy-";

/// Returns the protocols that the client wants instead of HTTP/1.1, if any. Clients offer h2c by default; HTTP/2 and TLS are never
/// accepted, in which requests would follow that nobody here checks.
pub(super) fn wanted_upgrade(head: &Parts) -> Option<HeaderValue> {
    let headers = &head.headers;
    let accepted = |protocol: &&str| {
        let name = protocol.split('/').next().unwrap_or_default();
        !["h2c", "h2", "http", "tls"].iter().any(|refused| name.eq_ignore_ascii_case(refused))
    };
    let wanted: Vec<_> = listed(headers, &header::UPGRADE).filter(accepted).collect();
    // Most requests have none. Other versions know none (RFC 9110 section 7.8).
    if wanted.is_empty() || head.version != Version::HTTP_11 {
        return None;
    }
    let named = listed(headers, &header::CONNECTION).any(|name| name.eq_ignore_ascii_case("upgrade"));
    named.then(|| HeaderValue::from_str(&wanted.join(", ")).ok()).flatten()
}

/// Returns the approximate number of bytes of a head.
pub(super) fn size(head: &Parts) -> usize {
    let uri = head.uri.path_and_query().map_or(0, |path| path.as_str().len());
    head.headers
        .iter()
        .fold(uri, |sum, (name, value)| sum + name.as_str().len() + value.len() + ": \r\n".len())
}

/// Rewrites the head for an HTTP/1.1 target.
///
/// # Errors
/// `host` is not a valid Host, or the request's target cannot be forwarded.
pub fn target_head(head: &mut Parts, host: &str, upgrade: Option<&HeaderValue>) -> Result<(), String> {
    for_target(&mut head.headers);
    join_cookies(&mut head.headers);
    let host = HeaderValue::try_from(host).map_err(|_| "Host is not text")?;
    head.headers.insert(header::HOST, host);
    head.uri = Uri::builder().path_and_query(path_of(head)).build().map_err(|_| NOT_PASSED)?;
    head.version = Version::HTTP_11;
    head.extensions.clear();
    if let Some(upgrade) = upgrade {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        head.headers.insert(header::UPGRADE, upgrade.clone());
    }
    Ok(())
}

/// An HTTP/2 client may send a field for each cookie, an HTTP/1.1 server expects one (RFC 9113 section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<_> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(all) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(header::COOKIE, all);
    }
}

/// Rewrites the head for an HTTP/2 target.
pub(super) fn target_head_2(head: &mut Parts, host: &str) -> Result<(), String> {
    for_target(&mut head.headers);
    head.headers.remove(header::HOST);
    let uri = Uri::builder().scheme("https").authority(host).path_and_query(path_of(head));
    head.uri = uri.build().map_err(|_| NOT_PASSED)?;
    head.version = Version::HTTP_2;
    head.extensions.clear();
    Ok(())
}

const NOT_PASSED: &str = "the request's target cannot be forwarded";

/// Returns a path that is never empty: `Uri` would write nothing for an empty path, such as one before a fragment.
fn path_of(head: &Parts) -> PathAndQuery {
    let path = head.uri.path_and_query().filter(|path| path.as_str() != "/");
    path.cloned().unwrap_or(PathAndQuery::from_static("/"))
}

/// Removes headers that are only for this server. Trailers are forwarded, so their announcements are too.
fn for_target(headers: &mut HeaderMap) {
    let trailers = listed(headers, &header::TE).any(|coding| coding.eq_ignore_ascii_case("trailers"));
    hop_by_hop(headers);
    let own: Vec<_> = headers.keys().filter(|name| name.as_str().starts_with(OWN)).cloned().collect();
    for name in own {
        headers.remove(name);
    }
    // The caller's credentials for this server.
    headers.remove(header::PROXY_AUTHORIZATION);
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Removes headers that concern one connection only.
pub(super) fn hop_by_hop(headers: &mut HeaderMap) {
    // A sender must not remove headers that every message needs, or that decide where it ends.
    let named: Vec<HeaderName> = listed(headers, &header::CONNECTION)
        .filter_map(|name| name.parse().ok())
        .filter(|name| ![header::HOST, header::CONTENT_LENGTH, header::AUTHORIZATION].contains(name))
        .collect();
    let known = [
        header::CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        HTTP2_SETTINGS,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ];
    for name in named.into_iter().chain(known) {
        headers.remove(name);
    }
}

/// Returns the members of a list that may be spread over several headers.
fn listed<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(headers: &[(&'static str, &'static str)]) -> HeaderMap {
        let header = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        headers.iter().map(header).collect()
    }

    #[test]
    fn the_target_gets_a_path() {
        for (asked, got) in [
            ("http://edge-1", "/"),
            ("http://edge-1#top", "/"),
            ("http://edge-1?a=b", "/?a=b"),
            ("/metrics?a=b#top", "/metrics?a=b"),
        ] {
            let mut head = http::Request::get(asked).body(()).unwrap().into_parts().0;
            target_head(&mut head, "edge-1", None).unwrap();
            assert_eq!(head.uri.to_string(), got, "{asked}");
        }
    }

    #[test]
    fn what_concerns_one_connection_is_not_passed_on() {
        let mut headers = map(&[
            ("connection", "close, X-Secret"),
            ("connection", "x-other"),
            ("x-secret", "1"),
            ("x-other", "1"),
            ("keep-alive", "5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic x"),
            ("te", "gzip, trailers"),
            ("upgrade", "h2c"),
            ("http2-settings", "x"),
            ("x-tunnel-proxy-host", "edge-1"),
            ("x-tunnel-proxy-anything", "1"),
            ("trailer", "x-sum"),
            ("accept", "*/*"),
        ]);
        for_target(&mut headers);
        assert_eq!(headers, map(&[("trailer", "x-sum"), ("accept", "*/*"), ("te", "trailers")]));
    }

    /// A careless proxy would remove Host if a sender names it in Connection.
    #[test]
    fn a_sender_cannot_remove_what_others_rely_on() {
        let mut headers = map(&[
            ("connection", "host, content-length, authorization"),
            ("host", "edge-1:9100"),
            ("content-length", "3"),
            ("authorization", "Bearer x"),
        ]);
        for_target(&mut headers);
        assert_eq!(
            headers,
            map(&[("host", "edge-1:9100"), ("content-length", "3"), ("authorization", "Bearer x")])
        );
    }

    #[test]
    fn an_upgrade_is_one_only_if_connection_says_so() {
        let of = |version, headers: &[_]| {
            let mut head = http::Request::new(()).into_parts().0;
            (head.version, head.headers) = (version, map(headers));
            wanted_upgrade(&head)
        };
        let wanted = |headers: &[_]| of(Version::HTTP_11, headers);
        assert_eq!(wanted(&[("connection", "Upgrade"), ("upgrade", "SPDY/3.1")]).unwrap(), "SPDY/3.1");
        assert_eq!(
            wanted(&[("connection", "keep-alive, upgrade"), ("upgrade", "websocket")]).unwrap(),
            "websocket"
        );
        assert_eq!(wanted(&[("upgrade", "websocket")]), None);
        for refused in ["h2c", "H2C,h2c", "TLS/1.0, h2", "HTTP/2.0", ""] {
            let headers = [("connection", "upgrade, http2-settings"), ("upgrade", refused)];
            assert_eq!(wanted(&headers), None, "{refused}");
        }
        let several = [("connection", "upgrade"), ("upgrade", "h2c, websocket"), ("upgrade", "foo/1")];
        assert_eq!(wanted(&several).unwrap(), "websocket, foo/1");
        assert_eq!(of(Version::HTTP_10, &several), None);
    }

    #[test]
    fn cookies_of_several_fields_are_one_for_http_1() {
        let (mut head, ()) = http::Request::new(()).into_parts();
        for cookie in ["a=1", "b=2; c=3"] {
            head.headers.append(header::COOKIE, HeaderValue::from_static(cookie));
        }
        let mut for_h2 = head.clone();
        target_head(&mut head, "edge-1:9100", None).unwrap();
        assert_eq!(head.headers.get_all(header::COOKIE).iter().collect::<Vec<_>>(), ["a=1; b=2; c=3"]);
        target_head_2(&mut for_h2, "edge-1:9100").unwrap();
        assert_eq!(for_h2.headers.get_all(header::COOKIE).iter().count(), 2);
    }
}

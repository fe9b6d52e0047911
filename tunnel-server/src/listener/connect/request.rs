//! Parses the head of a request to a proxy.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::request::Parts;
use http::uri::Scheme;
use http::{HeaderMap, Method, header};
use tunnel_runtime::text::printable;

use tunnel_routing::split_host;

/// Port of an `http://` URL that names none.
const HTTP: u16 = 80;

/// The target and the credentials of a request to a proxy: CONNECT, or one with a whole `http://` URL.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProxyRequest {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The token, or the password, of Proxy-Authorization.
    pub(crate) token: Option<String>,
}

/// Parses a head.
///
/// # Errors
/// It is not a request to a proxy.
pub(crate) fn parse(head: &Parts) -> Result<ProxyRequest, String> {
    let token = token(&head.headers)?;
    let connect = head.method == Method::CONNECT;
    let scheme = (!connect).then_some(&Scheme::HTTP);
    let Some(authority) = head.uri.authority().filter(|_| head.uri.scheme() == scheme) else {
        let reason = "this is a proxy: send CONNECT HOST:PORT, or a request with a whole http:// URL";
        return Err(reason.to_owned());
    };
    let (host, port) = split_host(authority.as_str())?;
    let port = match port {
        Some(port) => port,
        None if connect => {
            return Err(format!("CONNECT {}: add the port", printable(authority.as_str(), 100)));
        }
        None => HTTP,
    };
    Ok(ProxyRequest { host: host.to_owned(), port, token })
}

/// Returns a bearer token, or the password of Basic credentials, or their user if the password is empty.
fn token(fields: &HeaderMap) -> Result<Option<String>, String> {
    let mut found = fields.get_all(header::PROXY_AUTHORIZATION).iter();
    let Some(field) = found.next() else { return Ok(None) };
    if found.next().is_some() {
        return Err("more than one Proxy-Authorization".to_owned());
    }
    // The error leaves out the value, which is secret.
    let wrong = || "Proxy-Authorization is neither a Bearer token nor Basic credentials".to_owned();
    let text = field.to_str().map_err(|_| wrong())?.trim();
    let (scheme, value) = text.split_once(' ').ok_or_else(wrong)?;
    let value = value.trim();
    if scheme.eq_ignore_ascii_case("bearer") && !value.is_empty() {
        return Ok(Some(value.to_owned()));
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return Err(wrong());
    }
    let decoded = STANDARD.decode(value).map_err(|_| wrong())?;
    let decoded = String::from_utf8(decoded).map_err(|_| wrong())?;
    let (user, password) = decoded.split_once(':').ok_or_else(wrong)?;
    let token = if password.is_empty() { user } else { password };
    if token.is_empty() { Err(wrong()) } else { Ok(Some(token.to_owned())) }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parsed(method: &str, uri: &str, credentials: &[&str]) -> Result<ProxyRequest, String> {
        let mut request = Request::builder().method(method).uri(uri);
        for value in credentials {
            request = request.header(header::PROXY_AUTHORIZATION, *value);
        }
        parse(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn connect_and_absolute_urls() {
        for (method, uri, host, port) in [
            ("CONNECT", "edge-1:22", "edge-1", 22),
            ("CONNECT", "[fd00::7]:22", "fd00::7", 22),
            ("GET", "http://edge-1:9100/metrics", "edge-1", 9100),
            ("GET", "http://edge-1/", "edge-1", 80),
            ("POST", "http://edge-1", "edge-1", 80),
        ] {
            let request = parsed(method, uri, &[]).unwrap();
            assert_eq!(request, ProxyRequest { host: host.to_owned(), port, token: None }, "{method} {uri}");
        }
    }

    #[test]
    fn tokens_of_both_kinds() {
        for (value, token) in [
            ("Bearer abc.def", "abc.def"),
            ("bearer  abc", "abc"),
            // user:secret, secret:, and a password with a colon.
            ("Basic dXNlcjpzZWNyZXQ=", "secret"),
            ("basic c2VjcmV0Og==", "secret"),
            ("Basic dXNlcjphOmI=", "a:b"),
        ] {
            let request = parsed("CONNECT", "e:1", &[value]).unwrap();
            assert_eq!(request.token.as_deref(), Some(token), "{value}");
        }
        for wrong in ["", "Bearer", "Bearer ", "Basic !", "Basic Og==", "Basic YWJj", "Digest x"] {
            let error = parsed("CONNECT", "e:1", &[wrong]).unwrap_err();
            assert!(error.starts_with("Proxy-Authorization is neither"), "{wrong}: {error}");
        }
        let twice = parsed("CONNECT", "e:1", &["Bearer a", "Bearer b"]).unwrap_err();
        assert_eq!(twice, "more than one Proxy-Authorization");
    }

    #[test]
    fn what_is_no_request_to_a_proxy_is_refused() {
        for (method, uri, reason) in [
            ("GET", "/", "this is a proxy"),
            ("GET", "https://e:1/", "this is a proxy"),
            ("OPTIONS", "*", "this is a proxy"),
            ("GET", "e:1", "this is a proxy"),
            ("CONNECT", "http://e:1/", "this is a proxy"),
            ("CONNECT", "edge-1", "add the port"),
            ("CONNECT", "edge-1:0", "not a host and a port"),
            ("CONNECT", ":22", "not a host and a port"),
            ("GET", "http://user@e:1/", "not a host and a port"),
        ] {
            let error = parsed(method, uri, &[]).unwrap_err();
            assert!(error.contains(reason), "{method} {uri}: {error}");
        }
    }
}

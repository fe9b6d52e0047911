//! Parses the request of a client of the connect listener.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, header};
use tunnel_core::text::printable;

use crate::door::front::{target_head, wanted_upgrade};
use crate::route::split_host;

/// Maximum length of a request's head, in bytes.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
/// Port of an `http://` URL that names none.
const HTTP: u16 = 80;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) host: String,
    pub(super) port: u16,
    /// Length of the head, in bytes.
    pub(super) length: usize,
    /// The token, or the password, of Proxy-Authorization.
    pub(super) token: Option<String>,
    pub(super) kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing was read: the target is a static map's.
    Map,
    Tunnel,
    /// A request with an absolute URL; holds the head for the target.
    Request(Bytes),
}

/// Parses a request. Returns `None` if the head is not complete yet.
///
/// # Errors
/// It is not a request to a proxy.
pub(super) fn parse(read: &[u8]) -> Result<Option<Asked>, String> {
    // Parses an incomplete head again after each read. That is slow only for heads in tiny pieces, which real clients
    // do not send.
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(read) {
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD => length,
        Ok(httparse::Status::Partial) if read.len() < MAX_HEAD => return Ok(None),
        Ok(_) => return Err(format!("the head of the request is larger than {MAX_HEAD} bytes")),
        Err(error) => return Err(format!("not an HTTP/1.1 request: {error}")),
    };
    // A complete request has all three.
    let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
        return Err("not an HTTP/1.1 request".to_owned());
    };
    let mut fields = HeaderMap::new();
    for header in request.headers.iter() {
        let named = HeaderName::try_from(header.name).ok().zip(HeaderValue::try_from(header.value).ok());
        let (name, value) =
            named.ok_or_else(|| format!("the header {} is malformed", printable(header.name, 100)))?;
        fields.append(name, value);
    }
    let token = token(&fields)?;
    if method == "CONNECT" {
        let (host, port) = split_host(target)?;
        let port = port.ok_or_else(|| format!("CONNECT {}: add the port", printable(target, 100)))?;
        return Ok(Some(Asked { host: host.to_owned(), port, length, token, kind: Kind::Tunnel }));
    }
    let uri = target.parse::<Uri>().ok().filter(|uri| uri.scheme() == Some(&Scheme::HTTP));
    let Some((uri, authority)) = uri.and_then(|uri| Some((uri.clone(), uri.into_parts().authority?))) else {
        let reason = "this is a proxy: send CONNECT HOST:PORT, or a request with a whole http:// URL";
        return Err(reason.to_owned());
    };
    let (host, port) = split_host(authority.as_str())?;
    let (host, port) = (host.to_owned(), port.unwrap_or(HTTP));
    let coding = framing(&fields, version)?.cloned();
    let (mut head, ()) = Request::new(()).into_parts();
    (head.uri, head.headers) = (uri, fields);
    let upgrade = wanted_upgrade(&head.headers);
    target_head(&mut head, authority.as_str(), upgrade.as_ref())?;
    // The body is forwarded as it comes.
    head.headers.extend(coding.map(|coding| (header::TRANSFER_ENCODING, coding)));
    // Everything that the client sends on this connection goes to this target, so it must not send another request,
    // with its credentials, on it. After an upgrade there is none; the target may refuse the upgrade.
    let connection = if upgrade.is_some() { "Upgrade, close" } else { "close" };
    head.headers.insert(header::CONNECTION, HeaderValue::from_static(connection));
    let mut text = format!("{method} {} HTTP/1.{version}\r\n", head.uri).into_bytes();
    for (name, value) in &head.headers {
        text.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    text.extend(b"\r\n");
    Ok(Some(Asked { host, port, length, token, kind: Kind::Request(text.into()) }))
}

/// Checks that every recipient agrees where the request ends (RFC 9112 section 6). Returns the transfer coding, if any.
fn framing(fields: &HeaderMap, version: u8) -> Result<Option<&HeaderValue>, String> {
    let single = |name: HeaderName| {
        let mut values = fields.get_all(&name).iter();
        match (values.next(), values.next()) {
            (first, None) => Ok(first),
            _ => Err(format!("more than one {name}")),
        }
    };
    let (length, coding) = (single(header::CONTENT_LENGTH)?, single(header::TRANSFER_ENCODING)?);
    let number = |value: &HeaderValue| {
        let text = value.to_str().unwrap_or_default();
        text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u64>().is_ok()
    };
    match (length, coding) {
        (Some(_), Some(_)) => Err("both Transfer-Encoding and Content-Length".to_owned()),
        (Some(length), None) if !number(length) => Err("Content-Length is not a number".to_owned()),
        (None, Some(_)) if version == 0 => Err("Transfer-Encoding in a request of HTTP/1.0".to_owned()),
        // Other codings may come before it, but no client uses them.
        (None, Some(coding)) if !coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
            Err("Transfer-Encoding is not chunked".to_owned())
        }
        _ => Ok(coding),
    }
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
    use super::*;
    use proptest::prelude::*;

    fn asked(text: &str) -> Asked {
        parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn connect_and_absolute_urls() {
        let tunnel = asked("CONNECT edge-1:22 HTTP/1.1\r\nHost: other:1\r\n\r\nSSH-2.0");
        assert_eq!((tunnel.host.as_str(), tunnel.port, &tunnel.kind), ("edge-1", 22, &Kind::Tunnel));
        assert_eq!(tunnel.length, 45);
        let v6 = asked("CONNECT [fd00::7]:22 HTTP/1.0\r\n\r\n");
        assert_eq!((v6.host.as_str(), v6.port), ("fd00::7", 22));
        let request = asked(
            "GET http://edge-1:9100/metrics HTTP/1.1\r\nHost: edge-1:9100\r\nProxy-Authorization: Bearer abc\r\n\r\n",
        );
        assert_eq!(
            (request.host.as_str(), request.port, request.token.as_deref()),
            ("edge-1", 9100, Some("abc"))
        );
        let head = "GET /metrics HTTP/1.1\r\nhost: edge-1:9100\r\nconnection: close\r\n\r\n";
        assert_eq!(request.kind, Kind::Request(head.into()), "the target gets no credentials");
        assert_eq!(asked("GET http://edge-1/ HTTP/1.1\r\n\r\n").port, 80);
        assert_eq!(parse(b"CONNECT edge-1:22 HTTP/1.1\r\n").unwrap(), None);
    }

    #[test]
    fn tokens_of_both_kinds() {
        let with = |value: &str| format!("CONNECT e:1 HTTP/1.1\r\nProxy-Authorization: {value}\r\n\r\n");
        for (value, token) in [
            ("Bearer abc.def", "abc.def"),
            ("bearer  abc", "abc"),
            // user:secret, secret:, and a password with a colon.
            ("Basic dXNlcjpzZWNyZXQ=", "secret"),
            ("basic c2VjcmV0Og==", "secret"),
            ("Basic dXNlcjphOmI=", "a:b"),
        ] {
            assert_eq!(asked(&with(value)).token.as_deref(), Some(token), "{value}");
        }
        for wrong in ["", "Bearer", "Bearer ", "Basic !", "Basic Og==", "Basic YWJj", "Digest x"] {
            let error = parse(with(wrong).as_bytes()).unwrap_err();
            assert!(error.starts_with("Proxy-Authorization is neither"), "{wrong}: {error}");
        }
        let twice =
            "CONNECT e:1 HTTP/1.1\r\nProxy-Authorization: Bearer a\r\nproxy-authorization: Bearer b\r\n\r\n";
        assert_eq!(parse(twice.as_bytes()).unwrap_err(), "more than one Proxy-Authorization");
    }

    #[test]
    fn a_body_and_an_upgrade_go_on_as_they_come() {
        let head = |text: &str| match asked(text).kind {
            Kind::Request(head) => String::from_utf8(head.to_vec()).unwrap(),
            other => panic!("{text:?} is {other:?}"),
        };
        let chunked = head(
            "PUT http://e:1/x?y HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive, X-A\r\nX-A: 1\r\nX-B: 2\r\n\r\n5",
        );
        assert_eq!(
            chunked,
            "PUT /x?y HTTP/1.1\r\nx-b: 2\r\nhost: e:1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        );
        let sized = head("POST http://e:1 HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc");
        assert_eq!(sized, "POST / HTTP/1.0\r\ncontent-length: 3\r\nhost: e:1\r\nconnection: close\r\n\r\n");
        let upgrade = head("GET http://e:1/ HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
        assert!(upgrade.contains("connection: Upgrade, close\r\nupgrade: websocket\r\n"), "{upgrade}");
    }

    #[test]
    fn what_is_no_request_to_a_proxy_is_refused() {
        for (text, reason) in [
            ("GET / HTTP/1.1\r\nHost: e:1\r\n\r\n", "this is a proxy"),
            ("GET https://e:1/ HTTP/1.1\r\n\r\n", "this is a proxy"),
            ("CONNECT edge-1 HTTP/1.1\r\n\r\n", "add the port"),
            ("CONNECT edge-1:0 HTTP/1.1\r\n\r\n", "not a host and a port"),
            ("CONNECT :22 HTTP/1.1\r\n\r\n", "not a host and a port"),
            ("SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 request"),
            ("POST http://e:1/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "both"),
            ("POST http://e:1/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "more than one"),
            ("POST http://e:1/ HTTP/1.1\r\nContent-Length: +1\r\n\r\n", "not a number"),
            ("POST http://e:1/ HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", "not chunked"),
            ("POST http://e:1/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.0"),
            ("GET http://user@e:1/ HTTP/1.1\r\n\r\n", "not a host and a port"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}

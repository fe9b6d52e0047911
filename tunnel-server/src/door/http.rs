//! The http door: the first request's head names the node.
//!
//! A connection carries one request: the target is asked to close after its answer (`Connection: close`, RFC 9112
//! §9.6), so that a client has to connect again before it names another node. Upgrades are carried unchanged. No
//! credentials are added.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use tokio::net::TcpStream;
use tunnel_core::identity::NodeName;
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use super::context::{Door, OpenError, OpenRequest};
use super::preface::{PrefaceError, answer, read_preface, timed_out};
use super::resolve::resolve;
use crate::route::Router;

const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
const SCHEME: &str = "http://";
/// Header that names the node instead of Host.
const PROXY_HOST: &str = "x-tunnel-proxy-host";
/// Header with the target, instead of the node's own address and Host's port.
const PROXY_DEST: &str = "x-tunnel-proxy-dest";

pub struct Http;

impl Door for Http {
    const NAME: &'static str = "http";

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<OpenRequest, OpenError> {
        const HEAD: &str = "request";
        let mut read = BytesMut::new();
        let parse = |bytes: &[u8]| match parse(bytes)? {
            None if bytes.len() > MAX_HEAD => {
                Err(format!("the head of the request is larger than {MAX_HEAD} bytes"))
            }
            head => Ok(head),
        };
        let (status, reason) = match read_preface(socket, &mut read, HEAD, parse).await {
            Ok(head) => match target(&head, router) {
                Ok((node, target)) => return Ok(OpenRequest { node, target, prefix: head.prefix(&read) }),
                Err(reason) => (StatusCode::BAD_REQUEST, reason),
            },
            Err(PrefaceError::Lost(error)) => return Err(error),
            Err(PrefaceError::Invalid(reason)) => (StatusCode::BAD_REQUEST, reason),
            Err(PrefaceError::TimedOut) => (StatusCode::REQUEST_TIMEOUT, timed_out(HEAD)),
        };
        answer(socket, &response(status, &reason)).await;
        Err(OpenError::Client(reason))
    }

    async fn failed(socket: &mut TcpStream, outcome: Outcome, detail: &str) {
        let status = match outcome {
            Outcome::NoTunnel | Outcome::Busy | Outcome::Shutdown => StatusCode::SERVICE_UNAVAILABLE,
            Outcome::TimedOut => StatusCode::GATEWAY_TIMEOUT,
            Outcome::Denied => StatusCode::FORBIDDEN,
            _ => StatusCode::BAD_GATEWAY,
        };
        answer(socket, &response(status, detail)).await;
    }
}

/// A request's head, as far as the door needs it.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    /// Bytes of the head, including the empty line.
    length: usize,
    host: Option<String>,
    proxy_host: Option<String>,
    proxy_dest: Option<String>,
    /// The head that is sent to the target.
    rewritten: Bytes,
}

impl Head {
    /// What is sent to the target of the bytes that were `read`.
    fn prefix(&self, read: &[u8]) -> Bytes {
        [&self.rewritten, &read[self.length..]].concat().into()
    }
}

/// None: the head is not whole yet.
fn parse(read: &[u8]) -> Result<Option<Head>, String> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(read) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(format!("not an HTTP/1.1 request: {error}")),
    };
    // A complete request has all three of them.
    let (Some(method), Some(path), Some(version)) = (request.method, request.path, request.version) else {
        return Err("not an HTTP/1.1 request".to_owned());
    };
    // A proxy's client names the target in the request line, which then replaces Host (RFC 9112 §3.2.2).
    let absolute = path.get(..SCHEME.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME));
    let (authority, path) = if absolute {
        let rest = &path[SCHEME.len()..];
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let slash = if rest[end..].starts_with('/') { "" } else { "/" };
        (Some(rest[..end].to_owned()), format!("{slash}{}", &rest[end..]))
    } else {
        (None, path.to_owned())
    };
    // Clients offer h2c by default, and servers seldom accept: their HTTP/1.1 answer would leave the connection open.
    let upgrade = request.headers.iter().any(|header| {
        header.name.eq_ignore_ascii_case("upgrade") && !header.value.eq_ignore_ascii_case(b"h2c")
    });
    let mut head = Head { length, host: None, proxy_host: None, proxy_dest: None, rewritten: Bytes::new() };
    let mut rewritten = format!("{method} {path} HTTP/1.{version}\r\n").into_bytes();
    if let Some(authority) = &authority {
        rewritten.extend_from_slice(format!("Host: {authority}\r\n").as_bytes());
    }
    for header in request.headers.iter() {
        let name = header.name.to_ascii_lowercase();
        let taken = match name.as_str() {
            "host" => Some(&mut head.host),
            PROXY_HOST => Some(&mut head.proxy_host),
            PROXY_DEST => Some(&mut head.proxy_dest),
            _ => None,
        };
        if let Some(taken) = taken {
            let value =
                std::str::from_utf8(header.value).map_err(|_| format!("the header {name} is not text"))?;
            if taken.replace(value.trim().to_owned()).is_some() {
                return Err(format!("duplicate header {name}"));
            }
        }
        let hop = matches!(
            name.as_str(),
            "connection" | "keep-alive" | "proxy-connection" | "upgrade" | "http2-settings"
        );
        let named = name == "host" && authority.is_some();
        if name.starts_with("x-tunnel-proxy-") || named || hop && !upgrade {
            continue;
        }
        rewritten.extend_from_slice(header.name.as_bytes());
        rewritten.extend_from_slice(b": ");
        rewritten.extend_from_slice(header.value);
        rewritten.extend_from_slice(b"\r\n");
    }
    if !upgrade {
        rewritten.extend_from_slice(b"Connection: close\r\n");
    }
    rewritten.extend_from_slice(b"\r\n");
    head.host = authority.or(head.host);
    head.rewritten = rewritten.into();
    Ok(Some(head))
}

/// The node, and the target for its agent.
fn target(head: &Head, router: &Router) -> Result<(NodeName, SocketAddr), String> {
    let host = head.host.as_deref().filter(|host| !host.is_empty()).ok_or("the request has no Host")?;
    let dest = match &head.proxy_dest {
        Some(dest) => Some(dest.parse::<SocketAddr>().map_err(|_| {
            format!("{PROXY_DEST}: {:?} is not an IP address and a port", printable(dest, 100))
        })?),
        None => None,
    };
    let named = head.proxy_host.as_deref().filter(|host| !host.is_empty()).unwrap_or(host);
    let node = resolve(split(named)?.0, router)?;
    let target = match dest {
        Some(dest) => dest,
        None => {
            let (_, port) = split(host)?;
            let port = port.ok_or_else(|| {
                format!("Host {:?} has no port: add the port of the node", printable(host, 100))
            })?;
            router.target(node.address, port)
        }
    };
    // As at the redirect: a door without authentication leads only to the ports that the operator named.
    if !router.tunnels(target.port()) {
        return Err(format!(
            "port {} is not tunnelled: name it in --redirect-ports or the ConfigMap",
            target.port()
        ));
    }
    Ok((node.node, target))
}

/// Host and port. Not by `http::uri::Authority`, which drops user information and takes an unusable port for none.
fn split(authority: &str) -> Result<(&str, Option<u16>), String> {
    let wrong = || format!("{:?} is not a host and a port", printable(authority, 100));
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(wrong)?) })
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port =
        port.map(|port| port.parse::<u16>().ok().filter(|port| *port != 0).ok_or_else(wrong)).transpose()?;
    if host.is_empty() { Err(wrong()) } else { Ok((host, port)) }
}

fn response(status: StatusCode, reason: &str) -> Vec<u8> {
    let body = format!("tunnel-server: {reason}\n");
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Head {
        parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn a_request_is_carried_alone() {
        let text = "GET /metrics?x=1 HTTP/1.1\r\nHost: edge-1:10255\r\nConnection: keep-alive\r\nKeep-Alive: 5\r\nX-Tunnel-Proxy-Host: edge-1\r\nX-Other: a  b\r\n\r\nbody";
        let head = head(text);
        assert_eq!(
            head.prefix(text.as_bytes()),
            "GET /metrics?x=1 HTTP/1.1\r\nHost: edge-1:10255\r\nX-Other: a  b\r\nConnection: close\r\n\r\nbody"
        );
        assert_eq!(
            (head.host.as_deref(), head.proxy_host.as_deref()),
            (Some("edge-1:10255"), Some("edge-1"))
        );
    }

    #[test]
    fn upgrades_and_proxies_requests() {
        let upgrade =
            "GET /exec HTTP/1.1\r\nHost: edge-1:10255\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
        assert_eq!(head(upgrade).rewritten, upgrade);
        let proxied = head("GET http://edge-1:9100/metrics HTTP/1.1\r\nHost: other\r\n\r\n");
        assert_eq!(proxied.host.as_deref(), Some("edge-1:9100"));
        assert_eq!(
            proxied.rewritten,
            "GET /metrics HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n"
        );
        let bare = head("GET HTTP://edge-1:9100?a=b HTTP/1.1\r\n\r\n");
        assert!(bare.rewritten.starts_with(b"GET /?a=b HTTP/1.1\r\n"));
        let h2c = head(
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n",
        );
        assert_eq!(h2c.rewritten, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    }

    #[test]
    fn malformed_requests_are_refused() {
        assert_eq!(parse(b"GET / HTTP/1.1\r\nHost: a").unwrap(), None);
        for wrong in [
            "\x16\x03\x01\x00",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: \u{ff}\r\n\r\n",
        ] {
            let bytes: Vec<u8> = wrong.chars().map(|c| c as u8).collect();
            assert!(parse(&bytes).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn authorities() {
        assert_eq!(split("edge-1:10255"), Ok(("edge-1", Some(10255))));
        assert_eq!(split("edge-1"), Ok(("edge-1", None)));
        assert_eq!(split("[fd00::1]:80"), Ok(("fd00::1", Some(80))));
        assert_eq!(split("[fd00::1]"), Ok(("fd00::1", None)));
        for wrong in ["", ":80", "a:", "a:0", "a:70000", "[fd00::1", "[fd00::1]80", "[]:80"] {
            assert!(split(wrong).is_err(), "{wrong}");
        }
    }
}

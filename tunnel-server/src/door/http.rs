//! The http door: the first request's head names the node.
//!
//! A connection carries one request: the target is asked to close after its answer (`Connection: close`, RFC 9112
//! §9.6), so that a client has to connect again before it names another node. Upgrades are carried unchanged. No
//! credentials are added.

use std::net::SocketAddr;

use bytes::BytesMut;
use http::StatusCode;
use tokio::net::TcpStream;
use tunnel_core::identity::NodeName;
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use super::context::{Door, OpenError, OpenRequest};
use super::http_head::{Head, HeadReader, PROXY_DEST, split};
use super::preface::{PrefaceError, answer, read_preface, timed_out};
use super::resolve::resolve;
use crate::route::Router;

pub struct Http;

impl Door for Http {
    const NAME: &'static str = "http";

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<OpenRequest, OpenError> {
        const HEAD: &str = "request";
        let (mut read, mut reader) = (BytesMut::new(), HeadReader::default());
        let parse = |read: &[u8]| reader.parse(read);
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

fn response(status: StatusCode, reason: &str) -> Vec<u8> {
    let body = format!("tunnel-server: {reason}\n");
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

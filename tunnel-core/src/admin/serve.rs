//! Connections to the admin endpoints, and who may change something through them.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, HeaderName, header};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::text::printable;

/// The source address of what an agent dials at its own admin port for a server. Whoever reaches a node's ports through the tunnel
/// may read metrics there, and is not the node's administrator. An address tells also a process that has taken the listener over.
pub const TUNNELLED: Ipv4Addr = Ipv4Addr::new(127, 80, 84, 1);
/// How long a connection may take to send a request's head, from its start or from the last answer, and then its body.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// The pause after a failed accept: errors of a single connection do not repeat, EMFILE does.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Accepts connections while `open`, and answers their requests, until it is dropped. The second router is for those from
/// [`TUNNELLED`].
pub(super) async fn answer(
    listener: &TcpListener,
    (own, tunnelled): (&Router, &Router),
    mut open: watch::Receiver<bool>,
) -> io::Result<Infallible> {
    let mut server = http1::Builder::new();
    // A client may end its half behind its request, and wait for the answer.
    server.timer(TokioTimer::new()).header_read_timeout(READ_TIMEOUT).max_buf_size(MAX_HEAD).half_close(true);
    loop {
        if open.wait_for(|open| *open).await.is_err() {
            // The end is near: only that drops the sender.
            return std::future::pending().await;
        }
        let accepted = tokio::select! {
            biased;
            Ok(()) = open.changed() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((socket, client)) => {
                let router = if client.ip() == TUNNELLED { tunnelled } else { own };
                let service = TowerToHyperService::new(router.clone());
                let connection = server.serve_connection(TokioIo::new(socket), service);
                tokio::spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::debug!(%client, %error, "a connection to the admin endpoints has failed");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the admin endpoints");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Checks that a request which changes something is not sent by a foreign web page in a browser on this host. Such a page
/// reaches this port under a name of its own (DNS rebinding), or says where it came from.
///
/// # Errors
/// It may be, for this reason.
pub(super) fn own_page(headers: &HeaderMap) -> Result<(), String> {
    let text = |name: &HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let host = text(&header::HOST);
    if let Some(host) = host
        && !is_address(host)
    {
        return Err(format!(
            "Host {:?} may not change anything: name this port by its IP address or as localhost",
            printable(host, 100)
        ));
    }
    match text(&header::ORIGIN) {
        Some(origin) if host.is_none_or(|host| origin != format!("http://{host}")) => {
            Err(format!("a web page of {:?} may not change anything here", printable(origin, 100)))
        }
        _ => Ok(()),
    }
}

/// Whether no DNS server can have said where this `Host` leads.
fn is_address(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    name.eq_ignore_ascii_case("localhost")
        || host.parse::<SocketAddr>().is_ok()
        || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_may_change_something() {
        let headers = |host: &str, origin: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, origin.parse().unwrap());
            }
            headers
        };
        for host in [
            "127.0.0.1:10265",
            "127.0.0.1",
            "[::1]:10265",
            "[::1]",
            "localhost:10265",
            "LOCALHOST",
            "10.0.0.9:1",
        ] {
            assert_eq!(own_page(&headers(host, None)), Ok(()), "{host}");
            assert_eq!(own_page(&headers(host, Some(&format!("http://{host}")))), Ok(()), "{host}");
            for origin in ["http://evil.example", "null", "https://127.0.0.1:10265", "http://127.0.0.1:1"] {
                assert!(own_page(&headers(host, Some(origin))).is_err(), "{host} {origin}");
            }
        }
        for host in [
            "evil.example",
            "evil.example:10265",
            "127.0.0.1.evil.example",
            "localhost.evil.example:1",
            "",
            ":1",
        ] {
            assert!(own_page(&headers(host, None)).is_err(), "{host}");
        }
        assert_eq!(own_page(&HeaderMap::new()), Ok(()), "HTTP/1.0");
    }
}

//! Serves connections to the admin endpoints, and checks which requests are answered.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::time::Instant;

use crate::accept::Gated;
use crate::places::Places;
use crate::text::printable;

/// Source address that an agent uses to dial its own admin port for a server. A client that reaches a node's ports
/// through the tunnel may read metrics there, but is not the node's administrator. An address also works after another
/// process took over the listener.
pub const TUNNELLED: Ipv4Addr = Ipv4Addr::new(127, 80, 84, 1);
/// Maximum time for receiving a request's head, from the start or the last answer on, and then its body; and for which a
/// client may take nothing of an answer.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a request's head, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Maximum number of connections, with those that are being closed.
pub(super) const MAX_CONNECTIONS: u32 = 64;

/// Accepts connections and answers their requests, until dropped. The second router serves connections from
/// [`TUNNELLED`].
pub(super) async fn answer(mut listener: Gated, own: Router, tunnelled: Router) -> Infallible {
    let mut server = http1::Builder::new();
    // A client may close its sending half after the request and wait for the answer.
    server.timer(TokioTimer::new()).header_read_timeout(READ_TIMEOUT).max_buf_size(MAX_HEAD).half_close(true);
    // Each is a source of its own, so that the oldest gives way: those who hold the others may have the address of the newest.
    let places = Places::new(MAX_CONNECTIONS, 1).undisturbed_for(Duration::ZERO);
    loop {
        let (socket, client) = listener.accept("admin").await;
        let Some(place) = places.admit(client, Instant::now()) else { continue };
        let router = if client.ip() == TUNNELLED { &tunnelled } else { &own };
        let service = TowerToHyperService::new(router.clone());
        let connection = server.serve_connection(TokioIo::new(socket), service);
        tokio::spawn(async move {
            tokio::select! {
                ended = connection => if let Err(error) = ended {
                    tracing::debug!(%client, %error, "admin connection failed");
                },
                () = place.evicted() => tracing::debug!(%client, "too many admin connections, closing the oldest"),
            }
        });
        // Those that have to give way are closed before the next ones come.
        tokio::task::yield_now().await;
    }
}

/// Refuses requests that name this port by anything but an address or localhost: a web page in a browser on this host
/// reaches it under the page's own host name (DNS rebinding), and could read the answers. Also refuses another page's
/// requests that change something, which name the port by its address but send the page's origin.
pub(super) async fn own_requests(request: Request, next: Next) -> Response {
    let checked = own_name(request.headers()).and_then(|()| match *request.method() {
        Method::GET | Method::HEAD => Ok(()),
        _ => own_page(request.headers()),
    });
    match checked {
        Ok(()) => next.run(request).await,
        Err(reason) => {
            tracing::warn!(path = request.uri().path(), reason, "admin request refused");
            (StatusCode::FORBIDDEN, format!("{reason}\n")).into_response()
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

fn own_name(headers: &HeaderMap) -> Result<(), String> {
    match text(headers, &header::HOST) {
        Some(host) if !is_address(host) => Err(format!(
            "Host {:?} is not this port's: name it by its IP address or as localhost",
            printable(host, 100)
        )),
        // HTTP/1.0, which no browser speaks.
        _ => Ok(()),
    }
}

fn own_page(headers: &HeaderMap) -> Result<(), String> {
    let host = text(headers, &header::HOST);
    match text(headers, &header::ORIGIN) {
        Some(origin) if host.is_none_or(|host| origin != format!("http://{host}")) => {
            Err(format!("a web page of {:?} may not change anything here", printable(origin, 100)))
        }
        _ => Ok(()),
    }
}

/// Reports whether this `Host` cannot be the result of a DNS lookup.
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
    fn only_addresses_and_localhost_are_this_ports_names() {
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
            assert_eq!(own_name(&headers(host, None)), Ok(()), "{host}");
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
            assert!(own_name(&headers(host, None)).is_err(), "{host}");
        }
        assert_eq!(own_name(&HeaderMap::new()), Ok(()), "HTTP/1.0");
    }
}

//! Connections through an HTTP proxy, by CONNECT (RFC 9110 §9.3.6).

use std::io;

use http::header::{HOST, PROXY_AUTHORIZATION};
use http::{HeaderValue, Request, StatusCode, Uri};
use hyper::client::conn::http1;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;
use tunnel_runtime::error::chain;

use super::direct;
use super::server::Server;

/// Go's default for http://. (curl's is 1080.)
const DEFAULT_PORT: u16 = 80;

/// An HTTP proxy and its exceptions.
#[derive(Debug)]
pub struct Proxy {
    matcher: Matcher,
    /// The URL without user and password, for logs.
    shown: String,
}

impl Proxy {
    /// Parses `http://[USER:PASSWORD@]HOST[:PORT]`. `except` has the format of `NO_PROXY`.
    ///
    /// # Errors
    /// The fault in the URL, without its password.
    pub fn parse(url: &str, except: &str) -> Result<Self, String> {
        // As in curl, http is the default scheme.
        let whole = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let form = "not http://[USER:PASSWORD@]HOST[:PORT]";
        let uri: Uri = whole.parse().map_err(|error| format!("{form}: {error}"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(scheme) => {
                return Err(format!(
                    "{scheme}:// proxies are not supported, only http://; the tunnel encrypts by itself"
                ));
            }
            None => return Err(form.to_owned()),
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(format!("{form}: nothing may follow the port"));
        }
        let matcher = Matcher::builder().https(whole.as_str()).no(except).build();
        Ok(Self { matcher, shown: format!("http://{}", address_of(&uri).ok_or(form)?) })
    }

    /// Returns the proxy to connect through, or None if the server is an exception.
    pub(super) fn endpoint_for(&self, server: &str) -> Option<ProxyEndpoint> {
        let uri: Uri = format!("https://{server}").parse().ok()?;
        let found = self.matcher.intercept(&uri)?;
        Some(ProxyEndpoint { address: address_of(found.uri())?, credentials: found.basic_auth().cloned() })
    }
}

impl std::fmt::Display for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.shown)
    }
}

/// HOST:PORT of the proxy.
fn address_of(uri: &Uri) -> Option<String> {
    let (authority, host) = (uri.authority()?.as_str(), uri.host()?);
    let port = authority.rsplit('@').next()?.strip_prefix(host)?;
    // `Uri::port` returns None for a port that is not a number.
    let port = match port.strip_prefix(':') {
        Some(port) => port.parse().ok()?,
        None => DEFAULT_PORT,
    };
    Some(format!("{host}:{port}"))
}

/// Errors of a connection through the proxy.
#[derive(Debug, thiserror::Error)]
enum ProxyError {
    #[error("proxy {proxy}: {reason}")]
    Unreachable { proxy: String, reason: io::Error },
    #[error("proxy {proxy} asks for a user and a password: give http://USER:PASSWORD@{proxy}")]
    AuthenticationRequired { proxy: String },
    #[error("proxy {proxy} refuses the user and the password that it was given")]
    AuthenticationRefused { proxy: String },
    #[error("proxy {proxy} answers CONNECT {server} with {status}")]
    Refused { proxy: String, server: String, status: StatusCode },
    #[error("{proxy} does not answer as an HTTP proxy: {reason}")]
    Protocol { proxy: String, reason: String },
}

/// The part of a proxied connection that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyFault {
    /// The proxy cannot be reached.
    Unreachable,
    /// The proxy refuses to connect to the server.
    Refuses,
}

/// Returns the proxy's fault if an error of a connection comes from it.
pub fn proxy_fault(error: &io::Error) -> Option<ProxyFault> {
    match error.get_ref()?.downcast_ref::<ProxyError>()? {
        ProxyError::Unreachable { .. } => Some(ProxyFault::Unreachable),
        _ => Some(ProxyFault::Refuses),
    }
}

/// The proxy to connect through.
pub(super) struct ProxyEndpoint {
    /// HOST:PORT of the proxy.
    pub(super) address: String,
    credentials: Option<HeaderValue>,
}

impl ProxyEndpoint {
    /// Connects to the proxy, and through it to the server.
    pub(super) async fn connect(&self, server: &str) -> io::Result<TcpStream> {
        let proxy = || self.address.clone();
        let stream = direct::connect(&Server::Named(proxy())).await.map_err(|reason| {
            io::Error::new(reason.kind(), ProxyError::Unreachable { proxy: proxy(), reason })
        })?;
        let protocol = |reason: String| io::Error::other(ProxyError::Protocol { proxy: proxy(), reason });
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| protocol(chain(&error)))?;
        let _driving = AbortOnDropHandle::new(tokio::spawn(connection.with_upgrades()));
        let mut request = Request::connect(server).header(HOST, server);
        if let Some(credentials) = &self.credentials {
            request = request.header(PROXY_AUTHORIZATION, credentials);
        }
        let request = request.body(String::new()).map_err(io::Error::other)?;
        let answer = sender.send_request(request).await.map_err(|error| protocol(chain(&error)))?;
        let status = answer.status();
        // tinyproxy answers a wrong password with 401.
        if matches!(status, StatusCode::PROXY_AUTHENTICATION_REQUIRED | StatusCode::UNAUTHORIZED) {
            let error = match self.credentials {
                None => ProxyError::AuthenticationRequired { proxy: proxy() },
                Some(_) => ProxyError::AuthenticationRefused { proxy: proxy() },
            };
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, error));
        }
        if !status.is_success() {
            let error = ProxyError::Refused { proxy: proxy(), server: server.to_owned(), status };
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, error));
        }
        let upgraded = hyper::upgrade::on(answer).await.map_err(|error| protocol(chain(&error)))?;
        let parts = upgraded
            .downcast::<TokioIo<TcpStream>>()
            .map_err(|_| protocol("the connection is not the one that was opened".to_owned()))?;
        // In TLS the client speaks first.
        if !parts.read_buf.is_empty() {
            return Err(protocol("it sends bytes of its own after its answer".to_owned()));
        }
        Ok(parts.io.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn urls_are_parsed_and_passwords_are_not_shown() {
        let shown = |url: &str| Proxy::parse(url, "").map(|proxy| proxy.to_string());
        assert_eq!(shown("http://proxy.example:3128").unwrap(), "http://proxy.example:3128");
        assert_eq!(shown("proxy.example:3128/").unwrap(), "http://proxy.example:3128");
        assert_eq!(shown("http://[fd00::1]").unwrap(), "http://[fd00::1]:80");
        assert_eq!(shown("http://me:secret@proxy:1").unwrap(), "http://proxy:1");
        let proxy = Proxy::parse("http://me:secret@proxy:1", "").unwrap();
        assert!(!format!("{proxy:?}").contains("secret"));
        for (url, says) in [
            ("https://me:secret@proxy", "https:// proxies are not supported"),
            ("socks5://proxy:1080", "socks5:// proxies"),
            ("http://me:secret@proxy:port", "not http://"),
            ("http://proxy/path", "nothing may follow"),
            ("http://", "not http://"),
        ] {
            let error = shown(url).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn exceptions_go_past_it() {
        let proxy = Proxy::parse("http://u:p@proxy:3128", "10.0.0.0/8, .internal,fd00::/8").unwrap();
        let endpoint = proxy.endpoint_for("tunnel.example:10262").unwrap();
        assert_eq!(endpoint.address, "proxy:3128");
        assert_eq!(endpoint.credentials.unwrap(), "Basic dTpw");
        assert!(
            proxy.endpoint_for("192.0.2.1:10262").is_some()
                && proxy.endpoint_for("[2001:db8::1]:10262").is_some()
        );
        for past in ["10.1.2.3:10262", "a.internal:10262", "[fd00::1]:10262"] {
            assert!(proxy.endpoint_for(past).is_none(), "{past}");
        }
        assert!(Proxy::parse("http://proxy", "*").unwrap().endpoint_for("a:1").is_none());
    }

    /// A proxy for one connection. It sends `answer` and returns the head of the request.
    async fn proxy(answer: &'static str) -> (ProxyEndpoint, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Echoes four bytes that come through the tunnel.
            let mut rest = [0; 4];
            if stream.read_exact(&mut rest).await.is_ok() {
                stream.write_all(&rest).await.unwrap();
            }
            String::from_utf8(head).unwrap()
        });
        (ProxyEndpoint { address, credentials: Some(HeaderValue::from_static("Basic dTpw")) }, serving)
    }

    #[tokio::test]
    async fn connects_and_is_a_plain_connection_then() {
        let (endpoint, serving) = proxy("HTTP/1.1 200 Connection established\r\n\r\n").await;
        let mut stream = endpoint.connect("server:10262").await.unwrap();
        stream.write_all(b"ping").await.unwrap();
        let mut back = [0; 4];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"ping");
        let head = serving.await.unwrap().to_lowercase();
        assert!(head.starts_with("connect server:10262 http/1.1\r\n"), "{head}");
        assert!(head.contains("\r\nhost: server:10262\r\n"), "{head}");
        assert!(head.contains("\r\nproxy-authorization: basic dtpw\r\n"), "{head}");
    }

    #[tokio::test]
    async fn errors_say_what_the_proxy_said() {
        for (answer, says) in [
            ("HTTP/1.1 407 Authenticate\r\nContent-Length: 0\r\n\r\n", "refuses the user and the password"),
            ("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "refuses the user and the password"),
            (
                "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
                "CONNECT server:10262 with 403 Forbidden",
            ),
            ("SSH-2.0-OpenSSH_9.2\r\n", "does not answer as an HTTP proxy"),
            ("HTTP/1.1 200 OK\r\n\r\nwelcome", "sends bytes of its own"),
        ] {
            let (endpoint, _serving) = proxy(answer).await;
            let error = endpoint.connect("server:10262").await.unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(&endpoint.address), "{answer:?}: {error}");
        }
        let (mut endpoint, _serving) = proxy("HTTP/1.1 407 Authenticate\r\nContent-Length: 0\r\n\r\n").await;
        endpoint.credentials = None;
        let error = endpoint.connect("server:10262").await.unwrap_err().to_string();
        assert!(error.contains("http://USER:PASSWORD@127.0.0.1:"), "{error}");
    }

    #[tokio::test]
    async fn a_proxy_that_is_not_there() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let error = ProxyEndpoint { address: address.clone(), credentials: None }
            .connect("server:1")
            .await
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(error.to_string().starts_with(&format!("proxy {address}: ")), "{error}");
    }
}

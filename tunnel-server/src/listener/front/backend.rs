//! The connection to a target: HTTP, over TLS if the target speaks it.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::TunnelStream;
use tunnel_runtime::error::chain;

use super::expect::RequestBody;
use super::kinds::MAX_HEAD;
use crate::listener::answer::Failure;

const HANDSHAKE: Duration = Duration::from_secs(10);

/// A connection to a target for one request.
pub(super) struct Backend {
    sender: Sender,
    pub(super) connection: AbortOnDropHandle<()>,
}

enum Sender {
    Http1(http1::SendRequest<RequestBody>),
    Http2(http2::SendRequest<RequestBody>),
}

/// TLS settings for a target, and the server name to send.
pub(super) struct Tls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) name: ServerName<'static>,
}

/// Speaks HTTP on `stream`, over TLS if `tls` is given. `to` names the target in errors.
///
/// # Errors
/// The target's certificate is not its node's, or it does not speak these protocols.
pub(super) async fn connect(stream: TunnelStream, tls: Option<Tls>, to: &str) -> Result<Backend, Failure> {
    let Some(Tls { config, name }) = tls else { return over_http1(stream, to).await };
    let status = stream.status();
    let handshake = TlsConnector::from(config).connect(name, stream);
    let stream = match tokio::time::timeout(HANDSHAKE, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            let (outcome, reason) = match status.failure() {
                Some((outcome, reason)) if outcome != Outcome::ClientReset => (outcome, reason),
                _ => (Outcome::Protocol, chain(&error)),
            };
            return Err(Failure::of_outcome(outcome, format!("TLS to {to}: {reason}")));
        }
        Err(_) => {
            let reason = format!("TLS to {to}: no handshake within {} s", HANDSHAKE.as_secs());
            return Err(Failure::of_outcome(Outcome::TimedOut, reason));
        }
    };
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return over_http1(stream, to).await;
    }
    let built = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
        .handshake(TokioIo::new(stream))
        .await;
    let (sender, connection) = built.map_err(|error| broken(to, &error))?;
    Ok(Backend::new(Sender::Http2(sender), connection))
}

async fn over_http1<S>(stream: S, to: &str) -> Result<Backend, Failure>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let built = http1::Builder::new().max_buf_size(MAX_HEAD).handshake(TokioIo::new(stream)).await;
    let (sender, connection) = built.map_err(|error| broken(to, &error))?;
    Ok(Backend::new(Sender::Http1(sender), connection.with_upgrades()))
}

fn broken(to: &str, error: &hyper::Error) -> Failure {
    Failure::of_outcome(Outcome::TargetReset, format!("{to} broke off: {}", chain(error)))
}

impl Backend {
    fn new(sender: Sender, connection: impl Future<Output = hyper::Result<()>> + Send + 'static) -> Self {
        let connection = tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = chain(&error), "a connection to a target ended");
            }
        });
        Self { sender, connection: AbortOnDropHandle::new(connection) }
    }

    pub(super) fn is_http2(&self) -> bool {
        matches!(self.sender, Sender::Http2(_))
    }

    /// Sends the only request, and waits for the head of the answer.
    pub(super) async fn send(
        self,
        request: Request<RequestBody>,
    ) -> (hyper::Result<Response<Incoming>>, AbortOnDropHandle<()>) {
        let answer = match self.sender {
            Sender::Http1(mut sender) => sender.send_request(request).await,
            Sender::Http2(mut sender) => sender.send_request(request).await,
        };
        (answer, self.connection)
    }
}

//! gRPC client of a server's Enrollment service.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};
use tower::service_fn;
use tunnel_link::link::{Wire, tune_link};
use tunnel_link::proto::EnrollResponse;
use tunnel_link::proto::enrollment_client::EnrollmentClient;
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::error::chain;

use crate::enrol::attempt::{AttemptError, check_issued};
use crate::enrol::reach::{Reach, Server, tls_hint};
use crate::{AgentIdentity, Holder, IdentityError, PrivateKey, TrustBundle, refusal, server_name};

/// Maximum time for the TCP connection and the TLS handshake together. An edge's link may be slow.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Enough for a chain and a few roots.
const MAX_MESSAGE: usize = 256 * 1024;

/// A connection to a server's Enrollment service.
pub(crate) struct Connection {
    pub(crate) client: EnrollmentClient<Channel>,
    server_chain: Vec<CertificateDer<'static>>,
}

impl Connection {
    /// Connects and does the handshake outside tonic, so that an error says which of the two failed and why.
    pub(crate) async fn open(
        reach: &Reach,
        server: &str,
        tls: &Arc<ClientConfig>,
    ) -> Result<Self, AttemptError> {
        let (stream, server_chain) = connect(reach, server, tls).await?;
        tune_link(stream.get_ref().0);
        Ok(Self { client: client(stream).await?, server_chain })
    }

    /// Returns the answer to a call, or gives the call up. A limit of tonic's own would end with the answer's headers.
    pub(crate) async fn answer<T>(
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AttemptError> {
        let answer = tokio::time::timeout(CALL_TIMEOUT, call).await.map_err(|_| {
            AttemptError::Transient(format!("no answer to the call within {} s", CALL_TIMEOUT.as_secs()))
        })?;
        Ok(answer?.into_inner())
    }

    /// Returns the identity in an answer. It must be for this holder and this key, and its roots must verify this very
    /// server: otherwise its holder could not connect to it again.
    pub(crate) fn issued_identity(
        &self,
        response: &EnrollResponse,
        key: &PrivateKey,
        (holder, node): (Holder, &NodeName),
        clock: Clock,
    ) -> Result<AgentIdentity, AttemptError> {
        let parse = || {
            let bundle = TrustBundle::from_pem(&response.trust_bundle)?;
            bundle.verify_server(&self.server_chain, clock.now())?;
            let mut identity = AgentIdentity::from_pem(&response.certificate_chain, &key.to_pem(), bundle)?;
            identity.clock = clock;
            Ok(identity)
        };
        parse()
            .and_then(|identity| check_issued(identity, holder, node))
            .map_err(|error| AttemptError::Transient(format!("unusable answer: {error}")))
    }
}

/// Returns a client of the service at the other end.
async fn client(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<EnrollmentClient<Channel>, AttemptError> {
    let mut stream = Some(TokioIo::new(stream));
    let connector = service_fn(move |_: Uri| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::other("the connection was closed")) }
    });
    // The name is only the :authority. The connector already has the connection.
    let channel = Endpoint::from_static("http://tunnel-server.postern.internal")
        .connect_with_connector(connector)
        .await
        .map_err(|error| AttemptError::Transient(chain(&error)))?;
    Ok(EnrollmentClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
}

/// Fetches the certificates that the server presents now. A link may be older than the server's certificate.
pub(crate) async fn fetch_chain(
    reach: &Reach,
    server: &str,
    tls: &Arc<ClientConfig>,
) -> Result<Vec<CertificateDer<'static>>, AttemptError> {
    Ok(connect(reach, server, tls).await?.1)
}

/// Returns a connection and the certificates that the server presented.
async fn connect(
    reach: &Reach,
    server: &str,
    tls: &Arc<ClientConfig>,
) -> Result<(TlsStream<Wire>, Vec<CertificateDer<'static>>), AttemptError> {
    let handshake = async {
        let reached = reach
            .connect(&Server::Named(server.to_owned()))
            .await
            .map_err(|error| AttemptError::Transient(format!("connect: {error}")))?;
        TlsConnector::from(Arc::clone(tls))
            .connect(server_name(), reached.stream)
            .await
            .map_err(|error| handshake_error(&error, reached.proxy.as_deref()))
    };
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, handshake).await.map_err(|_| {
        AttemptError::Transient(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()))
    })??;
    let chain = stream
        .get_ref()
        .1
        .peer_certificates()
        .map(|chain| chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
        .unwrap_or_default();
    Ok((stream, chain))
}

impl From<Status> for AttemptError {
    fn from(status: Status) -> Self {
        let text =
            if status.message().is_empty() { status.code().to_string() } else { status.message().to_owned() };
        match status.code() {
            Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument => Self::Refused(text),
            // The source of the transport's error, whose own text says only "transport error".
            _ => Self::Transient(match status.source() {
                Some(source) => format!("{text}: {}", chain(source)),
                None => text,
            }),
        }
    }
}

fn handshake_error(error: &io::Error, proxy: Option<&str>) -> AttemptError {
    let hint = tls_hint(proxy);
    match refusal(error) {
        Some(reason @ IdentityError::CaMismatch { .. }) => AttemptError::Refused(format!("{reason}{hint}")),
        Some(reason) => AttemptError::Transient(format!("TLS: {reason}{hint}")),
        None => AttemptError::Transient(format!("TLS: {error}{hint}")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use tunnel_link::proto::RenewRequest;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_dies_behind_its_headers_does_not_hold_a_renewal() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let server = tokio::spawn(async move {
            let mut link = h2::server::handshake(far).await.unwrap();
            let (_request, mut respond) = link.accept().await.unwrap().unwrap();
            let headers = http::Response::builder().header("content-type", "application/grpc");
            let _answer = respond.send_response(headers.body(()).unwrap(), false).unwrap();
            while link.accept().await.is_some() {}
        });
        let mut client = client(near).await.unwrap();
        let started = Instant::now();
        let answer = Connection::answer(client.renew(RenewRequest { csr: Vec::new() })).await;
        assert!(matches!(answer, Err(AttemptError::Transient(_))));
        assert_eq!(started.elapsed(), CALL_TIMEOUT);
        server.abort();
    }
}

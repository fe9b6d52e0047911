use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use rcgen::KeyPair;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower::service_fn;
use tunnel_core::identity::{AgentIdentity, IdentityError, NodeName, TrustBundle, refusal, server_name};
use tunnel_core::proto::EnrollResponse;
use tunnel_core::proto::enrollment_client::EnrollmentClient;

/// To reach the server and shake hands with it; an edge's link may be slow.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// A chain and a few roots.
const MAX_MESSAGE: usize = 256 * 1024;

/// Why one attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The same request will get the same answer.
    Definite(String),
    /// Another time, or another server, may do better.
    Transient(String),
}

impl Failure {
    pub(super) fn of_status(status: &Status) -> Self {
        let text =
            if status.message().is_empty() { status.code().to_string() } else { status.message().to_owned() };
        match status.code() {
            Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument => Self::Definite(text),
            _ => Self::Transient(format!("{text}{}", causes(status))),
        }
    }

    pub(super) fn reason(&self) -> &str {
        match self {
            Self::Definite(reason) | Self::Transient(reason) => reason,
        }
    }

    fn of_handshake(error: &io::Error) -> Self {
        match refusal(error) {
            Some(reason @ IdentityError::CaMismatch { .. }) => Self::Definite(reason.to_string()),
            Some(reason) => Self::Transient(format!("TLS: {reason}")),
            None => Self::Transient(format!("TLS: {error}")),
        }
    }
}

/// What the transport's error wraps: its own text says only "transport error".
fn causes(error: &dyn Error) -> String {
    let mut text = String::new();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}

/// A connection to a server's Enrollment service.
pub(super) struct Connection {
    pub(super) client: EnrollmentClient<Channel>,
    server_chain: Vec<CertificateDer<'static>>,
}

impl Connection {
    /// Connects and shakes hands, so that an error says which of the two failed and why.
    pub(super) async fn open(server: &str, tls: &Arc<ClientConfig>) -> Result<Self, Failure> {
        let handshake = async {
            let tcp = TcpStream::connect(server)
                .await
                .map_err(|error| Failure::Transient(format!("connect: {error}")))?;
            TlsConnector::from(Arc::clone(tls))
                .connect(server_name(), tcp)
                .await
                .map_err(|error| Failure::of_handshake(&error))
        };
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, handshake)
            .await
            .map_err(|_| Failure::Transient(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs())))??;
        let server_chain = stream
            .get_ref()
            .1
            .peer_certificates()
            .map(|chain| chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
            .unwrap_or_default();
        let mut stream = Some(TokioIo::new(stream));
        let connector = service_fn(move |_: Uri| {
            let stream = stream.take();
            async move { stream.ok_or_else(|| io::Error::other("the connection has ended")) }
        });
        // The name is only the :authority; the connector has the connection already.
        let channel = Endpoint::from_static("http://tunnel-server.postern.internal")
            .timeout(CALL_TIMEOUT)
            .connect_with_connector(connector)
            .await
            .map_err(|error| Failure::Transient(format!("{error}{}", causes(&error))))?;
        let client = EnrollmentClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        Ok(Self { client, server_chain })
    }

    /// The identity in an answer, if it is what was asked for: our node, our key, and roots by which this very
    /// server would be accepted the next time.
    pub(super) fn identity_of(
        &self,
        response: &EnrollResponse,
        key: &KeyPair,
        node: &NodeName,
    ) -> Result<AgentIdentity, Failure> {
        self.check(response, key, node)
            .map_err(|error| Failure::Transient(format!("unusable answer: {error}")))
    }

    fn check(
        &self,
        response: &EnrollResponse,
        key: &KeyPair,
        node: &NodeName,
    ) -> Result<AgentIdentity, IdentityError> {
        let bundle = TrustBundle::from_pem(&response.trust_bundle)?;
        bundle.verify_server(&self.server_chain)?;
        let identity = AgentIdentity::from_pem(&response.certificate_chain, &key.serialize_pem(), bundle)?;
        if identity.node != *node {
            return Err(IdentityError::OtherNode {
                expected: node.to_string(),
                found: identity.node.to_string(),
            });
        }
        match identity.chain.first().and_then(|leaf| identity.bundle.issuer_of(leaf)) {
            Some(_) => Ok(identity),
            None => Err(IdentityError::Bundle("no root of it signed the certificate".into())),
        }
    }
}

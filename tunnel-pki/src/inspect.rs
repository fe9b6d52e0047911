//! Inspects the certificate of any TLS server, trusted or not. For diagnosis only: nothing secret is sent on such a
//! connection.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::{ClientConfig, version};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel_link::link::Wire;
use tunnel_runtime::text::printable;

use super::certificate::{SERVER_NAME, alternative_names, parse, server_names_of_certificate};
use super::tls::server_name;
use super::verify::{provider, server_verifier};

/// Maximum number of bytes read of an answer.
const MAX_HEAD: u64 = 4 << 10;

/// Performs a handshake and closes the connection. Returns the chain, the server's certificate first. Checks only that
/// the server has the key of that certificate.
///
/// # Errors
/// Fails if the peer does not speak TLS, or if it refuses.
pub async fn presented_chain(
    stream: impl Into<Wire>,
    alpn: &[u8],
) -> io::Result<Vec<CertificateDer<'static>>> {
    let (chain, shaken) = shake_hands(stream.into(), server_name(), alpn).await?;
    match shaken {
        // The presented chain counts even if the rest of the handshake fails.
        Err(error) if chain.is_empty() => Err(error),
        _ => Ok(chain),
    }
}

/// Certificates of an HTTPS server, and the first line of its answer.
#[derive(Clone, Debug)]
pub struct HttpsAnswer {
    /// The server's own certificate first.
    pub chain: Vec<CertificateDer<'static>>,
    /// DNS names and addresses in that certificate.
    pub names: Vec<String>,
    pub status: Option<u16>,
    line: String,
}

impl HttpsAnswer {
    pub fn status_line(&self) -> &str {
        &self.line
    }
}

/// Sends a GET without credentials to a server whose certificate is not verified: the path must not contain secrets.
///
/// # Errors
/// Fails if the peer does not speak TLS, or does not answer.
pub async fn ask_https(stream: TcpStream, name: ServerName<'static>, path: &str) -> io::Result<HttpsAnswer> {
    let host = name.to_str().into_owned();
    let (chain, shaken) = shake_hands(stream.into(), name, b"http/1.1").await?;
    let mut stream = shaken?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    // The peer may close without TLS' close_notify.
    if let Err(error) = stream.take(MAX_HEAD).read_to_end(&mut head).await
        && head.is_empty()
    {
        return Err(error);
    }
    let head = String::from_utf8_lossy(&head);
    let line = printable(head.lines().next().unwrap_or_default(), 100);
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let names = chain.first().and_then(|leaf| alternative_names(&parse(leaf).ok()?).ok()).unwrap_or_default();
    Ok(HttpsAnswer { chain, names, status, line })
}

type Shaken = io::Result<TlsStream<Wire>>;

async fn shake_hands(
    stream: Wire,
    name: ServerName<'static>,
    alpn: &[u8],
) -> io::Result<(Vec<CertificateDer<'static>>, Shaken)> {
    let seen = Arc::<Mutex<Vec<CertificateDer<'static>>>>::default();
    let note = seen.clone();
    let verifier = server_verifier(move |leaf, rest, _, _| {
        let chain = std::iter::once(leaf).chain(rest).map(|certificate| certificate.clone().into_owned());
        *note.lock() = chain.collect();
        Ok(())
    });
    // TLS 1.2 too: an interceptor may not support a newer version.
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13, &version::TLS12])
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    let shaken = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    let chain = std::mem::take(&mut *seen.lock());
    Ok((chain, shaken))
}

/// Describes a foreign certificate by its subject and issuer.
pub fn describe_certificate(certificate: &CertificateDer<'_>) -> String {
    match parse(certificate) {
        Ok(parsed) => {
            format!("a certificate for \"{}\", issued by \"{}\"", parsed.subject(), parsed.issuer())
        }
        Err(error) => format!("a certificate that cannot be read ({error})"),
    }
}

/// True if this could be a tunnel-server's certificate, of any CA.
pub fn names_a_tunnel_server(certificate: &CertificateDer<'_>) -> bool {
    server_names_of_certificate(certificate).is_ok_and(|names| names.iter().any(|name| name == SERVER_NAME))
}

//! The edge's end: dials the cloud, redials whenever the link ends, and dials a target for each stream.
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint, RecvStream, SendStream};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{RootCertStore, version};
use tokio::net::TcpStream;
use tunnel_link::relay::prepare_socket;

use super::relay::relay;
use super::{ALPN, endpoint, provider, transport};

/// Pause between two attempts to dial.
const PAUSE: Duration = Duration::from_millis(200);

/// The process `--quic-edge CLOUD CA TARGET CONGESTION`: serves until killed.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let [cloud, ca, target, congestion] = args else {
        anyhow::bail!("--quic-edge CLOUD CA TARGET CONGESTION")
    };
    let cloud: SocketAddr = cloud.to_str().and_then(|cloud| cloud.parse().ok()).context("CLOUD")?;
    let target: IpAddr = target.to_str().and_then(|target| target.parse().ok()).context("TARGET")?;
    let mut config = tls(Path::new(ca))?;
    config.transport_config(transport(congestion.to_str().context("CONGESTION")?)?);
    tunnel_runtime::lifecycle::raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let endpoint = endpoint((Ipv4Addr::UNSPECIFIED, 0).into(), None)?;
        loop {
            if let Err(error) = link(&endpoint, config.clone(), cloud, target).await {
                eprintln!("the link: {error:#}");
            }
            tokio::time::sleep(PAUSE).await;
        }
    })
}

fn tls(ca: &Path) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).context("the CA's certificate")?).context("the CA")?;
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .context("TLS 1.3")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).context("TLS for QUIC")?)))
}

/// Serves streams until the link ends.
async fn link(endpoint: &Endpoint, config: ClientConfig, cloud: SocketAddr, target: IpAddr) -> Result<()> {
    let name = cloud.ip().to_string();
    let link = endpoint.connect_with(config, cloud, &name).context("dialling")?.await.context("dialling")?;
    loop {
        let (send, receive) = link.accept_bi().await.context("serving")?;
        tokio::spawn(async move {
            // The other end sees how the connection ended.
            serve(send, receive, target).await.ok();
        });
    }
}

async fn serve(send: SendStream, mut receive: RecvStream, target: IpAddr) -> Result<()> {
    let mut port = [0; 2];
    receive.read_exact(&mut port).await.context("the port")?;
    let socket = TcpStream::connect((target, u16::from_be_bytes(port))).await.context("the target")?;
    prepare_socket(&socket);
    relay(socket, send, receive).await
}

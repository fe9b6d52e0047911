//! The cloud's end: waits for the edge's link, accepts connections and opens a stream for each.
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use postern_testbed::load_target::RELAYED;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Connection, Endpoint, ServerConfig};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tunnel_link::relay::prepare_socket;

use super::relay::relay;
use super::{ALPN, endpoint, provider, transport};
use crate::accept;

type Link = watch::Receiver<Option<Connection>>;

/// The process `--quic-cloud LISTEN CERTIFICATE KEY CONGESTION`: serves until killed.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let [listen, certificate, key, congestion] = args else {
        anyhow::bail!("--quic-cloud LISTEN CERTIFICATE KEY CONGESTION")
    };
    let listen: SocketAddr = listen.to_str().and_then(|listen| listen.parse().ok()).context("LISTEN")?;
    let mut config = tls(Path::new(certificate), Path::new(key))?;
    config.transport_config(transport(congestion.to_str().context("CONGESTION")?)?);
    tunnel_runtime::lifecycle::raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let endpoint = endpoint(listen, Some(config))?;
        let (links, link) = watch::channel(None);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept_links(endpoint, links));
        for port in RELAYED {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.context("listening")?;
            // Accepted sockets inherit this.
            prepare_socket(&listener);
            let link = link.clone();
            tasks.spawn(accept::each(listener, move |socket| serve(link.clone(), socket, port)));
        }
        tasks.join_next().await;
        anyhow::bail!("a listener ended")
    })
}

fn tls(certificate: &Path, key: &Path) -> Result<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(certificate).context("the certificate")?;
    let key = PrivateKeyDer::from_pem_file(key).context("the key")?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .context("TLS 1.3")?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .context("certificate and key")?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let config = QuicServerConfig::try_from(config).context("TLS for QUIC")?;
    Ok(ServerConfig::with_crypto(Arc::new(config)))
}

/// Accepts links, of which the newest is used.
async fn accept_links(endpoint: Endpoint, links: watch::Sender<Option<Connection>>) {
    while let Some(incoming) = endpoint.accept().await {
        match incoming.await {
            Ok(link) => drop(links.send_replace(Some(link))),
            Err(error) => eprintln!("a link: {error}"),
        }
    }
}

async fn serve(mut link: Link, socket: TcpStream, port: u16) -> Result<()> {
    let link = link.wait_for(Option::is_some).await.context("no link")?.clone().context("no link")?;
    let (mut send, receive) = link.open_bi().await.context("a stream")?;
    send.write_all(&port.to_be_bytes()).await.context("the port")?;
    relay(socket, send, receive).await
}

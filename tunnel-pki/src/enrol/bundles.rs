//! Installs the trust bundles that servers announce.

use std::sync::Arc;

use anyhow::Context;
use rustls_pki_types::CertificateDer;
use tokio::sync::mpsc;

use crate::enrol::IdentityKeeper;
use crate::enrol::enrollment::fetch_chain;
use crate::enrol::reach::Reach;
use crate::{ALPN_GRPC, agent_tls};

/// A trust bundle that a server announced over its link.
#[derive(Debug)]
pub struct Announced {
    /// PEM.
    pub bundle: String,
    /// The server's address as configured.
    pub server: String,
    /// Certificates that the server presented in its TLS handshake, leaf first.
    pub server_chain: Arc<[CertificateDer<'static>]>,
}

/// Installs the bundles that sessions announce until all senders are gone.
pub async fn install_bundles(
    keeper: Arc<IdentityKeeper>,
    reach: Reach,
    mut announced: mpsc::Receiver<Announced>,
) {
    while let Some(announced) = announced.recv().await {
        // The keeper logs a change.
        if let Err(error) = install_bundle(&keeper, &reach, &announced).await {
            tracing::error!(
                server = announced.server,
                error = format!("{error:#}"),
                "rejected the trusted roots announced by the server, keeping the present ones"
            );
        }
    }
}

/// Installs a bundle if it verifies the server that announced it. A session may be older than the server's certificate,
/// so the certificate that the server presents now is tried too.
async fn install_bundle(keeper: &IdentityKeeper, reach: &Reach, announced: &Announced) -> anyhow::Result<()> {
    if keeper.install_bundle(&announced.bundle, &announced.server_chain).await.is_ok() {
        return Ok(());
    }
    let tls = agent_tls(&keeper.current(), ALPN_GRPC)?;
    let chain = fetch_chain(reach, &announced.server, &tls)
        .await
        .map_err(|error| anyhow::anyhow!("{}", error.reason()))
        .context("fetching the server's present certificate")?;
    keeper.install_bundle(&announced.bundle, &chain).await?;
    Ok(())
}

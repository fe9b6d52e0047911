//! Installs the trust bundles that servers announce.

use std::sync::Arc;

use anyhow::Context;
use tokio::sync::mpsc;
use tunnel_core::identity::{ALPN_GRPC, agent_tls};

use super::connect::fetch_chain;
use super::shared::Announced;
use crate::identity::IdentityKeeper;
use crate::reach::Reach;

/// Installs what sessions announce, until none is left that could.
pub async fn install_bundles(
    keeper: Arc<IdentityKeeper>,
    reach: Reach,
    mut announced: mpsc::Receiver<Announced>,
) {
    while let Some(announced) = announced.recv().await {
        match install_bundle(&keeper, &reach, &announced).await {
            Ok(true) => {
                tracing::info!(server = announced.server, "trusting the roots that the server announced");
            }
            Ok(false) => {}
            Err(error) => {
                tracing::error!(
                    server = announced.server,
                    error = format!("{error:#}"),
                    "the roots that the server announced are refused; the present ones stay"
                );
            }
        }
    }
}

/// Roots are accepted only if they verify the server that announces them. A session may be older than the server's
/// certificate, so the certificate that the server presents now counts too.
async fn install_bundle(
    keeper: &IdentityKeeper,
    reach: &Reach,
    announced: &Announced,
) -> anyhow::Result<bool> {
    if let Ok(installed) = keeper.install_bundle(&announced.bundle, &announced.server_chain).await {
        return Ok(installed);
    }
    let tls = agent_tls(&keeper.current(), ALPN_GRPC)?;
    let chain = fetch_chain(reach, &announced.server, tls)
        .await
        .context("fetching the server's present certificate")?;
    Ok(keeper.install_bundle(&announced.bundle, &chain).await?)
}

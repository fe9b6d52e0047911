//! How an operator revokes nodes and readmits them, and how a server reads that.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::sleep;
use tunnel_runtime::NodeName;
use tunnel_server::pki::{Revocation, RevocationStore, Revocations};

use crate::fleet::RIGHT;

/// Follows the files of a server in the place of [`RevocationStore::follow`], which the kernel tells of changes.
pub(crate) struct Reading {
    pub(crate) store: RevocationStore,
    pub(crate) publish: watch::Sender<Arc<Revocations>>,
    pub(crate) every: Duration,
}

impl Reading {
    pub(crate) async fn run(self) {
        loop {
            sleep(self.every).await;
            match self.store.load() {
                Ok((known, _)) => {
                    self.publish.send_if_modified(|current| {
                        let changed = **current != known;
                        if changed {
                            *current = Arc::new(known);
                        }
                        changed
                    });
                }
                Err(error) => tracing::error!(%error, "failed to read the revocations"),
            }
        }
    }
}

/// An order of an operator about a node: `tunnel-server agent revoke`, or `readmit` after the record of that.
pub(crate) fn record(before: Option<&Revocation>, node: &NodeName) -> Result<Revocation> {
    let now = Timestamp::try_from(RIGHT.now())?;
    match before {
        Some(before) => before.readmit(now).context("a node that is readmitted is revoked"),
        None => Ok(Revocation::revoke(None, node, now)),
    }
}

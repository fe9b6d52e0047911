//! The CA's Secret, and CertificateSigningRequests.

mod authority;
mod csr;

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_server::kube::events::Events;
use tunnel_server::kube::watch::Health;
use tunnel_server::kube::{Cluster, ObjectNames};

use super::scripted::ApiServer;

/// What every part gets, and who decides whether it leads.
pub(super) async fn cluster(server: &ApiServer, leads: bool) -> (Cluster, watch::Sender<bool>) {
    let client = server.client().await;
    let stop = CancellationToken::new();
    let (lead, leader) = watch::channel(leads);
    let cluster = Cluster {
        events: Events::start(client.clone(), "server-1", stop.clone()),
        client,
        namespace: "kube-system".into(),
        names: Arc::new(ObjectNames::default()),
        identity: "server-1".into(),
        leader,
        inventory: watch::channel(Arc::default()).1,
        settings: watch::channel(Arc::default()).1,
        health: Health::default(),
        stop,
    };
    (cluster, lead)
}

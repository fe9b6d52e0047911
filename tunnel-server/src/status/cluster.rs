//! The status of every server of the cluster: the answer of `/cluster`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde::de::IgnoredAny;
use serde_json::json;
use tunnel_runtime::admin;

use crate::peers::{Peer, Peers};
use crate::runtime::role::Role;

/// Time for another server to report. One with 100,000 nodes has tens of megabytes to send.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers `/cluster`: a list of this server's status, and of each other one's status or `{"server_id", "error"}`. A redirector,
/// which no server tells its status, lists only its own.
pub(crate) fn endpoint(role: Role, peers: Arc<Peers>, status: Arc<admin::Status>) -> Arc<admin::Cluster> {
    Arc::new(move || {
        let (peers, status) = (peers.clone(), status.clone());
        Box::pin(async move {
            // During a takeover there are links with both servers of a host; those of the one that stops come first.
            let mut others = if role == Role::Server { peers.all() } else { Vec::new() };
            others.sort_by_key(|peer| !peer.is_draining());
            let others: BTreeMap<_, _> =
                others.into_iter().map(|peer| (peer.server_id.clone(), peer)).collect();
            let told = join_all(others.values().map(|peer| ask(peer))).await;
            let mut reports = vec![status().to_string()];
            reports.extend(told);
            format!("[{}]", reports.join(","))
        })
    })
}

async fn ask(peer: &Peer) -> String {
    let told = tokio::time::timeout(PATIENCE, peer.status()).await;
    let told = told.unwrap_or_else(|_| Err(format!("nothing within {} s", PATIENCE.as_secs())));
    // Passed on as it is: another version may report more or less than this one knows.
    let report = told.and_then(|told| match serde_json::from_str::<IgnoredAny>(&told) {
        Ok(_) => Ok(told),
        Err(error) => Err(format!("its status is not JSON: {error}")),
    });
    report.unwrap_or_else(|error| json!({"server_id": peer.server_id, "error": error}).to_string())
}

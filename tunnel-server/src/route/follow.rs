//! Keeps a router up to date, off the threads that accept and carry: many nodes take long to compute.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::time::{Instant as TokioInstant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Router;
use crate::inventory::Inventory;

/// How often this host's addresses are compared with the inventory's.
const PERIOD: Duration = Duration::from_secs(30);

/// Gives the router an inventory. Wait for it before giving the next: that keeps their order.
pub async fn update(router: Arc<Router>, inventory: Inventory) {
    blocking(move || router.set_inventory(inventory)).await;
}

/// Gives the router the cluster's ranges of Service addresses.
pub async fn update_services(router: Arc<Router>, ranges: Vec<IpNet>) {
    blocking(move || router.set_services(ranges)).await;
}

/// Keeps `router` up to date with this host's addresses and with the time, until stopped.
pub async fn follow(router: Arc<Router>, stop: CancellationToken) {
    // Nobody waits for an agent longer because the routes are computed.
    tokio::join!(refresh(router.clone(), stop.clone()), give_up(router, stop));
}

async fn refresh(router: Arc<Router>, stop: CancellationToken) {
    let mut due = router.due();
    let mut tick = tokio::time::interval(PERIOD);
    loop {
        let next: Option<Instant> = *due.borrow_and_update();
        tokio::select! {
            _ = tick.tick() => {}
            () = sleep_until(next.map_or_else(TokioInstant::now, TokioInstant::from)), if next.is_some() => {}
            changed = due.changed() => if changed.is_err() { return } else { continue },
            () = stop.cancelled() => return,
        }
        let router = router.clone();
        blocking(move || router.refresh()).await;
    }
}

async fn give_up(router: Arc<Router>, stop: CancellationToken) {
    let mut next = router.gives_up();
    loop {
        let at: Option<Instant> = *next.borrow_and_update();
        tokio::select! {
            () = sleep_until(at.map_or_else(TokioInstant::now, TokioInstant::from)), if at.is_some() => {
                router.give_up(Instant::now());
            }
            changed = next.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

async fn blocking(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = tokio::task::spawn_blocking(work).await {
        tracing::error!(%error, "computing the routes failed; those before stay in effect");
    }
}

//! Keeps a router up to date outside the threads that accept and relay, as many nodes take long to compute.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::time::{Instant as TokioInstant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_runtime::blocking::blocking;

use super::Router;
use crate::inventory::Inventory;

/// Interval at which this host's addresses are compared with the inventory's.
const PERIOD: Duration = Duration::from_secs(30);

/// Gives the router an inventory. Await it before giving the next one, which keeps their order.
pub async fn update(router: Arc<Router>, inventory: Inventory) {
    compute(move || router.set_inventory(inventory)).await;
}

/// Gives the router the cluster's ranges of Service addresses.
pub async fn update_services(router: Arc<Router>, ranges: Vec<IpNet>) {
    compute(move || router.set_services(ranges)).await;
}

/// Updates `router` when this host's addresses change or something becomes due, until `stop`.
pub async fn follow(router: Arc<Router>, stop: CancellationToken) {
    // Concurrent: a long computation of the routes does not delay `give_up`.
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
        compute(move || router.refresh()).await;
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

async fn compute(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = blocking(work).await {
        tracing::error!(%error, "failed to compute the routes, keeping the present ones");
    }
}

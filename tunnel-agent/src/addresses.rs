//! Follows this node's own addresses.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::net::{Ended, NetChanges, identifies_host, interface_addresses, lookup, source_address};

use crate::runtime::Runtime;

/// Maximum time between two listings. The kernel reports changes, but a report may be missed.
const PERIOD: Duration = Duration::from_secs(10);
const LOOKUP: Duration = Duration::from_secs(3);

/// Publishes the node's addresses now, and again as they change by a task of `background`: those of the
/// interfaces that are up, except loopback and link-local ones, the node IP first. A node IP that is on no interface is
/// left out, because another machine may have it by now. It defaults to the source address of the route to the first of
/// `servers` that has one.
pub(crate) async fn follow(
    runtime: &Runtime,
    servers: watch::Receiver<Arc<Vec<HostPort>>>,
    background: &mut JoinSet<()>,
) {
    let (node_ip, publish) = (runtime.config.given.node_ip, runtime.addresses.clone());
    update(listed().await, node_ip, &servers, &publish).await;
    background.spawn(async move {
        let mut changes = subscribe();
        loop {
            let next = match &mut changes {
                Some(changes) => changes.next(PERIOD).await,
                None => {
                    tokio::time::sleep(PERIOD).await;
                    Err(Ended)
                }
            };
            if next.is_err() {
                changes = subscribe();
            }
            update(listed().await, node_ip, &servers, &publish).await;
        }
    });
}

/// None if no netlink socket can be opened. Then only [`PERIOD`] applies.
fn subscribe() -> Option<NetChanges> {
    NetChanges::of_addresses()
        .inspect_err(|error| tracing::debug!(%error, "failed to follow this node's addresses by rtnetlink"))
        .ok()
}

/// Returns the addresses of the interfaces that are up.
async fn listed() -> io::Result<Vec<IpAddr>> {
    // It takes a while on a node with thousands of interfaces.
    let listed = blocking(interface_addresses).await??;
    Ok(listed.into_iter().filter(|entry| entry.up).map(|entry| entry.address).collect())
}

async fn update(
    listed: io::Result<Vec<IpAddr>>,
    node_ip: Option<IpAddr>,
    servers: &watch::Receiver<Arc<Vec<HostPort>>>,
    publish: &watch::Sender<Arc<Vec<IpAddr>>>,
) {
    let mut up = match listed {
        Ok(listed) => listed,
        Err(error) => {
            return tracing::warn!(%error, "failed to list this node's addresses, keeping the last ones");
        }
    };
    up.retain(|address| identifies_host(*address));
    // Lost addresses are published at once, because without its address this node may reach no name server either.
    let known = publish.borrow().clone();
    let kept: Vec<IpAddr> = known.iter().copied().filter(|address| up.contains(address)).collect();
    if kept.len() < known.len() {
        publish_if_new(ordered(kept.first().copied(), up.clone()), publish);
    }
    let servers = servers.borrow().clone();
    let first = match node_ip.filter(|given| up.contains(given)) {
        Some(given) => Some(given),
        // A name server that does not answer must not hold up the start.
        None => tokio::time::timeout(LOOKUP, source_towards(&servers)).await.ok().flatten(),
    };
    // Else an outage of the name server would put another address first.
    let first = first.or_else(|| kept.first().copied());
    publish_if_new(ordered(first, up), publish);
}

fn publish_if_new(now: Vec<IpAddr>, publish: &watch::Sender<Arc<Vec<IpAddr>>>) {
    if **publish.borrow() != now {
        tracing::info!(addresses = ?now, "this node's addresses");
        publish.send_replace(Arc::new(now));
    }
}

/// Puts `first` first if it is listed, and sorts the rest without duplicates, so that another order of the interfaces
/// is not a change.
fn ordered(first: Option<IpAddr>, mut listed: Vec<IpAddr>) -> Vec<IpAddr> {
    listed.sort_unstable();
    listed.dedup();
    listed.sort_by_key(|address| Some(*address) != first);
    listed
}

/// The source address towards the first server that this node has a route to.
async fn source_towards(servers: &[HostPort]) -> Option<IpAddr> {
    for server in servers {
        let resolved = match lookup(&server.host, server.port).await {
            Ok(resolved) => resolved,
            Err(error) => {
                tracing::debug!(%server, %error, "failed to resolve the server for the node's own address");
                continue;
            }
        };
        if let Some(source) = resolved.into_iter().find_map(source_address) {
            return Some(source);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::of_flags;

    #[test]
    fn the_node_ip_comes_first_if_it_is_listed_and_duplicates_are_dropped() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let listed = vec![ip("10.0.0.9"), ip("10.0.0.1"), ip("10.0.0.9"), ip("fd00::1")];
        assert_eq!(
            ordered(Some(ip("10.0.0.9")), listed.clone()),
            [ip("10.0.0.9"), ip("10.0.0.1"), ip("fd00::1")]
        );
        for first in [Some(ip("192.0.2.1")), None] {
            assert_eq!(ordered(first, listed.clone()), [ip("10.0.0.1"), ip("10.0.0.9"), ip("fd00::1")]);
        }
    }

    #[tokio::test]
    async fn listed_addresses_can_be_bound_and_are_not_loopback() {
        let runtime = of_flags(&["--server=a:1"]);
        follow(&runtime, watch::Sender::default().subscribe(), &mut JoinSet::new()).await;
        for address in runtime.addresses.borrow().iter() {
            assert!(identifies_host(*address), "{address}");
            std::net::TcpListener::bind((*address, 0)).unwrap_or_else(|e| panic!("{address}: {e}"));
        }
    }

    #[tokio::test]
    async fn a_server_without_an_address_changes_no_order() {
        // Documentation addresses (RFC 5737).
        let [first, other] = [[198, 51, 100, 2], [192, 0, 2, 1]].map(IpAddr::from);
        let (publish, servers) = (watch::Sender::new(Arc::new(vec![first])), watch::Sender::default());
        servers.send_replace(Arc::new(vec!["no-such-server.invalid:1".parse().unwrap()]));
        update(Ok(vec![other, first]), None, &servers.subscribe(), &publish).await;
        assert_eq!(**publish.borrow(), [first, other]);
        update(Err(io::ErrorKind::OutOfMemory.into()), None, &servers.subscribe(), &publish).await;
        assert_eq!(**publish.borrow(), [first, other]);
    }

    #[tokio::test]
    async fn a_node_ip_on_no_interface_is_not_this_nodes() {
        // A documentation address (RFC 5737).
        let runtime = of_flags(&["--server=a:1", "--node-ip=192.0.2.1"]);
        follow(&runtime, watch::Sender::default().subscribe(), &mut JoinSet::new()).await;
        assert!(!runtime.addresses.borrow().contains(&"192.0.2.1".parse().unwrap()));
    }

    #[tokio::test]
    async fn a_loopback_server_gives_no_node_ip() {
        let servers = ["127.0.0.1:10262".parse().unwrap(), "[::1]:10262".parse().unwrap()];
        assert_eq!(source_towards(&servers).await, None);
    }
}

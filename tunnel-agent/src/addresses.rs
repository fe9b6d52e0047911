//! This node's own addresses, live.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tunnel_core::config::HostPort;

/// How often the interfaces are looked at. A DHCP lease or a roaming uplink changes rarely; a server may be asked to
/// dial an address that the node no longer has for this long, which the kernel then refuses.
const POLL: Duration = Duration::from_secs(10);
const LOOKUP: Duration = Duration::from_secs(3);

/// Publishes the node's addresses until it is dropped: the node IP first, then those of the interfaces that are up,
/// without loopback and link-local ones.
#[derive(Debug)]
pub struct NodeAddresses {
    shared: Arc<ArcSwap<Vec<IpAddr>>>,
    publish: Arc<watch::Sender<Arc<Vec<IpAddr>>>>,
    task: JoinHandle<()>,
}

impl NodeAddresses {
    /// Looks once, and then every 10 s. Without a `node_ip` it is the address used towards the first of `servers` that
    /// there is a route to.
    pub async fn start(node_ip: Option<IpAddr>, servers: watch::Receiver<Arc<Vec<HostPort>>>) -> Self {
        let (shared, publish) = (Arc::default(), Arc::new(watch::Sender::default()));
        let known = servers.borrow().clone();
        look(node_ip, &known, &shared, &publish).await;
        let task = tokio::spawn({
            let (shared, publish) = (Arc::clone(&shared), Arc::clone(&publish));
            async move {
                loop {
                    tokio::time::sleep(POLL).await;
                    let known = servers.borrow().clone();
                    look(node_ip, &known, &shared, &publish).await;
                }
            }
        });
        Self { shared, publish, task }
    }

    /// For the policy.
    pub fn shared(&self) -> Arc<ArcSwap<Vec<IpAddr>>> {
        Arc::clone(&self.shared)
    }

    /// For the sessions, which tell the servers of each change.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Vec<IpAddr>>> {
        self.publish.subscribe()
    }
}

impl Drop for NodeAddresses {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn look(
    node_ip: Option<IpAddr>,
    servers: &[HostPort],
    shared: &ArcSwap<Vec<IpAddr>>,
    publish: &watch::Sender<Arc<Vec<IpAddr>>>,
) {
    let node_ip = match node_ip {
        Some(given) => Some(given),
        // A name server that does not answer must not hold up the start.
        None => tokio::time::timeout(LOOKUP, source_towards(servers)).await.ok().flatten(),
    };
    // A node with thousands of interfaces takes a while to list them.
    let listed = match tokio::task::spawn_blocking(interface_addresses).await {
        Ok(Ok(listed)) => listed,
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot list this node's addresses; the last list stays");
            return;
        }
        Err(error) => {
            tracing::error!(%error, "listing this node's addresses failed; the last list stays");
            return;
        }
    };
    let now = ordered(node_ip, listed);
    if **shared.load() != now {
        tracing::info!(addresses = ?now, "this node's addresses");
        let now = Arc::new(now);
        // The policy first: a server must not be told of an address that is refused.
        shared.store(Arc::clone(&now));
        publish.send_replace(now);
    }
}

/// The node IP first, each once; the rest sorted, so that the order of the interfaces is no change.
fn ordered(node_ip: Option<IpAddr>, mut listed: Vec<IpAddr>) -> Vec<IpAddr> {
    listed.sort_unstable();
    listed.dedup();
    listed.retain(|address| Some(*address) != node_ip);
    node_ip.into_iter().chain(listed).collect()
}

fn interface_addresses() -> nix::Result<Vec<IpAddr>> {
    let up = getifaddrs()?.filter(|interface| interface.flags.contains(InterfaceFlags::IFF_UP));
    Ok(up
        .filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        })
        .filter(|address| is_reachable(*address))
        .collect())
}

/// Whether others may reach the node by it.
fn is_reachable(address: IpAddr) -> bool {
    !address.is_loopback()
        && !address.is_unspecified()
        && match address {
            IpAddr::V4(v4) => !v4.is_link_local(),
            IpAddr::V6(v6) => !v6.is_unicast_link_local(),
        }
}

/// The address that this node uses towards the first server it has a route to. Connecting a UDP socket asks the
/// routing table and sends nothing.
async fn source_towards(servers: &[HostPort]) -> Option<IpAddr> {
    for server in servers {
        let resolved = match tokio::net::lookup_host((server.host.as_str(), server.port)).await {
            Ok(resolved) => resolved,
            Err(error) => {
                tracing::debug!(%server, %error, "cannot resolve the server to find the node's own address");
                continue;
            }
        };
        for peer in resolved {
            if let Some(source) = source_of(peer).await {
                return Some(source);
            }
        }
    }
    None
}

async fn source_of(peer: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).await.ok()?;
    socket.connect(peer).await.ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|source| is_reachable(*source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_ip_comes_first_and_each_once() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let listed = vec![ip("10.0.0.9"), ip("10.0.0.1"), ip("10.0.0.9"), ip("fd00::1")];
        assert_eq!(
            ordered(Some(ip("10.0.0.9")), listed.clone()),
            [ip("10.0.0.9"), ip("10.0.0.1"), ip("fd00::1")]
        );
        assert_eq!(ordered(Some(ip("192.0.2.1")), listed.clone())[0], ip("192.0.2.1"));
        assert_eq!(ordered(None, listed), [ip("10.0.0.1"), ip("10.0.0.9"), ip("fd00::1")]);
    }

    #[tokio::test]
    async fn what_is_listed_can_be_bound_and_is_no_loopback() {
        let addresses = NodeAddresses::start(None, watch::Sender::default().subscribe()).await;
        for address in addresses.shared().load().iter() {
            assert!(is_reachable(*address), "{address}");
            std::net::TcpListener::bind((*address, 0)).unwrap_or_else(|e| panic!("{address}: {e}"));
        }
        assert_eq!(**addresses.shared().load(), **addresses.subscribe().borrow());
    }

    #[tokio::test]
    async fn a_loopback_server_gives_no_node_ip() {
        let servers = ["127.0.0.1:10262".parse().unwrap(), "[::1]:10262".parse().unwrap()];
        assert_eq!(source_towards(&servers).await, None);
    }
}

//! The ports of Postern's own listeners at this host and at the other servers.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::net::interface_addresses;

type Servers = watch::Receiver<Arc<BTreeSet<HostPort>>>;
/// True for the addresses of this cluster's servers and of their Services.
type Named = Box<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// Targets where a connection would become a client of Postern's with this server's address.
#[derive(Default)]
pub struct OwnPorts {
    /// From flags.
    fixed: OnceLock<BTreeSet<u16>>,
    /// Of the maps of the file.
    maps: ArcSwap<BTreeSet<u16>>,
    /// The other servers' agent ports.
    servers: OnceLock<Servers>,
    named: OnceLock<Named>,
}

impl OwnPorts {
    /// Sets what does not change by itself; only the first call counts.
    pub fn start(&self, ports: BTreeSet<u16>, servers: Servers, named: Named) {
        let _ = self.fixed.set(ports);
        let _ = self.servers.set(servers);
        let _ = self.named.set(named);
    }

    pub fn set_maps(&self, ports: BTreeSet<u16>) {
        self.maps.store(Arc::new(ports));
    }

    /// True if one of Postern's listeners is there. The other servers are taken to have this server's flags.
    /// `tunnelled`: the port is one of nodes that leads through the tunnels.
    pub(crate) fn has(&self, target: SocketAddr, tunnelled: bool) -> bool {
        let (address, port) = (target.ip().to_canonical(), target.port());
        let servers = self.servers.get().map(|servers| servers.borrow().clone()).unwrap_or_default();
        let of_server = |server: &&HostPort| server.host.parse() == Ok(address);
        let mut of_servers = servers.iter().filter(of_server).peekable();
        let is_server = of_servers.peek().is_some();
        let agents = of_servers.any(|server| server.port == port);
        let listens = agents
            || self.fixed.get().is_some_and(|ports| ports.contains(&port))
            || self.maps.load().contains(&port);
        let is_named = || self.named.get().is_some_and(|named| named(address));
        // At a Service's address the ports of nodes lead to the listeners.
        (listens && (is_server || is_this_host(address) || is_named()))
            || (tunnelled && !is_server && is_named() && !is_this_host(address))
    }
}

/// If the kernel does not say, every address may be.
fn is_this_host(address: IpAddr) -> bool {
    address.is_loopback()
        || interface_addresses().map_or(true, |own| own.iter().any(|own| own.address == address))
}

impl std::fmt::Debug for OwnPorts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnPorts").field("fixed", &self.fixed).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listeners_of_this_host_and_of_other_servers_are_posterns_own() {
        let ports = OwnPorts::default();
        let own = |target: &str| {
            let target: SocketAddr = target.parse().unwrap();
            ports.has(target, target.port() == 10250)
        };
        assert!(!own("127.0.0.1:10263"), "nothing is known yet");
        let servers = ["10.70.0.2:10262", "10.70.0.3:443", "other.example:10262"];
        let servers = servers.iter().map(|server| server.parse().unwrap()).collect::<BTreeSet<_>>();
        let (_sender, servers) = watch::channel(Arc::new(servers));
        ports.start([10262, 10263].into(), servers, Box::new(|_| false));
        ports.set_maps([2222].into());
        for (target, expected) in [
            // Every host has this one.
            ("127.0.0.1:10263", true),
            ("[::ffff:127.0.0.1]:10263", true),
            ("127.0.0.1:2222", true),
            ("127.0.0.2:10263", true),
            ("127.0.0.1:10250", false),
            ("10.70.0.2:10263", true),
            ("10.70.0.2:443", false),
            ("10.70.0.2:10250", false),
            ("10.70.0.3:443", true),
            ("10.70.0.4:10263", false),
        ] {
            assert_eq!(own(target), expected, "{target}");
        }
        ports.set_maps(BTreeSet::new());
        assert!(!own("127.0.0.1:2222"));
    }
}

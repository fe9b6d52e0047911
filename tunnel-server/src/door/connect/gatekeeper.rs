//! What a caller reaches: the destination that a host and a port mean, if the policy permits it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rand::seq::IndexedRandom as _;
use tunnel_core::identity::NodeName;
use tunnel_core::text::printable;

use crate::caller::Authenticator;
use crate::door::direct;
use crate::door::resolve::Host;
use crate::inventory::InventoryNode;
use crate::kube::ServiceEndpoints;
use crate::policy::{Destination, Identity, Origin, Policy};
use crate::route::{ByAddress, Router, Snapshot};

/// Where the endpoints of Services are found.
pub(crate) enum Services {
    Cluster(ServiceEndpoints),
    /// The resolver of this host; without Kubernetes.
    Resolver,
}

/// Decides what callers reach.
pub(crate) struct Gatekeeper {
    pub(crate) authenticator: Arc<Authenticator>,
    pub(crate) services: Services,
    pub(crate) policy: ArcSwap<Policy>,
    pub(crate) router: Arc<Router>,
}

/// What is dialled, and by whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// The node's agent dials it.
    Edge { node: NodeName, target: SocketAddr },
    /// This server does.
    Cloud(SocketAddr),
}

/// Why a caller reaches nothing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    Policy,
    /// It is not clear what is meant, or it is nothing that there is.
    Unclear(String),
    /// A Service whose endpoints are not known.
    Unavailable(String),
}

/// What a host means.
enum Meant {
    Edge { node: Arc<InventoryNode>, address: IpAddr, own: bool },
    Cloud(IpAddr),
    Service { name: String, namespace: String },
}

impl Gatekeeper {
    /// What a caller reaches at this host and port, and the name of the rule that permits it.
    ///
    /// # Errors
    /// Why it reaches nothing. Whom the policy does not know learns nothing about names and addresses.
    pub(crate) async fn reach(
        &self,
        identity: &Identity,
        client: IpAddr,
        host: &str,
        port: u16,
    ) -> Result<(Reached, String), Denied> {
        let snapshot = self.router.snapshot();
        let policy = self.policy.load_full();
        let node = match identity {
            Identity::Node(name) => snapshot.inventory().get(name.as_str()).map(|node| &**node),
            _ => None,
        };
        let origin = Origin { identity, client, node };
        if !policy.knows(origin) {
            return Err(Denied::Policy);
        }
        let permitted = |to| policy.permits(origin, to, port).map(str::to_owned).ok_or(Denied::Policy);
        match meant(host, &snapshot).map_err(Denied::Unclear)? {
            Meant::Edge { node, address, own } => {
                let rule = permitted(Destination::Edge { node: &node, address })?;
                Ok((self.edge(&node, address, port, own), rule))
            }
            Meant::Cloud(address) if self.router.is_token(address) => Err(Denied::Policy),
            Meant::Cloud(address) => {
                let rule = permitted(Destination::Cloud { address })?;
                Ok((Reached::Cloud(SocketAddr::new(address, port)), rule))
            }
            Meant::Service { name, namespace } => {
                let rule = permitted(Destination::Service(&format!("{name}.{namespace}")))?;
                let endpoints = self.endpoints(&name, &namespace, port).await.map_err(Denied::Unavailable)?;
                let elsewhere: Vec<_> =
                    endpoints.into_iter().filter(|endpoint| !is_own(endpoint.ip())).collect();
                // One of them, as a Service does it.
                let Some(endpoint) = elsewhere.choose(&mut rand::rng()).copied() else {
                    return Err(Denied::Unavailable(format!(
                        "{name}.{namespace} has no address but loopback"
                    )));
                };
                let reached = match at(endpoint.ip(), &snapshot).map_err(Denied::Unavailable)? {
                    Meant::Edge { node, address, .. } => Reached::Edge {
                        node: node.name.clone(),
                        target: SocketAddr::new(address, endpoint.port()),
                    },
                    _ if self.router.is_token(endpoint.ip()) => return Err(Denied::Policy),
                    _ => Reached::Cloud(endpoint),
                };
                Ok((reached, rule))
            }
        }
    }

    fn edge(&self, node: &InventoryNode, address: IpAddr, port: u16, own: bool) -> Reached {
        let target = if own { self.router.target(address, port) } else { SocketAddr::new(address, port) };
        Reached::Edge { node: node.name.clone(), target }
    }

    async fn endpoints(&self, name: &str, namespace: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
        match &self.services {
            Services::Cluster(endpoints) => endpoints.of(name, namespace, port).await,
            Services::Resolver => {
                let host = format!("{name}.{namespace}");
                direct::resolve(&host, port).await.map_err(|error| format!("{host}: {error}"))
            }
        }
    }
}

/// A node's name, an address, or `service.namespace`, with `.svc` and the cluster's domain or without.
fn meant(host: &str, snapshot: &Snapshot) -> Result<Meant, String> {
    let name = match Host::of(host) {
        Host::Address(address) => return at(address, snapshot),
        Host::Name(name) => name,
    };
    if let Some(node) = snapshot.inventory().get(&name).filter(|node| node.edge) {
        let found = snapshot.by_name(&name).ok_or_else(|| format!("node {name} has no address"))?;
        return Ok(Meant::Edge { node: node.clone(), address: found.address, own: true });
    }
    let mut labels = name.split('.');
    match (labels.next(), labels.next(), labels.next()) {
        (Some(service), Some(namespace), None | Some("svc"))
            if !service.is_empty() && !namespace.is_empty() =>
        {
            Ok(Meant::Service { name: service.to_owned(), namespace: namespace.to_owned() })
        }
        _ => Err(format!(
            "{:?} is not an edge node's name, an address, or SERVICE.NAMESPACE",
            printable(&name, 100)
        )),
    }
}

/// Whose address it is.
fn at(address: IpAddr, snapshot: &Snapshot) -> Result<Meant, String> {
    let inventory = snapshot.inventory();
    match snapshot.by_address(address) {
        ByAddress::Unique(found) => match inventory.get(found.node.as_str()) {
            Some(node) => Ok(Meant::Edge { node: node.clone(), address, own: true }),
            None => Err(format!("node {} has just left", found.node)),
        },
        ByAddress::Ambiguous(nodes) => {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            Err(format!("{address} is the address of {}: name the node instead", nodes.join(", ")))
        }
        ByAddress::Unknown => {
            // Ranges of pods are not indexed: a look at each node takes a millisecond where they are 100,000.
            let has = |node: &&Arc<InventoryNode>| {
                node.edge && node.pod_cidrs.iter().any(|range| range.contains(&address))
            };
            let mut nodes = inventory.iter().filter(has);
            match (nodes.next(), nodes.next()) {
                (Some(node), None) => Ok(Meant::Edge { node: node.clone(), address, own: false }),
                (Some(one), Some(other)) => {
                    Err(format!("{address} is in the ranges of pods of {} and {}", one.name, other.name))
                }
                (None, _) => Ok(Meant::Cloud(address)),
            }
        }
    }
}

/// Whether this server itself is what has the address. Its loopback, where whoever comes is trusted, is open by a range of a rule
/// only: what a name stands for is not the rules' to say.
fn is_own(address: IpAddr) -> bool {
    let address = address.to_canonical();
    address.is_loopback() || address.is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::door::resolve::tests::{HOSTS, crossed};

    #[test]
    fn an_address_is_an_address_before_it_is_a_name() {
        let router = crossed();
        for (host, expected) in HOSTS {
            let found = match meant(host, &router.snapshot()) {
                Ok(Meant::Edge { address, .. }) => Some(address.to_string()),
                Ok(Meant::Cloud(_) | Meant::Service { .. }) | Err(_) => None,
            };
            assert_eq!(found.as_deref(), expected, "{host}");
        }
    }

    #[test]
    fn a_name_does_not_open_this_servers_loopback() {
        for (address, own) in [
            ("127.0.0.1", true),
            ("127.8.0.1", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("0.0.0.0", true),
            ("::", true),
            ("10.80.0.7", false),
            ("fd00::7", false),
        ] {
            assert_eq!(is_own(address.parse().unwrap()), own, "{address}");
        }
    }
}

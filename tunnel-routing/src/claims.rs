//! Remembers the first node with each address: a node that names another's address later neither gets nor blocks it.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tunnel_runtime::NodeName;

use crate::inventory::Inventory;

/// Time after which a cloud node's address is excluded from the redirect: an edge node that drops its own label must
/// not decide at once which addresses are direct for everybody.
pub const CLOUD_CLAIM_DELAY: Duration = Duration::from_secs(300);

/// Claims from earlier inventories.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Claims {
    /// True after the first inventory with nodes; before that, no node is late.
    pub(super) known: bool,
    /// The edge node that holds an address.
    pub(super) edge: HashMap<IpAddr, NodeName>,
    /// The edge node whose pods a redirected range has.
    pub(super) pods: HashMap<IpNet, NodeName>,
    /// Cloud nodes that name an address, and the time from which it is excluded.
    cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>>,
}

impl Claims {
    /// The claims of `inventory`'s cloud nodes that follow these, without those of edge nodes yet. The first
    /// inventory's count from `now`, later ones after the delay.
    pub(super) fn followed_by(&self, inventory: &Inventory, now: Instant) -> Self {
        let mut cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>> = HashMap::new();
        for node in inventory.iter().filter(|node| !node.edge) {
            for address in &node.addresses {
                let claims = cloud.entry(*address).or_default();
                // A node that lists an address twice counts once.
                if claims.last().is_some_and(|(name, _)| *name == node.name) {
                    continue;
                }
                let mut before = self.cloud.get(address).into_iter().flatten();
                let from = match before.find(|(name, _)| *name == node.name) {
                    Some((_, from)) => *from,
                    None if self.known => now + CLOUD_CLAIM_DELAY,
                    None => now,
                };
                claims.push((node.name.clone(), from));
            }
        }
        let edge = HashMap::with_capacity(self.edge.len());
        Self { known: true, edge, pods: HashMap::new(), cloud }
    }

    /// Addresses that nodes which never were edge nodes have had for long enough: no edge node keeps them. Not at once,
    /// as an edge node may get its label only some time after it has joined.
    pub(super) fn of_cloud(&self, inventory: &Inventory, now: Instant) -> HashSet<IpAddr> {
        let always_cloud =
            |name: &NodeName| inventory.get(name.as_str()).is_some_and(|node| node.always_cloud());
        let theirs = |(name, from): &(NodeName, Instant)| *from <= now && always_cloud(name);
        let old = self.cloud.iter().filter(|(_, claims)| claims.iter().any(theirs));
        old.map(|(address, _)| *address).collect()
    }

    /// Addresses that cloud nodes have had for long enough.
    pub(super) fn excluded(&self, now: Instant) -> impl Iterator<Item = IpAddr> {
        let old = move |claims: &[(NodeName, Instant)]| claims.iter().any(|(_, from)| *from <= now);
        self.cloud.iter().filter(move |(_, claims)| old(claims)).map(|(address, _)| *address)
    }

    pub(super) fn cloud_nodes(&self, address: IpAddr) -> impl Iterator<Item = &NodeName> {
        self.cloud.get(&address).into_iter().flatten().map(|(name, _)| name)
    }

    /// Reports whether `node` names the address and no other cloud node did so before.
    pub(super) fn was_first(&self, node: &NodeName, address: IpAddr) -> bool {
        let claims = self.cloud.get(&address).map(Vec::as_slice).unwrap_or_default();
        let first = claims.iter().map(|(_, from)| *from).min();
        claims.iter().any(|(name, from)| name == node && Some(*from) == first)
    }

    /// The edge node with this address or pod range.
    pub(super) fn edge_node(&self, net: IpNet) -> Option<&NodeName> {
        let of_address = || self.edge.get(&net.addr()).filter(|_| net.prefix_len() == net.max_prefix_len());
        self.pods.get(&net).or_else(of_address)
    }

    /// Time at which the next address is excluded.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.cloud.values().flatten().map(|(_, from)| *from).filter(|from| *from > now).min()
    }
}

/// [`Claims`] as stored in a file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredClaims {
    version: u32,
    edge: HashMap<IpAddr, NodeName>,
    #[serde(default, skip_serializing_if = "HashMap::is_empty")]
    pods: HashMap<IpNet, NodeName>,
    /// Address, node, and the time from which the address is excluded, in seconds since 1970.
    cloud: Vec<(IpAddr, NodeName, u64)>,
}

const VERSION: u32 = 1;

impl Claims {
    /// # Errors
    /// The claims have another version.
    pub(super) fn restore(stored: StoredClaims, now: Instant, clock: SystemTime) -> Result<Self, String> {
        if stored.version != VERSION {
            return Err(format!("version {} is not {VERSION}", stored.version));
        }
        let seconds = since_1970(clock);
        let mut cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>> = HashMap::new();
        for (address, node, from) in stored.cloud {
            // A clock that was set back must not extend the delay.
            let delay = Duration::from_secs(from.saturating_sub(seconds)).min(CLOUD_CLAIM_DELAY);
            cloud.entry(address).or_default().push((node, now + delay));
        }
        Ok(Self { known: true, edge: stored.edge, pods: stored.pods, cloud })
    }

    pub(super) fn store(&self, now: Instant, clock: SystemTime) -> StoredClaims {
        let seconds = since_1970(clock);
        let cloud = self.cloud.iter().flat_map(|(address, claims)| {
            claims.iter().map(move |(node, from)| {
                (*address, node.clone(), seconds + from.saturating_duration_since(now).as_secs())
            })
        });
        StoredClaims {
            version: VERSION,
            edge: self.edge.clone(),
            pods: self.pods.clone(),
            cloud: cloud.collect(),
        }
    }
}

fn since_1970(clock: SystemTime) -> u64 {
    clock.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::InventoryNode;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    /// Cloud nodes with one address each.
    fn cloud(nodes: &[(&str, IpAddr)]) -> Inventory {
        let node = |(name, address): &(&str, IpAddr)| InventoryNode {
            addresses: vec![*address, *address],
            ..InventoryNode::new(name.parse().unwrap())
        };
        nodes.iter().map(node).collect()
    }

    #[test]
    fn a_cloud_node_that_lists_an_address_twice_claims_it_once() {
        let address: IpAddr = "10.0.0.2".parse().unwrap();
        let nodes = cloud(&[("cloud-1", address), ("cloud-2", address)]);
        let claims = Claims::default().followed_by(&nodes, Instant::now());
        let names: Vec<_> = claims.cloud_nodes(address).map(NodeName::as_str).collect();
        assert_eq!(names, ["cloud-1", "cloud-2"]);
    }

    #[test]
    fn stored_claims_are_restored() {
        let now = Instant::now();
        let clock = UNIX_EPOCH + Duration::from_secs(1_763_800_000);
        let (edge, address): (IpAddr, IpAddr) = ("10.8.0.7".parse().unwrap(), "fd00::1".parse().unwrap());
        let before = now - (CLOUD_CLAIM_DELAY - Duration::from_secs(200));
        let first = Claims::default().followed_by(&cloud(&[("cloud-1", address)]), now);
        let both = cloud(&[("cloud-1", address), ("cloud-2", address)]);
        let mut claims = first.followed_by(&both, before);
        claims.edge.insert(edge, name("edge-1"));
        claims.pods.insert("10.244.1.0/24".parse().unwrap(), name("edge-1"));
        let at = |later| Claims::restore(claims.store(now, clock), now, later).unwrap();
        assert_eq!(at(clock), claims);
        let later = at(clock + Duration::from_secs(150));
        assert_eq!(later.due(now), Some(now + Duration::from_secs(50)));
        assert_eq!(at(UNIX_EPOCH).due(now), Some(now + CLOUD_CLAIM_DELAY), "a clock that was set back");
        let other = StoredClaims { version: 2, ..claims.store(now, clock) };
        assert_eq!(Claims::restore(other, now, clock).unwrap_err(), "version 2 is not 1");
    }
}

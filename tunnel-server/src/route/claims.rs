//! Which node had an address first: a node that names another's address later gets nothing, and takes nothing away.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;

/// A cloud node's address is excluded from the redirect once it has been the node's for this long: an edge node that drops
/// its own label must not decide at once what is direct for everybody.
pub const CLOUD_CLAIM_DELAY: Duration = Duration::from_secs(300);

/// What follows from earlier inventories.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Claims {
    /// Whether there was an inventory with nodes; before the first, no node is late.
    pub(super) known: bool,
    /// The edge node that has an address.
    pub(super) edge: HashMap<IpAddr, NodeName>,
    /// Cloud nodes that name an address, and when it begins to be excluded.
    cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>>,
}

impl Claims {
    /// These claims with the cloud nodes of `inventory`, and still without edge nodes.
    pub(super) fn followed_by(&self, inventory: &Inventory, now: Instant) -> Self {
        let mut cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>> = HashMap::new();
        for node in inventory.nodes.iter().filter(|node| !node.edge) {
            for address in &node.addresses {
                let before = self.cloud.get(address).into_iter().flatten();
                let before = before.into_iter().find(|(name, _)| *name == node.name).map(|(_, from)| *from);
                let from = before.unwrap_or(if self.known { now + CLOUD_CLAIM_DELAY } else { now });
                let claims = cloud.entry(*address).or_default();
                // A node that lists an address twice is not two nodes.
                if claims.last().is_none_or(|(name, _)| *name != node.name) {
                    claims.push((node.name.clone(), from));
                }
            }
        }
        Self { known: true, edge: HashMap::with_capacity(self.edge.len()), cloud }
    }

    /// Addresses that cloud nodes name.
    pub(super) fn cloud(&self) -> impl Iterator<Item = &IpAddr> {
        self.cloud.keys()
    }

    pub(super) fn cloud_nodes(&self, address: IpAddr) -> impl Iterator<Item = &NodeName> {
        self.cloud.get(&address).into_iter().flatten().map(|(name, _)| name)
    }

    /// Whether a cloud node has had the address for long enough.
    pub(super) fn is_excluded(&self, address: IpAddr, now: Instant) -> bool {
        self.cloud.get(&address).is_some_and(|claims| claims.iter().any(|(_, from)| *from <= now))
    }

    /// Whether no other cloud node named the address before `node` did.
    pub(super) fn was_first(&self, node: &NodeName, address: IpAddr) -> bool {
        let claims = self.cloud.get(&address).map(Vec::as_slice).unwrap_or_default();
        let first = claims.iter().map(|(_, from)| *from).min();
        claims.iter().any(|(name, from)| name == node && Some(*from) == first)
    }

    /// When the next address begins to be excluded.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.cloud.values().flatten().map(|(_, from)| *from).filter(|from| *from > now).min()
    }
}

/// [`Claims`] as a file has them.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    edge: HashMap<IpAddr, NodeName>,
    /// Address, node, and when the address begins to be excluded, in seconds since 1970.
    cloud: Vec<(IpAddr, NodeName, u64)>,
}

const VERSION: u32 = 1;

impl Claims {
    /// # Errors
    /// The text is not what [`Self::store`] wrote.
    pub(super) fn restore(text: &[u8], now: Instant, clock: SystemTime) -> Result<Self, String> {
        let stored: Stored = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if stored.version != VERSION {
            return Err(format!("version {} is not {VERSION}", stored.version));
        }
        let seconds = since_1970(clock);
        let mut cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>> = HashMap::new();
        for (address, node, from) in stored.cloud {
            // A clock that was set back must not delay it further.
            let delay = Duration::from_secs(from.saturating_sub(seconds)).min(CLOUD_CLAIM_DELAY);
            cloud.entry(address).or_default().push((node, now + delay));
        }
        Ok(Self { known: true, edge: stored.edge, cloud })
    }

    pub(super) fn store(&self, now: Instant, clock: SystemTime) -> Result<Vec<u8>, serde_json::Error> {
        let seconds = since_1970(clock);
        let cloud = self.cloud.iter().flat_map(|(address, claims)| {
            claims.iter().map(move |(node, from)| {
                (*address, node.clone(), seconds + from.saturating_duration_since(now).as_secs())
            })
        });
        serde_json::to_vec(&Stored { version: VERSION, edge: self.edge.clone(), cloud: cloud.collect() })
    }
}

fn since_1970(clock: SystemTime) -> u64 {
    clock.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::InventoryNode;

    #[test]
    fn a_cloud_node_that_lists_an_address_twice_claims_it_once() {
        let address: IpAddr = "10.0.0.2".parse().unwrap();
        let node = |name: &str| InventoryNode {
            name: name.parse().unwrap(),
            edge: false,
            addresses: vec![address, address],
            left_out: 0,
            kubelet_port: 10250,
            pod_cidrs: Vec::new(),
            created: None,
        };
        let (inventory, now) = (Inventory { nodes: vec![node("cloud-1"), node("cloud-2")] }, Instant::now());
        let claims = Claims::default().followed_by(&inventory, now);
        let names: Vec<_> = claims.cloud_nodes(address).map(NodeName::as_str).collect();
        assert_eq!(names, ["cloud-1", "cloud-2"]);
    }

    #[test]
    fn stored_claims_are_restored() {
        let now = Instant::now();
        let clock = UNIX_EPOCH + Duration::from_secs(1_763_800_000);
        let address: IpAddr = "10.8.0.7".parse().unwrap();
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        let claims = Claims {
            known: true,
            edge: HashMap::from([(address, node("edge-1"))]),
            cloud: HashMap::from([(
                "fd00::1".parse().unwrap(),
                vec![(node("cloud-1"), now), (node("cloud-2"), now + Duration::from_secs(200))],
            )]),
        };
        let text = claims.store(now, clock).unwrap();
        assert_eq!(Claims::restore(&text, now, clock).unwrap(), claims);
        let later = Claims::restore(&text, now, clock + Duration::from_secs(150)).unwrap();
        assert_eq!(later.due(now), Some(now + Duration::from_secs(50)));
        let before = Claims::restore(&text, now, UNIX_EPOCH).unwrap();
        assert_eq!(before.due(now), Some(now + CLOUD_CLAIM_DELAY), "a clock that was set back");
        for damaged in [&text[..text.len() / 2], b"", b"{}", &text.repeat(2)] {
            assert!(Claims::restore(damaged, now, clock).is_err());
        }
        let other = String::from_utf8(text).unwrap().replace("\"version\":1", "\"version\":2");
        assert_eq!(Claims::restore(other.as_bytes(), now, clock).unwrap_err(), "version 2 is not 1");
    }
}

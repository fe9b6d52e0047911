//! Which node had an address first: a node that names another's address later gets nothing, and takes nothing away.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;

/// A cloud node's address is excluded from the redirect once it has been the node's for this long: an edge node that drops
/// its own label must not decide at once what is direct for everybody.
pub const CLOUD_CLAIM_DELAY: Duration = Duration::from_secs(300);

/// What follows from earlier inventories.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims {
    /// Whether there was an inventory with nodes; before the first, no node is late.
    pub(super) known: bool,
    /// The edge node that has an address.
    edge: HashMap<IpAddr, NodeName>,
    /// Cloud nodes that name an address, and when it begins to be excluded.
    cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>>,
    /// Each of these moments that may still be to come, with its address.
    ripening: BTreeSet<(Instant, IpAddr)>,
    /// Whether something has changed since [`Self::take_changed`].
    changed: bool,
}

impl Claims {
    /// The edge node that has the address.
    pub(super) fn holder(&self, address: IpAddr) -> Option<&NodeName> {
        self.edge.get(&address)
    }

    pub(super) fn set_holder(&mut self, address: IpAddr, node: Option<&NodeName>) {
        let before = match node {
            Some(node) => self.edge.insert(address, node.clone()),
            None => self.edge.remove(&address),
        };
        self.changed |= before.as_ref() != node;
    }

    /// A cloud node names the address. The first ones count from `now`, later ones after the delay.
    pub(super) fn name(&mut self, address: IpAddr, node: &NodeName, now: Instant) {
        let claims = self.cloud.entry(address).or_default();
        if claims.iter().any(|(name, _)| name == node) {
            return;
        }
        let from = if self.known { now + CLOUD_CLAIM_DELAY } else { now };
        claims.push((node.clone(), from));
        self.ripening.insert((from, address));
        self.changed = true;
    }

    /// A cloud node names the address no more.
    pub(super) fn unname(&mut self, address: IpAddr, node: &NodeName) {
        let Some(claims) = self.cloud.get_mut(&address) else { return };
        let Some(at) = claims.iter().position(|(name, _)| name == node) else { return };
        let (_, from) = claims.remove(at);
        if claims.iter().all(|(_, other)| *other != from) {
            self.ripening.remove(&(from, address));
        }
        if claims.is_empty() {
            self.cloud.remove(&address);
        }
        self.changed = true;
    }

    /// An inventory follows that is not compared with another: what its cloud nodes do not name is forgotten.
    pub(super) fn follow_anew(&mut self, inventory: &Inventory) {
        let named = |address: &IpAddr, node: &NodeName| {
            let node = inventory.get(node.as_str());
            node.is_some_and(|node| !node.edge && node.addresses.contains(address))
        };
        let claims = self
            .cloud
            .iter()
            .flat_map(|(address, claims)| claims.iter().map(move |(name, _)| (address, name)));
        let gone: Vec<_> = claims.filter(|(address, name)| !named(address, name)).collect();
        let gone: Vec<_> = gone.into_iter().map(|(address, name)| (*address, name.clone())).collect();
        for (address, name) in gone {
            self.unname(address, &name);
        }
    }

    /// Every address that anyone has or names.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.edge.keys().chain(self.cloud.keys()).copied()
    }

    /// Addresses that may have begun to be excluded since the last call.
    pub(super) fn ripe(&mut self, now: Instant) -> Vec<IpAddr> {
        let mut ripe = Vec::new();
        while let Some((from, address)) = self.ripening.first().copied().filter(|(from, _)| *from <= now) {
            self.ripening.remove(&(from, address));
            ripe.push(address);
        }
        ripe
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
        self.ripening.iter().map(|(from, _)| *from).find(|from| *from > now)
    }

    /// Whether something has changed since the last call.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}

/// [`Claims`] as a file has them.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredClaims {
    version: u32,
    edge: HashMap<IpAddr, NodeName>,
    /// Address, node, and when the address begins to be excluded, in seconds since 1970.
    cloud: Vec<(IpAddr, NodeName, u64)>,
}

const VERSION: u32 = 1;

impl Claims {
    /// # Errors
    /// They are of another version.
    pub(super) fn restore(stored: StoredClaims, now: Instant, clock: SystemTime) -> Result<Self, String> {
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
        let each =
            cloud.iter().flat_map(|(address, claims)| claims.iter().map(|(_, from)| (*from, *address)));
        let ripening = each.collect();
        Ok(Self { known: true, edge: stored.edge, cloud, ripening, changed: false })
    }

    pub(super) fn store(&self, now: Instant, clock: SystemTime) -> StoredClaims {
        let seconds = since_1970(clock);
        let cloud = self.cloud.iter().flat_map(|(address, claims)| {
            claims.iter().map(move |(node, from)| {
                (*address, node.clone(), seconds + from.saturating_duration_since(now).as_secs())
            })
        });
        StoredClaims { version: VERSION, edge: self.edge.clone(), cloud: cloud.collect() }
    }
}

fn since_1970(clock: SystemTime) -> u64 {
    clock.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    #[test]
    fn a_cloud_node_that_lists_an_address_twice_claims_it_once() {
        let (address, now): (IpAddr, _) = ("10.0.0.2".parse().unwrap(), Instant::now());
        let mut claims = Claims::default();
        for node in ["cloud-1", "cloud-1", "cloud-2"] {
            claims.name(address, &name(node), now);
        }
        let names: Vec<_> = claims.cloud_nodes(address).map(NodeName::as_str).collect();
        assert_eq!(names, ["cloud-1", "cloud-2"]);
    }

    #[test]
    fn an_address_ripens_once_and_not_when_it_is_named_no_more() {
        let (one, two): (IpAddr, IpAddr) = ("10.0.0.2".parse().unwrap(), "10.0.0.3".parse().unwrap());
        let (mut claims, now) = (Claims { known: true, ..Claims::default() }, Instant::now());
        let ripe = now + CLOUD_CLAIM_DELAY;
        claims.name(one, &name("cloud-1"), now);
        claims.name(two, &name("cloud-1"), now);
        claims.name(two, &name("cloud-2"), now);
        claims.unname(one, &name("cloud-1"));
        claims.unname(two, &name("cloud-2"));
        assert_eq!((claims.due(now), claims.ripe(now)), (Some(ripe), vec![]));
        assert_eq!((claims.ripe(ripe), claims.ripe(ripe), claims.due(ripe)), (vec![two], vec![], None));
        assert!(claims.is_excluded(two, ripe) && !claims.is_excluded(one, ripe));
        assert!(claims.take_changed() && !claims.take_changed());
    }

    #[test]
    fn stored_claims_are_restored() {
        let now = Instant::now();
        let clock = UNIX_EPOCH + Duration::from_secs(1_763_800_000);
        let (edge, cloud): (IpAddr, IpAddr) = ("10.8.0.7".parse().unwrap(), "fd00::1".parse().unwrap());
        let mut claims = Claims::default();
        claims.set_holder(edge, Some(&name("edge-1")));
        claims.name(cloud, &name("cloud-1"), now);
        claims.known = true;
        claims.name(cloud, &name("cloud-2"), now - (CLOUD_CLAIM_DELAY - Duration::from_secs(200)));
        let restored = Claims::restore(claims.store(now, clock), now, clock).unwrap();
        assert!(restored.known);
        assert_eq!((&restored.edge, &restored.cloud), (&claims.edge, &claims.cloud));
        assert_eq!(restored.ripening, claims.ripening);
        let at = |later| Claims::restore(claims.store(now, clock), now, later).unwrap();
        let later = at(clock + Duration::from_secs(150));
        assert_eq!(later.due(now), Some(now + Duration::from_secs(50)));
        assert_eq!(at(UNIX_EPOCH).due(now), Some(now + CLOUD_CLAIM_DELAY), "a clock that was set back");
        let other = StoredClaims { version: 2, ..claims.store(now, clock) };
        assert_eq!(Claims::restore(other, now, clock).unwrap_err(), "version 2 is not 1");
    }
}

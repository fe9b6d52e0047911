//! The router against a naive model that applies the rules address by address.

use prometheus_client::encoding::text::encode;
use proptest::prelude::*;
use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::CLOUD_CLAIM_DELAY;
use crate::inventory::InventoryNode;

#[derive(Clone, Debug)]
enum Step {
    Inventory(Vec<(u8, bool, Vec<u8>)>),
    Live(u8, TunnelHolder, bool),
    Lose(u8, TunnelHolder),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let nodes = prop::collection::btree_map(
        0u8..8,
        (prop::bool::weighted(0.7), prop::collection::vec(0u8..16, 0..3)),
        0..8,
    );
    let step = prop_oneof![
        3 => nodes.prop_map(|nodes| Step::Inventory(nodes.into_iter().map(|(n, (edge, a))| (n, edge, a)).collect())),
        2 => (0u8..8, holder(), any::<bool>()).prop_map(|(n, holder, live)| Step::Live(n, holder, live)),
        1 => (0u8..8, holder()).prop_map(|(n, holder)| Step::Lose(n, holder)),
        1 => (1u64..700).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 1..30)
}

fn holder() -> impl Strategy<Value = TunnelHolder> {
    prop_oneof![Just(TunnelHolder::This), Just(TunnelHolder::Peers)]
}

/// Outcome that the rules require for one address.
#[derive(Clone, Debug, PartialEq)]
enum Expect {
    Direct,
    Down,
    To(NodeName),
}

#[derive(Default)]
struct Model {
    known: bool,
    nodes: Vec<InventoryNode>,
    holders: HashMap<IpAddr, NodeName>,
    /// Time from which the cloud node's address is excluded.
    cloud: HashMap<(NodeName, IpAddr), Instant>,
    expected: HashMap<IpAddr, Expect>,
}

fn addresses() -> impl Iterator<Item = IpAddr> {
    (0..16u8).map(|a| IpAddr::from([10, 0, 0, a]))
}

impl Model {
    fn follow(&mut self, nodes: Vec<InventoryNode>, now: Instant) {
        self.nodes = nodes;
        self.expected = addresses().map(|address| (address, Expect::Direct)).collect();
        if self.nodes.is_empty() {
            return;
        }
        let since = if self.known { now + CLOUD_CLAIM_DELAY } else { now };
        let cloud: Vec<_> = self.nodes.iter().filter(|node| !node.edge).collect();
        let claims = cloud.iter().flat_map(|node| node.addresses.iter().map(|a| (node.name.clone(), *a)));
        self.cloud =
            claims.map(|claim| (claim.clone(), self.cloud.get(&claim).copied().unwrap_or(since))).collect();
        for address in addresses() {
            let expected = self.decide(address, now);
            match &expected {
                Some((holder, Expect::Direct | Expect::To(_))) => {
                    self.holders.insert(address, holder.clone());
                }
                _ => {
                    self.holders.remove(&address);
                }
            }
            if let Some((_, expected)) = expected {
                self.expected.insert(address, expected);
            }
        }
        self.known = true;
    }

    /// The holder of the address, and the outcome. None if nobody has it and it is direct.
    fn decide(&self, address: IpAddr, now: Instant) -> Option<(NodeName, Expect)> {
        let excluded = tests::config().exclude.iter().any(|net| net.contains(&address));
        let mut edges: Vec<_> =
            self.nodes.iter().filter(|node| node.edge && node.addresses.contains(&address)).collect();
        let first = edges.first()?.name.clone();
        let to = |name: &NodeName| {
            (name.clone(), if excluded { Expect::Direct } else { Expect::To(name.clone()) })
        };
        if address == tests::ip("10.0.0.1") {
            return None;
        }
        let claims = || self.cloud.iter().filter(|((_, claimed), _)| *claimed == address);
        let always_cloud =
            |name: &NodeName| self.nodes.iter().any(|node| node.name == *name && node.always_cloud());
        if claims().any(|((name, _), from)| *from <= now && always_cloud(name)) {
            return None;
        }
        let holder = self.holders.get(&address);
        if let Some(holder) = edges.iter().find(|node| Some(&node.name) == holder) {
            return Some(to(&holder.name));
        }
        if claims().next().is_some() {
            return None;
        }
        if edges.len() == 1 {
            return Some(to(&first));
        }
        edges.sort_by_key(|node| node.created);
        let older = edges.iter().all(|node| node.created.is_some()) && edges[0].created < edges[1].created;
        match older {
            true => Some(to(&edges[0].name)),
            false if excluded => None,
            false => Some((first, Expect::Down)),
        }
    }

    fn excluded(&self, now: Instant) -> BTreeSet<IpNet> {
        let old = self.cloud.iter().filter(|(_, from)| **from <= now && !self.nodes.is_empty());
        let free =
            old.map(|((_, address), _)| *address).filter(|address| !self.holders.contains_key(address));
        tests::config().exclude.into_iter().chain(free.map(IpNet::from)).collect()
    }
}

proptest! {
    #[test]
    fn routes_agree_with_the_rules(steps in steps()) {
        // Else the cloud nodes' network has no edge node.
        let config = RouterConfig { edge_addresses: vec![tests::net("10.0.0.0/24")], ..tests::config() };
        let mut registry = Registry::default();
        let router = Router::new(config, &mut registry);
        let (mut model, mut live, mut now) = (Model::default(), HashMap::new(), Instant::now());
        for step in steps {
            match step {
                Step::Wait(seconds) => {
                    now += Duration::from_secs(seconds);
                    router.refresh_at(now);
                    model.follow(model.nodes.clone(), now);
                }
                Step::Live(n, holder, up) => {
                    let name = tests::name(&format!("n{n}"));
                    router.set_live(&name, holder, up);
                    live.entry(name).or_insert([false; 2])[holder as usize] = up;
                }
                Step::Lose(n, holder) => {
                    let name = tests::name(&format!("n{n}"));
                    router.lose(&name, holder);
                    live.entry(name).or_insert([false; 2])[holder as usize] = false;
                }
                Step::Inventory(list) => {
                    let nodes: Vec<_> = list
                        .into_iter()
                        .map(|(n, edge, a)| {
                            let addresses: Vec<_> = a.iter().map(|a| format!("10.0.0.{a}")).collect();
                            let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
                            let created = (n % 3 != 0).then(|| UNIX_EPOCH + Duration::from_secs(u64::from(n / 2)));
                            let node = tests::node(&format!("n{n}"), edge, &addresses);
                            let before = model.nodes.iter().find(|before| before.name == node.name);
                            InventoryNode { created, ..node }.following(before)
                        })
                        .collect();
                    router.set_inventory_at(nodes.clone().into(), now);
                    model.follow(nodes, now);
                }
            }
            // Agents that are expected back are away already.
            let mut nodes = [("here", 0), ("elsewhere", 0), ("away", 0)];
            for node in model.nodes.iter().filter(|node| node.edge) {
                nodes[match live.get(&node.name) { Some([true, _]) => 0, Some([_, true]) => 1, _ => 2 }].1 += 1;
            }
            let mut metrics = String::new();
            encode(&mut metrics, &registry).unwrap();
            for (state, count) in nodes {
                let line = format!("nodes{{state=\"{state}\"}} {count}\n");
                prop_assert!(metrics.contains(&line), "{} is not in {}", line, metrics);
            }
            router.give_up(Instant::now() + crate::RETURN);
            let (desired, snapshot) = (router.desired(), router.snapshot());
            let mut virtual_addresses = HashSet::new();
            for address in addresses() {
                let target = desired.route(IpNet::from(address));
                match model.expected.get(&address).cloned().unwrap_or(Expect::Direct) {
                    Expect::Direct => prop_assert_eq!(target, None),
                    Expect::Down => {
                        let target = target.unwrap();
                        prop_assert!(!target.up && snapshot.by_virtual_address(target.virtual_address).is_none());
                        prop_assert!(virtual_addresses.insert(target.virtual_address));
                    }
                    Expect::To(name) => {
                        let target = target.unwrap();
                        prop_assert_eq!(target.up, live.get(&name).is_some_and(|live| live[0] || live[1]));
                        let found = snapshot.by_virtual_address(target.virtual_address).unwrap();
                        prop_assert_eq!((&found.node, found.address), (&name, address));
                        prop_assert!(virtual_addresses.insert(target.virtual_address), "one virtual address, two routes");
                    }
                }
            }
            // Exactly the operator's ranges and the addresses that cloud nodes have had for a while are excluded.
            prop_assert_eq!(&desired.table.excluded, &model.excluded(now));
        }
    }
}

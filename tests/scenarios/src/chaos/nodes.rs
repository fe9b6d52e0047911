//! The inventory during changes of labels, addresses and nodes.
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::Result;
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::{CLOUD, POD_CIDR, Testbed};

use super::load::Addresses;

pub(super) struct Nodes {
    inventory: Inventory,
    addresses: Arc<Addresses>,
    now: Wrongs,
}

/// Current faults of the nodes.
#[derive(Debug, Default)]
pub(super) struct Wrongs {
    pub(super) unlabelled: BTreeSet<usize>,
    /// Edges whose address another node has too.
    pub(super) impostors: BTreeSet<usize>,
    /// True while two hundred additional nodes exist.
    pub(super) crowd: bool,
}

impl Nodes {
    pub(super) fn new(inventory: Inventory, addresses: Arc<Addresses>) -> Self {
        Self { inventory, addresses, now: Wrongs::default() }
    }

    pub(super) fn change<T>(
        &mut self,
        testbed: &Testbed,
        change: impl FnOnce(&mut Wrongs) -> T,
    ) -> Result<()> {
        change(&mut self.now);
        self.write(testbed)
    }

    /// Changes the address of an edge, and then of its node.
    pub(super) fn move_edge(&mut self, testbed: &Testbed, at: usize) -> Result<()> {
        let (old, ns) = (self.addresses.get(at), &testbed.edge(at + 1).ns);
        let [a, b, network, last] = old.octets();
        let new = Ipv4Addr::new(a, b, network, if last == 2 { 3 } else { 2 });
        ns.ip(&format!("addr del {old}/24 dev eth0"))?;
        ns.ip(&format!("addr add {new}/24 dev eth0"))?;
        ns.ip(&format!("route replace default via {a}.{b}.{network}.1"))?;
        self.addresses.set(at, new);
        self.write(testbed)
    }

    fn write(&mut self, testbed: &Testbed) -> Result<()> {
        let mut nodes = vec![node("cloud-1", false, &[CLOUD.into(), "fd70::1".parse()?], &[POD_CIDR])];
        for (at, edge) in testbed.edges().iter().enumerate() {
            let addresses = [self.addresses.get(at).into(), edge.address_v6.into()];
            nodes.push(node(&edge.name, !self.now.unlabelled.contains(&at), &addresses, &[]));
        }
        for at in &self.now.impostors {
            nodes.push(node(&format!("impostor-{at}"), true, &[self.addresses.get(*at).into()], &[]));
        }
        if self.now.crowd {
            nodes
                .extend((0..200).map(|n| node(&format!("passing-{n}"), true, &[[10, 99, 0, n].into()], &[])));
        }
        self.inventory.nodes = nodes;
        self.inventory.write()
    }
}

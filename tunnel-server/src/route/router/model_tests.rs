//! The router against a naive model that applies the rules to one address after the other.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::inventory::InventoryNode;

#[derive(Clone, Debug)]
enum Step {
    Inventory(Vec<(u8, bool, Vec<u8>)>),
    Live(u8, bool),
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
        2 => (0u8..8, any::<bool>()).prop_map(|(n, live)| Step::Live(n, live)),
        1 => (1u64..400).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 1..30)
}

/// What the rules require of one address.
#[derive(Debug, PartialEq)]
enum Expect {
    Direct,
    Down,
    To(NodeName, bool),
}

fn expect(address: IpAddr, nodes: &[InventoryNode], live: &HashSet<NodeName>) -> Expect {
    let claims: Vec<_> = nodes.iter().filter(|node| node.addresses.contains(&address)).collect();
    let edges: Vec<_> = claims.iter().filter(|node| node.edge).collect();
    if claims.iter().any(|node| !node.edge)
        || tests::config().exclude.iter().any(|net| net.contains(&address))
    {
        return Expect::Direct;
    }
    match edges[..] {
        [] => Expect::Direct,
        [node] => Expect::To(node.name.clone(), live.contains(&node.name)),
        _ => Expect::Down,
    }
}

proptest! {
    #[test]
    fn routes_agree_with_the_rules(steps in steps()) {
        let (router, _) = tests::router();
        let (mut nodes, mut live, mut now) = (Vec::new(), HashSet::new(), Instant::now());
        for step in steps {
            match step {
                Step::Wait(seconds) => now += Duration::from_secs(seconds),
                Step::Live(n, up) => {
                    let name = tests::name(&format!("n{n}"));
                    router.set_live(&name, up);
                    if up { live.insert(name); } else { live.remove(&name); }
                }
                Step::Inventory(list) => {
                    nodes = list
                        .into_iter()
                        .map(|(n, edge, a)| {
                            let addresses: Vec<_> = a.iter().map(|a| format!("10.0.0.{a}")).collect();
                            tests::node(&format!("n{n}"), edge, &addresses.iter().map(String::as_str).collect::<Vec<_>>())
                        })
                        .collect();
                    router.set_inventory_at(Inventory { nodes: nodes.clone() }, now);
                }
            }
            let (desired, snapshot) = (router.desired(), router.snapshot());
            let mut tokens = HashSet::new();
            for a in 0..16u8 {
                let address = IpAddr::from([10, 0, 0, a]);
                let target = desired.routes.get(&IpNet::from(address));
                match expect(address, &nodes, &live) {
                    Expect::Direct => prop_assert_eq!(target, None),
                    Expect::Down => {
                        let target = target.unwrap();
                        prop_assert!(!target.up && snapshot.by_token(target.token).is_none());
                        prop_assert!(tokens.insert(target.token));
                    }
                    Expect::To(name, up) => {
                        let target = target.unwrap();
                        prop_assert_eq!(target.up, up);
                        let found = snapshot.by_token(target.token).unwrap();
                        prop_assert_eq!((&found.node, found.address), (&name, address));
                        prop_assert!(tokens.insert(target.token), "one token, two routes");
                    }
                }
            }
            // Excluded is exactly the operator's ranges and the cloud's addresses.
            let expected: BTreeSet<IpNet> = tests::config().exclude.into_iter()
                .chain(nodes.iter().filter(|n| !n.edge).flat_map(|n| n.addresses.iter().copied().map(IpNet::from)))
                .collect();
            prop_assert_eq!(&desired.excluded, &expected);
        }
    }
}

//! Changes that are applied one after the other give what computing everything gives.

use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;

use super::*;
use crate::inventory::InventoryNode;
use crate::route::ByAddress;
use crate::route::plan::scratch;
use crate::route::rules::Rules;

#[derive(Clone, Debug)]
enum Step {
    /// A node comes, or changes.
    Node {
        n: u8,
        edge: bool,
        addresses: Vec<u8>,
        pods: Vec<u8>,
        created: Option<u8>,
    },
    Gone(u8),
    /// All of them.
    Empty,
    Live(u8, bool),
    /// The API server or a Service has this address.
    Service(Option<u8>),
    Wait(u64),
    /// The routes were computed half-way.
    Distrust,
}

fn step() -> impl Strategy<Value = Step> {
    let node = (
        0_u8..7,
        prop::bool::weighted(0.7),
        prop::collection::vec(0_u8..18, 0..4),
        prop::collection::vec(0_u8..13, 0..3),
        prop::option::of(0_u8..3),
    );
    let node =
        node.prop_map(|(n, edge, addresses, pods, created)| Step::Node { n, edge, addresses, pods, created });
    prop_oneof![
        12 => node,
        3 => (0_u8..7).prop_map(Step::Gone),
        1 => Just(Step::Empty),
        4 => (0_u8..7, any::<bool>()).prop_map(|(n, live)| Step::Live(n, live)),
        1 => prop::option::of(0_u8..18).prop_map(Step::Service),
        3 => (1_u64..400).prop_map(Step::Wait),
        1 => Just(Step::Distrust),
    ]
}

fn address(n: u8) -> IpAddr {
    match n {
        // Within the ranges of pods below.
        16 => tests::ip("10.244.1.5"),
        17 => tests::ip("10.244.4.0"),
        n => IpAddr::from([10, 0, 0, n]),
    }
}

/// Ranges that overlap one another, that are excluded, too wide, one address, or somebody else's.
fn range(n: u8) -> IpNet {
    tests::net(
        [
            "10.244.1.0/24",
            "10.244.1.128/25",
            "10.244.2.0/24",
            "10.244.0.0/22",
            "10.244.4.0/32",
            "10.0.0.8/29",
            "10.0.0.2/32",
            "172.16.0.0/16",
            "198.18.4.0/24",
            // With this host's address, of Services, and of everything.
            "10.0.0.0/30",
            "10.96.3.0/24",
            "0.0.0.0/0",
            "10.0.0.0/15",
        ][usize::from(n)],
    )
}

fn config() -> RouterConfig {
    let pods = ["10.244.0.0/16", "10.0.0.0/24", "198.18.0.0/15", "10.96.0.0/12"].map(tests::net).to_vec();
    RouterConfig { pods, ..tests::config() }
}

fn name(n: u8) -> NodeName {
    tests::name(&format!("n{n}"))
}

struct World {
    router: Router,
    config: RouterConfig,
    services: Vec<IpNet>,
    nodes: Inventory,
    live: HashSet<NodeName>,
    now: Instant,
    claims: scratch::Claims,
}

impl World {
    fn new() -> Self {
        let router = Router::new(config(), &mut Registry::default());
        Self {
            router,
            config: config(),
            services: Vec::new(),
            nodes: Inventory::default(),
            live: HashSet::new(),
            now: Instant::now(),
            claims: scratch::Claims::default(),
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Node { n, edge, addresses, pods, created } => {
                let node = InventoryNode {
                    addresses: addresses.into_iter().map(address).collect(),
                    pod_cidrs: pods.into_iter().map(range).collect(),
                    created: created.map(|age| UNIX_EPOCH + Duration::from_secs(age.into())),
                    ..tests::node(name(n).as_str(), edge, &[])
                };
                self.nodes.insert(node);
            }
            Step::Gone(n) => _ = self.nodes.remove(name(n).as_str()),
            Step::Empty => self.nodes = Inventory::default(),
            Step::Live(n, live) => {
                self.router.set_live(&name(n), Holder::This, live);
                if live {
                    self.live.insert(name(n))
                } else {
                    self.live.remove(&name(n))
                };
            }
            Step::Service(at) => self.services = at.map(|n| IpNet::from(address(n))).into_iter().collect(),
            Step::Wait(seconds) => self.now += Duration::from_secs(seconds),
            Step::Distrust => self.router.lock_planner().distrust(),
        }
        let mut planner = self.router.lock_planner();
        let all = planner.set_services(&self.config, self.services.clone());
        self.router.compute(Arc::new(self.nodes.clone()), &mut planner, all, self.now);
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let nodes: scratch::Nodes = self.nodes.iter().map(|node| (**node).clone()).collect();
        let foreign: Vec<_> = self.config.foreign.iter().chain(&self.services).copied().collect();
        let (host, token_ranges) = (HashSet::from([tests::ip("10.0.0.1")]), self.config.token_ranges());
        let rules = Rules {
            edge_addresses: &self.config.edge_addresses,
            exclude: &self.config.exclude,
            token_ranges: &token_ranges,
            foreign: &foreign,
            pods: &self.config.pods,
            host: &host,
        };
        let mut plan = scratch::Plan::new(&nodes, &rules, &self.claims, self.now);
        plan.route_pods(&nodes, &rules);
        let (desired, snapshot) = (self.router.desired(), self.router.snapshot());

        prop_assert!(
            desired.excluded.iter().eq(&plan.excluded),
            "{:?} {:?}",
            desired.excluded,
            plan.excluded
        );
        prop_assert!(
            snapshot.conflicts().iter().eq(&plan.conflicts),
            "{:?}\n{:?}",
            snapshot.conflicts(),
            plan.conflicts
        );
        for n in 0..18 {
            let found = match snapshot.by_address(address(n)) {
                ByAddress::Unique(found) => Some(vec![found.node]),
                ByAddress::Ambiguous(nodes) => Some(nodes),
                ByAddress::Unknown => None,
            };
            prop_assert_eq!(
                found,
                plan.holders.get(&address(n)).map(|holder| holder.names(&nodes)),
                "{}",
                address(n)
            );
        }
        // The address of a pod counts as that.
        let mut expected: HashMap<IpNet, Vec<NodeName>> =
            plan.routed.iter().map(|a| (IpNet::from(*a), plan.holders[a].names(&nodes))).collect();
        expected.extend(plan.pods.iter().map(|(range, index)| (*range, vec![nodes[*index].name.clone()])));
        prop_assert_eq!(desired.routes.len(), expected.len());
        let mut tokens = HashSet::new();
        for (net, target) in desired.routes.iter() {
            prop_assert!(tokens.insert(target.token), "one token, two routes");
            let found = snapshot.by_token(target.token);
            let [node] = &expected[net][..] else {
                prop_assert!(found.is_none() && !target.up, "{} is ambiguous", net);
                continue;
            };
            let found = found.unwrap();
            prop_assert_eq!((&found.node, found.address, found.pod), (node, net.network(), target.any_port));
            prop_assert_eq!(target.any_port, plan.pods.contains_key(net));
            prop_assert_eq!(target.up, self.live.contains(node), "{}", net);
        }
        let due = plan.claims.due(self.now).map(|at| at.max(self.now + Duration::from_secs(1)));
        prop_assert_eq!(*self.router.due().borrow(), due);
        let named = plan.claims.cloud_nodes(tests::ip("10.0.0.1"));
        let here = named.filter(|node| plan.claims.was_first(node, tests::ip("10.0.0.1")));
        let pods =
            here.filter_map(|node| self.nodes.get(node.as_str())).flat_map(|node| node.pod_cidrs.clone());
        let pods = pods.filter(|range| range.prefix_len() >= 8);
        let clients: BTreeSet<_> = self.config.clients.iter().copied().chain(pods).collect();
        if !self.nodes.is_empty() {
            prop_assert_eq!(&desired.clients, &clients);
        }
        // Who had it first is remembered alike.
        let planner = self.router.lock_planner();
        for n in 0..18 {
            prop_assert_eq!(planner.claims().holder(address(n)), plan.claims.edge.get(&address(n)));
        }
        drop(planner);
        self.claims = plan.claims;
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn changes_one_by_one_give_what_computing_everything_gives(steps in prop::collection::vec(step(), 1..40)) {
        let mut world = World::new();
        world.router.lock_planner().refresh_host(&world.config);
        for step in steps {
            world.take(step);
            world.check()?;
        }
    }
}

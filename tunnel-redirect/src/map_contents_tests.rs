//! Tests the order of map writes, step by step, and the rejections.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use proptest::prelude::*;
use tunnel_abi::{EXCLUDED_ENTRIES, LIST_CAPACITY, ROUTE_CAPACITY, ROUTE_ENTRIES};
use tunnel_routing::{Desired, Route, RouteTarget, Table, reserved_addresses, reserved_addresses_v6};

use super::change::{Change, ComesIn};
use super::map_contents::{HostContext, MapContents};
use super::self_test_addresses::SelfTestAddresses;
use super::{RedirectConfig, RedirectError};

/// Desired state of the kernel, with each route up or down on its own.
#[derive(Clone, Debug, Default)]
struct State {
    ports: BTreeSet<u16>,
    excluded: BTreeSet<IpNet>,
    clients: BTreeSet<IpNet>,
    routes: BTreeMap<IpNet, RouteTarget>,
}

impl State {
    fn desired(&self) -> Desired {
        // A node for each route.
        let node = |(n, net): (usize, &IpNet)| (format!("edge-{n:07}").parse().unwrap(), vec![*net]);
        let nodes = self.routes.keys().enumerate().map(node).collect();
        let route = |(n, (net, target)): (usize, (&IpNet, &RouteTarget))| {
            (
                *net,
                Route { virtual_address: target.virtual_address, any_port: target.any_port, node: Some(n) },
            )
        };
        let routes = self.routes.iter().enumerate().map(route).collect();
        let (excluded, clients) = (self.excluded.clone(), self.clients.clone());
        let up = self.routes.values().map(|target| target.up).collect();
        Desired {
            ports: self.ports.clone(),
            table: Arc::new(Table { excluded, clients, routes, nodes, edge: Vec::new() }),
            up,
        }
    }
}

fn complete(desired: &State) -> Result<MapContents, RedirectError> {
    complete_with(desired, &RedirectConfig::default(), &BTreeSet::new())
}

fn complete_with(
    desired: &State,
    config: &RedirectConfig,
    own: &BTreeSet<IpAddr>,
) -> Result<MapContents, RedirectError> {
    let self_test = SelfTestAddresses {
        origin: "198.19.255.0".parse().unwrap(),
        virtual_address: "198.19.255.1".parse().unwrap(),
        origin_v6: "fd9e:706f:7374:6572:ffff:ffff:ffff:ff00".parse().unwrap(),
        virtual_address_v6: "fd9e:706f:7374:6572:ffff:ffff:ffff:ff01".parse().unwrap(),
    };
    let host = HostContext { config, own, self_test: &self_test, ipv6: true };
    MapContents::complete(&desired.desired(), &host)
}

fn desired(routes: &[(&str, &str, bool)]) -> State {
    State {
        ports: [10250].into(),
        routes: routes
            .iter()
            .map(|(net, virtual_address, up)| {
                (
                    net.parse().unwrap(),
                    RouteTarget {
                        virtual_address: virtual_address.parse().unwrap(),
                        up: *up,
                        any_port: false,
                    },
                )
            })
            .collect(),
        ..State::default()
    }
}

fn shared_virtual_address() -> IpAddr {
    "198.18.9.9".parse().unwrap()
}

/// Includes routes that share a virtual address, all of them down.
fn any_desired_with_shared() -> impl Strategy<Value = State> {
    (any_desired(), prop::collection::btree_set(20_u32..28, 0..5)).prop_map(|(mut desired, shared)| {
        for n in shared {
            let target =
                RouteTarget { virtual_address: shared_virtual_address(), up: false, any_port: n % 4 == 0 };
            desired.routes.insert(IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a08_0000 + n))), target);
        }
        desired
    })
}

fn any_desired() -> impl Strategy<Value = State> {
    let address = |n: u32| Ipv4Addr::from(0x0a08_0000 + n);
    // Few addresses and few virtual addresses, so that virtual addresses move from one node to another.
    let routes = prop::collection::btree_map(0_u32..12, (0_u32..16, any::<bool>()), 0..12);
    let excluded = prop::collection::btree_set(0_u32..12, 0..6);
    let clients = prop::collection::btree_set(0_u32..6, 0..4);
    let ports = prop::collection::btree_set(10250_u16..10256, 1..4);
    (routes, excluded, clients, ports).prop_map(move |(routes, excluded, clients, ports)| {
        let mut used = BTreeSet::new();
        State {
            ports,
            excluded: excluded.into_iter().map(|n| IpNet::from(IpAddr::V4(address(n)))).collect(),
            clients: clients.into_iter().map(|n| IpNet::from(IpAddr::V4(address(100 + n)))).collect(),
            routes: routes
                .into_iter()
                .filter(|(_, (virtual_address, _))| used.insert(*virtual_address))
                .map(|(n, (virtual_address, up))| {
                    let virtual_address = IpAddr::V4(Ipv4Addr::from(0xc612_0000 + virtual_address));
                    (
                        IpNet::from(IpAddr::V4(address(n))),
                        RouteTarget { virtual_address, up, any_port: false },
                    )
                })
                .collect(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn every_step_between_two_states_is_safe(
        before in any_desired_with_shared(), after in any_desired_with_shared(),
    ) {
        let (have, want) = (complete(&before).unwrap(), complete(&after).unwrap());
        let mut now = have.clone();
        for change in have.changes_to(&want) {
            now.record(&change);
            for (net, target) in now.routes.iter().filter(|(_, target)| target.virtual_address != shared_virtual_address()) {
                let block = IpNet::new(target.virtual_address, net.prefix_len()).unwrap();
                prop_assert_eq!(now.origins.get(&block), Some(net), "after {:?}", change);
            }
            for net in have.excluded.intersection(&want.excluded) {
                prop_assert!(now.excluded.contains(net), "{} lost its exclusion after {:?}", net, change);
            }
            // An address that becomes both a route and excluded is never just a route.
            for net in want.excluded.iter().filter(|net| !have.routes.contains_key(*net)) {
                prop_assert!(!now.routes.contains_key(net) || now.excluded.contains(net), "{} after {:?}", net, change);
            }
        }
        prop_assert_eq!(&now, &want);
        prop_assert_eq!(want.changes_to(&want), Vec::<Change>::new());
    }

    #[test]
    fn routes_that_go_up_or_down_are_written_alone(before in any_desired_with_shared(), flips: Vec<bool>) {
        let (mut now, before) = (complete(&before).unwrap(), before.desired());
        let mut after = before.clone();
        let up = |(net, target): (IpNet, RouteTarget)| (net, target.up);
        // Routes that share a virtual address are never up.
        for ((up, flip), (_, target)) in after.up.iter_mut().zip(flips).zip(before.routes()) {
            *up ^= flip && target.virtual_address != shared_virtual_address();
        }
        let changes = now.changes_of(after.flips_since(&before).unwrap());
        let differ = after.routes().zip(before.routes()).filter(|(after, before)| after != before);
        prop_assert_eq!(changes.len(), differ.count());
        changes.iter().for_each(|change| now.record(change));
        let written: BTreeMap<_, _> = now.routes.iter().map(|(net, target)| (*net, target.up)).collect();
        prop_assert!(after.routes().map(up).all(|(net, up)| written[&net] == up));
        after.ports.insert(1);
        prop_assert_eq!(after.flips_since(&before), None, "something else has changed");
    }

    #[test]
    fn only_differences_are_written(before in any_desired(), port in 1_u16..65535) {
        let have = complete(&before).unwrap();
        let mut after = before.clone();
        after.ports.insert(port);
        let changes = have.changes_to(&complete(&after).unwrap());
        let expected = if before.ports.contains(&port) { vec![] } else { vec![Change::OpenPort(port)] };
        prop_assert_eq!(changes, expected);
    }
}

#[test]
fn a_virtual_address_that_forwards_is_unrouted_first() {
    let have =
        complete(&desired(&[("10.8.0.1/32", "198.18.0.2", true), ("10.8.0.2/32", "198.18.0.3", true)]))
            .unwrap();
    let want =
        complete(&desired(&[("10.8.0.1/32", "198.18.0.3", true), ("10.8.0.2/32", "198.18.0.2", true)]))
            .unwrap();
    let changes = have.changes_to(&want);
    let first_origin = changes.iter().position(|change| matches!(change, Change::Origin(..))).unwrap();
    let last_unroute = changes.iter().rposition(|change| matches!(change, Change::Unroute(_))).unwrap();
    assert!(last_unroute < first_origin, "{changes:?}");
}

#[track_caller]
fn refused(routes: &[(&str, &str, bool)], words: &str) {
    let error = complete(&desired(routes)).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn impossible_routes_are_refused() {
    refused(&[("10.8.0.1/32", "fd00::1", true)], "other address family");
    refused(&[("fd00:1::1/128", "198.18.0.1", true)], "other address family");
    refused(&[("10.8.0.1/32", "10.9.0.1", true)], "outside the redirect range");
    refused(&[("10.8.0.0/24", "198.18.0.1", true)], "first address of a block");
    refused(&[("198.18.0.9/32", "198.18.0.1", true)], "overlaps the redirect range");
    refused(&[("0.0.0.0/1", "128.0.0.0", true)], "outside the redirect range");
    refused(&[("10.8.0.1/32", "198.19.255.77", true)], "reserved");
    refused(
        &[("10.8.0.1/32", "198.18.0.1", true), ("10.8.0.2/32", "198.18.0.1", false)],
        "has the same virtual address",
    );
    refused(&[("10.8.0.0/24", "198.18.1.0", true), ("10.9.0.1/32", "198.18.1.7", true)], "lies inside");
    refused(&[("10.8.0.1/32", "198.18.0.1", true), ("::ffff:10.8.0.1/128", "198.18.0.2", true)], "twice");
}

#[test]
fn one_agent_among_100_000_is_one_write() {
    for count in [10_000_u32, 100_000] {
        let mut state = State { ports: [10250].into(), ..State::default() };
        for n in 0..count {
            let target = RouteTarget {
                virtual_address: Ipv4Addr::from(0xc612_0002 + n).into(),
                up: false,
                any_port: false,
            };
            state.routes.insert(IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a20_0000 + n))), target);
        }
        let (mut now, mut desired) = (complete(&state).unwrap(), state.desired());
        let mut longest = std::time::Duration::ZERO;
        // An agent that flaps.
        for n in 0..100 {
            let before = desired.clone();
            desired.up[n / 2 * 100] = n % 2 == 0;
            let started = std::time::Instant::now();
            let changes = now.changes_of(desired.flips_since(&before).unwrap());
            longest = longest.max(started.elapsed());
            let net = IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a20_0000 + n as u32 / 2 * 100)));
            assert_eq!(changes, [Change::Route(net, desired.route(net).unwrap())]);
            now.record(&changes[0]);
        }
        let started = std::time::Instant::now();
        let want = complete(&state).unwrap();
        let changes = now.changes_to(&want);
        println!(
            "{count} routes: an agent comes or goes {longest:?} at most of 100 times, all compared {:?}",
            started.elapsed()
        );
        assert_eq!(changes, []);
    }
}

#[test]
fn another_address_of_this_host_leaves_the_routes_alone() {
    let state = desired(&[("10.8.0.1/32", "198.18.0.2", true)]);
    let (config, have) = (RedirectConfig::default(), complete(&state).unwrap());
    let own = ["10.1.2.3".parse().unwrap()].into();
    let changes = have.changes_to(&complete_with(&state, &config, &own).unwrap());
    let net: IpNet = "10.1.2.3/32".parse().unwrap();
    assert_eq!(changes, [Change::Exclude(net), Change::Admit(net, ComesIn::Here)]);
}

#[test]
fn a_client_that_becomes_this_host_is_admitted_anew() {
    let mut state = desired(&[("10.8.0.1/32", "198.18.0.2", true)]);
    let net: IpNet = "10.1.2.3/32".parse().unwrap();
    state.clients.insert(net);
    let (config, before) = (RedirectConfig::default(), complete(&state).unwrap());
    let own = ["10.1.2.3".parse().unwrap()].into();
    let after = complete_with(&state, &config, &own).unwrap();
    let changes = before.changes_to(&after);
    // Never dismissed: its packets would be dropped meanwhile.
    assert_eq!(changes, [Change::Exclude(net), Change::Admit(net, ComesIn::Here)]);
    let mut now = before.clone();
    changes.iter().for_each(|change| now.record(change));
    assert_eq!(now, after);
    assert!(after.changes_to(&before).contains(&Change::Admit(net, ComesIn::Pods)));
}

#[test]
fn exclusions_that_do_not_fit_are_left_out_unless_they_matter() {
    let mut state = desired(&[("10.8.0.1/32", "198.18.0.2", true)]);
    let pods = RouteTarget { virtual_address: "198.18.4.0".parse().unwrap(), up: true, any_port: true };
    state.routes.insert("11.1.0.0/24".parse().unwrap(), pods);
    let address = |n: u32| IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0b00_0000 + n)));
    // The last 256 are within the pods' range.
    let first_pod = 0x0001_0000;
    state.excluded = (0..131_072).map(address).collect();
    assert!((first_pod..first_pod + 256).all(|n| state.excluded.contains(&address(n))));
    state.excluded.insert("12.0.0.0/8".parse().unwrap());
    let own = ["13.1.2.3".parse().unwrap()].into();
    let contents = complete_with(&state, &RedirectConfig::default(), &own).unwrap();
    // The loopback range, this host's address and the /8.
    assert_eq!((contents.left_out, contents.routes.len()), (3, 4));
    for kept in ["12.0.0.0/8", "13.1.2.3/32", "127.0.0.0/8"] {
        assert!(contents.excluded.contains(&kept.parse().unwrap()), "{kept}");
    }
    assert!((first_pod..first_pod + 256).all(|n| contents.excluded.contains(&address(n))));
    // None of these may be left out.
    let too_many: BTreeSet<IpAddr> =
        (0..131_073_u32).map(|n| Ipv4Addr::from(0x0e00_0000 + n).into()).collect();
    assert!(complete_with(&state, &RedirectConfig::default(), &too_many).is_err());
}

#[test]
fn routes_that_are_down_may_share_a_virtual_address() {
    complete(&desired(&[("10.8.0.1/32", "198.18.0.1", false), ("10.8.0.2/32", "198.18.0.1", false)]))
        .unwrap();
}

#[test]
fn mapped_networks_count_as_ipv4() {
    let maps = complete(&desired(&[("::ffff:10.8.0.1/128", "198.18.0.1", true)])).unwrap();
    assert!(maps.routes.contains_key(&"10.8.0.1/32".parse::<IpNet>().unwrap()));
}

#[test]
fn more_routes_than_the_kernel_holds_are_refused() {
    let config =
        RedirectConfig { redirect_range: "20.0.0.0/8".parse().unwrap(), ..RedirectConfig::default() };
    let mut desired = State { ports: [10250].into(), ..State::default() };
    for n in 0..131_072_u32 {
        let net = IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + n)));
        desired.routes.insert(
            net,
            RouteTarget {
                virtual_address: Ipv4Addr::from(0x1400_0000 + n).into(),
                up: true,
                any_port: false,
            },
        );
    }
    let error = complete_with(&desired, &config, &BTreeSet::new()).unwrap_err();
    // The extra one is the self-test's.
    assert!(matches!(error, RedirectError::Full { what: "routes", wanted: 131_073, .. }), "{error}");
}

/// New entries are written before old ones are removed.
#[test]
fn on_the_way_from_one_full_state_to_another_every_map_has_room() {
    let config =
        RedirectConfig { redirect_range: "20.0.0.0/8".parse().unwrap(), ..RedirectConfig::default() };
    let nth = |first: u32, n: u32| IpNet::from(IpAddr::V4(Ipv4Addr::from(first + n)));
    let full = |routes: u32, virtual_addresses: u32, lists: u32| {
        // The self-test has a route as well, and the loopback range is in both lists.
        let target = |n: u32| RouteTarget {
            virtual_address: Ipv4Addr::from(virtual_addresses + n).into(),
            up: true,
            any_port: false,
        };
        let desired = State {
            ports: [10250].into(),
            excluded: (1..LIST_CAPACITY).map(|n| nth(lists, n)).collect(),
            clients: (1..LIST_CAPACITY).map(|n| nth(lists, n)).collect(),
            routes: (1..ROUTE_CAPACITY).map(|n| (nth(routes, n), target(n))).collect(),
        };
        complete_with(&desired, &config, &BTreeSet::new()).unwrap()
    };
    let mut now = full(0x0a00_0000, 0x1400_0000, 0x0c00_0000);
    // Other nodes, and then the same addresses with other virtual addresses.
    for want in [full(0x1e00_0000, 0x1410_0000, 0x0d00_0000), full(0x1e00_0000, 0x1420_0000, 0x0e00_0000)] {
        let mut most = [0_usize; 4];
        for change in now.changes_to(&want) {
            now.record(&change);
            let sizes = [now.routes.len(), now.origins.len(), now.excluded.len(), now.clients.len()];
            // One of each is of the other family.
            most = std::array::from_fn(|map| most[map].max(sizes[map] - 1));
        }
        assert!(now == want);
        let [routes, origins, excluded, clients] = most;
        let (has, list) = (ROUTE_ENTRIES as usize, EXCLUDED_ENTRIES as usize);
        // Replacing a route needs a free entry too.
        assert!(routes < has && origins <= has && excluded <= list, "{most:?}");
        assert!(clients <= LIST_CAPACITY as usize, "{most:?}");
    }
}

#[test]
fn own_addresses_are_excluded_and_clients_but_never_a_virtual_address() {
    let own = ["10.1.2.3", "198.18.7.7", "fe80::1"].map(|a| a.parse().unwrap()).into();
    let maps = complete_with(&State::default(), &RedirectConfig::default(), &own).unwrap();
    for net in ["10.1.2.3/32", "fe80::1/128", "127.0.0.0/8", "::1/128"] {
        let net: IpNet = net.parse().unwrap();
        assert!(maps.excluded.contains(&net) && maps.clients.contains_key(&net), "{net}");
    }
    let virtual_address: IpNet = "198.18.7.7/32".parse().unwrap();
    assert!(
        !maps.clients.contains_key(&virtual_address),
        "a virtual address as a client would be let in from outside"
    );
}

#[test]
fn self_test_pairs_lie_in_the_reserved_block() {
    for (v4, v6) in [("198.18.0.0/15", "fd00::/64"), ("198.18.0.0/24", "fd00::/112")] {
        let config = RedirectConfig {
            redirect_range: v4.parse().unwrap(),
            redirect_range_v6: v6.parse().unwrap(),
            ..RedirectConfig::default()
        };
        for _ in 0..200 {
            let pair = SelfTestAddresses::new(&config);
            let (v4, v6) =
                (reserved_addresses(config.redirect_range), reserved_addresses_v6(config.redirect_range_v6));
            assert!(
                v4.contains(&pair.origin)
                    && v4.contains(&pair.virtual_address)
                    && pair.origin != pair.virtual_address,
                "{pair:?}"
            );
            assert!(v6.contains(&pair.origin_v6) && v6.contains(&pair.virtual_address_v6), "{pair:?}");
            let tried = SelfTestAddresses::never_an_origin(config.redirect_range, config.redirect_range_v6);
            assert!(v4.contains(&tried.0) && v6.contains(&tried.1), "{tried:?}");
            assert!(
                tried.0 != pair.origin && tried.1 != pair.origin_v6,
                "the doctor's connects are redirected"
            );
        }
    }
}

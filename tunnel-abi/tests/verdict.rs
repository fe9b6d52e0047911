//! Compares the verdict with a naive model, over tables small and dense enough that prefixes overlap.
#![expect(clippy::expect_used, reason = "test")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proptest::prelude::*;
use tunnel_abi::verdict::{
    Connect, GlobalState, Reason, Tables, Verdict, VerdictV6, takes, verdict, verdict_v6,
};
use tunnel_abi::{ANY_PORT, Address, DOWN, Mapping, PORT_WORDS, Prefix, V4, V6, counter};

#[derive(Clone, Debug, Default)]
struct World {
    ports: BTreeSet<u16>,
    excluded: BTreeSet<IpNet>,
    /// Virtual address, up, every port.
    routes: BTreeMap<IpNet, (IpAddr, bool, bool)>,
    serving: bool,
    orphaned: bool,
    refuse_orphaned: bool,
    fails_at_connect: bool,
    by_route: bool,
}

impl World {
    fn longest(&self, address: IpAddr) -> Option<(IpNet, IpAddr, u32)> {
        self.routes
            .iter()
            .filter(|(net, _)| net.contains(&address))
            .max_by_key(|(net, _)| net.prefix_len())
            .map(|(net, (virtual_address, up, any))| {
                (*net, *virtual_address, if *up { 0 } else { DOWN } | if *any { ANY_PORT } else { 0 })
            })
    }
}

impl GlobalState for World {
    fn tunnelled(&self, port: u16) -> bool {
        self.ports.contains(&port)
    }
    fn serving(&self) -> bool {
        self.serving
    }
    fn orphaned(&self) -> bool {
        self.orphaned
    }
    fn refuse_orphaned(&self) -> bool {
        self.refuse_orphaned
    }
    fn fails_at_connect(&self) -> bool {
        self.fails_at_connect
    }
    fn by_route(&self) -> bool {
        self.by_route
    }
    fn any_port_routes(&self) -> bool {
        self.routes.values().any(|(_, _, any)| *any)
    }
}

impl Tables<V4> for World {
    fn excluded(&self, address: V4) -> bool {
        let address = IpAddr::V4(address.into());
        self.excluded.iter().any(|net| net.contains(&address))
    }
    fn route(&self, address: V4) -> Option<Mapping<V4>> {
        let (net, virtual_address, flags) = self.longest(IpAddr::V4(address.into()))?;
        match (virtual_address, net.hostmask()) {
            (IpAddr::V4(virtual_address), IpAddr::V4(mask)) => {
                Some(Mapping { base: virtual_address.into(), host_mask: mask.into(), flags })
            }
            _ => None,
        }
    }
}

impl Tables<V6> for World {
    fn excluded(&self, address: V6) -> bool {
        let address = IpAddr::V6(address.into());
        self.excluded.iter().any(|net| net.contains(&address))
    }
    fn route(&self, address: V6) -> Option<Mapping<V6>> {
        let (net, virtual_address, flags) = self.longest(IpAddr::V6(address.into()))?;
        match (virtual_address, net.hostmask()) {
            (IpAddr::V6(virtual_address), IpAddr::V6(mask)) => {
                Some(Mapping { base: virtual_address.into(), host_mask: mask.into(), flags })
            }
            _ => None,
        }
    }
}

/// Applies the rules to plain integers; shares nothing with the code under test.
fn model(world: &World, address: IpAddr, port: u16, tcp: bool, bound: bool) -> Model {
    if !tcp || bound || world.orphaned && !world.refuse_orphaned {
        return Model::Direct;
    }
    if world.excluded.iter().any(|net| net.contains(&address)) {
        return Model::Direct;
    }
    let mut best: Option<(&IpNet, &(IpAddr, bool, bool))> = None;
    for (net, target) in &world.routes {
        if net.contains(&address) && best.is_none_or(|(b, _)| net.prefix_len() > b.prefix_len()) {
            best = Some((net, target));
        }
    }
    let Some((net, (virtual_address, up, any))) = best else { return Model::Direct };
    if !any && !world.ports.contains(&port) {
        return Model::Direct;
    }
    let number = |a: IpAddr| match a {
        IpAddr::V4(a) => u128::from(u32::from(a)),
        IpAddr::V6(a) => u128::from(a),
    };
    let sum = number(*virtual_address) + (number(address) - number(net.network()));
    let virtual_address = match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(u32::try_from(sum).expect("stays in the redirect range"))),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(sum)),
    };
    let up = *up && world.serving && !world.orphaned;
    if world.by_route && (up || !world.fails_at_connect) {
        Model::Direct
    } else if up {
        Model::Redirect(virtual_address)
    } else {
        Model::Down(virtual_address)
    }
}

#[derive(Debug, PartialEq)]
enum Model {
    Direct,
    Redirect(IpAddr),
    Down(IpAddr),
}

fn as_model<A: Address + Into<B>, B: Into<IpAddr>>(verdict: Verdict<A>) -> Model {
    match verdict {
        Verdict::Direct(_) => Model::Direct,
        Verdict::Redirect(a) => Model::Redirect(a.into().into()),
        Verdict::Down(a) => Model::Down(a.into().into()),
    }
}

fn address_v4() -> impl Strategy<Value = Ipv4Addr> {
    // 64 addresses: prefixes collide often.
    (0_u32..64).prop_map(|n| Ipv4Addr::from(0x0a08_0000 + n))
}

fn address_v6() -> impl Strategy<Value = Ipv6Addr> {
    (0_u128..64).prop_map(|n| Ipv6Addr::from(0x2001_0db8_u128 << 96 | 7 << 64 | n))
}

fn net_v4() -> impl Strategy<Value = Ipv4Net> {
    (address_v4(), 26_u8..=32).prop_map(|(a, len)| Ipv4Net::new(a, len).expect("valid length").trunc())
}

fn net_v6() -> impl Strategy<Value = Ipv6Net> {
    (address_v6(), 122_u8..=128).prop_map(|(a, len)| Ipv6Net::new(a, len).expect("valid length").trunc())
}

fn world() -> impl Strategy<Value = World> {
    let routes_v4 = prop::collection::btree_map(net_v4(), (any::<bool>(), prop::bool::weighted(0.2)), 0..8);
    let routes_v6 = prop::collection::btree_map(net_v6(), (any::<bool>(), prop::bool::weighted(0.2)), 0..8);
    let excluded_v4 = prop::collection::btree_set(net_v4(), 0..4);
    let excluded_v6 = prop::collection::btree_set(net_v6(), 0..4);
    let ports = prop::collection::btree_set(10250_u16..10253, 1..3);
    (
        routes_v4,
        routes_v6,
        excluded_v4,
        excluded_v6,
        ports,
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.2),
        (any::<bool>(), any::<bool>(), any::<bool>()),
    )
        .prop_map(
            |(routes_v4, routes_v6, excluded_v4, excluded_v6, ports, serving, orphaned, others)| {
                let (refuse_orphaned, fails_at_connect, by_route) = others;
                let mut routes = BTreeMap::new();
                // Each route owns a 64-address slot of the virtual range, so blocks of any size are aligned.
                for (slot, (net, (up, any))) in (0_u32..).zip(routes_v4) {
                    let virtual_address = Ipv4Addr::from(0xc612_0000 + slot * 64);
                    routes.insert(IpNet::V4(net), (IpAddr::V4(virtual_address), up, any));
                }
                for (slot, (net, (up, any))) in (0_u128..).zip(routes_v6) {
                    let virtual_address = Ipv6Addr::from((0xfd70_u128 << 112) + slot * 64);
                    routes.insert(IpNet::V6(net), (IpAddr::V6(virtual_address), up, any));
                }
                let excluded = excluded_v4
                    .into_iter()
                    .map(IpNet::V4)
                    .chain(excluded_v6.into_iter().map(IpNet::V6))
                    .collect();
                World {
                    ports,
                    excluded,
                    routes,
                    serving,
                    orphaned,
                    refuse_orphaned,
                    fails_at_connect,
                    by_route,
                }
            },
        )
}

fn flags() -> impl Strategy<Value = (bool, bool)> {
    (prop::bool::weighted(0.9), prop::bool::weighted(0.1))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn v4_agrees_with_the_model(
        world in world(), address in address_v4(), port in 10250_u16..10254, (tcp, bound) in flags()
    ) {
        let connect = Connect { address: V4::from(address), port, tcp, bound_device: bound };
        let expected = model(&world, address.into(), port, tcp, bound);
        prop_assert_eq!(as_model::<V4, Ipv4Addr>(verdict(&world, &connect)), expected);
    }

    #[test]
    fn v6_agrees_with_the_model(
        world in world(), address in address_v6(), port in 10250_u16..10254, (tcp, bound) in flags()
    ) {
        let connect = Connect { address: V6::from(address), port, tcp, bound_device: bound };
        let expected = model(&world, address.into(), port, tcp, bound);
        match verdict_v6(&world, &connect) {
            VerdictV6::Native(v) => prop_assert_eq!(as_model::<V6, Ipv6Addr>(v), expected),
            VerdictV6::Mapped(v) => prop_assert!(false, "{} treated as mapped: {:?}", address, v),
        }
    }

    #[test]
    fn mapped_is_decided_as_v4(
        world in world(), address in address_v4(), port in 10250_u16..10254, (tcp, bound) in flags()
    ) {
        let connect =
            Connect { address: V6::from(address.to_ipv6_mapped()), port, tcp, bound_device: bound };
        let expected = model(&world, address.into(), port, tcp, bound);
        match verdict_v6(&world, &connect) {
            VerdictV6::Mapped(v) => prop_assert_eq!(as_model::<V4, Ipv4Addr>(v), expected),
            VerdictV6::Native(v) => prop_assert!(false, "{} not treated as mapped: {:?}", address, v),
        }
    }

    #[test]
    fn orphaned_routes_lead_nowhere_or_are_direct(world in world(), address in address_v4(), refuse: bool) {
        let mut world = World { orphaned: true, refuse_orphaned: refuse, by_route: false, ..world };
        world.excluded.clear();
        let virtual_address = IpAddr::V4(Ipv4Addr::new(198, 18, 200, 0));
        world.routes.insert(IpNet::V4(address.into()), (virtual_address, true, true));
        let connect = Connect { address: V4::from(address), port: 10250, tcp: true, bound_device: false };
        let expected = if refuse { Model::Down(virtual_address) } else { Model::Direct };
        prop_assert_eq!(as_model::<V4, Ipv4Addr>(verdict(&world, &connect)), expected);
        // An address of no edge node stays direct.
        let elsewhere = Connect { address: v4("192.0.2.1"), ..connect };
        prop_assert!(matches!(verdict(&world, &elsewhere), Verdict::Direct(_)));
    }

    #[test]
    fn a_route_takes_exactly_what_connects_are_redirected_or_refused_for(
        world in world(), address in address_v4(), port in 10250_u16..10254
    ) {
        let world = World { orphaned: false, ..world };
        let connect = Connect { address: V4::from(address), port, tcp: true, bound_device: false };
        let verdict = verdict(&world, &connect);
        let redirected = matches!(verdict, Verdict::Redirect(_) | Verdict::Direct(Reason::ByRoute));
        let down = matches!(verdict, Verdict::Down(_));
        prop_assert_eq!(takes(&world, connect.address, port), redirected || down);
        prop_assert!(world.by_route || verdict != Verdict::Direct(Reason::ByRoute));
        prop_assert!(!world.by_route || !matches!(verdict, Verdict::Redirect(_)));
    }

    #[test]
    fn exclusion_wins(world in world(), address in address_v4()) {
        let mut world = World { orphaned: false, ..world };
        world.excluded.insert(IpNet::V4(address.into()));
        let connect =
            Connect { address: V4::from(address), port: 10250, tcp: true, bound_device: false };
        prop_assert!(matches!(verdict(&world, &connect), Verdict::Direct(Reason::Excluded | Reason::Port)));
    }

    #[test]
    fn blocks_map_one_to_one_and_back(net in net_v4(), slot in 0_u32..1000) {
        let virtual_address = Ipv4Net::new(Ipv4Addr::from(0xc612_0000 + slot * 64), net.prefix_len()).expect("valid");
        let mask = V4::from(net.hostmask());
        let there = Mapping { base: V4::from(virtual_address.network()), host_mask: mask, flags: 0 };
        let back = Mapping { base: V4::from(net.network()), host_mask: mask, flags: 0 };
        let mut seen = BTreeSet::new();
        for n in 0..(1_u32 << (32 - u32::from(net.prefix_len()))) {
            let address = Ipv4Addr::from(u32::from(net.network()) + n);
            let mapped = there.apply(V4::from(address));
            prop_assert!(virtual_address.contains(&Ipv4Addr::from(mapped)));
            prop_assert!(seen.insert(mapped.0), "{} shares a virtual address", address);
            prop_assert_eq!(Ipv4Addr::from(back.apply(mapped)), address);
        }
    }

    #[test]
    fn v6_blocks_map_one_to_one_and_back(net in net_v6(), slot in 0_u128..1000) {
        let virtual_address = Ipv6Net::new(Ipv6Addr::from((0xfd70_u128 << 112) + slot * 64), net.prefix_len()).expect("valid");
        let mask = V6::from(net.hostmask());
        let there = Mapping { base: V6::from(virtual_address.network()), host_mask: mask, flags: 0 };
        let back = Mapping { base: V6::from(net.network()), host_mask: mask, flags: 0 };
        let mut seen = BTreeSet::new();
        for n in 0..(1_u128 << (128 - u32::from(net.prefix_len()))) {
            let address = Ipv6Addr::from(u128::from(net.network()) + n);
            let mapped = there.apply(V6::from(address));
            prop_assert!(virtual_address.contains(&Ipv6Addr::from(mapped)));
            prop_assert!(seen.insert(mapped.0), "{} shares a virtual address", address);
            prop_assert_eq!(Ipv6Addr::from(back.apply(mapped)), address);
        }
    }

    #[test]
    fn addresses_survive_the_wire_format(a in any::<u32>(), b in any::<u128>()) {
        let (a, b) = (Ipv4Addr::from(a), Ipv6Addr::from(b));
        prop_assert_eq!(Ipv4Addr::from(V4::from(a)), a);
        prop_assert_eq!(Ipv6Addr::from(V6::from(b)), b);
        prop_assert_eq!(V6::from(b).mapped().map(Ipv4Addr::from), b.to_ipv4_mapped());
    }
}

fn v4(text: &str) -> V4 {
    text.parse::<Ipv4Addr>().expect("an address").into()
}

fn v6(text: &str) -> V6 {
    text.parse::<Ipv6Addr>().expect("an address").into()
}

#[test]
fn only_a_mapped_address_is_taken_for_ipv4() {
    assert_eq!(v6("::ffff:10.8.0.1").mapped(), Some(v4("10.8.0.1")));
    // Each of these differs in one of the three words before the IPv4 address.
    for other in
        ["1::ffff:10.8.0.1", "0:0:1::ffff:10.8.0.1", "::10.8.0.1", "::fffe:10.8.0.1", "::1:ffff:10.8.0.1"]
    {
        assert_eq!(v6(other).mapped(), None, "{other}");
    }
}

#[test]
fn a_prefix_contains_its_addresses_and_no_other() {
    let range = Prefix { base: v4("198.18.0.0"), mask: v4("255.254.0.0") };
    assert!(range.contains(v4("198.18.0.0")) && range.contains(v4("198.19.255.255")));
    assert!(!range.contains(v4("198.17.255.255")) && !range.contains(v4("198.20.0.0")));
    let range = Prefix { base: v6("fd00:706f::"), mask: v6("ffff:ffff:ffff:ffff::") };
    assert!(range.contains(v6("fd00:706f::")) && range.contains(v6("fd00:706f::ffff:ffff:ffff:ffff")));
    assert!(!range.contains(v6("fd00:706e:ffff::")) && !range.contains(v6("fd00:706f:0:1::")));
}

#[test]
fn every_port_has_its_bit() {
    assert_eq!(PORT_WORDS * u64::BITS, 65_536);
}

#[test]
fn bits_that_both_have_stay_set() {
    assert_eq!(v4("12.12.12.12").or(v4("10.10.10.10")), v4("14.14.14.14"));
    assert_eq!(v4("12.12.12.12").and(v4("10.10.10.10")), v4("8.8.8.8"));
    let (a, b) = (v6("c:c:c:c:c:c:c:c"), v6("a:a:a:a:a:a:a:a"));
    assert_eq!((a.or(b), a.and(b)), (v6("e:e:e:e:e:e:e:e"), v6("8:8:8:8:8:8:8:8")));
}

#[test]
fn every_counter_has_its_own_index() {
    use counter::{Hook, Lookup, RedirectedBy, of_lookup, of_verdict};
    let verdicts = [
        (Verdict::Direct(Reason::NotTcp), "not_tcp"),
        (Verdict::Direct(Reason::BoundDevice), "bound_device"),
        (Verdict::Direct(Reason::Port), "port"),
        (Verdict::Direct(Reason::Excluded), "excluded"),
        (Verdict::Direct(Reason::NoRoute), "no_route"),
        (Verdict::Redirect(()), "redirected"),
        (Verdict::Down(()), "down"),
        (Verdict::Direct(Reason::Orphaned), "orphaned"),
        (Verdict::Direct(Reason::ByRoute), "by_route"),
    ];
    let mut found = BTreeMap::new();
    for (hook, prefix) in [(Hook::Connect4, "connect4"), (Hook::Connect6, "connect6")] {
        for (verdict, name) in &verdicts {
            found.insert(of_verdict(hook, verdict), format!("{prefix}/{name}"));
        }
    }
    found.insert(counter::RESTORED_V4, "getpeername4/restored".into());
    found.insert(counter::RESTORED_V6, "getpeername6/restored".into());
    for (v6, prefix) in [(false, "lookup4"), (true, "lookup6")] {
        for (lookup, name) in [
            (Lookup::Steered, "steered"),
            (Lookup::NoListener, "no_listener"),
            (Lookup::ForeignClient, "foreign_client"),
            (Lookup::Replaced, "replaced"),
        ] {
            found.insert(of_lookup(RedirectedBy::Hook, v6, lookup), format!("{prefix}/{name}"));
        }
    }
    for (v6, prefix) in [(false, "route4"), (true, "route6")] {
        for (lookup, name) in [
            (Lookup::Steered, "steered"),
            (Lookup::NoListener, "no_listener"),
            (Lookup::ForeignClient, "foreign_client"),
        ] {
            found.insert(of_lookup(RedirectedBy::Route, v6, lookup), format!("{prefix}/{name}"));
        }
        assert_eq!(
            of_lookup(RedirectedBy::Route, v6, Lookup::Replaced),
            of_lookup(RedirectedBy::Route, v6, Lookup::Steered)
        );
    }
    let named: BTreeMap<u32, String> = (0..).zip(counter::NAMES.map(String::from)).collect();
    assert_eq!(found, named);
}

#[test]
fn tries_hold_the_new_state_beside_the_old_one() {
    assert_eq!(tunnel_abi::ROUTE_ENTRIES / 2, tunnel_abi::ROUTE_CAPACITY);
    assert_eq!(tunnel_abi::EXCLUDED_ENTRIES / 2, tunnel_abi::LIST_CAPACITY);
}

//! The rules and routes that a server needs. Makes no system calls.

use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::map_contents::MapContents;

/// A server's routing table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Table {
    /// Networks that are taken on the tunnelled ports.
    Ports,
    /// Networks that are taken on every port.
    AnyPort,
    /// Where what others send to these networks, and neither of those takes, fails.
    NotTaken,
}

/// Leads packets to one of the tables.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Rule {
    pub(super) ipv6: bool,
    pub(super) packets: Packets,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Packets {
    /// TCP to one port.
    Port(u16),
    /// TCP.
    EveryPort,
    /// ICMP to the networks of a table.
    Icmp(Table),
    /// All that this host has not sent itself.
    OfOthers,
}

impl Rule {
    pub(super) fn table(self) -> Table {
        match self.packets {
            Packets::Port(_) => Table::Ports,
            Packets::EveryPort => Table::AnyPort,
            Packets::Icmp(table) => table,
            Packets::OfOthers => Table::NotTaken,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Kind {
    /// To this host, by the device.
    Local,
    /// Back to the host's other tables.
    Throw,
    /// Fails. Behind a [`Kind::Local`] for the same network, so that it counts once that is gone.
    Unreachable,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Route {
    pub(super) table: Table,
    pub(super) net: IpNet,
    pub(super) kind: Kind,
}

/// The rules and routes of one server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(super) rules: BTreeSet<Rule>,
    pub(super) routes: BTreeSet<Route>,
}

impl Wanted {
    /// The rules and routes that take exactly the connections that [`tunnel_abi::verdict::takes`] accepts. Networks in `own_ranges` are left out:
    /// the self-test's. Nodes without a tunnel have routes too, so that a tunnel that goes up or down changes none.
    pub(crate) fn of(contents: &MapContents, own_ranges: &[IpNet], refuse: bool) -> Self {
        let mut wanted = Self::default();
        let excluded_lengths: BTreeSet<u8> = contents.excluded.iter().map(IpNet::prefix_len).collect();
        let lengths: BTreeSet<u8> = contents.routes.keys().map(IpNet::prefix_len).collect();
        let table_of = |any_port| if any_port { Table::AnyPort } else { Table::Ports };
        for (net, target) in &contents.routes {
            let excluded = || above(*net, &excluded_lengths).any(|above| contents.excluded.contains(&above));
            if own_ranges.iter().any(|range| range.contains(net)) || excluded() {
                continue;
            }
            let table = table_of(target.any_port);
            wanted.routes.insert(Route { table, net: *net, kind: Kind::Local });
            if refuse {
                wanted.routes.insert(Route { table, net: *net, kind: Kind::Unreachable });
            }
            let ipv6 = matches!(net, IpNet::V6(_));
            match table {
                Table::Ports
                    if wanted.rules.iter().any(|rule| rule.ipv6 == ipv6 && rule.table() == table) => {}
                Table::Ports => {
                    let rule = |port: &u16| Rule { ipv6, packets: Packets::Port(*port) };
                    wanted.rules.extend(contents.ports.iter().map(rule));
                }
                _ => _ = wanted.rules.insert(Rule { ipv6, packets: Packets::EveryPort }),
            }
        }
        let around = |net: IpNet| {
            let wider = above(net, &lengths).filter(move |above| *above != net);
            wider.filter_map(|above| contents.routes.get(&above))
        };
        for net in &contents.excluded {
            for target in around(*net) {
                let table = table_of(target.any_port);
                wanted.routes.insert(Route { table, net: *net, kind: Kind::Throw });
            }
        }
        // A network inside one with every port that is itself taken on some only.
        let on_some = contents.routes.iter().filter(|(_, target)| contents.any_port && !target.any_port);
        for (net, _) in on_some {
            if around(*net).any(|target| target.any_port) {
                wanted.routes.insert(Route { table: Table::AnyPort, net: *net, kind: Kind::Throw });
            }
        }
        wanted
    }

    /// Adds what a gateway needs: the network has sent it these packets, and would again if it sent them on. Errors are for
    /// its connections: a router answers a packet that is too large for the way to the client to the edge node's address.
    pub(crate) fn of_a_gateway(mut self) -> Self {
        let icmp = |rule: &Rule| Rule { ipv6: rule.ipv6, packets: Packets::Icmp(rule.table()) };
        let icmp: Vec<Rule> = self.rules.iter().map(icmp).collect();
        self.rules.extend(icmp);
        let of_kind = |kind| self.routes.iter().filter(move |route| route.kind == kind);
        let taken: BTreeSet<IpNet> = of_kind(Kind::Local).map(|route| route.net).collect();
        let left: BTreeSet<IpNet> = of_kind(Kind::Throw).map(|route| route.net).collect();
        let table = Table::NotTaken;
        for net in &taken {
            let rule = Rule { ipv6: matches!(net, IpNet::V6(_)), packets: Packets::OfOthers };
            self.rules.insert(rule);
            self.routes.insert(Route { table, net: *net, kind: Kind::Unreachable });
        }
        for net in left.difference(&taken) {
            self.routes.insert(Route { table, net: *net, kind: Kind::Throw });
        }
        self
    }
}

/// The network itself and those that contain it, of these prefix lengths.
fn above(net: IpNet, lengths: &BTreeSet<u8>) -> impl Iterator<Item = IpNet> {
    lengths
        .range(..=net.prefix_len())
        .filter_map(move |length| Some(IpNet::new(net.addr(), *length).ok()?.trunc()))
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use ipnet::Ipv4Net;
    use proptest::prelude::*;
    use tunnel_abi::verdict::{GlobalState, Tables, takes};
    use tunnel_abi::{ANY_PORT, Mapping, V4};
    use tunnel_routing::RouteTarget;

    use super::*;

    /// The maps as the program at the listener lookup sees them.
    struct Maps<'a>(&'a MapContents);

    impl GlobalState for Maps<'_> {
        fn tunnelled(&self, port: u16) -> bool {
            self.0.ports.contains(&port)
        }
        fn any_port_routes(&self) -> bool {
            self.0.any_port
        }
        // Not asked for a packet that a route led here.
        fn serving(&self) -> bool {
            unreachable!()
        }
        fn orphaned(&self) -> bool {
            unreachable!()
        }
        fn refuse_orphaned(&self) -> bool {
            unreachable!()
        }
        fn fails_at_connect(&self) -> bool {
            unreachable!()
        }
        fn by_route(&self) -> bool {
            unreachable!()
        }
    }

    impl Tables<V4> for Maps<'_> {
        fn excluded(&self, address: V4) -> bool {
            let address = IpAddr::from(Ipv4Addr::from(address));
            self.0.excluded.iter().any(|net| net.contains(&address))
        }
        fn route(&self, address: V4) -> Option<Mapping<V4>> {
            let address = IpAddr::from(Ipv4Addr::from(address));
            let (_, target) = self
                .0
                .routes
                .iter()
                .filter(|(net, _)| net.contains(&address))
                .max_by_key(|(net, _)| net.prefix_len())?;
            let flags = if target.any_port { ANY_PORT } else { 0 };
            Some(Mapping { base: V4(0), host_mask: V4(0), flags })
        }
    }

    impl Wanted {
        /// Follows rules and routes as the kernel does: by priority, the longest prefix, then the lowest metric.
        fn leads_here(&self, address: Ipv4Addr, port: u16) -> bool {
            let asked =
                [Packets::Port(port), Packets::EveryPort].map(|packets| Rule { ipv6: false, packets });
            asked.iter().filter(|rule| self.rules.contains(rule)).any(|rule| {
                let covers = |route: &&Route| {
                    route.table == rule.table() && route.net.contains(&IpAddr::from(address))
                };
                let best =
                    self.routes.iter().filter(covers).min_by_key(|route| {
                        (u8::MAX - route.net.prefix_len(), route.kind == Kind::Unreachable)
                    });
                best.is_some_and(|route| route.kind == Kind::Local)
            })
        }
    }

    fn nets() -> impl Strategy<Value = IpNet> {
        // 32 addresses: prefixes collide often.
        let net = |(n, length)| Ipv4Net::new(Ipv4Addr::from(0x0a08_0000 + n), length).unwrap().trunc();
        (0_u32..32, 27_u8..=32).prop_map(net).prop_map(IpNet::V4)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        /// Every address and port that the program at the listener lookup takes is led here, and no other.
        #[test]
        fn exactly_what_the_program_takes_is_led_here(
            routes in prop::collection::btree_map(nets(), any::<bool>(), 0..8),
            excluded in prop::collection::btree_set(nets(), 0..4),
            refuse: bool,
        ) {
            let target = |any_port| RouteTarget { virtual_address: [198, 18, 0, 1].into(), up: true, any_port };
            let contents = MapContents {
                ports: [10250, 10255].into(),
                excluded,
                any_port: routes.values().any(|any| *any),
                routes: routes.into_iter().map(|(net, any)| (net, target(any))).collect(),
                ..MapContents::default()
            };
            let wanted = Wanted::of(&contents, &[], refuse);
            for address in (0..32).map(|n| Ipv4Addr::from(0x0a08_0000 + n)) {
                for port in [10250, 10255, 8080] {
                    let takes = takes(&Maps(&contents), V4::from(address), port);
                    prop_assert_eq!(wanted.leads_here(address, port), takes, "{}:{}", address, port);
                }
            }
        }
    }

    fn contents(routes: &[(&str, bool)], excluded: &[&str], ports: &[u16]) -> MapContents {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let target = |any_port| RouteTarget { virtual_address: [198, 18, 0, 1].into(), up: false, any_port };
        MapContents {
            ports: ports.iter().copied().collect(),
            excluded: excluded.iter().map(|text| net(text)).collect(),
            routes: routes.iter().map(|(text, any)| (net(text), target(*any))).collect(),
            any_port: routes.iter().any(|(_, any)| *any),
            ..MapContents::default()
        }
    }

    fn routes(wanted: &Wanted) -> Vec<String> {
        let text = |route: &Route| format!("{:?} {} {:?}", route.table, route.net, route.kind);
        wanted.routes.iter().map(text).collect()
    }

    #[test]
    fn every_port_of_a_family_with_routes_has_a_rule() {
        let wanted = Wanted::of(&contents(&[("10.8.0.7/32", false)], &[], &[10250, 10255]), &[], false);
        let rule = |packets| Rule { ipv6: false, packets };
        assert_eq!(wanted.rules, [10250, 10255].map(|port| rule(Packets::Port(port))).into());
        assert_eq!(routes(&wanted), ["Ports 10.8.0.7/32 Local"]);
        let pods = Wanted::of(&contents(&[("10.244.3.0/24", true)], &[], &[10250]), &[], false);
        assert_eq!(pods.rules, [rule(Packets::EveryPort)].into());
        assert_eq!(Wanted::of(&contents(&[], &[], &[10250]), &[], true), Wanted::default());
    }

    #[test]
    fn what_is_excluded_is_left_to_other_tables() {
        let given = [("10.8.0.7/32", false), ("10.8.0.8/32", false), ("10.244.3.0/24", true)];
        let wanted = Wanted::of(&contents(&given, &["10.8.0.8/31", "10.244.3.9/32"], &[10250]), &[], false);
        let expected =
            ["Ports 10.8.0.7/32 Local", "AnyPort 10.244.3.0/24 Local", "AnyPort 10.244.3.9/32 Throw"];
        assert_eq!(routes(&wanted), expected);
    }

    #[test]
    fn a_node_among_pods_is_taken_on_its_own_ports_only() {
        let given = [("10.244.3.0/24", true), ("10.244.3.7/32", false)];
        let wanted = Wanted::of(&contents(&given, &[], &[10250]), &[], false);
        let expected =
            ["Ports 10.244.3.7/32 Local", "AnyPort 10.244.3.0/24 Local", "AnyPort 10.244.3.7/32 Throw"];
        assert_eq!(routes(&wanted), expected);
    }

    #[test]
    fn the_self_test_has_no_route_and_refusal_outlasts_the_device() {
        let given = [("198.19.255.240/32", false), ("10.8.0.7/32", false)];
        let range = "198.18.0.0/15".parse().unwrap();
        let wanted = Wanted::of(&contents(&given, &[], &[10250]), &[range], true);
        assert_eq!(routes(&wanted), ["Ports 10.8.0.7/32 Local", "Ports 10.8.0.7/32 Unreachable"]);
    }

    #[test]
    fn what_a_gateway_does_not_take_fails_there() {
        let given = [("10.244.3.0/24", true), ("10.244.3.7/32", false), ("fd50::7/128", false)];
        let wanted = Wanted::of(&contents(&given, &["10.244.3.9/32"], &[10250]), &[], false);
        let before = routes(&wanted);
        let wanted = wanted.of_a_gateway();
        let added = routes(&wanted).split_off(before.len());
        let expected = [
            "NotTaken 10.244.3.0/24 Unreachable",
            "NotTaken 10.244.3.7/32 Unreachable",
            "NotTaken 10.244.3.9/32 Throw",
            "NotTaken fd50::7/128 Unreachable",
        ];
        assert_eq!(added, expected);
        let families = |packets| {
            let rules = wanted.rules.iter().filter(move |rule| rule.packets == packets);
            rules.map(|rule| rule.ipv6).collect::<Vec<_>>()
        };
        assert_eq!(families(Packets::OfOthers), [false, true]);
        assert_eq!(families(Packets::Icmp(Table::Ports)), [false, true]);
        assert_eq!(families(Packets::Icmp(Table::AnyPort)), [false]);
        assert_eq!(Wanted::default().of_a_gateway(), Wanted::default());
    }
}

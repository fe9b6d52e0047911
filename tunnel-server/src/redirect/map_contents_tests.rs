//! The order of map writes, step by step, and the refusals.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use proptest::prelude::*;

use super::map_contents::{Change, HostContext, MapContents};
use super::self_test_addresses::SelfTestAddresses;
use super::{Desired, RedirectConfig, RedirectError, RouteTarget, reserved_tokens, reserved_tokens_v6};

fn complete(desired: &Desired) -> Result<MapContents, RedirectError> {
    complete_with(desired, &RedirectConfig::default(), &BTreeSet::new())
}

fn complete_with(
    desired: &Desired,
    config: &RedirectConfig,
    own: &BTreeSet<IpAddr>,
) -> Result<MapContents, RedirectError> {
    let self_test = SelfTestAddresses {
        origin: "198.19.255.0".parse().unwrap(),
        token: "198.19.255.1".parse().unwrap(),
        origin_v6: "fd9e:706f:7374:6572:ffff:ffff:ffff:ff00".parse().unwrap(),
        token_v6: "fd9e:706f:7374:6572:ffff:ffff:ffff:ff01".parse().unwrap(),
    };
    MapContents::complete(desired, &HostContext { config, own, self_test: &self_test, ipv6: true })
}

fn desired(routes: &[(&str, &str, bool)]) -> Desired {
    Desired {
        ports: [10250].into(),
        routes: routes
            .iter()
            .map(|(net, token, up)| {
                (
                    net.parse().unwrap(),
                    RouteTarget { token: token.parse().unwrap(), up: *up, any_port: false },
                )
            })
            .collect(),
        ..Desired::default()
    }
}

fn any_desired() -> impl Strategy<Value = Desired> {
    let address = |n: u32| Ipv4Addr::from(0x0a08_0000 + n);
    // Few addresses and few tokens, so that tokens pass from one node to another.
    let routes = prop::collection::btree_map(0_u32..12, (0_u32..16, any::<bool>()), 0..12);
    let excluded = prop::collection::btree_set(0_u32..12, 0..6);
    let clients = prop::collection::btree_set(0_u32..6, 0..4);
    let ports = prop::collection::btree_set(10250_u16..10256, 1..4);
    (routes, excluded, clients, ports).prop_map(move |(routes, excluded, clients, ports)| {
        let mut used = BTreeSet::new();
        Desired {
            ports,
            excluded: excluded.into_iter().map(|n| IpNet::from(IpAddr::V4(address(n)))).collect(),
            clients: clients.into_iter().map(|n| IpNet::from(IpAddr::V4(address(100 + n)))).collect(),
            routes: routes
                .into_iter()
                .filter(|(_, (token, _))| used.insert(*token))
                .map(|(n, (token, up))| {
                    let token = IpAddr::V4(Ipv4Addr::from(0xc612_0000 + token));
                    (IpNet::from(IpAddr::V4(address(n))), RouteTarget { token, up, any_port: false })
                })
                .collect(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn every_step_between_two_states_is_safe(before in any_desired(), after in any_desired()) {
        let (have, want) = (complete(&before).unwrap(), complete(&after).unwrap());
        let mut now = have.clone();
        for change in have.changes_to(&want) {
            now.record(&change);
            for (net, target) in &now.routes {
                let block = IpNet::new(target.token, net.prefix_len()).unwrap();
                prop_assert_eq!(now.origins.get(&block), Some(net), "after {:?}", change);
            }
            for net in have.excluded.intersection(&want.excluded) {
                prop_assert!(now.excluded.contains(net), "{} lost its exclusion after {:?}", net, change);
            }
            // An address that both becomes a route and is excluded is never a route alone.
            for net in want.excluded.iter().filter(|net| !have.routes.contains_key(*net)) {
                prop_assert!(!now.routes.contains_key(net) || now.excluded.contains(net), "{} after {:?}", net, change);
            }
        }
        prop_assert_eq!(&now, &want);
        prop_assert_eq!(want.changes_to(&want), Vec::<Change>::new());
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
fn a_token_that_passes_on_is_unrouted_first() {
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
    refused(&[("10.8.0.1/32", "10.9.0.1", true)], "outside the token range");
    refused(&[("10.8.0.0/24", "198.18.0.1", true)], "first address of a block");
    refused(&[("198.18.0.9/32", "198.18.0.1", true)], "overlaps the token range");
    refused(&[("0.0.0.0/1", "128.0.0.0", true)], "outside the token range");
    refused(&[("10.8.0.1/32", "198.19.255.77", true)], "reserved");
    refused(
        &[("10.8.0.1/32", "198.18.0.1", true), ("10.8.0.2/32", "198.18.0.1", false)],
        "has the same token",
    );
    refused(&[("10.8.0.0/24", "198.18.1.0", true), ("10.9.0.1/32", "198.18.1.7", true)], "lies inside");
    refused(&[("10.8.0.1/32", "198.18.0.1", true), ("::ffff:10.8.0.1/128", "198.18.0.2", true)], "twice");
}

#[test]
fn routes_that_are_down_may_share_a_token() {
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
    let config = RedirectConfig { token_range: "20.0.0.0/8".parse().unwrap(), ..RedirectConfig::default() };
    let mut desired = Desired { ports: [10250].into(), ..Desired::default() };
    for n in 0..131_072_u32 {
        let net = IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + n)));
        desired.routes.insert(
            net,
            RouteTarget { token: Ipv4Addr::from(0x1400_0000 + n).into(), up: true, any_port: false },
        );
    }
    let error = complete_with(&desired, &config, &BTreeSet::new()).unwrap_err();
    // One more: the self-test's own.
    assert!(matches!(error, RedirectError::Full { what: "routes", wanted: 131_073, .. }), "{error}");
}

#[test]
fn own_addresses_are_excluded_and_clients_but_never_a_token() {
    let own = ["10.1.2.3", "198.18.7.7", "fe80::1"].map(|a| a.parse().unwrap()).into();
    let maps = complete_with(&Desired::default(), &RedirectConfig::default(), &own).unwrap();
    for net in ["10.1.2.3/32", "fe80::1/128", "127.0.0.0/8", "::1/128"] {
        let net: IpNet = net.parse().unwrap();
        assert!(maps.excluded.contains(&net) && maps.clients.contains(&net), "{net}");
    }
    let token: IpNet = "198.18.7.7/32".parse().unwrap();
    assert!(!maps.clients.contains(&token), "a token as a client would be let in from outside");
}

#[test]
fn the_reserved_block_is_the_end_of_the_range() {
    let reserved = |range: &str| reserved_tokens(range.parse::<Ipv4Net>().unwrap()).to_string();
    assert_eq!(reserved("198.18.0.0/15"), "198.19.255.0/24");
    assert_eq!(reserved("10.0.0.0/8"), "10.255.255.0/24");
    assert_eq!(reserved("198.18.0.0/24"), "198.18.0.240/28");
    let reserved = |range: &str| reserved_tokens_v6(range.parse().unwrap()).to_string();
    assert_eq!(reserved("fd00::/64"), "fd00::ffff:ffff:ffff:ff00/120");
    assert_eq!(reserved("fd00::/112"), "fd00::ff00/120");
}

#[test]
fn self_test_pairs_lie_in_the_reserved_block() {
    for (v4, v6) in [("198.18.0.0/15", "fd00::/64"), ("198.18.0.0/24", "fd00::/112")] {
        let config = RedirectConfig {
            token_range: v4.parse().unwrap(),
            token_range_v6: v6.parse().unwrap(),
            ..RedirectConfig::default()
        };
        for _ in 0..200 {
            let pair = SelfTestAddresses::new(&config).unwrap();
            let (v4, v6) = (reserved_tokens(config.token_range), reserved_tokens_v6(config.token_range_v6));
            assert!(
                v4.contains(&pair.origin) && v4.contains(&pair.token) && pair.origin != pair.token,
                "{pair:?}"
            );
            assert!(v6.contains(&pair.origin_v6) && v6.contains(&pair.token_v6), "{pair:?}");
        }
    }
    let small = RedirectConfig { token_range: "198.18.0.0/25".parse().unwrap(), ..RedirectConfig::default() };
    assert!(
        SelfTestAddresses::new(&small)
            .unwrap_err()
            .to_string()
            .contains("--token-range=198.18.0.0/25: too small")
    );
}

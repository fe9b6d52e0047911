//! Targets that the agent may dial on behalf of a server.
//!
//! A compromised server must not gain access to the edge's network through the agent: without `--allow-target`, only
//! the node itself and, with `--pod-targets=on`, its pods can be reached.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use tokio::sync::watch;
use tunnel_runtime::config::{PortSet, TargetNet, TargetRule};
use tunnel_runtime::net::Reach;

use crate::config::TargetConfig;

/// Decides whether a target may be dialled.
#[derive(Debug)]
pub struct Policy {
    /// Empty: the node's own addresses and its pods on any port, and its loopback on those of the ports in `loopback`
    /// that the server names.
    rules: Vec<TargetRule>,
    loopback: PortSet,
    addresses: watch::Receiver<Arc<Vec<IpAddr>>>,
    pods: Arc<ArcSwap<Vec<IpNet>>>,
    /// The agent's own admin port.
    admin: Option<SocketAddr>,
}

/// Reasons why a target may not be dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error("port 0 cannot be dialled")]
    Port,
    #[error("it is not the address of a single host")]
    NotAHost,
    #[error(
        "it is link-local or a cloud's metadata service; only an --allow-target that lies within such a range allows it"
    )]
    LinkLocal,
    #[error(
        "it is loopback, and the server does not name the port; an --allow-target within the loopback range would allow it"
    )]
    Loopback,
    #[error(
        "it is loopback, and the agent's --loopback-ports do not contain the port, which the server names; add it there"
    )]
    LoopbackBound,
    #[error("it is loopback, and no --allow-target within the loopback range allows it")]
    LoopbackRule,
    #[error(
        "it is not an address of this node, nor of its pods with --pod-targets=on; --allow-target would allow it"
    )]
    Foreign,
    #[error("no --allow-target of the agent allows it")]
    NoRule,
    #[error(
        "it is the agent's own admin port; its metrics are there for servers if its --admin-address is one of IPv4"
    )]
    Admin,
}

impl Policy {
    /// `admin` is the agent's own `--admin-address`. `addresses` of the node and the ranges of its `pods` may change at
    /// any time.
    pub fn new(
        targets: TargetConfig,
        admin: Option<SocketAddr>,
        addresses: watch::Receiver<Arc<Vec<IpAddr>>>,
        pods: Arc<ArcSwap<Vec<IpNet>>>,
    ) -> Self {
        Self { rules: targets.allow, loopback: targets.loopback, addresses, pods, admin }
    }

    /// True if a server may open the port on loopback.
    pub(crate) fn opens_loopback(&self, port: u16) -> bool {
        self.loopback.contains(port)
    }

    /// True if the loopback ports that servers name count at all: only without rules.
    pub(crate) fn follows_servers(&self) -> bool {
        self.rules.is_empty()
    }

    /// True for the agent's own admin port.
    pub(crate) fn is_admin(&self, target: SocketAddr) -> bool {
        self.admin == Some(SocketAddr::new(target.ip().to_canonical(), target.port()))
    }

    /// Returns the address to connect to for `target`. `of_node`: the server says that this node's Node object names
    /// the address. If that address is on no interface, it stands for this host itself: behind a NAT the node never had
    /// it, and after a move another machine may have it while the Node still names it. That gives a server no new
    /// access, because this host's address has to be allowed too, on the same port. `loopback_ports` are those that the
    /// server has named; they count only without rules.
    ///
    /// # Errors
    /// The reason why the target may not be dialled.
    pub fn place(
        &self,
        target: SocketAddr,
        of_node: bool,
        loopback_ports: &BTreeSet<u16>,
    ) -> Result<SocketAddr, Denied> {
        if of_node
            && let Some(own) = self.stand_in(target.ip().to_canonical())
            && self.check(SocketAddr::new(own, target.port()), loopback_ports).is_ok()
        {
            return Ok(SocketAddr::new(own, target.port()));
        }
        self.check(target, loopback_ports).map(|()| target)
    }

    /// This host's address that replaces one that it does not have: the first of the same family, else the first of
    /// all. Never loopback, where programs trust their clients.
    fn stand_in(&self, address: IpAddr) -> Option<IpAddr> {
        if Reach::of(address) != Reach::Host || self.is_own(address) {
            return None;
        }
        let own = self.addresses.borrow();
        own.iter().find(|own| own.is_ipv4() == address.is_ipv4()).or(own.first()).copied()
    }

    /// `loopback_ports` as in [`Self::place`].
    ///
    /// # Errors
    /// The reason why the target may not be dialled.
    fn check(&self, target: SocketAddr, loopback_ports: &BTreeSet<u16>) -> Result<(), Denied> {
        // ::ffff:127.0.0.1 connects to 127.0.0.1 (RFC 4291 §2.5.5.2).
        let (address, port) = (target.ip().to_canonical(), target.port());
        if port == 0 {
            return Err(Denied::Port);
        }
        // The admin port recognizes tunnelled connections by an IPv4 source address only.
        if address.is_ipv6() && self.is_admin(target) {
            return Err(Denied::Admin);
        }
        let reach = Reach::of(address);
        let allowed = match reach {
            Reach::Nothing => return Err(Denied::NotAHost),
            Reach::Loopback if self.rules.is_empty() => {
                loopback_ports.contains(&port) && self.opens_loopback(port)
            }
            Reach::Host if self.rules.is_empty() => self.is_own(address) || self.is_pod(address),
            // Also covers link-local without rules, which nothing allows.
            _ => self.rules.iter().any(|rule| self.allows(rule, address, port, reach)),
        };
        if allowed {
            return Ok(());
        }
        Err(match (reach, self.rules.is_empty()) {
            (Reach::LinkLocal, _) => Denied::LinkLocal,
            (Reach::Loopback, true) if loopback_ports.contains(&port) => Denied::LoopbackBound,
            (Reach::Loopback, true) => Denied::Loopback,
            (Reach::Loopback, false) => Denied::LoopbackRule,
            (_, true) => Denied::Foreign,
            (_, false) => Denied::NoRule,
        })
    }

    fn is_own(&self, address: IpAddr) -> bool {
        self.addresses.borrow().iter().any(|own| own.to_canonical() == address)
    }

    fn is_pod(&self, address: IpAddr) -> bool {
        self.pods.load().iter().any(|range| range.contains(&address))
    }

    fn allows(&self, rule: &TargetRule, address: IpAddr, port: u16, reach: Reach) -> bool {
        match &rule.net {
            TargetNet::Node => reach == Reach::Host && self.is_own(address) && rule.ports.contains(port),
            TargetNet::Net(net) => rule.names(address, port) && reach.is_meant_by(net),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy(rules: &[&str], own: &[&str]) -> Policy {
        let allow = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let targets = TargetConfig { allow, loopback: "10266".parse().unwrap(), pods: false };
        let own: Vec<IpAddr> = own.iter().map(|ip| ip.parse().unwrap()).collect();
        Policy::new(targets, None, watch::channel(Arc::new(own)).1, Arc::default())
    }

    fn check(policy: &Policy, target: &str) -> Result<(), Denied> {
        policy.check(target.parse().unwrap(), &BTreeSet::from([10266]))
    }

    #[test]
    fn a_server_opens_no_loopback_port_beyond_the_agents_own_bound() {
        // All that a compromised server can say.
        let named: BTreeSet<u16> = (1..=u16::MAX).collect();
        let bounded = |ports: &str| Policy { loopback: ports.parse().unwrap(), ..policy(&[], &["10.8.0.7"]) };
        let narrow = bounded("10266,8000-8099");
        for (target, expected) in [
            ("127.0.0.1:10266", Ok(())),
            ("[::ffff:127.0.0.1]:8042", Ok(())),
            ("127.0.0.1:2375", Err(Denied::LoopbackBound)),
            ("[::1]:2379", Err(Denied::LoopbackBound)),
            ("127.9.9.9:22", Err(Denied::LoopbackBound)),
            ("10.8.0.7:22", Ok(())),
        ] {
            assert_eq!(narrow.check(target.parse().unwrap(), &named), expected, "{target}");
        }
        // The server has to name a port, too.
        assert_eq!(check(&bounded("*"), "127.0.0.1:22"), Err(Denied::Loopback));
    }

    #[test]
    fn by_default_only_the_node_itself_may_be_dialled() {
        let policy = policy(&[], &["10.8.0.7", "fd00:8::7"]);
        for target in [
            "10.8.0.7:10250",
            "10.8.0.7:22",
            "[fd00:8::7]:1",
            "[::ffff:10.8.0.7]:80",
            "127.0.0.1:10266",
            "[::1]:10266",
        ] {
            assert_eq!(check(&policy, target), Ok(()), "{target}");
        }
        for (target, reason) in [
            ("10.8.0.8:22", Denied::Foreign),
            ("8.8.8.8:53", Denied::Foreign),
            ("127.0.0.1:22", Denied::Loopback),
            ("[::ffff:127.0.0.1]:22", Denied::Loopback),
            ("127.9.9.9:22", Denied::Loopback),
            ("169.254.169.254:80", Denied::LinkLocal),
            ("[fe80::1]:80", Denied::LinkLocal),
            ("0.0.0.0:22", Denied::NotAHost),
            ("0.1.2.3:22", Denied::NotAHost),
            ("[::]:22", Denied::NotAHost),
            ("224.0.0.1:22", Denied::NotAHost),
            ("255.255.255.255:22", Denied::NotAHost),
            ("[ff02::1]:22", Denied::NotAHost),
            ("10.8.0.7:0", Denied::Port),
        ] {
            assert_eq!(check(&policy, target), Err(reason), "{target}");
        }
    }

    #[test]
    fn an_address_of_the_node_on_no_interface_is_this_host() {
        let place = |rules: &[&str], own: &[&str], target: &str| {
            let place = policy(rules, own).place(target.parse().unwrap(), true, &BTreeSet::from([10266]));
            place.map(|place| place.to_string())
        };
        let (v4, both) = (&["10.8.0.7"][..], &["10.8.0.7", "fd00:8::7"][..]);
        for (rules, own, target, expected) in [
            // The node has moved, or the address is a NAT's.
            (&[][..], v4, "10.8.0.2:10250", Ok("10.8.0.7:10250")),
            (&[], both, "[::ffff:10.8.0.2]:10250", Ok("10.8.0.7:10250")),
            (&[], both, "[fd00:8::2]:10250", Ok("[fd00:8::7]:10250")),
            (&[], v4, "[fd00:8::2]:10250", Ok("10.8.0.7:10250")),
            // The address is on an interface.
            (&[], both, "10.8.0.7:22", Ok("10.8.0.7:22")),
            (&[], &[], "10.8.0.2:22", Err(Denied::Foreign)),
            // The rules must allow this host's own address too.
            (&["node:9100"], v4, "10.8.0.2:9100", Ok("10.8.0.7:9100")),
            (&["node:9100"], v4, "10.8.0.2:22", Err(Denied::NoRule)),
            (&["10.8.0.0/24:9100"], v4, "10.8.0.2:9100", Ok("10.8.0.7:9100")),
            // The operator means another machine, or a gateway that leads back here.
            (&["203.0.113.9:9100"], v4, "203.0.113.9:9100", Ok("203.0.113.9:9100")),
            // A server cannot open the loopback by claiming that it is the node's address.
            (&[], v4, "127.0.0.1:22", Err(Denied::Loopback)),
            (&[], v4, "127.0.0.1:10266", Ok("127.0.0.1:10266")),
            (&[], v4, "169.254.169.254:80", Err(Denied::LinkLocal)),
            (&[], v4, "0.0.0.0:80", Err(Denied::NotAHost)),
            (&[], v4, "10.8.0.2:0", Err(Denied::Port)),
        ] {
            assert_eq!(place(rules, own, target), expected.map(str::to_owned), "{rules:?} {target}");
        }
        let unnamed = policy(&[], v4).place("10.8.0.2:22".parse().unwrap(), false, &BTreeSet::new());
        assert_eq!(unnamed, Err(Denied::Foreign), "the server does not say that it is this node's");
    }

    #[test]
    fn an_admin_port_that_cannot_tell_servers_is_closed_to_them() {
        let with_admin = |admin: &str| Policy { admin: Some(admin.parse().unwrap()), ..policy(&[], &[]) };
        let v4 = with_admin("127.0.0.1:10266");
        assert!(v4.is_admin("[::ffff:127.0.0.1]:10266".parse().unwrap()));
        assert!(!v4.is_admin("127.0.0.1:10267".parse().unwrap()));
        assert_eq!(check(&v4, "127.0.0.1:10266"), Ok(()));
        assert_eq!(check(&v4, "[::1]:10266"), Ok(()));
        let v6 = with_admin("[::1]:10266");
        assert_eq!(check(&v6, "[::1]:10266"), Err(Denied::Admin));
        assert_eq!(check(&v6, "127.0.0.1:10266"), Ok(()));
    }

    #[test]
    fn changes_of_the_nodes_addresses_count_immediately() {
        let addresses = watch::Sender::new(Arc::new(vec![IpAddr::from([10, 8, 0, 7])]));
        let policy = Policy { addresses: addresses.subscribe(), ..policy(&[], &[]) };
        assert_eq!(check(&policy, "10.8.0.9:22"), Err(Denied::Foreign));
        addresses.send_replace(Arc::new(vec![IpAddr::from([10, 8, 0, 9])]));
        assert_eq!(check(&policy, "10.8.0.9:22"), Ok(()));
        assert_eq!(check(&policy, "10.8.0.7:22"), Err(Denied::Foreign));
    }

    #[test]
    fn the_nodes_pods_may_be_dialled() {
        let pods = Arc::new(ArcSwap::from_pointee(vec!["10.244.3.0/24".parse().unwrap()]));
        let on_node = |rules: &[&str]| Policy { pods: pods.clone(), ..policy(rules, &[]) };
        let default = on_node(&[]);
        assert_eq!(check(&default, "10.244.3.9:8080"), Ok(()));
        assert_eq!(check(&default, "[::ffff:10.244.3.9]:8080"), Ok(()));
        assert_eq!(check(&default, "10.244.4.9:8080"), Err(Denied::Foreign));
        // Even a range of all addresses opens neither loopback nor link-local addresses.
        pods.store(Arc::new(vec!["0.0.0.0/0".parse().unwrap()]));
        assert_eq!(check(&default, "127.0.0.1:22"), Err(Denied::Loopback));
        assert_eq!(check(&default, "169.254.169.254:80"), Err(Denied::LinkLocal));
        assert_eq!(check(&on_node(&["node:10250"]), "10.244.3.9:8080"), Err(Denied::NoRule));
    }

    #[test]
    fn rules_replace_the_default() {
        let narrow = policy(&["node:10250,10255"], &["10.8.0.7"]);
        assert_eq!(check(&narrow, "10.8.0.7:10250"), Ok(()));
        assert_eq!(check(&narrow, "10.8.0.7:22"), Err(Denied::NoRule));
        assert_eq!(check(&narrow, "10.8.0.8:10250"), Err(Denied::NoRule), "the port of another host");
        assert_eq!(check(&narrow, "127.0.0.1:10266"), Err(Denied::LoopbackRule));

        let wide = policy(&["0.0.0.0/0:22", "192.168.1.0/24:8000-8099"], &["10.8.0.7"]);
        assert_eq!(check(&wide, "203.0.113.1:22"), Ok(()));
        assert_eq!(check(&wide, "192.168.1.9:8042"), Ok(()));
        assert_eq!(check(&wide, "192.168.1.9:80"), Err(Denied::NoRule));
    }

    #[test]
    fn loopback_and_link_local_take_a_rule_within_them() {
        let explicit = policy(&["127.0.0.0/8:22", "169.254.0.0/16:80", "[fe80::/10]:80", "[::1]:22"], &[]);
        for target in
            ["127.0.0.1:22", "169.254.169.254:80", "[fe80::1]:80", "[::1]:22", "[::ffff:127.0.0.1]:22"]
        {
            assert_eq!(check(&explicit, target), Ok(()), "{target}");
        }
        assert_eq!(check(&explicit, "127.0.0.1:23"), Err(Denied::LoopbackRule));
        assert_eq!(check(&explicit, "10.0.0.1:22"), Err(Denied::NoRule));
        // Ranges that begin or end within such a range, but not both.
        let across = policy(&["126.0.0.0/7:*", "169.254.0.0/15:*"], &[]);
        assert_eq!(check(&across, "126.0.0.1:22"), Ok(()));
        assert_eq!(check(&across, "127.0.0.1:22"), Err(Denied::LoopbackRule));
        assert_eq!(check(&across, "169.255.0.1:80"), Ok(()));
        assert_eq!(check(&across, "169.254.169.254:80"), Err(Denied::LinkLocal));
        let broad = policy(&["[::/0]:*", "0.0.0.0/0:*", "node:*"], &["127.0.0.1", "169.254.1.1"]);
        for target in [
            "127.0.0.1:22",
            "[::1]:22",
            "169.254.169.254:80",
            "169.254.1.1:80",
            "[fe80::1]:80",
            "[fd00:ec2::254]:80",
            "[ff02::1]:80",
            "0.0.0.0:80",
        ] {
            assert!(check(&broad, target).is_err(), "{target}");
        }
    }

    fn v4() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[u8; 4]>(),
            prop::sample::select(vec![
                [127, 0, 0, 1],
                [169, 254, 1, 1],
                [0, 0, 0, 0],
                [224, 0, 0, 1],
                [255, 255, 255, 255],
                [10, 0, 0, 1]
            ])
        ]
        .prop_map(IpAddr::from)
    }

    proptest! {
        /// Compares with a naive model. A v4-mapped address is treated as its IPv4 address.
        #[test]
        fn agrees_with_the_naive_model(
            address in v4(),
            port in 0u16..4,
            own in prop::collection::vec(v4(), 0..3),
            rules in prop::collection::vec((v4(), 0u8..=32, 0u16..4), 0..4),
            loopback_port in 0u16..4,
            bound in 1u16..4,
        ) {
            let parsed: Vec<TargetRule> = rules
                .iter()
                .filter(|(_, _, port)| *port != 0)
                .map(|(ip, bits, port)| format!("{}:{port}", IpNet::new(*ip, *bits).unwrap().trunc()).parse().unwrap())
                .collect();
            let IpAddr::V4(v4) = address else { unreachable!() };
            let loopback = format!("1-{bound}").parse().unwrap();
            let targets = TargetConfig { allow: parsed.clone(), loopback, pods: false };
            let policy = Policy::new(targets, None, watch::channel(Arc::new(own.clone())).1, Arc::default());
            let ports = BTreeSet::from([loopback_port]);
            let class = |v4: std::net::Ipv4Addr| match v4.octets() {
                [0, ..] | [224..=239, ..] | [255, 255, 255, 255] => 'n',
                [127, ..] => 'l',
                [169, 254, ..] => 'k',
                _ => 'h',
            };
            let expected = port != 0 && class(v4) != 'n' && if parsed.is_empty() {
                match class(v4) { 'l' => loopback_port == port && port <= bound, 'k' => false, _ => own.contains(&address) }
            } else {
                rules.iter().any(|(ip, bits, rule_port)| {
                    let IpNet::V4(net) = IpNet::new(*ip, *bits).unwrap().trunc() else { unreachable!() };
                    *rule_port != 0 && *rule_port == port && net.contains(&v4)
                        && (class(v4) == 'h'
                            || class(net.network()) == class(v4) && class(net.broadcast()) == class(v4))
                })
            };
            prop_assert_eq!(policy.check(SocketAddr::new(address, port), &ports).is_ok(), expected);
            let mapped = SocketAddr::new(IpAddr::V6(v4.to_ipv6_mapped()), port);
            prop_assert_eq!(policy.check(mapped, &ports).is_ok(), expected);
        }
    }
}

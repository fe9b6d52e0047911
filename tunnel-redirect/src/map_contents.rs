//! Contents of the kernel's maps, current and desired. Makes no system calls.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};
use tunnel_abi::{LIST_CAPACITY, ROUTE_CAPACITY};
use tunnel_routing::{Desired, RouteTarget};

use super::change::{Change, ComesIn};
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::self_test_addresses::{SELF_TEST_PORT, SelfTestAddresses};

/// Contents of all maps that change at run time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MapContents {
    pub(super) ports: BTreeSet<u16>,
    pub(super) excluded: BTreeSet<IpNet>,
    pub(super) clients: BTreeMap<IpNet, ComesIn>,
    pub(super) routes: BTreeMap<IpNet, RouteTarget>,
    /// Virtual address block to the network that it stands for.
    pub(super) origins: BTreeMap<IpNet, IpNet>,
    /// True if any route takes every port; otherwise the programs skip that lookup.
    pub(super) any_port: bool,
    /// Number of excluded addresses without room in the kernel's list. They stay direct, as no route covers them.
    pub(super) left_out: usize,
}

/// This host's additions to every [`Desired`].
pub(super) struct HostContext<'a> {
    pub(super) config: &'a RedirectConfig,
    /// This host's own addresses.
    pub(super) own: &'a BTreeSet<IpAddr>,
    pub(super) self_test: &'a SelfTestAddresses,
    /// If false, IPv6 entries are left out.
    pub(super) ipv6: bool,
}

impl MapContents {
    /// Checks and completes `desired`. An error changes nothing.
    pub(super) fn complete(desired: &Desired, host: &HostContext<'_>) -> Result<Self, RedirectError> {
        let mut contents = Self::default();
        (contents.excluded, contents.clients) = lists(desired, host);
        let wanted = |net: &IpNet| host.ipv6 || matches!(net, IpNet::V4(_));
        for (net, target) in host.self_test.routes(host.ipv6) {
            contents.add_route(net, target)?;
        }
        if desired.ports.is_empty() {
            // Nothing is tunnelled; one port stays open for the self-test, whose address is the only route.
            contents.ports.insert(SELF_TEST_PORT);
        } else {
            contents.ports.clone_from(&desired.ports);
            for (net, target) in desired.routes() {
                let net = normalize(&net);
                if !wanted(&net) {
                    continue;
                }
                check_route(net, target, host.config)?;
                contents.add_route(net, target)?;
            }
        }
        contents.any_port = contents.routes.values().any(|target| target.any_port);
        contents.leave_out(host);
        contents.check_sizes()?;
        contents.check_origins()?;
        Ok(contents)
    }

    fn add_route(&mut self, net: IpNet, target: RouteTarget) -> Result<(), RedirectError> {
        let refuse =
            |reason: String| RedirectError::Route { net, virtual_address: target.virtual_address, reason };
        let block = IpNet::new(target.virtual_address, net.prefix_len())
            .map_err(|_| refuse("its virtual address is of the other address family".into()))?;
        if let Some(other) = self.origins.insert(block, net) {
            let other_up = self.routes.get(&other).is_some_and(|route| route.up);
            if target.up || other_up {
                return Err(refuse(format!("{other} has the same virtual address")));
            }
        }
        if self.routes.insert(net, target).is_some() {
            return Err(refuse("given twice (as IPv4 and as IPv4-mapped IPv6)".into()));
        }
        Ok(())
    }

    /// Drops excluded single addresses that do not fit. This host's own, ranges, and addresses within a redirected
    /// range always stay.
    fn leave_out(&mut self, host: &HostContext<'_>) {
        for ipv4 in [true, false] {
            let of_family = self.excluded.iter().filter(|net| matches!(net, IpNet::V4(_)) == ipv4);
            let over = of_family.clone().count().saturating_sub(LIST_CAPACITY as usize);
            if over == 0 {
                continue;
            }
            let ranges: Vec<IpNet> =
                self.routes.iter().filter(|(_, target)| target.any_port).map(|(net, _)| *net).collect();
            // The ranges do not overlap, so only the last one that starts before an address can contain it.
            let redirected = |net: &IpNet| {
                let before = ranges.partition_point(|range| range.network() <= net.network());
                before.checked_sub(1).is_some_and(|at| ranges[at].contains(net))
            };
            let needless = |net: &IpNet| {
                net.prefix_len() == net.max_prefix_len()
                    && !host.own.contains(&net.network())
                    && !redirected(net)
            };
            let gone: Vec<IpNet> = of_family.rev().filter(|net| needless(net)).take(over).copied().collect();
            self.left_out += gone.len();
            for net in gone {
                self.excluded.remove(&net);
            }
        }
    }

    /// Rejects overlapping blocks of virtual addresses: a virtual address must stand for one address only.
    fn check_origins(&self) -> Result<(), RedirectError> {
        let mut before: Option<(&IpNet, &IpNet)> = None;
        for (block, net) in &self.origins {
            if let Some((previous, previous_net)) = before
                && previous.contains(block)
            {
                return Err(RedirectError::Route {
                    net: *net,
                    virtual_address: block.network(),
                    reason: format!(
                        "its block of virtual addresses {block} lies inside {previous}, which stands for {previous_net}"
                    ),
                });
            }
            before = Some((block, net));
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), RedirectError> {
        let count = |nets: &mut dyn Iterator<Item = &IpNet>| {
            nets.fold([0_usize; 2], |[v4, v6], net| match net {
                IpNet::V4(_) => [v4 + 1, v6],
                IpNet::V6(_) => [v4, v6 + 1],
            })
        };
        let tables: [(_, _, u32); 3] = [
            ("routes", count(&mut self.routes.keys()), ROUTE_CAPACITY),
            ("excluded networks", count(&mut self.excluded.iter()), LIST_CAPACITY),
            ("client networks", count(&mut self.clients.keys()), LIST_CAPACITY),
        ];
        for (what, counts, capacity) in tables {
            let capacity = capacity as usize;
            if let Some(&wanted) = counts.iter().find(|count| **count > capacity) {
                return Err(RedirectError::Full { what, wanted, capacity });
            }
        }
        Ok(())
    }

    /// Records a change that was written.
    pub(super) fn record(&mut self, change: &Change) {
        let _ = match *change {
            Change::Exclude(net) => self.excluded.insert(net),
            Change::Include(net) => self.excluded.remove(&net),
            Change::Admit(net, from) => self.clients.insert(net, from).is_some(),
            Change::Dismiss(net) => self.clients.remove(&net).is_some(),
            Change::OpenPort(port) => self.ports.insert(port),
            Change::ClosePort(port) => self.ports.remove(&port),
            Change::Route(net, target) => self.routes.insert(net, target).is_some(),
            Change::Unroute(net) => self.routes.remove(&net).is_some(),
            Change::Origin(block, net) => self.origins.insert(block, net).is_some(),
            Change::Forget(block) => self.origins.remove(&block).is_some(),
            Change::AnyPort(any) => std::mem::replace(&mut self.any_port, any),
        };
    }
}

/// The excluded networks and the clients, including this host's additions.
fn lists(desired: &Desired, host: &HostContext<'_>) -> (BTreeSet<IpNet>, BTreeMap<IpNet, ComesIn>) {
    let loopback = [
        IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8)),
        IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST)),
    ];
    let ranges = host.config.ranges(true);
    // An interface of this host may have a virtual address as its address; as a client it would be admitted from outside.
    let own = || {
        let own = host.own.iter().filter(|address| !ranges.iter().any(|range| range.contains(*address)));
        own.map(|address| IpNet::from(*address)).chain(loopback)
    };
    let wanted = |net: &IpNet| host.ipv6 || matches!(net, IpNet::V4(_));
    let excluded = own().chain(desired.table.excluded.iter().map(normalize)).filter(wanted).collect();
    let named: Vec<IpNet> = host.config.clients.iter().map(normalize).collect();
    let given = |net: IpNet| {
        let anywhere = named.iter().any(|named| named.contains(&net));
        (net, if anywhere { ComesIn::Anywhere } else { ComesIn::Pods })
    };
    // The last one counts.
    let clients = named
        .iter()
        .copied()
        .chain(desired.table.clients.iter().map(normalize))
        .map(given)
        .chain(own().map(|net| (net, ComesIn::Here)))
        .filter(|(net, _)| wanted(net))
        .collect();
    (excluded, clients)
}

/// Clears host bits and turns IPv4-mapped networks into IPv4, the form that the programs look up.
pub(super) fn normalize(net: &IpNet) -> IpNet {
    let net = net.trunc();
    if let IpNet::V6(v6) = net
        && v6.prefix_len() >= 96
        && let Some(address) = v6.network().to_ipv4_mapped()
        && let Ok(v4) = Ipv4Net::new(address, v6.prefix_len() - 96)
    {
        return IpNet::V4(v4);
    }
    net
}

fn check_route(net: IpNet, target: RouteTarget, config: &RedirectConfig) -> Result<(), RedirectError> {
    let ranges = config.ranges(true);
    let refuse = |reason: &str| RedirectError::Route {
        net,
        virtual_address: target.virtual_address,
        reason: reason.to_owned(),
    };
    let block = IpNet::new(target.virtual_address, net.prefix_len())
        .ok()
        .filter(|block| block.network().is_ipv4() == net.network().is_ipv4())
        .ok_or_else(|| refuse("its virtual address is of the other address family"))?;
    if block.trunc() != block {
        return Err(refuse("its virtual address is not the first address of a block of the network's size"));
    }
    if !ranges.iter().any(|range| range.contains(&block)) {
        return Err(refuse("its block of virtual addresses lies outside the redirect range"));
    }
    if ranges.iter().any(|range| range.contains(&net) || net.contains(range)) {
        return Err(refuse("the network overlaps the redirect range"));
    }
    if config.self_tests().iter().any(|reserved| reserved.contains(&block) || block.contains(reserved)) {
        return Err(refuse(
            "its block of virtual addresses overlaps the end of the range, which is reserved for the self-test",
        ));
    }
    Ok(())
}

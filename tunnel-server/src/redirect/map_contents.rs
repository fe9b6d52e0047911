//! What the kernel's maps hold, what they should hold, and the ordered difference between the two. Does not touch the
//! kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};
use tunnel_abi::{LIST_CAPACITY, ROUTE_CAPACITY};

use super::config::RedirectConfig;
use super::desired::{Desired, RouteTarget};
use super::error::RedirectError;
use super::self_test_addresses::{SELF_TEST_PORT, SelfTestAddresses, reserved_tokens, reserved_tokens_v6};

/// Contents of all maps that change while running.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MapContents {
    pub(super) ports: BTreeSet<u16>,
    pub(super) excluded: BTreeSet<IpNet>,
    pub(super) clients: BTreeSet<IpNet>,
    pub(super) routes: BTreeMap<IpNet, RouteTarget>,
    /// Token block to the network that it stands for.
    pub(super) origins: BTreeMap<IpNet, IpNet>,
    /// Whether there are routes that take every port; without any, the programs skip that lookup.
    pub(super) any_port: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Exclude(IpNet),
    Include(IpNet),
    Admit(IpNet),
    Dismiss(IpNet),
    OpenPort(u16),
    ClosePort(u16),
    Route(IpNet, RouteTarget),
    Unroute(IpNet),
    Origin(IpNet, IpNet),
    Forget(IpNet),
    AnyPort(bool),
}

impl Change {
    pub(super) fn is_delete(&self) -> bool {
        matches!(
            self,
            Self::Include(_)
                | Self::Dismiss(_)
                | Self::ClosePort(_)
                | Self::Unroute(_)
                | Self::Forget(_)
                | Self::AnyPort(false)
        )
    }
}

/// What this host adds to every [`Desired`].
pub(super) struct HostContext<'a> {
    pub(super) config: &'a RedirectConfig,
    /// This host's own addresses.
    pub(super) own: &'a BTreeSet<IpAddr>,
    pub(super) self_test: &'a SelfTestAddresses,
    /// Without it IPv6 entries are left out.
    pub(super) ipv6: bool,
}

impl MapContents {
    /// Checks `desired` and completes it. An error changes nothing.
    pub(super) fn complete(desired: &Desired, host: &HostContext<'_>) -> Result<Self, RedirectError> {
        let mut contents = Self::default();
        let loopback = [
            IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8)),
            IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST)),
        ];
        let ranges =
            [IpNet::V4(host.config.token_range.trunc()), IpNet::V6(host.config.token_range_v6.trunc())];
        // An interface of this host may have a token as its address; as a client it would be let in from outside.
        let own = || {
            host.own
                .iter()
                .filter(|a| !ranges.iter().any(|r| r.contains(*a)))
                .map(|a| IpNet::from(*a))
                .chain(loopback)
        };
        let wanted = |net: &IpNet| host.ipv6 || matches!(net, IpNet::V4(_));
        contents.excluded = own().chain(desired.excluded.iter().map(normalize)).filter(wanted).collect();
        contents.clients = own()
            .chain(desired.clients.iter().map(normalize))
            .chain(host.config.clients.iter().map(normalize))
            .filter(wanted)
            .collect();

        for (net, target) in host.self_test.routes(host.ipv6) {
            contents.add_route(net, target)?;
        }
        if desired.ports.is_empty() {
            // Nothing is tunnelled; one port stays open for the self-test, whose address is the only route.
            contents.ports.insert(SELF_TEST_PORT);
        } else {
            contents.ports.clone_from(&desired.ports);
            for (net, target) in &desired.routes {
                let net = normalize(net);
                if !wanted(&net) {
                    continue;
                }
                check_route(net, *target, &ranges, host.config)?;
                contents.add_route(net, *target)?;
            }
        }
        contents.any_port = contents.routes.values().any(|target| target.any_port);
        contents.check_sizes()?;
        contents.check_origins()?;
        Ok(contents)
    }

    fn add_route(&mut self, net: IpNet, target: RouteTarget) -> Result<(), RedirectError> {
        let refuse = |reason: String| RedirectError::Route { net, token: target.token, reason };
        let block = IpNet::new(target.token, net.prefix_len())
            .map_err(|_| refuse("its token is of the other address family".into()))?;
        if let Some(other) = self.origins.insert(block, net) {
            let other_up = self.routes.get(&other).is_some_and(|route| route.up);
            if target.up || other_up {
                return Err(refuse(format!("{other} has the same token")));
            }
        }
        if self.routes.insert(net, target).is_some() {
            return Err(refuse("given twice (as IPv4 and as IPv4-mapped IPv6)".into()));
        }
        Ok(())
    }

    /// Token blocks must not overlap: a token must stand for one address only.
    fn check_origins(&self) -> Result<(), RedirectError> {
        let mut before: Option<(&IpNet, &IpNet)> = None;
        for (block, net) in &self.origins {
            if let Some((previous, previous_net)) = before
                && previous.contains(block)
            {
                return Err(RedirectError::Route {
                    net: *net,
                    token: block.network(),
                    reason: format!(
                        "its token block {block} lies inside {previous}, which stands for {previous_net}"
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
            ("client networks", count(&mut self.clients.iter()), LIST_CAPACITY),
        ];
        for (what, counts, capacity) in tables {
            let capacity = capacity as usize;
            if let Some(&wanted) = counts.iter().find(|count| **count > capacity) {
                return Err(RedirectError::Full { what, wanted, capacity });
            }
        }
        Ok(())
    }

    /// The changes that turn `self` into `want`, in an order that leaves no window in which an excluded
    /// address is redirected, a redirected one has no origin, or a token leads to two origins.
    pub(super) fn changes_to(&self, want: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        changes.extend(want.excluded.difference(&self.excluded).map(|net| Change::Exclude(*net)));
        changes.extend(self.ports.difference(&want.ports).map(|port| Change::ClosePort(*port)));
        changes.extend(self.clients.difference(&want.clients).map(|net| Change::Dismiss(*net)));
        changes.extend(want.clients.difference(&self.clients).map(|net| Change::Admit(*net)));
        changes.extend(
            self.routes.keys().filter(|net| !want.routes.contains_key(net)).map(|net| Change::Unroute(*net)),
        );
        // A token that passes from one network to another: remove the old route before the origin changes.
        changes.extend(self.origins.iter().filter_map(|(block, net)| {
            let passed_on = want.origins.get(block).is_some_and(|other| other != net);
            let still_routed = want.routes.contains_key(net);
            (passed_on && still_routed).then_some(Change::Unroute(*net))
        }));
        let unrouted: BTreeSet<IpNet> = changes
            .iter()
            .filter_map(|change| if let Change::Unroute(net) = change { Some(*net) } else { None })
            .collect();
        changes.extend(
            want.origins
                .iter()
                .filter(|(block, net)| self.origins.get(block) != Some(net))
                .map(|(block, net)| Change::Origin(*block, *net)),
        );
        changes.extend(
            want.routes
                .iter()
                .filter(|(net, target)| unrouted.contains(net) || self.routes.get(net) != Some(target))
                .map(|(net, target)| Change::Route(*net, *target)),
        );
        changes.extend(
            self.origins
                .keys()
                .filter(|block| !want.origins.contains_key(block))
                .map(|block| Change::Forget(*block)),
        );
        changes.extend(want.ports.difference(&self.ports).map(|port| Change::OpenPort(*port)));
        changes.extend((want.any_port != self.any_port).then_some(Change::AnyPort(want.any_port)));
        changes.extend(self.excluded.difference(&want.excluded).map(|net| Change::Include(*net)));
        changes
    }

    /// Applies a change that was written.
    pub(super) fn record(&mut self, change: &Change) {
        let _ = match *change {
            Change::Exclude(net) => self.excluded.insert(net),
            Change::Include(net) => self.excluded.remove(&net),
            Change::Admit(net) => self.clients.insert(net),
            Change::Dismiss(net) => self.clients.remove(&net),
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

/// Without host bits, and IPv4-mapped networks as IPv4: the form in which the programs search for them.
fn normalize(net: &IpNet) -> IpNet {
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

fn check_route(
    net: IpNet,
    target: RouteTarget,
    ranges: &[IpNet; 2],
    config: &RedirectConfig,
) -> Result<(), RedirectError> {
    let refuse = |reason: &str| RedirectError::Route { net, token: target.token, reason: reason.to_owned() };
    let block = IpNet::new(target.token, net.prefix_len())
        .ok()
        .filter(|block| block.network().is_ipv4() == net.network().is_ipv4())
        .ok_or_else(|| refuse("its token is of the other address family"))?;
    if block.trunc() != block {
        return Err(refuse("its token is not the first address of a block of the network's size"));
    }
    if !ranges.iter().any(|range| range.contains(&block)) {
        return Err(refuse("its token block lies outside the token range"));
    }
    if ranges.iter().any(|range| range.contains(&net) || net.contains(range)) {
        return Err(refuse("the network overlaps the token range"));
    }
    let reserved = [
        IpNet::V4(reserved_tokens(config.token_range)),
        IpNet::V6(reserved_tokens_v6(config.token_range_v6)),
    ];
    if reserved.iter().any(|reserved| reserved.contains(&block) || block.contains(reserved)) {
        return Err(refuse(
            "its token block overlaps the end of the range, which is reserved for the self-test",
        ));
    }
    Ok(())
}

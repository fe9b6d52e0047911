//! The ordered writes that lead from what the kernel's maps hold to what they should hold.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Bound;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_abi::{LIST_CAPACITY, ROUTE_CAPACITY};

use super::change::Change;
use super::desired::{Desired, RouteTarget};
use super::error::RedirectError;
use super::map_contents::{HostContext, MapContents, block, check_route, lists, normalize};

/// More routes than these are not compared one by one with what is there.
const MANY: usize = 1024;
/// The first and the last network in their order.
const FIRST: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0));
const LAST: IpNet = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from_bits(u128::MAX), 128));

/// In what the maps differ from what they should hold.
#[derive(Debug, Default)]
struct Difference {
    exclude: Vec<IpNet>,
    include: Vec<IpNet>,
    admit: Vec<IpNet>,
    dismiss: Vec<IpNet>,
    open: Vec<u16>,
    close: Vec<u16>,
    /// The routes that differ; None is to go.
    routes: BTreeMap<IpNet, Option<RouteTarget>>,
    /// Blocks of tokens that stand for something and belong to no route: a write has failed.
    stale: Vec<IpNet>,
    any_port: bool,
}

fn added_and_removed<T: Ord + Copy>(want: &BTreeSet<T>, have: &BTreeSet<T>) -> (Vec<T>, Vec<T>) {
    (want.difference(have).copied().collect(), have.difference(want).copied().collect())
}

impl MapContents {
    /// The changes that turn `self` into `want`, in an order that leaves no window in which an excluded
    /// address is redirected, a redirected one has no origin, or a token leads to two origins.
    pub(super) fn changes_to(&self, want: &Self) -> Vec<Change> {
        let (exclude, include) = added_and_removed(&want.excluded, &self.excluded);
        let (admit, dismiss) = added_and_removed(&want.clients, &self.clients);
        let (open, close) = added_and_removed(&want.ports, &self.ports);
        let gone = self.routes.keys().filter(|net| !want.routes.contains_key(net)).map(|net| (*net, None));
        let others = want.routes.iter().filter(|(net, target)| self.routes.get(net) != Some(target));
        let routes = gone.chain(others.map(|(net, target)| (*net, Some(*target)))).collect();
        let stale = self.origins.keys().filter(|block| !want.origins.contains_key(block)).copied().collect();
        let any_port = want.any_port;
        self.ordered(&Difference { exclude, include, admit, dismiss, open, close, routes, stale, any_port })
    }

    /// The same for this host's own addresses, of which `self` has others.
    pub(super) fn changes_of_host(&self, desired: &Desired, host: &HostContext<'_>) -> Option<Vec<Change>> {
        let (excluded, clients) = lists(desired, host);
        let fits = |list: &BTreeSet<IpNet>| list.len() <= LIST_CAPACITY as usize;
        if self.left_out > 0 || !fits(&excluded) || !fits(&clients) {
            return None;
        }
        let (exclude, include) = added_and_removed(&excluded, &self.excluded);
        let (admit, dismiss) = added_and_removed(&clients, &self.clients);
        let any_port = self.any_port;
        Some(self.ordered(&Difference {
            exclude,
            include,
            admit,
            dismiss,
            any_port,
            ..Difference::default()
        }))
    }

    /// The same when `self` holds what follows from `before`, at the cost of what differs. None: compute everything.
    ///
    /// # Errors
    /// Those of [`Self::complete`].
    pub(super) fn changes_by(
        &self,
        before: &Desired,
        desired: &Desired,
        host: &HostContext<'_>,
    ) -> Result<Option<Vec<Change>>, RedirectError> {
        // Without ports there are no routes at all.
        if before.ports.is_empty() || desired.ports.is_empty() {
            return Ok(None);
        }
        let Some(mut difference) = self.difference_of_lists(before, desired, host) else { return Ok(None) };
        (difference.open, difference.close) = added_and_removed(&desired.ports, &before.ports);
        let mut counts = self.counts;
        let mut any_ports = self.any_ports;
        for change in desired.routes.changes_since(&before.routes) {
            let (net, target) = (*change.key, change.now.copied());
            if normalize(&net) != net {
                return Ok(None);
            }
            if !host.ipv6 && matches!(net, IpNet::V6(_)) {
                continue;
            }
            if let Some(target) = target {
                check_route(net, target, host.config)?;
            }
            let family = usize::from(net.network().is_ipv6());
            counts[family] += usize::from(target.is_some());
            any_ports += usize::from(target.is_some_and(|target| target.any_port));
            if let Some(had) = self.routes.get(&net) {
                counts[family] -= 1;
                any_ports -= usize::from(had.any_port);
            }
            difference.routes.insert(net, target);
        }
        if counts.iter().any(|count| *count > ROUTE_CAPACITY as usize) || self.may_collide(&difference.routes)
        {
            return Ok(None);
        }
        difference.any_port = any_ports > 0;
        Ok(Some(self.ordered(&difference)))
    }

    fn difference_of_lists(
        &self,
        before: &Desired,
        desired: &Desired,
        host: &HostContext<'_>,
    ) -> Option<Difference> {
        let mut difference = Difference::default();
        let mut own = None;
        for (net, is) in desired.excluded.changes_since(&before.excluded) {
            if self.left_out > 0 || normalize(net) != *net {
                return None;
            }
            if !host.ipv6 && matches!(net, IpNet::V6(_)) {
                continue;
            }
            let own = own.get_or_insert_with(|| lists(&Desired::default(), host).0);
            match (is, self.excluded.contains(net)) {
                (true, false) => difference.exclude.push(*net),
                (false, true) if !own.contains(net) => difference.include.push(*net),
                _ => {}
            }
        }
        if !difference.exclude.is_empty()
            && self.excluded.len() + difference.exclude.len() > LIST_CAPACITY as usize
        {
            return None;
        }
        if desired.clients != before.clients {
            let clients = lists(&Desired { clients: desired.clients.clone(), ..Desired::default() }, host).1;
            if clients.len() > LIST_CAPACITY as usize {
                return None;
            }
            (difference.admit, difference.dismiss) = added_and_removed(&clients, &self.clients);
        }
        Some(difference)
    }

    /// Whether a token may then stand for two networks. Only then all of them have to be compared.
    fn may_collide(&self, routes: &BTreeMap<IpNet, Option<RouteTarget>>) -> bool {
        // With so many it costs no more to compare all.
        if routes.len() > MANY {
            return true;
        }
        let mut up = BTreeMap::new();
        for (net, target) in routes.iter().filter_map(|(net, target)| Some((*net, (*target)?))) {
            let Some(own) = block(net, target) else { return true };
            // Of the routes that stay, all that share a block are down.
            let stays = |other: &IpNet| !routes.contains_key(other);
            let same = self.of_block(own).rev().find(stays).and_then(|other| self.routes.get(&other));
            let twice = up.insert(own, target.up);
            let others = [twice, same.map(|same| same.up)];
            if others.iter().flatten().any(|other| *other || target.up) {
                return true;
            }
            let previous = self.blocks.range(..(own, FIRST)).next_back();
            let next = self.blocks.range((Bound::Excluded((own, LAST)), Bound::Unbounded)).next();
            if previous.is_some_and(|(other, _)| other.contains(&own))
                || next.is_some_and(|(other, _)| own.contains(other))
            {
                return true;
            }
        }
        let blocks: Vec<_> = up.into_keys().collect();
        blocks.windows(2).any(|pair| pair[0].contains(&pair[1]))
    }

    /// The networks whose tokens are this block, in their order.
    fn of_block(&self, block: IpNet) -> impl DoubleEndedIterator<Item = IpNet> {
        self.blocks.range((block, FIRST)..=(block, LAST)).map(|(_, net)| *net)
    }

    fn ordered(&self, difference: &Difference) -> Vec<Change> {
        let Difference { exclude, include, admit, dismiss, open, close, routes, stale, any_port } =
            difference;
        let mut changes = Vec::new();
        changes.extend(exclude.iter().map(|net| Change::Exclude(*net)));
        changes.extend(close.iter().map(|port| Change::ClosePort(*port)));
        changes.extend(dismiss.iter().map(|net| Change::Dismiss(*net)));
        changes.extend(admit.iter().map(|net| Change::Admit(*net)));

        // What each token that is concerned stands for then.
        let mut origins: BTreeMap<IpNet, Option<IpNet>> = stale.iter().map(|block| (*block, None)).collect();
        for net in routes.keys() {
            let had = self.routes.get(net).and_then(|target| block(*net, *target));
            origins.extend(had.map(|block| (block, None)));
        }
        for (net, target) in routes {
            let new = target.and_then(|target| block(*net, target));
            origins.extend(new.map(|block| (block, Some(*net))));
        }
        for (block, origin) in &mut origins {
            let stays = self.of_block(*block).rev().find(|net| !routes.contains_key(net));
            *origin = (*origin).max(stays);
        }

        let mut unrouted = BTreeSet::new();
        unrouted.extend(
            routes
                .iter()
                .filter(|(net, target)| target.is_none() && self.routes.contains_key(net))
                .map(|(net, _)| *net),
        );
        changes.extend(unrouted.iter().map(|net| Change::Unroute(*net)));
        // A token that passes from one network to another: remove the old route before the origin changes.
        for (block, origin) in &origins {
            let Some(had) =
                self.origins.get(block).filter(|had| origin.is_some_and(|origin| origin != **had))
            else {
                continue;
            };
            let still_routed = routes.get(had).map_or(self.routes.contains_key(had), Option::is_some);
            if still_routed && unrouted.insert(*had) {
                changes.push(Change::Unroute(*had));
            }
        }
        changes.extend(origins.iter().filter_map(|(block, origin)| {
            let origin = (*origin)?;
            (self.origins.get(block) != Some(&origin)).then_some(Change::Origin(*block, origin))
        }));
        let wanted = |net: &IpNet| routes.get(net).copied().unwrap_or_else(|| self.routes.get(net).copied());
        let differ = routes.iter().filter(|(net, target)| self.routes.get(net) != target.as_ref());
        let routed: BTreeSet<IpNet> = differ.map(|(net, _)| *net).chain(unrouted).collect();
        changes.extend(routed.iter().filter_map(|net| Some(Change::Route(*net, wanted(net)?))));
        changes.extend(
            origins
                .iter()
                .filter(|(block, origin)| origin.is_none() && self.origins.contains_key(block))
                .map(|(block, _)| Change::Forget(*block)),
        );
        changes.extend(open.iter().map(|port| Change::OpenPort(*port)));
        changes.extend((*any_port != self.any_port).then_some(Change::AnyPort(*any_port)));
        changes.extend(include.iter().map(|net| Change::Include(*net)));
        changes
    }
}

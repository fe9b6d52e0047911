//! Computes the ordered writes from the current contents of the kernel's maps to the desired ones.

use std::collections::BTreeSet;

use ipnet::IpNet;
use tunnel_routing::RouteTarget;

use super::change::Change;
use super::map_contents::{MapContents, normalize};

impl MapContents {
    /// The changes that turn `self` into `want`. At no step is an excluded address redirected, a redirected one without
    /// an origin, or a virtual address mapped to two origins.
    pub(super) fn changes_to(&self, want: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        changes.extend(want.excluded.difference(&self.excluded).map(|net| Change::Exclude(*net)));
        changes.extend(self.ports.difference(&want.ports).map(|port| Change::ClosePort(*port)));
        let dismissed = self.clients.keys().filter(|net| !want.clients.contains_key(net));
        changes.extend(dismissed.map(|net| Change::Dismiss(*net)));
        let admitted = want.clients.iter().filter(|(net, from)| self.clients.get(net) != Some(from));
        changes.extend(admitted.map(|(net, from)| Change::Admit(*net, *from)));

        let gone = self.routes.keys().filter(|net| !want.routes.contains_key(net));
        let mut unrouted: BTreeSet<IpNet> = gone.copied().collect();
        // A virtual address moves to another network: remove the old route before the origin changes.
        unrouted.extend(self.origins.iter().filter_map(|(block, net)| {
            let passes = want.origins.get(block).is_some_and(|other| other != net);
            (passes && self.routes.contains_key(net)).then_some(*net)
        }));
        changes.extend(unrouted.iter().map(|net| Change::Unroute(*net)));
        let origins = want.origins.iter().filter(|(block, net)| self.origins.get(block) != Some(net));
        changes.extend(origins.map(|(block, net)| Change::Origin(*block, *net)));
        let routes = want.routes.iter();
        let routes =
            routes.filter(|(net, target)| unrouted.contains(net) || self.routes.get(net) != Some(target));
        changes.extend(routes.map(|(net, target)| Change::Route(*net, *target)));
        let forgotten = self.origins.keys().filter(|block| !want.origins.contains_key(block));
        changes.extend(forgotten.map(|block| Change::Forget(*block)));

        changes.extend(want.ports.difference(&self.ports).map(|port| Change::OpenPort(*port)));
        changes.extend((want.any_port != self.any_port).then_some(Change::AnyPort(want.any_port)));
        changes.extend(self.excluded.difference(&want.excluded).map(|net| Change::Include(*net)));
        changes
    }

    /// The changes that bring these routes up or down and leave everything else alone. The cost is proportional to the
    /// number of these routes.
    pub(super) fn changes_of(&self, flips: Vec<(IpNet, bool)>) -> Vec<Change> {
        let changed = |(net, up)| {
            let net = normalize(&net);
            let target = self.routes.get(&net).filter(|target| target.up != up)?;
            Some(Change::Route(net, RouteTarget { up, ..*target }))
        };
        flips.into_iter().filter_map(changed).collect()
    }
}

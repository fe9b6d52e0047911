//! Keeps the kernel's rules and routes at the wanted ones.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::route::RouteType;
use tunnel_abi::{LOOPBACK_IFINDEX, UPLINK_CAPACITY};

use super::device::{self, Device};
use super::messages::{ListedRoute, ListedRule, Place};
use super::uplinks::{self, Uplinks};
use super::wanted::{Kind, Packets, Route, Rule, Table, Wanted};
use crate::error::RedirectError;
use crate::kernel::Kernel;

const TABLES: [Table; 3] = [Table::Ports, Table::AnyPort, Table::NotTaken];

/// Objects of a subscription to changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Watched {
    pub(crate) tables: [u32; 3],
    pub(crate) device: u32,
    /// The netlink address of this process as the author of changes.
    pub(crate) author: u32,
}

/// The rules and routes of this process. They end with it, or with [`Self::withdraw`].
pub(crate) struct ByRoute {
    device: Device,
    pub(super) kernel: Kernel,
    ipv6: bool,
    pub(super) present: Wanted,
    /// The rules are removed for now.
    pub(super) paused: bool,
    /// The route of each family that was looked up last.
    pub(super) probed: [Option<Route>; 2],
    /// The nodes are known, so that the remains of servers that are gone can go.
    nodes_known: bool,
    /// They are removed.
    swept: bool,
    /// Numbers of the devices of servers beside this one.
    others: BTreeSet<u32>,
}

impl ByRoute {
    /// Makes the device.
    pub(crate) fn open(ipv6: bool) -> Result<Self, RedirectError> {
        let mut kernel = Kernel::open()?;
        let device = device(&mut kernel)?;
        // Fails where the kernel has no policy routing, and where a new device has no IPv6 although the loopback device does. The
        // table is still empty.
        let place = Place { number: device.number, index: device.index };
        for ipv6 in families(ipv6) {
            let rule = || vec![Rule { ipv6, packets: Packets::Port(1) }.message(place)];
            kernel.add_rules(rule())?;
            kernel.remove_rules(rule())?;
            let loopback = if ipv6 { Ipv6Addr::LOCALHOST.into() } else { IpAddr::from(Ipv4Addr::LOCALHOST) };
            let route = Route { table: Table::Ports, net: loopback.into(), kind: Kind::Local };
            kernel.add_routes([route.message(place)].into_iter())?;
            kernel.remove_routes([route.message(place)].into_iter())?;
        }
        Ok(Self {
            device,
            kernel,
            ipv6,
            present: Wanted::default(),
            paused: false,
            probed: [None; 2],
            nodes_known: false,
            swept: false,
            others: BTreeSet::new(),
        })
    }

    /// Removes what is no longer wanted. To be called before the maps change, so that no packet is led to this host that
    /// the programs leave to others' listeners.
    pub(crate) fn take_away(&mut self, wanted: &Wanted) -> Result<(), RedirectError> {
        let place = self.place();
        let rules: Vec<Rule> = self.present.rules.difference(&wanted.rules).copied().collect();
        self.kernel.remove_rules(rules.iter().map(|rule| rule.message(place)).collect())?;
        self.present.rules.retain(|rule| wanted.rules.contains(rule));
        let routes = self.present.routes.difference(&wanted.routes).map(|route| route.message(place));
        self.kernel.remove_routes(routes)?;
        self.present.routes.retain(|route| wanted.routes.contains(route));
        Ok(())
    }

    /// Adds what is missing. To be called once the maps have changed.
    pub(crate) fn add(&mut self, wanted: Wanted) -> Result<(), RedirectError> {
        let place = self.place();
        let unwanted = self.remove_unwanted_rules(&wanted);
        let routes = wanted.routes.difference(&self.present.routes).map(|route| route.message(place));
        let routes = self.kernel.add_routes(routes);
        let rules = wanted.rules.difference(&self.present.rules).map(|rule| rule.message(place)).collect();
        let rules = if self.paused { Ok(()) } else { self.kernel.add_rules(rules) };
        // Also those that failed, which the next restore() adds.
        self.present = wanted;
        unwanted.and(routes).and(rules)
    }

    /// Removes rules that a dead server with the same number has left and this one does not want, if they lead to a table with
    /// routes of this one: packets for other ports would be led to this host, where the programs leave them to others'
    /// listeners. The other remains stay until the nodes are known.
    fn remove_unwanted_rules(&mut self, wanted: &Wanted) -> Result<(), RedirectError> {
        if self.swept {
            return Ok(());
        }
        let place = self.place();
        let may_stay = |rule: Rule| {
            let leads_to =
                |route: &Route| route.table == rule.table() && matches!(route.net, IpNet::V6(_)) == rule.ipv6;
            wanted.rules.contains(&rule) || !wanted.routes.iter().any(leads_to)
        };
        for ipv6 in families(self.ipv6) {
            let listed = self.kernel.rules(ipv6)?.into_iter().filter_map(ListedRule::read);
            let unwanted =
                listed.filter(|left| left.number == place.number && !left.rule.is_some_and(may_stay));
            let unwanted = unwanted.map(|left| left.message).collect();
            self.kernel.remove_rules(unwanted)?;
        }
        Ok(())
    }

    /// Has [`Self::restore`] remove the remains of servers that are gone. Until the nodes are known these may refuse
    /// connections, as the orphan policy of those servers says.
    pub(crate) fn nodes_are_known(&mut self) {
        self.nodes_known = true;
    }

    /// Compares the kernel's device, rules and routes with what this process has written, and restores those that are
    /// missing, or foreign once the nodes are known. Returns the names of those parts, for the log.
    pub(crate) fn restore(&mut self) -> Result<Vec<&'static str>, RedirectError> {
        if self.nodes_known && !self.swept {
            remove_dead(&mut self.kernel)?;
            self.swept = true;
        }
        let device_differs = self.restore_device()?;
        let place = self.place();
        let (mut rules, mut foreign) = (BTreeSet::new(), Vec::new());
        self.others.clear();
        for ipv6 in families(self.ipv6) {
            let listed = self.kernel.rules(ipv6)?.into_iter().filter_map(ListedRule::read);
            for ListedRule { message, number, rule } in listed {
                if number != place.number {
                    self.others.insert(number);
                    continue;
                }
                if !rule.is_some_and(|rule| self.present.rules.contains(&rule) && rules.insert(rule)) {
                    foreign.push(message);
                }
            }
        }
        let mut rules_differ = self.swept && !foreign.is_empty();
        if self.swept {
            self.kernel.remove_rules(foreign)?;
        }
        if self.another_died() {
            remove_dead(&mut self.kernel)?;
            self.others.retain(|number| device::is_taken(*number));
        }
        let (mut routes, mut foreign) = (BTreeSet::<Route>::new(), Vec::new());
        for ipv6 in families(self.ipv6) {
            for table in TABLES {
                for message in self.kernel.routes_in(ipv6, place.table(table))? {
                    let listed = ListedRoute::read(message, table, place);
                    let wanted = listed.route.filter(|route| self.present.routes.contains(route));
                    if !wanted.is_some_and(|route| routes.insert(route)) {
                        foreign.push(listed.message);
                    }
                }
            }
        }
        let mut routes_differ = self.swept && !foreign.is_empty();
        if self.swept {
            self.kernel.remove_routes(foreign.into_iter())?;
        }
        let missing: Vec<Route> = self.present.routes.difference(&routes).copied().collect();
        routes_differ |= !missing.is_empty();
        let added = self.kernel.add_routes(missing.into_iter().map(|route| route.message(place)));
        let mut missing: Vec<Rule> = self.present.rules.difference(&rules).copied().collect();
        if self.paused {
            missing.clear();
        }
        rules_differ |= !missing.is_empty();
        let rules = self.kernel.add_rules(missing.into_iter().map(|rule| rule.message(place)).collect());
        // Whatever becomes of the routes: those of one family may be there.
        added.and(rules)?;
        let parts = [
            (device_differs, "TUN device"),
            (rules_differ, "rules"),
            (routes_differ, "routes of edge nodes"),
        ];
        Ok(parts.into_iter().filter_map(|(restored, part)| restored.then_some(part)).collect())
    }

    /// Reports whether a server beside this one has ended without removing its rules. These come first, and with
    /// --orphan-policy=refuse their routes refuse what is meant for this server now.
    pub(crate) fn another_died(&self) -> bool {
        self.swept && !self.paused && self.others.iter().any(|number| !device::is_taken(*number))
    }

    /// Returns true if it was removed, renamed or set down.
    fn restore_device(&mut self) -> Result<bool, RedirectError> {
        match self.kernel.is_up(self.device.index, &self.device.name)? {
            Some(true) => return Ok(false),
            Some(false) => self.kernel.bring_up(self.device.index)?,
            None => {
                self.device = device(&mut self.kernel)?;
                if self.swept {
                    remove_dead(&mut self.kernel)?;
                }
            }
        }
        Ok(true)
    }

    /// Has [`Self::restore`] add the rules again, and returns false if it does so already. To be called once the programs are
    /// attached, without which others' listeners would get the connections.
    pub(crate) fn unpause(&mut self) -> bool {
        std::mem::take(&mut self.paused)
    }

    /// Removes the rules, so that nothing is led to this process any more, until [`Self::unpause`].
    pub(crate) fn pause(&mut self) -> Result<(), RedirectError> {
        self.paused = true;
        let place = self.place();
        self.kernel.remove_rules(self.present.rules.iter().map(|rule| rule.message(place)).collect())
    }

    /// Removes everything, and what servers beside it have left that are dead, unless a successor does.
    pub(crate) fn withdraw(mut self) -> Result<(), RedirectError> {
        let has_successor = self.paused;
        let mut rules = self.pause();
        if self.swept && !has_successor {
            rules = rules.and(remove_dead(&mut self.kernel).map(drop));
        }
        // The device takes the others with it.
        let place = self.place();
        let routes = self.present.routes.iter().filter(|route| route.kind != Kind::Local);
        self.kernel.remove_routes(routes.map(|route| route.message(place))).and(rules)
    }

    /// Changes with the device.
    pub(crate) fn watched(&self) -> Watched {
        let tables = TABLES.map(|table| self.place().table(table));
        Watched { tables, device: self.device.index, author: self.kernel.port }
    }

    /// Interfaces that lead to other hosts: those of default routes, and those by which these addresses are reached. Of all
    /// tables: a host with several networks may have the default route of one in a table for some sources only.
    pub(crate) fn uplinks(&mut self, others: &BTreeSet<IpAddr>) -> Result<Uplinks, RedirectError> {
        let mut uplinks = Uplinks::default();
        let routes = self.kernel.routes_of(RouteType::Unicast, |route| uplinks::leads_to(route, others))?;
        routes.iter().for_each(|route| uplinks.add(route));
        uplinks.interfaces.remove(&LOOPBACK_IFINDEX);
        for interface in uplinks.interfaces.clone() {
            uplinks.interfaces.extend(self.kernel.controller(interface)?);
        }
        uplinks.interfaces = uplinks.interfaces.into_iter().take(UPLINK_CAPACITY as usize).collect();
        Ok(uplinks)
    }

    /// Index of the device.
    pub(crate) fn device(&self) -> u32 {
        self.device.index
    }

    pub(super) fn place(&self) -> Place {
        Place { number: self.device.number, index: self.device.index }
    }
}

/// IPv4, and IPv6 if it is used.
fn families(ipv6: bool) -> impl Iterator<Item = bool> {
    [Some(false), ipv6.then_some(true)].into_iter().flatten()
}

fn device(kernel: &mut Kernel) -> Result<Device, RedirectError> {
    let device = Device::create().map_err(|source| RedirectError::Tun { source })?;
    kernel.bring_up(device.index)?;
    Ok(device)
}

/// For `cleanup`, and servers that take nothing by route. Returns the numbers of rules and of routes that were removed.
pub(crate) fn remove_leftovers() -> Result<(usize, usize), RedirectError> {
    let mut kernel = Kernel::open()?;
    let before = rules(&mut kernel)?.len();
    let routes = remove_dead(&mut kernel)?;
    Ok((before - rules(&mut kernel)?.len().min(before), routes))
}

/// Removes the rules and routes of servers whose device is gone. Returns the number of routes.
fn remove_dead(kernel: &mut Kernel) -> Result<usize, RedirectError> {
    let is_dead = |listed: &ListedRule| !device::is_taken(listed.number);
    let listed: Vec<ListedRule> = rules(kernel)?.into_iter().filter(is_dead).collect();
    let mut numbers: BTreeSet<u32> = listed.iter().map(|listed| listed.number).collect();
    kernel.remove_rules(listed.into_iter().map(|listed| listed.message).collect())?;
    numbers.extend(dead_with_routes(kernel)?);
    let mut removed = 0;
    for number in numbers {
        for (ipv6, table) in [false, true].into_iter().flat_map(|ipv6| TABLES.map(|table| (ipv6, table))) {
            let place = Place { number, index: 0 };
            let listed = kernel.routes_in(ipv6, place.table(table))?;
            removed += listed.len();
            let listed = listed.into_iter();
            kernel.remove_routes(listed.map(|message| ListedRoute::read(message, table, place).message))?;
        }
    }
    Ok(removed)
}

/// Numbers of dead servers that have left routes, of the kinds that do not end with the device. They may have left no rule: a
/// server that hands over or stops removes its rules first, and may be killed after that.
fn dead_with_routes(kernel: &mut Kernel) -> Result<BTreeSet<u32>, RedirectError> {
    let mut numbers = BTreeSet::new();
    for kind in [RouteType::Throw, RouteType::Unreachable] {
        let routes = kernel.routes_of(kind, |route| ListedRoute::server_of(route).is_some())?;
        numbers.extend(routes.iter().filter_map(ListedRoute::server_of));
    }
    numbers.retain(|number| !device::is_taken(*number));
    Ok(numbers)
}

fn rules(kernel: &mut Kernel) -> Result<Vec<ListedRule>, RedirectError> {
    let rules = [kernel.rules(false)?, kernel.rules(true)?].concat();
    Ok(rules.into_iter().filter_map(ListedRule::read).collect())
}

//! Detects other users of the redirect ranges in this network namespace: an address, a route, or a rule that takes
//! precedence over the redirect route.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteProtocol, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};
use nix::libc;
use nix::net::if_::if_indextoname;
use tunnel_abi::LOOPBACK_IFINDEX;

use super::config::RedirectConfig;
use super::error::RedirectError;
use super::kernel::Kernel;
use super::netlink::{attribute, destination, family};

/// Configuration of this network namespace.
#[derive(Debug, Default)]
struct Network {
    addresses: Vec<AddressMessage>,
    routes: Vec<RouteMessage>,
    rules: Vec<RuleMessage>,
}

/// Looks for another user of the redirect ranges.
///
/// # Errors
/// [`RedirectError::RangeUsed`], or the namespace cannot be listed.
pub(super) fn check(config: &RedirectConfig, ipv6: bool) -> Result<(), RedirectError> {
    let ranges = config.ranges(ipv6);
    let network = read(&ranges)?;
    for range in ranges {
        if let Some(user) = network.user_of(range) {
            let key = if range.addr().is_ipv4() { "--redirect-range" } else { "--redirect-range-v6" };
            return Err(RedirectError::RangeUsed { key, range, user });
        }
    }
    Ok(())
}

/// Reads what may concern these ranges: a host may have a million other routes.
fn read(ranges: &[IpNet]) -> Result<Network, RedirectError> {
    let mut kernel = Kernel::open()?;
    let overlaps =
        |network: IpNet| ranges.iter().any(|range| network.contains(range) || range.contains(&network));
    let addresses = kernel.addresses()?;
    let routes = kernel.routes_of(RouteType::Unspec, |route| destination(route).is_none_or(overlaps))?;
    let mut rules = Vec::new();
    for ipv6 in [false, true] {
        // A kernel without policy routing has no rules, and may answer with an error.
        rules.extend(kernel.rules(ipv6).unwrap_or_default());
    }
    Ok(Network { addresses, routes, rules })
}

impl Network {
    /// Describes the user of the range, if any.
    fn user_of(&self, range: IpNet) -> Option<String> {
        self.address_in(range).or_else(|| self.route_in(range)).or_else(|| self.rule_for(range))
    }

    fn address_in(&self, range: IpNet) -> Option<String> {
        let inside =
            |message: &&AddressMessage| own_address(message).is_some_and(|address| range.contains(&address));
        let found = self.addresses.iter().find(inside)?;
        let (address, length) = (own_address(found)?, found.header.prefix_len);
        Some(format!("the address {address}/{length} of the interface {}", link(found.header.index)))
    }

    /// Ignores wider routes, such as a default route: they are not meant for the range.
    fn route_in(&self, range: IpNet) -> Option<String> {
        let foreign = |route: &&RouteMessage| {
            destination(route).is_some_and(|network| range.contains(&network)) && !is_harmless(route)
        };
        self.routes.iter().find(foreign).map(describe)
    }

    /// Finds a rule before the table `local` that has another route for virtual addresses. Rules for marked packets or for a VRF
    /// do not apply to the clients' packets.
    fn rule_for(&self, range: IpNet) -> Option<String> {
        let family = family(range.addr().is_ipv6());
        let rules = || self.rules.iter().filter(|rule| rule.header.family == family);
        rules().next()?;
        let asking =
            || rules().filter(|rule| rule.header.action == RuleAction::ToTable && applies(rule, range));
        if !asking().any(|rule| table_of_rule(rule) == LOCAL) {
            return Some("rules of which none asks the table local".to_owned());
        }
        // The kernel lists rules as it follows them, which also orders those of one priority.
        for rule in asking().take_while(|rule| table_of_rule(rule) != LOCAL) {
            let table = table_of_rule(rule);
            let leads = |route: &&RouteMessage| {
                let network = destination(route).unwrap_or(default_of(range));
                table_of(route) == table
                    && (network.contains(&range) || range.contains(&network))
                    && !is_harmless(route)
            };
            if let Some(route) =
                self.routes.iter().filter(|route| route.header.address_family == family).find(leads)
            {
                let (priority, route) = (priority(rule), describe(route));
                return Some(format!(
                    "{route}, which the rule of priority {priority} puts before the table local"
                ));
            }
        }
        None
    }
}

fn describe(route: &RouteMessage) -> String {
    let network = destination(route).map_or_else(|| "default".to_owned(), |network| network.to_string());
    let device = attribute!(route, RouteAttribute::Oif);
    let device = device.map(|index| format!(" by the interface {}", link(*index)));
    let table = match table_of(route) {
        LOCAL => "local".to_owned(),
        254 => "main".to_owned(),
        other => other.to_string(),
    };
    let (device, protocol) = (device.unwrap_or_default(), route.header.protocol);
    format!("the route {network}{device} in the table {table} (protocol {protocol:?})")
}

/// Name of an interface.
fn link(index: u32) -> String {
    let name = if_indextoname(index as libc::c_uint);
    name.map_or_else(|_| "that is gone".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// This host's address in a message: IFA_LOCAL, else IFA_ADDRESS, which is the same or a point-to-point peer's.
pub(super) fn own_address(message: &AddressMessage) -> Option<IpAddr> {
    let local = attribute!(message, AddressAttribute::Local);
    local.or_else(|| attribute!(message, AddressAttribute::Address)).copied()
}

const LOCAL: u32 = libc::RT_TABLE_LOCAL as u32;

/// True for a server's route, possibly left by a killed one, and for routes that the kernel derives from addresses.
fn is_harmless(route: &RouteMessage) -> bool {
    let loopback = |attribute: &RouteAttribute| *attribute == RouteAttribute::Oif(LOOPBACK_IFINDEX);
    let servers = route.header.kind == RouteType::Local && route.attributes.iter().any(loopback);
    servers || route.header.protocol == RouteProtocol::Kernel
}

fn table_of(route: &RouteMessage) -> u32 {
    attribute!(route, RouteAttribute::Table).copied().unwrap_or_else(|| route.header.table.into())
}

fn table_of_rule(rule: &RuleMessage) -> u32 {
    attribute!(rule, RuleAttribute::Table).copied().unwrap_or_else(|| rule.header.table.into())
}

fn priority(rule: &RuleMessage) -> u32 {
    attribute!(rule, RuleAttribute::Priority).copied().unwrap_or_default()
}

/// Share of the clients' packets to a range that a selector fits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fits {
    None,
    Some,
    All,
}

/// Reports whether the rule applies to some of the clients' packets to the range. An inverted rule (`not from …`)
/// applies to what its selectors together do not fit.
fn applies(rule: &RuleMessage, range: IpNet) -> bool {
    let of_header = if rule.header.tos == 0 { Fits::All } else { Fits::Some };
    let selectors = rule.attributes.iter().map(|selector| fits(selector, rule.header.dst_len, range));
    let fits = selectors.fold(of_header, Fits::min);
    let excepted = if rule.header.flags.contains(RuleFlags::Invert) { Fits::All } else { Fits::None };
    fits != excepted
}

fn fits(selector: &RuleAttribute, dst_len: u8, range: IpNet) -> Fits {
    match selector {
        RuleAttribute::Destination(address) => match IpNet::new(*address, dst_len) {
            Ok(to) if to.contains(&range) => Fits::All,
            Ok(to) if range.contains(&to) => Fits::Some,
            Ok(_) => Fits::None,
            Err(_) => Fits::All,
        },
        // Clients' packets have no mark, and are in no VRF.
        RuleAttribute::FwMark(mark) if *mark != 0 => Fits::None,
        RuleAttribute::L3MDev(true) => Fits::None,
        // These select nothing.
        RuleAttribute::FwMark(_)
        | RuleAttribute::FwMask(_)
        | RuleAttribute::L3MDev(false)
        | RuleAttribute::Table(_)
        | RuleAttribute::Priority(_)
        | RuleAttribute::Protocol(_)
        | RuleAttribute::Goto(_)
        | RuleAttribute::Realm(_)
        | RuleAttribute::SuppressIfGroup(_)
        | RuleAttribute::SuppressPrefixLen(_) => Fits::All,
        _ => Fits::Some,
    }
}

fn default_of(range: IpNet) -> IpNet {
    // A length of 0 fits either family.
    IpNet::new(range.addr(), 0).unwrap_or(range).trunc()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use netlink_packet_route::AddressFamily;
    use rtnetlink::RouteMessageBuilder;

    use super::*;

    fn rule(
        priority: u32,
        table: u32,
        inverted: bool,
        selectors: &[RuleAttribute],
        dst_len: u8,
    ) -> RuleMessage {
        let mut rule = RuleMessage::default();
        rule.header.family = AddressFamily::Inet;
        rule.header.action = RuleAction::ToTable;
        rule.header.dst_len = dst_len;
        rule.header.flags = if inverted { RuleFlags::Invert } else { RuleFlags::empty() };
        rule.attributes =
            [&[RuleAttribute::Priority(priority), RuleAttribute::Table(table)], selectors].concat();
        rule
    }

    #[test]
    fn rules_of_one_priority_come_in_the_order_in_which_they_were_made() {
        let range = "198.18.0.0/15".parse().unwrap();
        let mut route = RouteMessageBuilder::<Ipv4Addr>::new().build();
        route.attributes.push(RouteAttribute::Table(77));
        let (other, local) = (rule(100, 77, false, &[], 0), rule(100, LOCAL, false, &[], 0));
        for (rules, used) in [([other.clone(), local.clone()], true), ([local, other], false)] {
            let network =
                Network { routes: vec![route.clone()], rules: rules.to_vec(), ..Network::default() };
            assert_eq!(network.user_of(range).is_some(), used);
        }
    }

    #[test]
    fn an_inverted_rule_applies_to_what_it_does_not_select() {
        let range = "198.18.0.0/15".parse().unwrap();
        let mut route = RouteMessageBuilder::<Ipv4Addr>::new().build();
        route.attributes.push(RouteAttribute::Table(77));
        let to = |text: &str| RuleAttribute::Destination(text.parse().unwrap());
        let from = RuleAttribute::Source("10.0.0.0".parse().unwrap());
        // `to` and its length, further selectors, and if the rule leads virtual addresses elsewhere: as it is, and inverted.
        for (dst_len, selectors, plain, inverted) in [
            (0, vec![], true, false),
            (0, vec![from.clone()], true, true),
            (0, vec![RuleAttribute::FwMark(51820)], false, true),
            (0, vec![RuleAttribute::L3MDev(true)], false, true),
            (8, vec![to("10.0.0.0")], false, true),
            (24, vec![to("198.18.7.0")], true, true),
            (15, vec![to("198.18.0.0")], true, false),
            (8, vec![to("198.0.0.0")], true, false),
            (8, vec![to("198.0.0.0"), from], true, true),
        ] {
            for (is_inverted, used) in [(false, plain), (true, inverted)] {
                let network = Network {
                    routes: vec![route.clone()],
                    rules: vec![
                        rule(10, 77, is_inverted, &selectors, dst_len),
                        rule(100, LOCAL, false, &[], 0),
                    ],
                    ..Network::default()
                };
                let found = network.user_of(range);
                assert_eq!(found.is_some(), used, "inverted={is_inverted} {selectors:?}: {found:?}");
            }
        }
    }
}

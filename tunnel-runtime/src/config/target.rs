//! Targets that an agent may dial: `CIDR:PORTS` and `node:PORTS`.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use ipnet::IpNet;

use super::value::{cidr, entries};

/// Ports of a rule: `*`, or comma-separated ports and ranges such as `22,8000-8099`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSet(Vec<RangeInclusive<u16>>);

impl PortSet {
    /// Returns all ports but 0.
    pub fn all() -> Self {
        Self(vec![1..=u16::MAX])
    }

    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

impl FromStr for PortSet {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if s.trim() == "*" {
            return Ok(Self::all());
        }
        let ranges = entries(s)
            .map(|entry| {
                let (low, high) = entry.split_once('-').unwrap_or((entry, entry));
                match (low.trim().parse::<u16>(), high.trim().parse::<u16>()) {
                    (Ok(low), Ok(high)) if low != 0 && low <= high => Ok(low..=high),
                    _ => Err(format!("{entry:?} is not a port, a range such as 8000-8099, or *")),
                }
            })
            .collect::<Result<Vec<_>, _>>()?;
        if ranges.is_empty() {
            return Err("no port given; use ports such as 22,8000-8099, or * for every port".to_owned());
        }
        Ok(Self(ranges))
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::all() {
            return f.write_str("*");
        }
        for (i, range) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let (low, high) = (range.start(), range.end());
            if low == high { write!(f, "{comma}{low}")? } else { write!(f, "{comma}{low}-{high}")? }
        }
        Ok(())
    }
}

/// Addresses of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetNet {
    /// The node's current addresses, except loopback.
    Node,
    Net(IpNet),
}

/// One `--allow-target`: addresses and ports that the agent may dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRule {
    pub net: TargetNet,
    pub ports: PortSet,
}

impl TargetRule {
    /// True if the rule has an address range that covers this target. Always false for `node`: the node's addresses
    /// are not known here.
    pub fn names(&self, address: IpAddr, port: u16) -> bool {
        matches!(&self.net, TargetNet::Net(net) if net.contains(&address)) && self.ports.contains(port)
    }
}

impl FromStr for TargetRule {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        // Split at the last colon: an IPv6 range contains colons.
        let (net, ports) = s
            .trim()
            .rsplit_once(':')
            .filter(|(net, _)| !net.is_empty())
            .ok_or("not CIDR:PORTS; use one such as 10.8.0.0/24:22,80, [fd00::/64]:443 or node:*")?;
        let ports = ports.parse()?;
        if net == "node" {
            return Ok(Self { net: TargetNet::Node, ports });
        }
        let bare = net.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if bare.is_none() && net.contains(':') && !net.contains('/') {
            // fd00::1:22 could also be an address without a port.
            return Err("put an IPv6 address in brackets: [ADDRESS]:PORTS".to_owned());
        }
        Ok(Self { net: TargetNet::Net(cidr(bare.unwrap_or(net))?), ports })
    }
}

impl fmt::Display for TargetRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.net {
            TargetNet::Node => write!(f, "node:{}", self.ports),
            TargetNet::Net(net @ IpNet::V4(_)) => write!(f, "{net}:{}", self.ports),
            TargetNet::Net(net @ IpNet::V6(_)) => write!(f, "[{net}]:{}", self.ports),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rules() {
        for (value, printed) in [
            ("10.8.0.0/24:22,80", "10.8.0.0/24:22,80"),
            ("10.8.0.7:22", "10.8.0.7/32:22"),
            ("[fd00::/64]:443", "[fd00::/64]:443"),
            ("fd00::/64:8000-8099", "[fd00::/64]:8000-8099"),
            ("[fd00::7]:*", "[fd00::7/128]:*"),
            ("node:*", "node:*"),
            ("node: 10250 , 10255", "node:10250,10255"),
            ("0.0.0.0/0:*", "0.0.0.0/0:*"),
        ] {
            let rule: TargetRule = value.parse().unwrap_or_else(|e| panic!("{value}: {e}"));
            assert_eq!(rule.to_string(), printed);
            assert_eq!(printed.parse::<TargetRule>().unwrap(), rule);
        }
        for (value, reason) in [
            ("10.8.0.0/24", "not CIDR:PORTS; use one such as 10.8.0.0/24:22,80, [fd00::/64]:443 or node:*"),
            (":22", "not CIDR:PORTS; use one such as 10.8.0.0/24:22,80, [fd00::/64]:443 or node:*"),
            ("10.8.0.0/24:", "no port given; use ports such as 22,8000-8099, or * for every port"),
            ("10.8.0.0/24:0", "\"0\" is not a port, a range such as 8000-8099, or *"),
            ("10.8.0.0/24:90-80", "\"90-80\" is not a port, a range such as 8000-8099, or *"),
            ("10.8.0.1/24:1", "\"10.8.0.1/24\" has bits set after its prefix; did you mean 10.8.0.0/24?"),
            ("fd00::1:22", "put an IPv6 address in brackets: [ADDRESS]:PORTS"),
            ("edge:22", "\"edge\" is not an address range; use ADDRESS/BITS such as 10.8.0.0/16"),
        ] {
            assert_eq!(value.parse::<TargetRule>().unwrap_err(), reason, "{value}");
        }
    }

    proptest! {
        #[test]
        fn a_port_set_is_the_union_of_its_ranges(
            ranges in prop::collection::vec((1..=u16::MAX, 0u16..200), 1..6), port in any::<u16>()
        ) {
            let ranges: Vec<_> = ranges.into_iter().map(|(low, len)| low..=low.saturating_add(len)).collect();
            let text = ranges.iter().map(|r| format!("{}-{}", r.start(), r.end())).collect::<Vec<_>>().join(",");
            let set: PortSet = text.parse().unwrap();
            prop_assert_eq!(set.contains(port), ranges.iter().any(|r| r.contains(&port)));
            prop_assert_eq!(set.to_string().parse::<PortSet>().unwrap(), set);
        }

        #[test]
        fn the_parser_never_panics(value in "\\PC{0,40}") {
            let _ = value.parse::<TargetRule>();
        }
    }
}

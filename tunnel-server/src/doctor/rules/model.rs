//! Rules of iptables and nftables, as far as they may concern a TCP connection.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use ipnet::IpNet;

/// Where the kernel enters a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hook {
    NatOutput,
    NatPrerouting,
    FilterInput,
}

/// A chain's table, with its family (ip, ip6, inet), and its name.
pub(super) type ChainName = (String, String);

#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) hooks: Vec<Hook>,
    /// What no rule decides is dropped.
    pub(super) drops: bool,
    pub(super) rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) tests: Tests,
    pub(super) action: Action,
    /// As the tool prints it.
    pub(super) text: String,
}

/// What a rule asks of a packet.
#[derive(Clone, Debug, Default)]
pub(super) struct Tests {
    /// It is for another protocol than TCP.
    pub(super) not_tcp: bool,
    pub(super) destination: Option<Is<Vec<IpNet>>>,
    pub(super) ports: Option<Is<Vec<RangeInclusive<u16>>>>,
    /// Something else, which may or may not be so.
    pub(super) other: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Is<T> {
    pub(super) not: bool,
    pub(super) of: T,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The connection goes elsewhere.
    Rewrite,
    /// Another chain of the table; `goto` does not come back.
    Jump {
        chain: String,
        back: bool,
    },
    Accept,
    Drop,
    Return,
    /// It goes on.
    Other,
}

/// Rules of all tables.
#[derive(Debug, Default)]
pub(crate) struct Ruleset {
    pub(super) chains: BTreeMap<ChainName, Chain>,
}

impl Ruleset {
    pub(super) fn chain(&mut self, table: &str, chain: &str) -> &mut Chain {
        self.chains.entry((table.to_owned(), chain.to_owned())).or_default()
    }

    pub(super) fn at(&self, hook: Hook) -> impl Iterator<Item = &ChainName> {
        self.chains.iter().filter(move |(_, chain)| chain.hooks.contains(&hook)).map(|(name, _)| name)
    }
}

impl Tests {
    /// The ports, of these, of a TCP connection to somewhere in `destination` that may fulfil this.
    pub(super) fn may_match(&self, destination: Option<IpNet>, ports: &[u16]) -> Vec<u16> {
        if self.not_tcp {
            return Vec::new();
        }
        if let (Some(Is { not, of }), Some(destination)) = (&self.destination, destination) {
            let matches = if *not {
                !of.iter().any(|net| net.contains(&destination))
            } else {
                of.iter().any(|net| net.contains(&destination) || destination.contains(net))
            };
            if !matches {
                return Vec::new();
            }
        }
        ports.iter().copied().filter(|port| self.has_port(*port)).collect()
    }

    /// Whether every TCP connection to `destination` on the ports of [`Self::may_match`] fulfils this.
    pub(super) fn is_certain(&self, destination: Option<IpNet>) -> bool {
        let whole = match (&self.destination, destination) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(Is { not: false, of }), Some(to)) => of.iter().any(|net| net.contains(&to)),
            (Some(Is { not: true, of }), Some(to)) => {
                !of.iter().any(|net| net.contains(&to) || to.contains(net))
            }
        };
        whole && !self.other && !self.not_tcp
    }

    fn has_port(&self, port: u16) -> bool {
        self.ports.as_ref().is_none_or(|Is { not, of }| of.iter().any(|range| range.contains(&port)) != *not)
    }
}

//! This host's firewall rules, as its tools print them: finds those that may have taken or dropped a connection.
//!
//! They are read after a connection was tried and failed, or if none can be tried. So their combined effect is not
//! computed: a rule is named if it may match the connection by protocol, destination and port.

mod read;
#[cfg(test)]
mod tests;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use text::{Action, action, is_unconditional, may_concern, ports_of, words};

/// Text for a chain whose policy drops the connection.
const POLICY: &str = "policy DROP";

/// Point at which the kernel enters a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// Rewrites destinations of this host's or other hosts' connections.
    Nat,
    /// Packets for this host.
    Input,
    /// Packets from this host.
    Output,
}

/// A table with its family, such as `ip nat`, and a chain in it.
type ChainName = (String, String);

#[derive(Debug, Default)]
struct Chain {
    hook: Option<Hook>,
    /// True if packets that no rule decides are dropped.
    drops: bool,
    rules: Vec<String>,
}

/// The rules of all tables.
#[derive(Debug, Default)]
pub(super) struct Rules {
    chains: BTreeMap<ChainName, Chain>,
    /// The tools or files they were read with.
    pub(super) with: Vec<String>,
    /// The reasons why others could not be read.
    pub(super) unread: Vec<String>,
}

/// A rule that may match a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Suspect {
    /// True if neither the rule nor the rules leading to it test more than protocol, port and destination.
    pub(super) unconditional: bool,
    pub(super) table: String,
    pub(super) chain: String,
    /// The chain of the table at which the kernel enters.
    pub(super) base: String,
    pub(super) rule: String,
}

impl Suspect {
    /// The rule with its location.
    pub(super) fn shown(&self, what: &str) -> String {
        format!("table {}, chain {}, {what}: {}", self.table, self.chain, self.rule)
    }
}

impl Rules {
    /// Rules that send a connection to one of `virtual_addresses` elsewhere.
    pub(super) fn takers(&self, virtual_addresses: IpNet, port: u16) -> Vec<Suspect> {
        self.search(Hook::Nat, Some(virtual_addresses), port, Action::Rewrite)
    }

    /// Ports of `virtual_addresses` in rules that send them elsewhere; the first port of a range.
    pub(super) fn ports_taken(&self, virtual_addresses: IpNet) -> BTreeSet<u16> {
        let nat = self.chains.iter().filter(|((table, _), _)| self.nat_bases(table).next().is_some());
        let rules = nat.flat_map(|(_, chain)| &chain.rules).map(|rule| (rule, words(rule)));
        let taken = rules.filter(|(rule, words)| {
            matches!(action(words), Action::Rewrite | Action::Chain(_))
                && may_concern(rule, words, Some(virtual_addresses), None)
        });
        taken.flat_map(|(_, words)| ports_of(&words)).collect()
    }

    /// Returns the rule or policy that is most likely to drop a connection at `hook`.
    pub(super) fn dropper(&self, hook: Hook, to: Option<IpNet>, port: u16) -> Option<Suspect> {
        let mut found = self.search(hook, to, port, Action::Drop);
        found.extend(self.bases(hook, to).filter(|(_, chain)| chain.drops).map(|((table, base), _)| {
            Suspect {
                unconditional: true,
                table: table.clone(),
                chain: base.clone(),
                base: base.clone(),
                rule: POLICY.to_owned(),
            }
        }));
        // Fewer words mean fewer conditions.
        found.into_iter().min_by_key(|suspect| (!suspect.unconditional, suspect.rule.len()))
    }

    /// Returns the rule that certainly closes this port to everyone, unless a rule may admit some.
    pub(super) fn closes(&self, to: Option<IpNet>, port: u16) -> Option<Suspect> {
        if !self.search(Hook::Input, to, port, Action::Accept).is_empty() {
            return None;
        }
        self.dropper(Hook::Input, to, port).filter(|suspect| suspect.unconditional)
    }

    /// Returns Calico's rule that drops packets from pods to their host. Only packets of pods' interfaces pass it.
    pub(super) fn calicos_drop(&self) -> Option<String> {
        let chain = |(_, name): &ChainName| name == "cali-wl-to-host";
        self.chains.iter().filter(|(name, _)| chain(name)).flat_map(|(_, chain)| &chain.rules).find_map(
            |rule| {
                let drops =
                    rule.contains("DefaultEndpointToHostAction") && action(&words(rule)) == Action::Drop;
                drops.then(|| rule.clone())
            },
        )
    }

    /// The chains of a table at which the kernel starts to rewrite destinations.
    pub(super) fn nat_bases(&self, table: &str) -> impl Iterator<Item = &str> {
        let bases =
            self.chains.iter().filter(move |((of, _), chain)| of == table && chain.hook == Some(Hook::Nat));
        bases.map(|((_, name), _)| name.as_str())
    }

    /// True if the table has a chain with such a name.
    pub(super) fn has_chain(&self, table: &str, name: impl Fn(&str) -> bool) -> bool {
        self.chains.keys().any(|(other, chain)| other == table && name(chain))
    }

    fn bases(&self, hook: Hook, to: Option<IpNet>) -> impl Iterator<Item = (&ChainName, &Chain)> {
        let of_family = move |table: &str| match (table.split(' ').next(), to) {
            (Some("ip"), Some(to)) => to.addr().is_ipv4(),
            (Some("ip6"), Some(to)) => to.addr().is_ipv6(),
            _ => true,
        };
        self.chains.iter().filter(move |(name, chain)| chain.hook == Some(hook) && of_family(&name.0))
    }

    /// Finds rules with this action in the chains that a connection may pass.
    fn search(&self, hook: Hook, to: Option<IpNet>, port: u16, wanted: Action<'_>) -> Vec<Suspect> {
        let mut chains: Vec<_> =
            self.bases(hook, to).map(|(name, chain)| (&name.1, name, chain, true)).collect();
        let mut seen: BTreeSet<&ChainName> = chains.iter().map(|(_, name, ..)| *name).collect();
        let (mut found, mut next) = (Vec::new(), 0);
        while let Some((base, name, chain, unconditional)) = chains.get(next).copied() {
            next += 1;
            for rule in &chain.rules {
                let words = words(rule);
                if !may_concern(rule, &words, to, Some(port)) {
                    continue;
                }
                let unconditional = unconditional && is_unconditional(&words);
                let action = action(&words);
                if action == wanted {
                    found.push(Suspect {
                        unconditional,
                        table: name.0.clone(),
                        chain: name.1.clone(),
                        base: base.clone(),
                        rule: rule.clone(),
                    });
                } else if let Action::Chain(to) = action
                    && let Some((name, chain)) = self.chains.get_key_value(&(name.0.clone(), to.to_owned()))
                    && seen.insert(name)
                {
                    chains.push((base, name, chain, unconditional));
                }
            }
        }
        found
    }
}

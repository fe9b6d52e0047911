//! This host's firewall rules, as its tools print them: which of them may have taken or dropped a connection.
//!
//! They are read where a connection was tried and failed, or where none can be tried. So nothing is decided here about what all
//! rules do together: one that may be for the connection, by its protocol, destination and port, is named.

mod read;
#[cfg(test)]
mod tests;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use text::{Action, action, is_unconditional, may_concern, ports_of, words};

/// What a chain without a rule for the connection does.
const POLICY: &str = "policy DROP";

/// Where the kernel enters a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// Rewrites destinations, of this host's connections or of others'.
    Nat,
    /// What is for this host.
    Input,
    /// What this host sends.
    Output,
}

/// A table with its family, such as `ip nat`, and a chain in it.
type ChainName = (String, String);

#[derive(Debug, Default)]
struct Chain {
    hook: Option<Hook>,
    /// What no rule decides is dropped.
    drops: bool,
    rules: Vec<String>,
}

/// The rules of all tables.
#[derive(Debug, Default)]
pub(super) struct Rules {
    chains: BTreeMap<ChainName, Chain>,
    /// What they were read with.
    pub(super) with: Vec<String>,
    /// Why others could not be read.
    pub(super) unread: Vec<String>,
}

/// A rule that may be for a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Suspect {
    /// Neither it nor a rule that leads to it asks for more than protocol, port and destination.
    pub(super) unconditional: bool,
    pub(super) table: String,
    pub(super) chain: String,
    /// The chain of the table that the kernel enters.
    pub(super) base: String,
    pub(super) rule: String,
}

impl Suspect {
    /// Where it is, and what it says.
    pub(super) fn shown(&self, what: &str) -> String {
        format!("table {}, chain {}, {what}: {}", self.table, self.chain, self.rule)
    }
}

impl Rules {
    /// Rules that send a connection to one of `tokens` elsewhere.
    pub(super) fn takers(&self, tokens: IpNet, port: u16) -> Vec<Suspect> {
        self.search(Hook::Nat, Some(tokens), port, Action::Rewrite)
    }

    /// The ports of `tokens` that rules name and send elsewhere; of a range the first one.
    pub(super) fn ports_taken(&self, tokens: IpNet) -> BTreeSet<u16> {
        let nat = self.chains.iter().filter(|((table, _), _)| self.nat_bases(table).next().is_some());
        let rules = nat.flat_map(|(_, chain)| &chain.rules).map(|rule| (rule, words(rule)));
        let taken = rules.filter(|(rule, words)| {
            matches!(action(words), Action::Rewrite | Action::Chain(_))
                && may_concern(rule, words, Some(tokens), None)
        });
        taken.flat_map(|(_, words)| ports_of(&words)).collect()
    }

    /// The rule, or the policy, that is the likeliest to drop a connection which comes in from elsewhere.
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
        // The fewer words, the fewer conditions.
        found.into_iter().min_by_key(|suspect| (!suspect.unconditional, suspect.rule.len()))
    }

    /// What certainly keeps everybody out of this port, unless a rule may let some in.
    pub(super) fn closes(&self, to: Option<IpNet>, port: u16) -> Option<Suspect> {
        if !self.search(Hook::Input, to, port, Action::Accept).is_empty() {
            return None;
        }
        self.dropper(Hook::Input, to, port).filter(|suspect| suspect.unconditional)
    }

    /// Calico's verdict on what pods send to their host, which no interface but a pod's own meets.
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

    /// The chains of a table in which the kernel begins to rewrite destinations.
    pub(super) fn nat_bases(&self, table: &str) -> impl Iterator<Item = &str> {
        let bases =
            self.chains.iter().filter(move |((of, _), chain)| of == table && chain.hook == Some(Hook::Nat));
        bases.map(|((_, name), _)| name.as_str())
    }

    /// Whether the table has a chain of this kind.
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

    /// The rules with this action, in the chains that a connection may come through.
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

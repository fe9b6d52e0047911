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

/// Chains within chains beyond this are not followed.
const DEPTH: usize = 16;
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
pub(super) type ChainName = (String, String);

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
    /// The chains that lead to it, its own last.
    pub(super) path: Vec<ChainName>,
    pub(super) rule: String,
    /// The ports that it is for, of those that it names.
    pub(super) ports: BTreeSet<u16>,
}

impl Suspect {
    /// Where it is, and what it says.
    pub(super) fn shown(&self, what: &str) -> String {
        let (table, chain) = self.path.last().cloned().unwrap_or_default();
        format!("table {table}, chain {chain}, {what}: {}", self.rule)
    }

    pub(super) fn is_in(&self, chain: impl Fn(&str) -> bool) -> bool {
        self.path.iter().any(|(_, name)| chain(name))
    }

    pub(super) fn table(&self) -> &str {
        self.path.last().map_or("", |(table, _)| table)
    }
}

impl Rules {
    /// Rules that send a connection to one of `tokens` elsewhere. Without a port: at any port that they name.
    pub(super) fn takers(&self, tokens: IpNet, port: Option<u16>) -> Vec<Suspect> {
        self.search(Hook::Nat, Some(tokens), port, |action| matches!(action, Action::Rewrite))
    }

    /// The rule, or the policy, that is the likeliest to drop a connection which comes in from elsewhere.
    pub(super) fn dropper(&self, hook: Hook, to: Option<IpNet>, port: u16) -> Option<Suspect> {
        let mut found = self.search(hook, to, Some(port), |action| matches!(action, Action::Drop));
        found.extend(self.bases(hook, to).filter(|(_, chain)| chain.drops).map(|(name, _)| Suspect {
            unconditional: true,
            path: vec![name.clone()],
            rule: POLICY.to_owned(),
            ports: BTreeSet::new(),
        }));
        // The fewer words, the fewer conditions.
        found.into_iter().min_by_key(|suspect| (!suspect.unconditional, suspect.rule.len()))
    }

    /// What certainly keeps everybody out of this port, unless a rule may let some in.
    pub(super) fn closes(&self, to: Option<IpNet>, port: u16) -> Option<Suspect> {
        let accepts = |action: &Action<'_>| matches!(action, Action::Accept);
        if !self.search(Hook::Input, to, Some(port), accepts).is_empty() {
            return None;
        }
        self.dropper(Hook::Input, to, port).filter(|suspect| suspect.unconditional)
    }

    /// Calico's verdict on what pods send to their host, which no interface but a pod's own meets.
    pub(super) fn calicos_drop(&self) -> Option<Suspect> {
        self.chains.iter().find_map(|(name, chain)| {
            let drops = |rule: &&String| {
                rule.contains("DefaultEndpointToHostAction") && action(&words(rule)) == Action::Drop
            };
            let rule = chain.rules.iter().find(drops).filter(|_| name.1 == "cali-wl-to-host")?;
            let (path, ports) = (vec![name.clone()], BTreeSet::new());
            Some(Suspect { unconditional: true, path, rule: rule.clone(), ports })
        })
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

    fn search(
        &self,
        hook: Hook,
        to: Option<IpNet>,
        port: Option<u16>,
        wanted: fn(&Action<'_>) -> bool,
    ) -> Vec<Suspect> {
        let mut search = Search { rules: self, to, port, wanted, found: BTreeSet::new() };
        for (name, _) in self.bases(hook, to) {
            search.follow(&mut vec![name.clone()], true, &BTreeSet::new());
        }
        search.found.into_iter().collect()
    }
}

struct Search<'a> {
    rules: &'a Rules,
    to: Option<IpNet>,
    port: Option<u16>,
    wanted: fn(&Action<'_>) -> bool,
    found: BTreeSet<Suspect>,
}

impl Search<'_> {
    /// Follows the last chain of `path`; `ports` are those that the rules which lead there name.
    fn follow(&mut self, path: &mut Vec<ChainName>, unconditional: bool, ports: &BTreeSet<u16>) {
        let Some(name) = path.last().filter(|_| path.len() <= DEPTH).cloned() else { return };
        let Some(chain) = self.rules.chains.get(&name) else { return };
        for rule in &chain.rules {
            let words = words(rule);
            if !may_concern(rule, &words, self.to, self.port) {
                continue;
            }
            let unconditional = unconditional && is_unconditional(&words);
            let named = ports_of(&words);
            let ports = if named.is_empty() { ports.clone() } else { named };
            let action = action(&words);
            if (self.wanted)(&action) {
                let (path, rule) = (path.clone(), rule.clone());
                self.found.insert(Suspect { unconditional, path, rule, ports });
            } else if let Action::Chain(next) = action {
                path.push((name.0.clone(), next.to_owned()));
                self.follow(path, unconditional, &ports);
                path.pop();
            }
        }
    }
}

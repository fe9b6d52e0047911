//! The policy: callers and the destinations that they may reach through the listeners that authenticate. Each rule of
//! the file permits something; everything else is denied.

mod caller;
mod file;

use std::collections::BTreeMap;
use std::net::IpAddr;

pub use caller::{Destination, Identity, Origin};
pub(crate) use file::Ranges;

use file::{File, What, Who};
use tunnel_runtime::config::PortSet;
use tunnel_runtime::net::may_dial;
use tunnel_runtime::yaml;

/// The rules in effect. The default has none and denies everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
}

/// Permits each of `from` to reach each of `to`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    name: String,
    from: Vec<Who>,
    to: Vec<Target>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    to: What,
    ports: PortSet,
}

/// Kubernetes' group of callers that have shown nothing.
const UNAUTHENTICATED: &str = "system:unauthenticated";

/// Formats an error with its place in the file, such as `rules[1].to[0]`.
fn wrong(rule: usize, list: &str, entry: usize, reason: &str) -> String {
    format!("rules[{rule}].{list}[{entry}]: {reason}")
}

impl Policy {
    /// Parses a policy file.
    ///
    /// # Errors
    /// Names the place and the reason.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = yaml::read(text)?;
        let mut rules: Vec<Rule> = Vec::new();
        for (number, entry) in file.rules.into_iter().enumerate() {
            if entry.name.trim().is_empty() {
                return Err(format!("rules[{number}].name: empty; the log names the rule that permits"));
            }
            if let Some(first) = rules.iter().position(|rule| rule.name == entry.name) {
                let name = &entry.name;
                return Err(format!("rules[{number}].name: {name:?} is the name of rules[{first}] already"));
            }
            for (list, empty) in [("from", entry.from.is_empty()), ("to", entry.to.is_empty())] {
                if empty {
                    return Err(format!(
                        "rules[{number}].{list}: an empty list permits nothing; leave the rule out"
                    ));
                }
            }
            for (place, from) in entry.from.iter().enumerate() {
                from.check().map_err(|reason| wrong(number, "from", place, &reason))?;
            }
            let to = entry
                .to
                .into_iter()
                .enumerate()
                .map(|(place, to)| Target::new(to).map_err(|reason| wrong(number, "to", place, reason)));
            rules.push(Rule { name: entry.name, to: to.collect::<Result<_, _>>()?, from: entry.from });
        }
        Ok(Self { rules })
    }

    pub fn len(&self) -> usize {
        self.rules.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the name of the first rule that permits the connection.
    pub fn permits(&self, caller: Origin<'_>, to: Destination<'_>, port: u16) -> Option<&str> {
        let permits = |rule: &&Rule| {
            rule.to.iter().any(|target| target.covers(to, port))
                && rule.from.iter().any(|from| from.is(caller))
        };
        self.rules.iter().find(permits).map(|rule| rule.name.as_str())
    }

    /// True if any rule permits this caller anything. A caller that no rule matches does not get detailed errors.
    pub fn knows(&self, caller: Origin<'_>) -> bool {
        self.rules.iter().any(|rule| rule.from.iter().any(|from| from.is(caller)))
    }
}

impl Who {
    fn check(&self) -> Result<(), String> {
        if *self == Self::default() {
            let reason = "it names nobody; for everybody write clients: [0.0.0.0/0, \"::/0\"]";
            return Err(reason.to_owned());
        }
        for (key, group) in [("organization", &self.organization), ("group", &self.group)] {
            if group.as_deref() == Some(UNAUTHENTICATED) {
                return Err(format!(
                    "{key}: {UNAUTHENTICATED:?} matches nobody, as whoever shows a certificate or token is authenticated; for \
                     everybody write clients: [0.0.0.0/0, \"::/0\"]"
                ));
            }
        }
        if let Some(key) = self.nodes.as_ref().and_then(|nodes| nodes.0.set_by_kubelets()) {
            return Err(format!(
                "nodes: a kubelet may set the label {key:?} of its own Node; use labels below node-restriction.kubernetes.io/ \
                 or node-role.kubernetes.io/, or name each node with `node`"
            ));
        }
        if self.nodes.as_ref().is_some_and(|nodes| nodes.0.matches(&BTreeMap::new())) {
            let reason =
                "nodes: it matches a node without labels, which any new Node is; also ask for a label";
            return Err(reason.to_owned());
        }
        let kinds = ["cn or organization", "user, group or serviceAccount", "node or nodes"];
        let kinds = kinds.into_iter().zip(self.kinds());
        let named: Vec<_> = kinds.filter(|(_, named)| *named).map(|(kind, _)| kind).collect();
        match named.as_slice() {
            [one, other, ..] => Err(format!("no caller has both {one} and {other}; write two entries")),
            _ => Ok(()),
        }
    }

    /// True for each kind of caller that it names: by a certificate, by a token, and workloads on a node.
    fn kinds(&self) -> [bool; 3] {
        let certificate = self.cn.is_some() || self.organization.is_some();
        let token = self.user.is_some() || self.group.is_some() || self.service_account.is_some();
        [certificate, token, self.node.is_some() || self.nodes.is_some()]
    }

    fn is(&self, caller: Origin<'_>) -> bool {
        let in_ranges = self.clients.as_ref().is_none_or(|ranges| contains(ranges, caller.client));
        let equals =
            |wanted: &Option<String>, value: &str| wanted.as_ref().is_none_or(|wanted| wanted == value);
        let among = |wanted: &Option<String>, values: &[String]| {
            wanted.as_ref().is_none_or(|wanted| values.contains(wanted))
        };
        let [certificate, token, node] = self.kinds();
        in_ranges
            && match caller.identity {
                // A workload on an edge node comes from its agent's address, which does not identify it.
                Identity::Node(name) => {
                    node && self.node.as_ref().is_none_or(|wanted| wanted == name)
                        && self
                            .nodes
                            .as_ref()
                            .is_none_or(|nodes| caller.node.is_some_and(|node| nodes.0.matches(&node.labels)))
                }
                _ if node => false,
                Identity::Certificate(known) => {
                    !token && equals(&self.cn, &known.name) && among(&self.organization, &known.groups)
                }
                Identity::Token(known) => {
                    !certificate
                        && equals(&self.user, &known.name)
                        && among(&self.group, &known.groups)
                        && self.service_account.as_ref().is_none_or(|account| account.0 == known.name)
                }
                Identity::None => !certificate && !token,
            }
    }
}

impl Target {
    fn new(mut to: What) -> Result<Self, &'static str> {
        let Some(ports) = to.ports.take() else {
            return Err("ports: missing; name ports such as [22, 8000-8099], or [\"*\"] for every one");
        };
        let node = to.node.is_some() || to.nodes.is_some();
        match (node, to.service.is_some(), to.addresses.is_some()) {
            (true, true, _) | (_, true, true) => {
                Err("a service stands alone: its endpoints are what is reached; write two entries")
            }
            (false, false, false) => Err("it names nothing; give node, nodes, service or addresses"),
            _ => Ok(Self { to, ports: ports.0 }),
        }
    }

    fn covers(&self, to: Destination<'_>, port: u16) -> bool {
        let Self { to: wanted, ports } = self;
        if !ports.contains(port) {
            return false;
        }
        let on_nodes = wanted.node.is_some() || wanted.nodes.is_some();
        match to {
            Destination::Edge { node, address } => {
                on_nodes
                    && wanted.node.as_ref().is_none_or(|name| *name == node.name)
                    && wanted.nodes.as_ref().is_none_or(|nodes| nodes.0.matches(&node.labels))
                    && match &wanted.addresses {
                        Some(ranges) => contains(ranges, address),
                        None => node.addresses.contains(&address),
                    }
            }
            Destination::Service(name) => wanted.service.as_ref().is_some_and(|wanted| wanted.0 == name),
            // A range in the cloud never opens edge nodes, however wide it is. Postern's own listeners lead to all of
            // them, so only a loopback range opens those on this host's loopback, and only their address itself others.
            Destination::Cloud { address, own } => {
                let opened = |ranges: &Ranges| may_dial(&ranges.0, address, own);
                !on_nodes && wanted.addresses.as_ref().is_some_and(opened)
            }
        }
    }
}

fn contains(ranges: &Ranges, address: IpAddr) -> bool {
    let address = address.to_canonical();
    ranges.0.iter().any(|range| range.contains(&address))
}

#[cfg(test)]
mod tests;

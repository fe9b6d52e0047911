//! What rules do to a connection to a token, and to one of an agent.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use tunnel_core::doctor::{Code, Finding, codes};

use super::model::{Action, ChainName, Hook, Ruleset, Tests};

/// Chains within chains beyond this are not followed: nobody writes that many.
const DEPTH: usize = 16;

/// The rules that would send a redirected connection elsewhere. The kernel applies them to the token address and the port
/// that the client asked for, after the redirect has written the token.
pub(crate) fn taken(rules: &Ruleset, tokens: &[IpNet], ports: &[u16]) -> Vec<Finding> {
    let mut found = BTreeSet::new();
    for hook in [Hook::NatOutput, Hook::NatPrerouting] {
        for chain in rules.at(hook) {
            for tokens in tokens.iter().filter(|tokens| is_of_family(&chain.0, tokens)) {
                let mut search = Search { rules, tokens: *tokens, found: &mut found };
                search.follow(chain, ports, &mut vec![chain.clone()]);
            }
        }
    }
    found.into_iter().map(|conflict| conflict.finding(tokens)).collect()
}

fn is_of_family(table: &str, tokens: &IpNet) -> bool {
    match table.split(' ').next() {
        Some("ip") => tokens.addr().is_ipv4(),
        Some("ip6") => tokens.addr().is_ipv6(),
        _ => true,
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Conflict {
    /// The chains that lead to the rule, its own last.
    path: Vec<ChainName>,
    rule: String,
    ports: Vec<u16>,
}

struct Search<'a> {
    rules: &'a Ruleset,
    tokens: IpNet,
    found: &'a mut BTreeSet<Conflict>,
}

impl Search<'_> {
    /// Follows a chain for these ports. Returns those for which it comes back.
    fn follow(&mut self, name: &ChainName, ports: &[u16], path: &mut Vec<ChainName>) -> Vec<u16> {
        let mut left = ports.to_vec();
        let Some(chain) = self.rules.chains.get(name).filter(|_| path.len() <= DEPTH) else { return left };
        let mut returned: Vec<u16> = Vec::new();
        for rule in &chain.rules {
            let may = rule.tests.may_match(Some(self.tokens), &left);
            if may.is_empty() {
                continue;
            }
            let certain = rule.tests.is_certain(Some(self.tokens));
            let mut gone = match &rule.action {
                Action::Rewrite => {
                    let conflict =
                        Conflict { path: path.clone(), rule: rule.text.clone(), ports: may.clone() };
                    self.found.insert(conflict);
                    may
                }
                Action::Jump { chain, back } => {
                    let next = (name.0.clone(), chain.clone());
                    path.push(next.clone());
                    let came_back = self.follow(&next, &may, path);
                    path.pop();
                    may.into_iter().filter(|port| !back || !came_back.contains(port)).collect()
                }
                Action::Return => {
                    if certain {
                        returned.extend(&may);
                    }
                    may
                }
                Action::Accept | Action::Drop => may,
                Action::Other => Vec::new(),
            };
            if !certain {
                gone.clear();
            }
            left.retain(|port| !gone.contains(port));
        }
        left.extend(returned);
        left
    }
}

impl Conflict {
    fn owner(&self, tokens: &[IpNet]) -> (&'static Code, String) {
        let names = || self.path.iter().map(|(_, chain)| chain.as_str());
        let of_port = |name: &str| {
            name.strip_prefix("TUNNEL-PORT-")
                .is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let flush = |chain: &str| {
            format!(
                "stop it for good, then remove its rules: `iptables -t nat -D OUTPUT -p tcp -j {chain}`, `iptables -t nat -F \
                 {chain}`"
            )
        };
        if names().any(of_port) {
            let fix = "kubectl -n kube-system delete deployment yurt-tunnel-server, and on this host `iptables-save -t nat \
                       | grep -v TUNNEL-PORT | iptables-restore -T nat`";
            return (&codes::YURTTUNNEL_RULES, fix.to_owned());
        }
        if names().any(|name| name == "TUNNEL-PORT" || name.starts_with("EDGE-MESH")) {
            let fix = "switch CloudCore's iptablesManager off (`modules.iptablesManager.enable: false`), or leave its port out \
                       of --redirect-ports; ";
            return (&codes::KUBEEDGE_RULES, format!("{fix}{}", flush("TUNNEL-PORT")));
        }
        let kube_proxy =
            |(table, chain): &ChainName| chain.starts_with("KUBE-") || table.ends_with(" kube-proxy");
        if self.path.iter().any(kube_proxy) {
            let ports = list(&self.ports);
            let fix = format!(
                "a NodePort is {ports}: give that Service another one (`kubectl get services -A | grep {ports}`), or \
                 leave the port out of --redirect-ports"
            );
            return (&codes::KUBE_PROXY_RULES, fix);
        }
        let table = self.path.last().map_or("", |(table, _)| table.as_str());
        let ranges = tokens.iter().filter(|range| is_of_family(table, range));
        let exclude = ranges.map(|range| {
            let tool = if range.addr().is_ipv6() { "ip6tables" } else { "iptables" };
            format!("`{tool} -t nat -I OUTPUT -d {range} -j RETURN`")
        });
        let exclude = exclude.collect::<Vec<_>>().join(" and ");
        let fix = format!(
            "remove the rule, limit it to its own addresses, or exclude the token range from it, such as by {exclude}"
        );
        (&codes::FOREIGN_RULES, fix)
    }

    fn finding(&self, tokens: &[IpNet]) -> Finding {
        let (code, fix) = self.owner(tokens);
        let (table, chain) = self.path.last().cloned().unwrap_or_default();
        let found = format!("table {table}, chain {chain}, takes port {}: {}", list(&self.ports), self.rule);
        Finding::new(code, found, fix)
    }
}

fn list(ports: &[u16]) -> String {
    ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// The rule, or the policy, that keeps every agent out of this port of `bind`.
pub(crate) fn filtered(rules: &Ruleset, bind: IpAddr, port: u16) -> Option<Finding> {
    rules.at(Hook::FilterInput).filter(|chain| concerns(&chain.0, bind)).find_map(|chain| {
        let Verdict::Dropped(rule) = verdict(rules, chain, port, 0) else { return None };
        let found = format!("table {}, chain {}: {rule}", chain.0, chain.1);
        let tool = if chain.0.starts_with("ip6 ") { "ip6tables" } else { "iptables" };
        let fix = format!("{tool} -I INPUT -p tcp --dport {port} -j ACCEPT (or the firewall's own command)");
        Some(Finding::new(&codes::AGENT_PORT_FILTERED, found, fix))
    })
}

fn concerns(table: &str, bind: IpAddr) -> bool {
    match table.split(' ').next() {
        // Who binds `::` is reached by IPv4 as well.
        Some("ip") => bind.is_ipv4() || bind.is_unspecified(),
        Some("ip6") => bind.is_ipv6(),
        _ => true,
    }
}

enum Verdict {
    Accepted,
    Dropped(String),
    /// Some came to the chain's end, or left it before.
    Open,
}

/// What certainly happens to every connection to `port`. Who may be accepted is.
fn verdict(rules: &Ruleset, name: &ChainName, port: u16, depth: usize) -> Verdict {
    let Some(chain) = rules.chains.get(name).filter(|_| depth <= DEPTH) else { return Verdict::Open };
    // Connections that an earlier rule has let leave this chain are not dropped by a later one.
    let (mut some_left, mut dropped) = (false, None);
    for rule in &chain.rules {
        if rule.tests.may_match(None, &[port]).is_empty()
            || only_answers(&rule.text)
            || only_loopback(&rule.text)
        {
            continue;
        }
        let certain = is_for_all(&rule.tests);
        match &rule.action {
            Action::Accept => return Verdict::Accepted,
            Action::Drop if certain => {
                dropped = Some(rule.text.clone());
                break;
            }
            Action::Return if certain => break,
            Action::Return => some_left = true,
            Action::Jump { chain, back } => {
                match verdict(rules, &(name.0.clone(), chain.clone()), port, depth + 1) {
                    Verdict::Accepted => return Verdict::Accepted,
                    Verdict::Dropped(by) if certain => {
                        dropped = Some(by);
                        break;
                    }
                    Verdict::Open if !back && certain => break,
                    Verdict::Open if !back => some_left = true,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    match dropped {
        Some(rule) if !some_left => Verdict::Dropped(rule),
        _ if chain.drops => Verdict::Dropped("policy DROP, and no rule accepts the port".to_owned()),
        _ => Verdict::Open,
    }
}

fn is_for_all(tests: &Tests) -> bool {
    !tests.other && !tests.not_tcp && tests.destination.is_none()
}

/// It accepts what belongs to a connection, or what was sent here by a rule for its destination: not what is new here.
fn only_answers(rule: &str) -> bool {
    let states = ["--ctstate ", "--state ", "ct state "].iter().find_map(|key| Some(rule.split_once(key)?.1));
    let Some(states) = states else {
        return ["ct status dnat", "ct status 0x20"].iter().any(|status| rule.contains(status));
    };
    let end = if states.starts_with('{') { '}' } else { ' ' };
    let states = states.split(end).next().unwrap_or_default();
    let has = |wanted: &[&str]| {
        states.split(|letter: char| !letter.is_ascii_alphanumeric()).any(|state| wanted.contains(&state))
    };
    // The numbers are those of `nft -n`.
    let answers = has(&["ESTABLISHED", "established", "0x2", "RELATED", "related", "0x4"]);
    answers && !has(&["NEW", "new", "0x8"])
}

fn only_loopback(rule: &str) -> bool {
    ["-i lo ", "iifname \"lo\"", "iif \"lo\"", "iif lo "].iter().any(|test| rule.contains(test))
}

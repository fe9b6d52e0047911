//! This host's firewall rules as its tools print them, and the lines that may have taken or dropped a connection.
//!
//! They are read for a connection that was tried and failed. So their combined effect is not computed: a line is a
//! suspect if its chain may be entered and it may match by protocol, destination and port.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use tunnel_doctor::tool_output;

/// The tools of both iptables back ends: a host may have rules in each.
const TOOLS: [(&str, &[&str]); 5] = [
    ("iptables-save", &[]),
    ("ip6tables-save", &[]),
    ("iptables-legacy-save", &[]),
    ("ip6tables-legacy-save", &[]),
    ("nft", &["list", "ruleset"]),
];
const TAKE: [&str; 6] = ["DNAT", "REDIRECT", "TPROXY", "dnat", "redirect", "tproxy"];
const DROP: [&str; 4] = ["DROP", "REJECT", "drop", "reject"];

/// A rule, an element of a map, or the policy of a chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    /// With its family, such as `ip nat`.
    pub(super) table: String,
    /// A chain, or a map with `@` before its name.
    pub(super) place: String,
    text: String,
    words: Vec<String>,
}

impl fmt::Display for Line {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, name) = self.place.strip_prefix('@').map_or(("chain", &*self.place), |name| ("map", name));
        write!(out, "table {}, {kind} {name}: {}", self.table, self.text)
    }
}

/// A line that may have taken or dropped a connection; the likeliest is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Suspect<'a> {
    /// False if it sends the connection elsewhere.
    pub(super) drops: bool,
    /// True if it does not name the port.
    pub(super) unnamed: bool,
    /// A longer line has more conditions.
    length: usize,
    pub(super) line: &'a Line,
}

#[derive(Debug, Default)]
pub(super) struct Rules {
    lines: Vec<Line>,
    /// The chains that the kernel enters: table, chain, hook.
    entries: Vec<[String; 3]>,
    /// The tools or files they were read with, and the reasons why others could not be read.
    pub(super) with: Vec<String>,
}

impl Rules {
    /// Reads the rules. `dir` is a directory that a pod shares with its host.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(super) async fn read(files: &[PathBuf], dir: &Path) -> Result<Self, String> {
        let mut rules = Self::default();
        for file in files {
            let name = file.display().to_string();
            let text = std::fs::read_to_string(file).map_err(|error| format!("{name}: {error}"))?;
            rules.add(&name, &text);
        }
        if !files.is_empty() {
            return Ok(rules);
        }
        for (tool, args) in TOOLS {
            match tool_output(tool, args).await {
                Ok(text) => rules.add(tool, &text),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => rules.with.push(format!("{tool}: {error}")),
            }
        }
        if rules.with.is_empty() {
            rules.with.push(by_files(dir));
        }
        Ok(rules)
    }

    fn add(&mut self, with: &str, text: &str) {
        self.with.push(with.to_owned());
        // iptables-nft keeps its tables among nft's.
        let shown: BTreeSet<String> = self.entries.iter().map(|[table, ..]| table.clone()).collect();
        let (mut family, mut table, mut place) = ("ip", String::new(), String::new());
        for line in text.lines().map(str::trim) {
            match line.split([' ', ';']).collect::<Vec<_>>()[..] {
                ["#", "Generated", "by", tool, ..] => {
                    family = if tool.starts_with("ip6") { "ip6" } else { "ip" };
                }
                [name] if name.starts_with('*') => table = format!("{family} {}", &name[1..]),
                [name, policy, ..] if name.starts_with(':') && policy != "-" => {
                    self.enter(&table, &name[1..], &name[1..].to_lowercase(), policy);
                }
                ["table", family, name, ..] => table = format!("{family} {name}"),
                ["chain", name, ..] => name.clone_into(&mut place),
                ["map", name, ..] => place = format!("@{name}"),
                ["}"] => place.clear(),
                _ if place.is_empty() => {
                    // With -c there are counters before it.
                    if let Some(at) = line.find("-A ") {
                        let chain = line[at..].split(' ').nth(1).unwrap_or_default();
                        self.push(&table, chain, &line[at..]);
                    }
                }
                _ if shown.contains(&table) => {}
                ["type", _, "hook", hook, ..] => {
                    let policy = line.split_once("policy ").map_or("", |(_, policy)| policy);
                    self.enter(&table, &place, hook, policy.trim_end_matches(';'));
                }
                ["type", ..] => {}
                _ if place.starts_with('@') => {
                    let list = line.trim_start_matches("elements = {").trim_end_matches('}');
                    list.split(',').for_each(|element| self.push(&table, &place, element.trim()));
                }
                _ => self.push(&table, &place, line),
            }
        }
    }

    fn enter(&mut self, table: &str, chain: &str, hook: &str, policy: &str) {
        self.entries.push([table, chain, hook].map(str::to_owned));
        self.push(table, chain, &format!("policy {policy}"));
    }

    fn push(&mut self, table: &str, place: &str, text: &str) {
        let words = words(text);
        let [table, place, text] = [table, place, text].map(str::to_owned);
        self.lines.push(Line { table, place, text, words });
    }

    /// The tables and chains that the kernel enters at these hooks with packets to this address.
    pub(super) fn entries(&self, hooks: &[&str], to: IpAddr) -> impl Iterator<Item = (&str, &str)> {
        let other = if to.is_ipv4() { "ip6 " } else { "ip " };
        let entered = self
            .entries
            .iter()
            .filter(move |[table, _, hook]| hooks.contains(&hook.as_str()) && !table.starts_with(other));
        entered.map(|[table, chain, _]| (table.as_str(), chain.as_str()))
    }

    /// The lines that may have taken or dropped a connection, the likeliest first. A line that names the port stands
    /// for those that it leads to.
    pub(super) fn suspects(&self, hooks: &[&str], to: IpAddr, port: u16) -> BTreeSet<Suspect<'_>> {
        let mut found = BTreeSet::new();
        let mut places: Vec<(&str, &str, Option<&Line>)> =
            self.entries(hooks, to).map(|(table, chain)| (table, chain, None)).collect();
        let mut next = 0;
        while let Some((table, place, named)) = places.get(next).copied() {
            next += 1;
            for line in self.lines.iter().filter(|line| line.table == table && line.place == place) {
                let Some(names) = concerns(&line.words, to, port) else { continue };
                let (named, target) = (named.or(names.then_some(line)), target(&line.words));
                let (drops, line) = (DROP.contains(&target), named.unwrap_or(line));
                if drops || TAKE.contains(&target) {
                    let length = line.words.len();
                    found.insert(Suspect { drops, unnamed: named.is_none(), length, line });
                } else if !places.iter().any(|(of, seen, _)| *of == table && *seen == target) {
                    places.push((table, target, named));
                }
            }
        }
        found
    }

    /// Calico's rule that drops packets from pods to their host. Only packets of pods' interfaces pass it.
    pub(super) fn calicos_drop(&self) -> Option<&Line> {
        let of_calico = |line: &&Line| line.text.contains("DefaultEndpointToHostAction");
        self.lines.iter().filter(of_calico).find(|line| DROP.contains(&target(&line.words)))
    }
}

/// Splits a rule into words, without comments, each set as one word. An element of a map reads as a rule.
fn words(rule: &str) -> Vec<String> {
    let plain: String = rule.replace("\"lo\"", "lo").split('"').step_by(2).collect();
    let plain = plain.replace("{ ", "").replace(" }", "").replace(", ", ",");
    let plain = plain.replace("daddr type", "--dst-type").replace("ct state", "--ctstate");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    let Some((key, verdict)) = plain.split_once(" : ") else { return words(&plain) };
    let part = |part: &str| match (net(part), range(part)) {
        (Some(_), _) => format!("daddr {part} "),
        (_, Some(_)) => format!("dport {part} "),
        _ => format!("{part} "),
    };
    let key: String = key.trim_end_matches(" comment ").split(" . ").map(part).collect();
    words(&(key + verdict))
}

/// The target of a rule: DNAT, drop and the like, or the chain or the map (`@NAME`) in which it continues.
fn target(words: &[String]) -> &str {
    let leads = |word: &String| matches!(word.as_str(), "-j" | "-g" | "jump" | "goto" | "vmap");
    let does = |word: &&String| TAKE.contains(&word.as_str()) || DROP.contains(&word.as_str());
    let next = words.iter().position(leads).map(|at| words.get(at + 1));
    next.unwrap_or_else(|| words.iter().find(does)).map_or("", String::as_str)
}

/// None if a rule cannot match a new TCP connection, true if it names the port. What is not understood may match.
fn concerns(words: &[String], to: IpAddr, port: u16) -> Option<bool> {
    let mut names = false;
    for (at, word) in words.iter().enumerate() {
        let is = |at: usize, signs: &[&str]| words.get(at).is_some_and(|word| signs.contains(&word.as_str()));
        let after = is(at + 1, &["!="]);
        // `reject with icmp …` tells how it rejects.
        let negated = after || (at > 0 && is(at - 1, &["!", "!=", "with"]));
        let value = words.get(at + 1 + usize::from(after)).map_or("", String::as_str);
        let any = |test: &dyn Fn(&str) -> Option<bool>| {
            let values: Option<Vec<bool>> = value.split(',').map(test).collect();
            Some(values?.contains(&true))
        };
        let matches = match word.as_str() {
            "--dport" | "--dports" | "dport" => any(&|value| Some(range(value)?.contains(&port))),
            "-d" | "daddr" => any(&|value| Some(net(value)?.contains(&to))),
            // Virtual addresses are local.
            "--dst-type" => any(&|value| Some(value.eq_ignore_ascii_case("local"))),
            "-p" | "l4proto" | "protocol" | "nexthdr" if value != "." => {
                any(&|value| Some(matches!(value, "tcp" | "6" | "all")))
            }
            "--ctstate" | "--state" => any(&|value| Some(value.eq_ignore_ascii_case("new"))),
            "-i" | "iif" | "iifname" => Some(value != "lo"),
            // `ct status dnat` is a connection that was rewritten before.
            "udp" | "sctp" | "icmp" | "icmpv6" | "status" => Some(false),
            _ => None,
        };
        if matches.is_some_and(|matches| matches == negated) {
            return None;
        }
        names |= word.contains("dport") && matches.is_some();
    }
    Some(names)
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once([':', '-']).unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

fn net(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

/// Text with the commands that write the rules to files for this program.
fn by_files(dir: &Path) -> String {
    let file = |number: usize| dir.join(format!("rules-{number}")).display().to_string();
    let (first, second) = (file(1), file(2));
    format!(
        "neither iptables-save nor nft is here: on the host `iptables-save > {first}; nft list ruleset > {second}`, then here \
         `tunnel-server doctor --rules {first} --rules {second}`"
    )
}

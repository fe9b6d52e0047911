//! The output of `nft list ruleset`, also with -n, which prints protocols and states as numbers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::model::{Action, Hook, Is, Rule, Ruleset, Tests};

/// Tables that iptables-nft keeps here: iptables-save shows them too.
const OF_IPTABLES: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];

/// Reads what nft printed. Lines that are not understood are skipped.
pub(super) fn parse(text: &str) -> Ruleset {
    let text = joined(text);
    let maps = maps(&text);
    let mut rules = Ruleset::default();
    let (mut table, mut chain) = (None::<String>, None::<String>);
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("table ") {
            let mut words = rest.trim_end_matches('{').split_whitespace();
            let (family, name) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let ours = matches!(family, "ip" | "ip6") && OF_IPTABLES.contains(&name);
            table = (!ours && matches!(family, "ip" | "ip6" | "inet")).then(|| format!("{family} {name}"));
        } else if let Some(rest) = line.strip_prefix("chain ") {
            chain = Some(rest.trim_end_matches('{').trim().to_owned());
            if let (Some(table), Some(chain)) = (&table, &chain) {
                rules.chain(table, chain);
            }
        } else if line == "}" {
            chain = None;
        } else if let (Some(table), Some(chain)) = (&table, &chain) {
            if line.starts_with("type ") {
                let base = rules.chain(table, chain);
                base.hooks.extend(hook(line));
                base.drops = line.contains("policy drop");
            } else if !line.is_empty() {
                let found = rules_of(line, &maps, table);
                rules.chain(table, chain).rules.extend(found);
            }
        }
    }
    rules
}

/// nft breaks long sets over several lines.
fn joined(text: &str) -> String {
    let (mut out, mut depth) = (String::new(), 0_i32);
    for line in text.lines() {
        let block = ["table ", "chain ", "map ", "set ", "flowtable "]
            .iter()
            .any(|word| line.trim().starts_with(word));
        let change = |sign: char| line.matches(sign).count() as i32;
        out += line.trim();
        if !block {
            depth += change('{') - change('}') + i32::from(line.trim() == "}" && depth == 0);
        }
        out.push(if depth > 0 { ' ' } else { '\n' });
        depth = depth.max(0);
    }
    out
}

/// Elements of maps whose values are verdicts, by table and name: keys and verdicts.
pub(super) type Maps = BTreeMap<(String, String), Vec<(String, String)>>;

/// The named ones.
fn maps(text: &str) -> Maps {
    let (mut maps, mut table, mut map) = (Maps::new(), String::new(), None::<String>);
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("table ") {
            rest.trim_end_matches('{').trim().clone_into(&mut table);
        } else if let Some(rest) = line.strip_prefix("map ") {
            map = Some(rest.trim_end_matches('{').trim().to_owned());
        } else if line == "}" {
            map = None;
        } else if let (Some(name), Some(list)) = (&map, line.strip_prefix("elements = ")) {
            maps.insert((table.clone(), name.clone()), elements(list));
        }
    }
    maps
}

/// Keys and verdicts of `{ key : verdict, … }`.
fn elements(list: &str) -> Vec<(String, String)> {
    let list = list.trim_start_matches('{').split('}').next().unwrap_or_default();
    let element = |text: &str| {
        let (key, verdict) = text.split_once(" : ")?;
        // A comment of the element may stand between them.
        let key = key.split(" comment ").next()?.trim();
        Some((key.to_owned(), verdict.trim().to_owned()))
    };
    list.split(',').filter_map(element).collect()
}

fn hook(line: &str) -> Option<Hook> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match (words.get(1)?, words.get(3)?) {
        (&"nat", &"output") => Some(Hook::NatOutput),
        (&"nat", &"prerouting") => Some(Hook::NatPrerouting),
        (&"filter", &"input") => Some(Hook::FilterInput),
        _ => None,
    }
}

/// One, or one for each element of a map of verdicts, which has a name or stands in the rule.
pub(super) fn rules_of(line: &str, maps: &Maps, table: &str) -> Vec<Rule> {
    if let Some((before, map)) = line.split_once(" vmap ") {
        let elements = match map.trim().strip_prefix('@') {
            Some(name) => {
                let name = name.split_whitespace().next().unwrap_or_default();
                maps.get(&(table.to_owned(), name.to_owned())).cloned().unwrap_or_default()
            }
            None => elements(map.trim()),
        };
        return elements.iter().map(|(key, verdict)| element(before, key, verdict)).collect();
    }
    let mut tests = Tests::default();
    let words: Vec<&str> = line.split_whitespace().collect();
    read_tests(&words, &mut tests);
    vec![Rule { tests, action: action(&words), text: line.to_owned() }]
}

/// `before` is the rule up to its map. It ends in the fields that the key has values of, and what it asks besides stands
/// in front of them.
fn element(before: &str, key: &str, verdict: &str) -> Rule {
    let mut tests = Tests::default();
    for (field, value) in before.split(" . ").zip(key.split(" . ")) {
        let words: Vec<&str> = field.split_whitespace().chain([value.trim()]).collect();
        read_tests(&words, &mut tests);
    }
    let words: Vec<&str> = verdict.split_whitespace().collect();
    Rule { tests, action: action(&words), text: format!("{before} {key} : {verdict}") }
}

fn read_tests(words: &[&str], tests: &mut Tests) {
    let mut at = 0;
    while at < words.len() {
        let rest = &words[at + 1..];
        match (words[at], rest.first().copied()) {
            ("tcp" | "th", Some("dport")) => {
                let (not, values, used) = operand(&rest[1..]);
                // What a named set holds is not known here.
                let ports: Option<Vec<_>> = values.iter().map(|value| port(value)).collect();
                match (bounded(&rest[1..]), ports) {
                    (Some(range), _) => tests.ports = Some(Is { not: false, of: vec![range] }),
                    (None, Some(of)) => tests.ports = Some(Is { not, of }),
                    (None, None) => tests.other = true,
                }
                at += used + 1;
            }
            ("udp" | "sctp" | "icmp" | "icmpv6", _) => tests.not_tcp = true,
            ("ip" | "ip6", Some("daddr")) => {
                let (not, values, used) = operand(&rest[1..]);
                let nets: Vec<IpNet> = values
                    .iter()
                    .filter_map(|value| {
                        value.parse().ok().or_else(|| value.parse::<IpAddr>().ok().map(IpNet::from))
                    })
                    .collect();
                if nets.len() == values.len() {
                    tests.destination = Some(Is { not, of: nets });
                } else {
                    tests.other = true;
                }
                at += used + 1;
            }
            ("meta", Some("l4proto")) | ("ip", Some("protocol")) | ("ip6", Some("nexthdr")) => {
                let (not, values, used) = operand(&rest[1..]);
                let unknown = values.iter().any(|value| value.starts_with('@') || value == ".");
                let tcp = values.iter().any(|value| matches!(value.as_str(), "tcp" | "6"));
                tests.not_tcp |= !unknown && tcp == not;
                // Of one IP version, it says nothing of the other.
                tests.other |= unknown || words[at] != "meta";
                at += used + 1;
            }
            (
                "ip" | "ip6" | "meta" | "ct" | "fib" | "iifname" | "oifname" | "iif" | "oif" | "mark"
                | "socket" | "tcp" | "th" | "ether" | "limit" | "quota" | "numgen" | "xt",
                _,
            ) => {
                tests.other = true;
            }
            (
                "dnat" | "redirect" | "tproxy" | "jump" | "goto" | "accept" | "drop" | "reject" | "return",
                _,
            ) => return,
            _ => {}
        }
        at += 1;
    }
}

/// Whether it is negated, the values, and how many words they take.
fn operand(words: &[&str]) -> (bool, Vec<String>, usize) {
    let not = words.first() == Some(&"!=");
    let from = usize::from(not);
    if words.get(from) == Some(&"{") {
        let end = words.iter().position(|word| *word == "}").unwrap_or(words.len());
        let values = words[from + 1..end].iter().map(|word| word.trim_end_matches(',').to_owned());
        return (not, values.collect(), end + 1);
    }
    (not, words.get(from).map(|word| (*word).to_owned()).into_iter().collect(), from + 1)
}

/// Ports that are compared with one: `>= 1024`.
fn bounded(words: &[&str]) -> Option<RangeInclusive<u16>> {
    let [sign, value, ..] = words else { return None };
    let value: u16 = value.parse().ok()?;
    match *sign {
        ">=" => Some(value..=u16::MAX),
        ">" => Some(value.checked_add(1)?..=u16::MAX),
        "<=" => Some(0..=value),
        "<" => Some(0..=value.checked_sub(1)?),
        _ => None,
    }
}

fn port(value: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = value.split_once('-').unwrap_or((value, value));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

fn action(words: &[&str]) -> Action {
    for (at, word) in words.iter().enumerate() {
        let chain = || words.get(at + 1).map(|chain| (*chain).to_owned()).unwrap_or_default();
        match *word {
            "dnat" | "redirect" | "tproxy" => return Action::Rewrite,
            "jump" => return Action::Jump { chain: chain(), back: true },
            "goto" => return Action::Jump { chain: chain(), back: false },
            "accept" => return Action::Accept,
            "drop" | "reject" => return Action::Drop,
            "return" => return Action::Return,
            _ => {}
        }
    }
    Action::Other
}

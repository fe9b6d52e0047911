//! What the text of a rule says, in the words of iptables or of nft.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

/// What becomes of a packet that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action<'a> {
    /// It goes elsewhere.
    Rewrite,
    Accept,
    Drop,
    /// Another chain of the table, or nft's map of verdicts (`@NAME`).
    Chain(&'a str),
    Other,
}

/// Options of iptables that narrow a rule to protocol and port at most.
const HARMLESS: [&str; 9] =
    ["-A", "-p", "-m", "-j", "-g", "--comment", "--dport", "--dports", "--reject-with"];
/// Words of nft that narrow a rule further.
const CONDITIONS: [&str; 17] = [
    "!", "!=", "saddr", "daddr", "sport", "iif", "iifname", "oif", "oifname", "ct", "limit", "flags", "mark",
    "fib", "status", "pkttype", "nfproto",
];

/// Comments left out, and each of nft's sets in one word.
pub(super) fn words(rule: &str) -> Vec<String> {
    let plain: String = rule.split('"').step_by(2).collect();
    let joined = plain.replace("{ ", "").replace(" }", "").replace(", ", ",");
    joined.split_whitespace().map(str::to_owned).collect()
}

pub(super) fn action(words: &[String]) -> Action<'_> {
    for (at, word) in words.iter().enumerate() {
        let next = words.get(at + 1).map_or("", String::as_str);
        match (word.as_str(), next) {
            ("-j", "DNAT" | "REDIRECT" | "TPROXY") => return Action::Rewrite,
            ("-j", "DROP" | "REJECT") | ("drop" | "reject", _) => return Action::Drop,
            ("-j", "ACCEPT") | ("accept", _) => return Action::Accept,
            ("-j" | "-g" | "jump" | "goto", chain) => return Action::Chain(chain),
            ("vmap", map) if map.starts_with('@') => return Action::Chain(map),
            // `ct status dnat accept` asks whether it has been done.
            ("dnat" | "redirect" | "tproxy", _) if at == 0 || words[at - 1] != "status" => {
                return Action::Rewrite;
            }
            _ => {}
        }
    }
    Action::Other
}

/// Whether a rule may be for a new TCP connection of another host or pod. What it asks besides may or may not be so.
pub(super) fn may_concern(rule: &str, words: &[String], to: Option<IpNet>, port: Option<u16>) -> bool {
    // A map of verdicts that stands in a rule is not taken apart.
    if only_loopback(rule) || only_known(rule) || rule.contains(" vmap {") {
        return false;
    }
    words.iter().enumerate().all(|(at, word)| {
        let before = at.checked_sub(1).map_or("", |at| words[at].as_str());
        let (sign, value) = match &words[at + 1..] {
            [sign, value, ..] if matches!(sign.as_str(), "!=" | ">=" | ">" | "<=" | "<") => {
                (sign.as_str(), value)
            }
            [value, ..] => (before, value),
            [] => return true,
        };
        let not = matches!(sign, "!" | "!=");
        match word.as_str() {
            "-p" | "l4proto" | "protocol" | "nexthdr" if value != "." => {
                value.split(',').any(|name| matches!(name, "tcp" | "6" | "all")) != not
            }
            "udp" | "sctp" | "icmp" | "icmpv6" => {
                matches!(before, "with" | "-p" | "!=" | "l4proto" | "protocol" | "nexthdr")
            }
            "--dport" | "--dports" | "dport" => match (ports(sign, value), port) {
                (Some(ranges), Some(port)) => ranges.iter().any(|range| range.contains(&port)) != not,
                _ => true,
            },
            "-d" | "daddr" => match (nets(value), to) {
                (Some(nets), Some(to)) if not => !nets.iter().any(|net| net.contains(&to)),
                (Some(nets), Some(to)) => nets.iter().any(|net| net.contains(&to) || to.contains(net)),
                _ => true,
            },
            // Token addresses are this host's.
            "--dst-type" => value.split(',').any(|kind| kind == "LOCAL") != not,
            "type" if before == "daddr" => value.split(',').any(|kind| kind == "local") != not,
            _ => true,
        }
    })
}

/// It asks for nothing but protocol and port.
pub(super) fn is_unconditional(words: &[String]) -> bool {
    words.iter().all(|word| {
        if word.starts_with('-') {
            HARMLESS.contains(&word.as_str())
        } else {
            !CONDITIONS.contains(&word.as_str())
        }
    })
}

/// The ports that a rule names; of a range the first one.
pub(super) fn ports_of(words: &[String]) -> BTreeSet<u16> {
    let named = words.windows(2).filter(|pair| matches!(pair[0].as_str(), "--dport" | "--dports" | "dport"));
    named.filter_map(|pair| ports("", &pair[1])).flatten().map(|range| *range.start()).collect()
}

/// None: not known from the text, such as those of a named set.
fn ports(sign: &str, value: &str) -> Option<Vec<RangeInclusive<u16>>> {
    let range = |text: &str| {
        let (first, last) = text.split_once([':', '-']).unwrap_or((text, text));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        Some(match sign {
            ">=" => first..=u16::MAX,
            ">" => first.checked_add(1)?..=u16::MAX,
            "<=" => 0..=last,
            "<" => 0..=last.checked_sub(1)?,
            _ => first..=last,
        })
    };
    value.split(',').map(range).collect()
}

fn nets(value: &str) -> Option<Vec<IpNet>> {
    value.split(',').map(net).collect()
}

fn net(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

fn only_loopback(rule: &str) -> bool {
    ["-i lo ", "iifname \"lo\"", "iif \"lo\"", "iif lo "].iter().any(|test| rule.contains(test))
}

/// It is for what belongs to a connection, or to none, and not for one that begins.
fn only_known(rule: &str) -> bool {
    let states = ["--ctstate ", "--state ", "ct state "].iter().find_map(|key| Some(rule.split_once(key)?.1));
    let Some(states) = states else { return rule.contains("ct status dnat") };
    let negated = states.starts_with("! ") || states.starts_with("!=") || rule.contains("! --ctstate");
    let end = if states.starts_with('{') { '}' } else { ' ' };
    !negated && !states.split(end).next().unwrap_or_default().to_lowercase().contains("new")
}

/// A rule for each element of nft's `{ KEY : VERDICT, … }`.
pub(super) fn elements(list: &str) -> Vec<String> {
    let plain: String = list.split('"').step_by(2).collect();
    let list = plain.split('}').next().unwrap_or_default();
    let element = |text: &str| {
        let (key, verdict) = text.split_once(" : ")?;
        let part = |part: &str| match (net(part), ports("", part)) {
            (Some(_), None) => format!("daddr {part}"),
            (_, Some(_)) => format!("dport {part}"),
            (None, None) => part.to_owned(),
        };
        let key = key.trim().trim_end_matches(" comment").split(" . ").map(str::trim).map(part);
        Some(format!("{} {}", key.collect::<Vec<_>>().join(" "), verdict.trim()))
    };
    list.split(',').filter_map(element).collect()
}

//! Parses the text of a rule, in the syntax of iptables or nft.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

/// Effect of a rule on a matching packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action<'a> {
    /// Sends it elsewhere.
    Rewrite,
    Accept,
    Drop,
    /// Continues in another chain of the table, or in nft's verdict map (`@NAME`).
    Chain(&'a str),
    Other,
}

/// iptables options that restrict a rule to protocol and port at most.
const HARMLESS: [&str; 9] =
    ["-A", "-p", "-m", "-j", "-g", "--comment", "--dport", "--dports", "--reject-with"];
/// nft words that restrict a rule further.
const CONDITIONS: [&str; 17] = [
    "!", "!=", "saddr", "daddr", "sport", "iif", "iifname", "oif", "oifname", "ct", "limit", "flags", "mark",
    "fib", "status", "pkttype", "nfproto",
];

/// Splits a rule into words, without comments, each nft set as one word.
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
            // `ct status dnat accept` matches connections that were already rewritten.
            ("dnat" | "redirect" | "tproxy", _) if at == 0 || words[at - 1] != "status" => {
                return Action::Rewrite;
            }
            _ => {}
        }
    }
    Action::Other
}

/// True if a rule may match a new TCP connection of another host or pod. Other conditions are taken as possibly true.
pub(super) fn may_concern(rule: &str, words: &[String], to: Option<IpNet>, port: Option<u16>) -> bool {
    // An inline verdict map is not analysed.
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
            // Virtual addresses are local.
            "--dst-type" => value.split(',').any(|kind| kind == "LOCAL") != not,
            "type" if before == "daddr" => value.split(',').any(|kind| kind == "local") != not,
            _ => true,
        }
    })
}

/// True if the rule tests nothing but protocol and port.
pub(super) fn is_unconditional(words: &[String]) -> bool {
    words.iter().all(|word| {
        if word.starts_with('-') {
            HARMLESS.contains(&word.as_str())
        } else {
            !CONDITIONS.contains(&word.as_str())
        }
    })
}

/// The ports named by a rule; the first one of a range.
pub(super) fn ports_of(words: &[String]) -> BTreeSet<u16> {
    let named = words.windows(2).filter(|pair| matches!(pair[0].as_str(), "--dport" | "--dports" | "dport"));
    named.filter_map(|pair| ports("", &pair[1])).flatten().map(|range| *range.start()).collect()
}

/// None if the text does not tell the ports, as with a named set.
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

/// True if the rule matches only packets of known connections, or of none, and not new ones.
fn only_known(rule: &str) -> bool {
    let states = ["--ctstate ", "--state ", "ct state "].iter().find_map(|key| Some(rule.split_once(key)?.1));
    let Some(states) = states else { return rule.contains("ct status dnat") };
    let negated = states.starts_with("! ") || states.starts_with("!=") || rule.contains("! --ctstate");
    let end = if states.starts_with('{') { '}' } else { ' ' };
    !negated && !states.split(end).next().unwrap_or_default().to_lowercase().contains("new")
}

/// Converts each element of nft's `{ KEY : VERDICT, … }` to a rule.
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

//! Matches and targets of iptables that nf_tables has no expressions of its own for: structures of its modules, native numbers.

use super::fields::{Loaded, UNKNOWN};

const ALL_PORTS: [u16; 2] = [0, u16::MAX];

/// What a match asks, as nft would print it. None: nothing.
pub(super) fn test(name: &str, revision: u32, info: &[u8]) -> Option<String> {
    let known = match (name, revision) {
        ("comment", _) => return None,
        ("tcp", 0) => tcp(info),
        ("udp", 0) => udp(info),
        ("multiport", 1) => multiport(info),
        ("conntrack", 2 | 3) => conntrack(info),
        ("state", 0) => word(info, 0).map(|states| Loaded::field("ct state", 4).is(false, &states)),
        _ => None,
    };
    known.or_else(|| Some(format!("xt match {name}"))).filter(|test| !test.is_empty())
}

/// What a target does.
pub(super) fn target(name: &str) -> String {
    match name {
        "DNAT" | "NETMAP" => "dnat".to_owned(),
        other => other.to_ascii_lowercase(),
    }
}

fn half(info: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?))
}

fn word(info: &[u8], at: usize) -> Option<[u8; 4]> {
    info.get(at..at + 4)?.try_into().ok()
}

/// `struct xt_tcp`: source ports, destination ports, an option, a mask of flags, flags, what is inverted.
fn tcp(info: &[u8]) -> Option<String> {
    let [option, flags, _, inverted] = word(info, 8)?;
    let mut tests = ports(info, "th", inverted)?;
    if option != 0 || flags != 0 {
        tests.push("xt match tcp".to_owned());
    }
    Some(tests.join(" "))
}

/// `struct xt_udp`: source ports, destination ports, what is inverted.
fn udp(info: &[u8]) -> Option<String> {
    let tests = ports(info, "udp", *info.get(8)?)?;
    Some(if tests.is_empty() { "meta l4proto udp".to_owned() } else { tests.join(" ") })
}

fn ports(info: &[u8], protocol: &str, inverted: u8) -> Option<Vec<String>> {
    let mut tests = Vec::new();
    for (at, bit, name) in [(0, 1, "sport"), (4, 2, "dport")] {
        let (ports, not) = ([half(info, at)?, half(info, at + 2)?], inverted & bit != 0);
        if ports != ALL_PORTS || not {
            let sign = if not { "!= " } else { "" };
            tests.push(format!("{protocol} {name} {sign}{}", range(ports)));
        }
    }
    Some(tests)
}

fn range([first, last]: [u16; 2]) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// `struct xt_multiport_v1`: which ports are meant, their count, 15 ports, which of them begin a range, whether it is inverted.
fn multiport(info: &[u8]) -> Option<String> {
    let (which, count, not) = (*info.first()?, usize::from(*info.get(1)?), *info.get(47)? != 0);
    const DESTINATION: u8 = 1;
    if which != DESTINATION || count > 15 {
        return None;
    }
    let (mut shown, mut at) = (Vec::new(), 0);
    while at < count {
        let first = half(info, 2 + 2 * at)?;
        let begins = *info.get(32 + at)? != 0;
        at += usize::from(begins);
        shown.push(range([first, half(info, 2 + 2 * at)?]));
        at += 1;
    }
    Some(format!("th dport {}{{ {} }}", if not { "!= " } else { "" }, shown.join(", ")))
}

/// `struct xt_conntrack_mtinfo2` and `3`: at 146 what is asked, what of that is inverted, and the states.
fn conntrack(info: &[u8]) -> Option<String> {
    const STATE: u16 = 1;
    let (asked, inverted, states) = (half(info, 146)?, half(info, 148)?, half(info, 150)?);
    let mut tests = Vec::new();
    if asked & STATE != 0 {
        // Those above are of addresses that were translated.
        let states = u32::from(states & 0xf).to_ne_bytes();
        tests.push(Loaded::field("ct state", 4).is(inverted & STATE != 0, &states));
    }
    if asked & !STATE != 0 {
        tests.push(UNKNOWN.to_owned());
    }
    Some(tests.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(halves: &[u16], rest: &[u8]) -> Vec<u8> {
        halves.iter().flat_map(|half| half.to_ne_bytes()).chain(rest.iter().copied()).collect()
    }

    #[test]
    fn ports_of_the_old_matches_are_read() {
        let tcp = |ports: [u16; 4], rest: [u8; 4]| test("tcp", 0, &bytes(&ports, &rest));
        assert_eq!(tcp([0, 65535, 10250, 10250], [0; 4]).as_deref(), Some("th dport 10250"));
        assert_eq!(tcp([0, 65535, 10, 20], [0, 0, 0, 2]).as_deref(), Some("th dport != 10-20"));
        assert_eq!(tcp([1, 2, 0, 65535], [0, 2, 2, 0]).as_deref(), Some("th sport 1-2 xt match tcp"));
        assert_eq!(tcp([0, 65535, 0, 65535], [0; 4]), None, "it asks nothing");
        assert_eq!(test("tcp", 0, &[0; 3]).as_deref(), Some("xt match tcp"));
        let udp = |ports: [u16; 4]| test("udp", 0, &bytes(&ports, &[0]));
        assert_eq!(udp([0, 65535, 53, 53]).as_deref(), Some("udp dport 53"));
        assert_eq!(udp([0, 65535, 0, 65535]).as_deref(), Some("meta l4proto udp"));
    }

    #[test]
    fn lists_of_ports_are_read() {
        // As iptables writes --dports 80,9000:9200.
        let info = |which: u8, not: u8| {
            let mut info = vec![which, 3];
            info.extend(bytes(&[80, 9000, 9200], &[]));
            info.resize(32, 0);
            info.extend([0, 1]);
            info.resize(47, 0);
            info.push(not);
            info
        };
        assert_eq!(test("multiport", 1, &info(1, 0)).as_deref(), Some("th dport { 80, 9000-9200 }"));
        assert_eq!(test("multiport", 1, &info(1, 1)).as_deref(), Some("th dport != { 80, 9000-9200 }"));
        assert_eq!(test("multiport", 1, &info(0, 0)).as_deref(), Some("xt match multiport"));
        assert_eq!(test("multiport", 1, &[1, 9, 0]).as_deref(), Some("xt match multiport"));
    }

    #[test]
    fn states_of_connections_are_read() {
        let info = |asked: u16, inverted: u16, states: u16| {
            let mut info = vec![0; 146];
            info.extend(bytes(&[asked, inverted, states, 0], &[0; 10]));
            info
        };
        let shown = |info: &[u8]| test("conntrack", 3, info);
        assert_eq!(shown(&info(1, 0, 6)).as_deref(), Some("ct state 0x2,0x4"));
        assert_eq!(shown(&info(1, 1, 1)).as_deref(), Some("ct state != 0x1"));
        assert_eq!(shown(&info(3, 0, 8)).as_deref(), Some("ct state 0x8 meta unknown"));
        assert_eq!(test("conntrack", 1, &info(1, 0, 6)).as_deref(), Some("xt match conntrack"));
        assert_eq!(test("state", 0, &6_u32.to_ne_bytes()).as_deref(), Some("ct state 0x2,0x4"));
        assert_eq!(test("addrtype", 1, &[]).as_deref(), Some("xt match addrtype"));
        assert_eq!(test("comment", 0, b"--dport 9100"), None);
        assert_eq!([target("DNAT"), target("REDIRECT"), target("LOG")], ["dnat", "redirect", "log"]);
    }
}

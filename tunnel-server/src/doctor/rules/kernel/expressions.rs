//! A rule's expressions, as a line of nft.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::super::nft::Maps;
use super::fields::{Loaded, UNKNOWN, between};
use super::netlink::{attribute, attributes, number, text};
use super::sets::{Element, Sets, verdict};
use super::xtables;

const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFT_REG_VERDICT: u32 = 0;
/// The comparisons of NFTA_CMP_OP.
const NEQ: u32 = 1;
const LTE: u32 = 3;
const GTE: u32 = 5;

/// The table of a rule.
pub(super) struct Table {
    pub(super) family: u8,
    pub(super) name: String,
    /// With its family, such as `ip nat`.
    pub(super) shown: String,
}

/// What nft would print. Maps of verdicts that the rule looks into are added to `maps`.
///
/// # Errors
/// A set cannot be read.
pub(super) fn line(
    expressions: &[u8],
    table: &Table,
    sets: &Sets<'_>,
    maps: &mut Maps,
) -> io::Result<String> {
    let mut reader = Reader {
        table,
        sets,
        maps,
        v6: match table.family {
            NFPROTO_IPV4 => Some(false),
            NFPROTO_IPV6 => Some(true),
            _ => None,
        },
        asks_version: None,
        loaded: BTreeMap::new(),
        constants: BTreeMap::new(),
        from: None,
        words: Vec::new(),
    };
    for (_, expression) in attributes(expressions).filter(|(kind, _)| *kind == NFTA_LIST_ELEM) {
        // NFTA_EXPR_NAME, _DATA.
        let Some(name) = text(expression, 1) else { continue };
        reader.read(&name, attribute(expression, 2).unwrap_or_default())?;
    }
    Ok(reader.finish())
}

struct Reader<'a> {
    table: &'a Table,
    sets: &'a Sets<'a>,
    maps: &'a mut Maps,
    /// The IP version, where the rule is for one only.
    v6: Option<bool>,
    /// The test for it, unless a field of that version says the same.
    asks_version: Option<String>,
    /// By the place of the register, of which each has four bytes.
    loaded: BTreeMap<u32, Loaded>,
    constants: BTreeMap<u32, Vec<u8>>,
    /// A lower bound whose upper one follows.
    from: Option<(Loaded, Vec<u8>)>,
    words: Vec<String>,
}

/// The place of a register: NFT_REG_1 to 4 have sixteen bytes, NFT_REG32_00 to 15 the same as four each.
fn place(register: u32) -> u32 {
    if register < 8 { register.saturating_sub(1) * 4 } else { register - 8 }
}

/// Registers that a value takes.
fn places(len: usize) -> u32 {
    u32::try_from(len.div_ceil(4)).unwrap_or(u32::MAX)
}

fn value(data: &[u8], kind: u16) -> Option<&[u8]> {
    attribute(attribute(data, kind)?, NFTA_DATA_VALUE)
}

impl Reader<'_> {
    fn read(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        match name {
            "payload" | "meta" | "ct" | "fib" => self.load(name, data),
            "bitwise" => self.mask(data),
            "cmp" => self.compare(data),
            "range" => self.range(data),
            "lookup" => return self.lookup(data),
            "immediate" => self.immediate(data),
            "nat" => self.nat(data),
            "redir" => {
                let port = self.port(number(data, 1));
                self.words.push(format!("redirect{port}"));
            }
            "tproxy" | "reject" => self.words.push(name.to_owned()),
            // NFTA_MATCH_NAME, _REV, _INFO.
            "match" => {
                let (name, revision) = (text(data, 1).unwrap_or_default(), number(data, 2));
                let info = attribute(data, 3).unwrap_or_default();
                self.words.extend(xtables::test(&name, revision.unwrap_or_default(), info));
            }
            "target" => self.words.push(xtables::target(&text(data, 1).unwrap_or_default())),
            // They ask nothing, and the rule goes on.
            "counter" | "log" | "masq" | "notrack" | "last" | "objref" | "dup" | "flow_offload" => {}
            other => {
                self.words.push(format!("meta {other}"));
                // It may have written to any of them.
                self.loaded.clear();
            }
        }
        Ok(())
    }

    fn load(&mut self, name: &str, data: &[u8]) {
        // Without a register to write to it is a statement. The numbers: NFTA_PAYLOAD_, _META_, _CT_, _FIB_.
        let Some(register) = number(data, 1) else { return };
        let second = number(data, 2).unwrap_or_default();
        let loaded = match (name, second) {
            ("payload", base) => {
                let [offset, len] = [3, 4].map(|kind| number(data, kind).unwrap_or_default() as usize);
                if base == 1 {
                    self.asks_version = None;
                }
                Loaded::payload(base, offset, len, self.v6)
            }
            ("meta", 3) => Loaded::field("meta mark", 4),
            ("meta", 4) => Loaded::field("iif", 4),
            ("meta", 5) => Loaded::field("oif", 4),
            ("meta", 6) => Loaded::field("iifname", 16),
            ("meta", 7) => Loaded::field("oifname", 16),
            ("meta", 15) => Loaded::field("meta nfproto", 1),
            ("meta", 16) => Loaded::field("meta l4proto", 1),
            ("ct", 0) => Loaded::field("ct state", 4),
            ("ct", 2) => Loaded::field("ct status", 4),
            // Its result is a type of addresses, and it is asked for the destination.
            ("fib", 3) if number(data, 3).is_some_and(|flags| flags & 2 != 0) => {
                Loaded::field("fib daddr type", 4)
            }
            _ => Loaded::field(UNKNOWN, 4),
        };
        self.loaded.insert(place(register), loaded);
    }

    /// NFTA_BITWISE_SREG, _DREG, _LEN, _MASK, _XOR, _OP.
    fn mask(&mut self, data: &[u8]) {
        let [from, to] = [1, 2].map(|kind| place(number(data, kind).unwrap_or_default()));
        let xor = value(data, 5).is_some_and(|xor| xor.iter().any(|byte| *byte != 0));
        let shifts = number(data, 6).is_some_and(|operation| operation != 0);
        let masked = match (self.loaded.get(&from), value(data, 4)) {
            (Some(loaded), Some(mask)) if !xor && !shifts => loaded.clone().masked(mask),
            _ => Loaded::field(UNKNOWN, 4),
        };
        self.loaded.insert(to, masked);
    }

    fn in_register(&self, register: Option<u32>) -> Loaded {
        let loaded = register.and_then(|register| self.loaded.get(&place(register)));
        loaded.cloned().unwrap_or_else(|| Loaded::field(UNKNOWN, 4))
    }

    /// NFTA_CMP_SREG, _OP, _DATA.
    fn compare(&mut self, data: &[u8]) {
        let loaded = self.in_register(number(data, 1));
        let value = value(data, 3).unwrap_or_default();
        let before = self.from.take();
        match number(data, 2).unwrap_or_default() {
            GTE => self.from = Some((loaded, value.to_vec())),
            LTE => {
                let first = match before {
                    Some((other, first)) if other == loaded => first,
                    other => {
                        self.open_end(other);
                        vec![0; value.len()]
                    }
                };
                self.words.push(loaded.lies(false, &first, value));
                return;
            }
            operation @ (0 | NEQ) => {
                let test = loaded.is(operation == NEQ, value);
                match (loaded.name(), operation) {
                    ("meta nfproto", 0) => {
                        self.v6 = Some(value == [NFPROTO_IPV6]);
                        self.asks_version = Some(test);
                    }
                    _ => self.words.push(test),
                }
            }
            _ => self.words.push(UNKNOWN.to_owned()),
        }
        self.open_end(before);
    }

    /// A lower bound without an upper one.
    fn open_end(&mut self, from: Option<(Loaded, Vec<u8>)>) {
        if let Some((loaded, first)) = from {
            self.words.push(loaded.lies(false, &first, &vec![u8::MAX; first.len()]));
        }
    }

    /// NFTA_RANGE_SREG, _OP, _FROM_DATA, _TO_DATA.
    fn range(&mut self, data: &[u8]) {
        let (first, last) = (value(data, 3).unwrap_or_default(), value(data, 4).unwrap_or_default());
        let loaded = self.in_register(number(data, 1));
        self.words.push(loaded.lies(number(data, 2) == Some(NEQ), first, last));
    }

    /// NFTA_LOOKUP_SET, _SREG, _DREG, _SET_ID, _FLAGS.
    fn lookup(&mut self, data: &[u8]) -> io::Result<()> {
        let Some(set) = text(data, 1) else { return Ok(()) };
        let inverted = number(data, 5).unwrap_or_default() & 1 != 0;
        let to = number(data, 3);
        let (len, elements) = self.sets.elements(self.table.family, &self.table.name, &set)?;
        let fields = self.key(place(number(data, 2).unwrap_or_default()), len);
        let names = fields.iter().map(Loaded::name).collect::<Vec<_>>().join(" . ");
        let sign = if inverted { "!= " } else { "" };
        match (to, &fields[..]) {
            (Some(NFT_REG_VERDICT), _) => {
                let pair = |element: &Element| Some((key(&fields, element), element.verdict.clone()?));
                let pairs = elements.iter().filter_map(pair).collect();
                self.maps.insert((self.table.shown.clone(), set.clone()), pairs);
                self.words.push(format!("{names} vmap @{set}"));
            }
            (Some(register), _) => {
                self.loaded.remove(&place(register));
                self.constants.remove(&place(register));
                self.words.push(format!("{UNKNOWN} map @{set}"));
            }
            (None, [field]) if field.name() != UNKNOWN => {
                let values = elements.iter().flat_map(|element| {
                    between(field.name(), cut(&element.first, field.len), cut(&element.last, field.len))
                });
                let values = values.collect::<Vec<_>>().join(", ");
                self.words.push(format!("{names} {sign}{{ {values} }}"));
            }
            (None, _) => self.words.push(format!("{names} {sign}@{set}")),
        }
        Ok(())
    }

    /// The fields of a key of this length, each of which begins with a register of its own.
    fn key(&self, from: u32, len: usize) -> Vec<Loaded> {
        let (mut fields, mut at) = (Vec::new(), 0);
        loop {
            let field = self.loaded.get(&(from + at)).cloned();
            let field = field.unwrap_or_else(|| Loaded::field(UNKNOWN, 4));
            at += places(field.len).max(1);
            fields.push(field);
            if at >= places(len) {
                return fields;
            }
        }
    }

    /// NFTA_IMMEDIATE_DREG, _DATA.
    fn immediate(&mut self, data: &[u8]) {
        let register = number(data, 1).unwrap_or_default();
        if register == NFT_REG_VERDICT {
            let decided = attribute(data, 2).and_then(|data| verdict(attribute(data, NFTA_DATA_VERDICT)?));
            self.words.extend(decided);
        } else if let Some(value) = value(data, 2) {
            self.constants.insert(place(register), value.to_vec());
        }
    }

    /// NFTA_NAT_TYPE, _FAMILY, _REG_ADDR_MIN, _REG_ADDR_MAX, _REG_PROTO_MIN.
    fn nat(&mut self, data: &[u8]) {
        const DESTINATION: u32 = 1;
        let kind = if number(data, 1) == Some(DESTINATION) { "dnat" } else { "snat" };
        let address = number(data, 3).and_then(|register| self.constants.get(&place(register)));
        let address = match address.map(Vec::as_slice) {
            Some(&[a, b, c, d]) => Ipv4Addr::new(a, b, c, d).to_string(),
            Some(other) => <[u8; 16]>::try_from(other)
                .map_or(String::new(), |address| format!("[{}]", Ipv6Addr::from(address))),
            None => String::new(),
        };
        let port = self.port(number(data, 5));
        let to = if address.is_empty() { port } else { format!(" to {address}{}", port.replace(" to ", "")) };
        self.words.push(format!("{kind}{to}"));
    }

    /// ` to :PORT` of a constant in this register.
    fn port(&self, register: Option<u32>) -> String {
        let constant = register.and_then(|register| self.constants.get(&place(register)));
        let port = constant.and_then(|port| Some(u16::from_be_bytes(port.as_slice().try_into().ok()?)));
        port.map(|port| format!(" to :{port}")).unwrap_or_default()
    }

    fn finish(mut self) -> String {
        let (from, before) = (self.from.take(), self.words.len());
        self.open_end(from);
        // Tests stand before what is decided.
        let added = self.words.len() - before;
        self.words.rotate_right(added);
        self.asks_version.into_iter().chain(self.words).collect::<Vec<_>>().join(" ")
    }
}

/// The first bytes of a key, which fills its registers.
fn cut(key: &[u8], len: usize) -> &[u8] {
    &key[..len.min(key.len())]
}

/// An element's key as nft prints it.
fn key(fields: &[Loaded], element: &Element) -> String {
    let mut at = 0;
    let one = |field: &Loaded| {
        let part = |key: &[u8]| cut(key.get(at..).unwrap_or_default(), field.len).to_vec();
        let (first, last) = (part(&element.first), part(&element.last));
        at += field.len.next_multiple_of(4);
        match &between(field.name(), &first, &last)[..] {
            [one] if !first.is_empty() => one.clone(),
            // All others, or a range of addresses that is several networks.
            _ => "*".to_owned(),
        }
    };
    fields.iter().map(one).collect::<Vec<_>>().join(" . ")
}

#[cfg(test)]
mod tests {
    use super::super::netlink::{Connection, named, packed};
    use super::*;

    fn expression(name: &str, data: &[Vec<u8>]) -> Vec<u8> {
        packed(NFTA_LIST_ELEM, &[named(1, name), packed(2, &data.concat())].concat())
    }

    fn number(kind: u16, number: u32) -> Vec<u8> {
        packed(kind, &number.to_be_bytes())
    }

    fn data(kind: u16, bytes: &[u8]) -> Vec<u8> {
        packed(kind, &packed(NFTA_DATA_VALUE, bytes))
    }

    fn load(name: &str, numbers: &[u32]) -> Vec<u8> {
        let numbers: Vec<_> = (1..).zip(numbers).map(|(kind, value)| number(kind, *value)).collect();
        expression(name, &numbers)
    }

    fn compare(operation: u32, bytes: &[u8]) -> Vec<u8> {
        expression("cmp", &[number(1, 1), number(2, operation), data(3, bytes)])
    }

    fn decide(code: i32, chain: &str) -> Vec<u8> {
        let verdict = [number(1, code.cast_unsigned()), named(2, chain)].concat();
        expression("immediate", &[number(1, 0), packed(2, &packed(NFTA_DATA_VERDICT, &verdict))])
    }

    fn shown(family: u8, expressions: &[Vec<u8>]) -> String {
        let table = Table { family, name: "nat".to_owned(), shown: "ip nat".to_owned() };
        let connection = Connection::open().unwrap();
        line(&expressions.concat(), &table, &Sets::none(&connection), &mut Maps::new()).unwrap()
    }

    /// `meta load l4proto => reg 1; cmp eq reg 1 6`.
    fn tcp() -> [Vec<u8>; 2] {
        [load("meta", &[1, 16]), compare(0, &[6])]
    }

    fn dport() -> Vec<u8> {
        load("payload", &[1, 2, 2, 2])
    }

    #[test]
    fn rules_of_iptables_become_lines() {
        let jump =
            [&tcp()[..], &[dport(), compare(0, &[0x28, 0x0a]), decide(-3, "TUNNEL-PORT-10250")]].concat();
        assert_eq!(shown(2, &jump), "meta l4proto tcp th dport 10250 jump TUNNEL-PORT-10250");
        let near = [load("payload", &[1, 1, 16, 1]), compare(0, &[127]), decide(-5, "")];
        assert_eq!(shown(2, &near), "ip daddr 127.0.0.0/8 return");
        let range = expression("range", &[number(1, 1), number(2, 1), data(3, &[0, 10]), data(4, &[0, 20])]);
        let target = expression("target", &[named(1, "DNAT"), number(2, 2)]);
        let dnat = [&tcp()[..], &[dport(), range, load("counter", &[]), target]].concat();
        assert_eq!(shown(2, &dnat), "meta l4proto tcp th dport != 10-20 dnat");
        let states = expression("match", &[named(1, "state"), number(2, 0), packed(3, &6_u32.to_ne_bytes())]);
        assert_eq!(shown(2, &[states, decide(1, "")]), "ct state 0x2,0x4 accept");
    }

    #[test]
    fn rules_of_nft_become_lines() {
        let constant =
            |register: u32, bytes: &[u8]| expression("immediate", &[number(1, register), data(2, bytes)]);
        let nat = load("nat", &[1, 2, 1, 1, 2, 2]);
        let dnat = [&tcp()[..], &[constant(1, &[10, 244, 0, 5]), constant(2, &[0, 80]), nat]].concat();
        assert_eq!(shown(2, &dnat), "meta l4proto tcp dnat to 10.244.0.5:80");
        let redirect = [constant(1, &[0, 1]), load("redir", &[1, 1, 2])];
        assert_eq!(shown(2, &redirect), "redirect to :1");
        let bounds = [dport(), compare(GTE, &[0x28, 0x16]), compare(LTE, &[0x28, 0x3c]), decide(1, "")];
        assert_eq!(shown(1, &bounds), "th dport 10262-10300 accept");
        assert_eq!(shown(1, &[dport(), compare(GTE, &[3, 232]), decide(0, "")]), "th dport 1000-65535 drop");
        assert_eq!(shown(1, &[dport(), compare(LTE, &[3, 232])]), "th dport 0-1000");
        assert_eq!(
            shown(1, &[dport(), compare(5, &[0, 1]), compare(0, &[0, 7])]),
            "th dport 7 th dport 1-65535"
        );
        let mask = expression(
            "bitwise",
            &[number(1, 1), number(2, 1), number(3, 4), data(4, &6_u32.to_ne_bytes()), data(5, &[0; 4])],
        );
        let states = [load("ct", &[1, 0]), mask, compare(NEQ, &[0; 4]), decide(1, "")];
        assert_eq!(shown(1, &states), "ct state 0x2,0x4 accept");
    }

    #[test]
    fn an_ip_version_is_told_where_no_address_tells_it() {
        let version = [load("meta", &[1, 15]), compare(0, &[NFPROTO_IPV6])];
        assert_eq!(shown(1, &[&version[..], &[decide(1, "")]].concat()), "meta nfproto ipv6 accept");
        let daddr = [load("payload", &[1, 1, 24, 2]), compare(0, &[0xfd, 0x9e])];
        assert_eq!(shown(1, &[&version[..], &daddr].concat()), "ip6 daddr fd9e::/16");
        assert_eq!(shown(1, &daddr), format!("{UNKNOWN} 0xfd9e"));
    }

    #[test]
    fn what_is_not_known_is_no_certain_test() {
        let limit = [load("limit", &[]), dport(), compare(0, &[0, 22]), decide(0, "")];
        assert_eq!(shown(1, &limit), "meta limit th dport 22 drop");
        // It has written to a register that had a port.
        assert_eq!(
            shown(1, &[dport(), load("numgen", &[1]), compare(0, &[0, 22])]),
            format!("meta numgen {UNKNOWN} 0x0016")
        );
        assert_eq!(shown(1, &[expression("match", &[named(1, "addrtype")])]), "xt match addrtype");
    }

    #[test]
    fn registers_of_both_sizes_have_places() {
        assert_eq!([1, 2, 4, 8, 9, 12, 23].map(place), [0, 4, 12, 0, 1, 4, 15]);
        let port = Loaded::payload(2, 2, 2, None);
        let range = Element {
            first: vec![6, 0, 0, 0, 0, 80, 0, 0],
            last: vec![6, 0, 0, 0, 0, 90, 0, 0],
            verdict: None,
        };
        assert_eq!(key(&[Loaded::field("meta l4proto", 1), port.clone()], &range), "tcp . 80-90");
        let all = Element { first: Vec::new(), last: Vec::new(), verdict: None };
        assert_eq!(key(&[port], &all), "*");
    }
}

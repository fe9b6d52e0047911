//! What a register was loaded with, and how nft prints values of it.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use ipnet::{Ipv4Net, Ipv4Subnets, Ipv6Net, Ipv6Subnets};

/// What is not known here: whether it is so, nobody can tell from the rule.
pub(super) const UNKNOWN: &str = "meta unknown";

/// Offset and size of fields of a header, and nft's names.
type Header = &'static [(usize, usize, &'static str)];
const IPV4: Header = &[(9, 1, "ip protocol"), (12, 4, "ip saddr"), (16, 4, "ip daddr")];
const IPV6: Header = &[(6, 1, "ip6 nexthdr"), (8, 16, "ip6 saddr"), (24, 16, "ip6 daddr")];
const TRANSPORT: Header = &[(0, 2, "th sport"), (2, 2, "th dport")];

/// A field, and where it is in what was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    name: &'static str,
    at: Range<usize>,
}

/// What is in a register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Loaded {
    parts: Vec<Part>,
    /// In bytes.
    pub(super) len: usize,
    mask: Option<Vec<u8>>,
}

impl Loaded {
    /// A field of its own.
    pub(super) fn field(name: &'static str, len: usize) -> Self {
        Self { parts: vec![Part { name, at: 0..len }], len, mask: None }
    }

    /// A part of a packet. `v6` tells the IP version, where it is certain.
    pub(super) fn payload(base: u32, offset: usize, len: usize, v6: Option<bool>) -> Self {
        // NFT_PAYLOAD_NETWORK_HEADER, _TRANSPORT_HEADER.
        let header: Header = match (base, v6) {
            (1, Some(false)) => IPV4,
            (1, Some(true)) => IPV6,
            (2, _) => TRANSPORT,
            _ => &[],
        };
        let end = offset.saturating_add(len);
        let begins = header.iter().filter(|&&(at, _, _)| (offset..end).contains(&at));
        let mut parts: Vec<Part> = begins
            .map(|&(at, size, name)| Part { name, at: at - offset..(at + size).min(end) - offset })
            .collect();
        if parts.iter().map(|part| part.at.len()).sum::<usize>() < len {
            parts.push(Part { name: UNKNOWN, at: 0..len });
        }
        Self { parts, len, mask: None }
    }

    #[must_use]
    pub(super) fn masked(self, mask: &[u8]) -> Self {
        Self { mask: Some(mask.to_vec()), ..self }
    }

    /// The name of the one field that this is.
    pub(super) fn name(&self) -> &'static str {
        match &self.parts[..] {
            [part] if self.mask.is_none() => part.name,
            _ => UNKNOWN,
        }
    }

    /// That it is this value.
    pub(super) fn is(&self, not: bool, value: &[u8]) -> String {
        if let Some(test) = self.has_bits(not, value) {
            return test;
        }
        if not && self.parts.len() > 1 {
            return UNKNOWN.to_owned();
        }
        let sign = if not { "!= " } else { "" };
        let one = |part: &Part| {
            let of = |bytes: &[u8]| Some(bytes.get(part.at.start..part.at.end.min(bytes.len()))?.to_vec());
            let mask = self.mask.as_ref().and_then(|mask| of(mask));
            let shown = of(value).and_then(|value| shown(part.name, &value, mask.as_deref()));
            shown.map_or(UNKNOWN.to_owned(), |shown| format!("{} {sign}{shown}", part.name))
        };
        self.parts.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    /// Bits of connection tracking's state: the mask has them, and the comparison asks whether any is set.
    fn has_bits(&self, not: bool, value: &[u8]) -> Option<String> {
        let (mask, [part]) = (self.mask.as_ref()?, &self.parts[..]) else { return None };
        let any = value.iter().all(|byte| *byte == 0) && matches!(part.name, "ct state" | "ct status");
        let sign = if not { "" } else { "!= " };
        any.then(|| format!("{} {sign}{}", part.name, bits(mask)))
    }

    /// That it lies between these, both included.
    pub(super) fn lies(&self, not: bool, first: &[u8], last: &[u8]) -> String {
        let (name, sign) = (self.name(), if not { "!= " } else { "" });
        match &between(name, first, last)[..] {
            _ if name == UNKNOWN => UNKNOWN.to_owned(),
            [one] => format!("{name} {sign}{one}"),
            several => format!("{name} {sign}{{ {} }}", several.join(", ")),
        }
    }
}

/// The values from `first` to `last`; a range of addresses is several networks.
pub(super) fn between(name: &str, first: &[u8], last: &[u8]) -> Vec<String> {
    if first == last {
        return vec![shown(name, first, None).unwrap_or_else(|| hex(first))];
    }
    let v4 = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok().map(Ipv4Addr::from);
    let v6 = |bytes: &[u8]| <[u8; 16]>::try_from(bytes).ok().map(Ipv6Addr::from);
    match name {
        "ip saddr" | "ip daddr" => {
            if let (Some(first), Some(last)) = (v4(first), v4(last)) {
                return Ipv4Subnets::new(first, last, 0).map(|net| net.to_string()).collect();
            }
        }
        "ip6 saddr" | "ip6 daddr" => {
            if let (Some(first), Some(last)) = (v6(first), v6(last)) {
                return Ipv6Subnets::new(first, last, 0).map(|net| net.to_string()).collect();
            }
        }
        _ => {}
    }
    let text = |bytes: &[u8]| shown(name, bytes, None).unwrap_or_else(|| hex(bytes));
    vec![format!("{}-{}", text(first), text(last))]
}

/// A value of a field. None: a mask that nft has no word for.
fn shown(name: &str, value: &[u8], mask: Option<&[u8]>) -> Option<String> {
    match (name, mask) {
        ("ip saddr" | "ip daddr", _) => {
            let (bytes, prefix) = network::<4>(value, mask)?;
            Some(Ipv4Net::new(bytes.into(), prefix).ok()?.to_string())
        }
        ("ip6 saddr" | "ip6 daddr", _) => {
            let (bytes, prefix) = network::<16>(value, mask)?;
            Some(Ipv6Net::new(bytes.into(), prefix).ok()?.to_string())
        }
        (_, Some(_)) => None,
        ("th sport" | "th dport", None) => Some(u16::from_be_bytes(value.try_into().ok()?).to_string()),
        ("ip protocol" | "ip6 nexthdr" | "meta l4proto", None) => match value {
            [6] => Some("tcp".to_owned()),
            [17] => Some("udp".to_owned()),
            [other] => Some(other.to_string()),
            _ => None,
        },
        ("meta nfproto", None) => Some(if value == [10] { "ipv6" } else { "ipv4" }.to_owned()),
        ("iifname" | "oifname", None) => {
            let text = String::from_utf8_lossy(value);
            let (name, more) = text.split_once('\0').map_or((&*text, "*"), |(name, _)| (name, ""));
            Some(format!("\"{name}{more}\""))
        }
        ("iif" | "oif", None) => match u32::from_ne_bytes(value.try_into().ok()?) {
            tunnel_abi::LOOPBACK_IFINDEX => Some("\"lo\"".to_owned()),
            index => Some(index.to_string()),
        },
        ("ct state" | "ct status", None) => Some(bits(value)),
        _ => Some(hex(value)),
    }
}

/// An address's bytes and its prefix. Where that ends with a byte, only those before are compared.
fn network<const N: usize>(value: &[u8], mask: Option<&[u8]>) -> Option<([u8; N], u8)> {
    let mut bytes = [0; N];
    bytes.get_mut(..value.len())?.copy_from_slice(value);
    let prefix = match mask {
        None => u32::try_from(value.len()).ok()? * 8,
        Some(mask) => prefix(mask)?,
    };
    Some((bytes, u8::try_from(prefix).ok()?))
}

/// The length of a prefix. None: the mask has a hole.
fn prefix(mask: &[u8]) -> Option<u32> {
    let whole = mask.iter().take_while(|byte| **byte == u8::MAX).count();
    let rest = &mask[whole..];
    let more = rest.first().map_or(0, |byte| byte.leading_ones());
    let ones: u32 = rest.iter().map(|byte| byte.count_ones()).sum();
    (ones == more).then_some(u32::try_from(whole).ok()? * 8 + more)
}

/// The bits of a native word, as `nft -n` prints those of a state.
fn bits(value: &[u8]) -> String {
    let word = value.try_into().map(u32::from_ne_bytes).unwrap_or_default();
    let set = (0..u32::BITS).map(|bit| 1_u32 << bit).filter(|bit| word & bit != 0);
    set.map(|bit| format!("{bit:#x}")).collect::<Vec<_>>().join(",")
}

fn hex(value: &[u8]) -> String {
    let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Option<bool> = Some(false);

    #[test]
    fn parts_of_packets_have_their_names() {
        let dport = Loaded::payload(2, 2, 2, None);
        assert_eq!(dport.name(), "th dport");
        assert_eq!(dport.is(false, &[0x28, 0x0a]), "th dport 10250");
        assert_eq!(dport.is(true, &[0, 22]), "th dport != 22");
        assert_eq!(dport.lies(true, &[0, 10], &[0, 20]), "th dport != 10-20");
        // Both ports at once.
        let both = Loaded::payload(2, 0, 4, None);
        assert_eq!(both.is(false, &[0, 22, 0, 23]), "th sport 22 th dport 23");
        assert_eq!(both.is(true, &[0, 22, 0, 23]), UNKNOWN);
        assert_eq!(both.name(), UNKNOWN);
        assert_eq!(both.lies(false, &[0; 4], &[9; 4]), UNKNOWN);
        // The flags.
        assert_eq!(Loaded::payload(2, 13, 1, None).is(false, &[2]), format!("{UNKNOWN} 0x02"));
        assert_eq!(Loaded::payload(1, 16, 4, None).name(), UNKNOWN, "of which IP version?");
        assert_eq!(Loaded::payload(0, 12, 2, V4).name(), UNKNOWN);
        assert_eq!(dport.is(false, &[1]), UNKNOWN);
    }

    #[test]
    fn addresses_are_networks() {
        let daddr = |len| Loaded::payload(1, 16, len, V4);
        assert_eq!(daddr(4).is(false, &[198, 18, 0, 5]), "ip daddr 198.18.0.5/32");
        assert_eq!(daddr(1).is(true, &[127]), "ip daddr != 127.0.0.0/8");
        let masked = daddr(4).masked(&[255, 255, 255, 128]);
        assert_eq!(masked.is(false, &[10, 1, 2, 0]), "ip daddr 10.1.2.0/25");
        for hole in [[255, 0, 255, 0], [255, 127, 0, 0], [0, 1, 0, 0]] {
            assert_eq!(daddr(4).masked(&hole).is(false, &[10, 0, 2, 0]), UNKNOWN, "{hole:?}");
        }
        let both = Loaded::payload(1, 12, 8, V4);
        assert_eq!(both.is(false, &[10, 0, 0, 1, 10, 0, 0, 2]), "ip saddr 10.0.0.1/32 ip daddr 10.0.0.2/32");
        assert_eq!(
            daddr(4).lies(false, &[10, 0, 0, 1], &[10, 0, 0, 3]),
            "ip daddr { 10.0.0.1/32, 10.0.0.2/31 }"
        );
        let v6 = Loaded::payload(1, 24, 2, Some(true));
        assert_eq!(v6.is(false, &[0xfd, 0x9e]), "ip6 daddr fd9e::/16");
    }

    #[test]
    fn other_values_are_printed_as_nft_does() {
        let name = |value: &[u8]| Loaded::field("iifname", 16).is(false, value);
        assert_eq!(name(b"lo\0"), "iifname \"lo\"");
        assert_eq!(name(b"eth"), "iifname \"eth*\"");
        assert_eq!(Loaded::field("iif", 4).is(false, &1_u32.to_ne_bytes()), "iif \"lo\"");
        assert_eq!(Loaded::field("meta l4proto", 1).is(false, &[6]), "meta l4proto tcp");
        let state = Loaded::field("ct state", 4);
        assert_eq!(state.is(true, &1_u32.to_ne_bytes()), "ct state != 0x1");
        let some = state.masked(&6_u32.to_ne_bytes());
        assert_eq!(some.is(true, &[0; 4]), "ct state 0x2,0x4");
        assert_eq!(some.is(false, &[0; 4]), "ct state != 0x2,0x4");
        let mark = Loaded::field("meta mark", 4).masked(&[1, 0, 0, 0]);
        assert_eq!(mark.is(false, &[1, 0, 0, 0]), UNKNOWN);
        assert_eq!(Loaded::field("meta mark", 4).is(false, &[1, 0, 0, 0]), "meta mark 0x01000000");
    }
}

//! Elements of sets and maps.

use std::collections::BTreeMap;
use std::io;

use super::netlink::{
    Connection, NFT_MSG_GETSET, NFT_MSG_GETSETELEM, attribute, attributes, named, number, text,
};

const NFT_SET_INTERVAL: u32 = 0x4;
const NFT_SET_CONCAT: u32 = 0x80;
const NFT_SET_ELEM_INTERVAL_END: u32 = 0x1;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;

/// Keys from `first` to `last`; both are empty where an element stands for all others.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) first: Vec<u8>,
    pub(super) last: Vec<u8>,
    /// In a map of verdicts.
    pub(super) verdict: Option<String>,
}

/// The sets of all tables.
pub(super) struct Sets<'a> {
    connection: &'a Connection,
    /// Family, table and name; flags, and the length of a key.
    known: BTreeMap<(u8, String, String), (u32, usize)>,
}

impl<'a> Sets<'a> {
    pub(super) fn of(connection: &'a Connection) -> io::Result<Self> {
        let mut known = BTreeMap::new();
        for set in connection.dump(NFT_MSG_GETSET, 0, &[])? {
            // NFTA_SET_TABLE, _NAME, _FLAGS, _KEY_LEN.
            let (table, name) = (text(&set.attributes, 1), text(&set.attributes, 2));
            let (Some(table), Some(name)) = (table, name) else { continue };
            let flags = number(&set.attributes, 3).unwrap_or_default();
            let length = number(&set.attributes, 5).unwrap_or_default();
            known.insert((set.family, table, name), (flags, length as usize));
        }
        Ok(Self { connection, known })
    }

    #[cfg(test)]
    pub(super) fn none(connection: &'a Connection) -> Self {
        Self { connection, known: BTreeMap::new() }
    }

    /// The length of a key, and the elements.
    pub(super) fn elements(&self, family: u8, table: &str, name: &str) -> io::Result<(usize, Vec<Element>)> {
        let set = (family, table.to_owned(), name.to_owned());
        let (flags, length) = self.known.get(&set).copied().unwrap_or_default();
        // NFTA_SET_ELEM_LIST_TABLE, _SET, _ELEMENTS.
        let which = [named(1, table), named(2, name)].concat();
        let mut found = Vec::new();
        for list in self.connection.dump(NFT_MSG_GETSETELEM, family, &which)? {
            let elements = attribute(&list.attributes, 3).unwrap_or_default();
            let elements = attributes(elements).filter(|(kind, _)| *kind == NFTA_LIST_ELEM);
            found.extend(elements.map(|(_, element)| Raw::of(element)));
        }
        Ok((length, ranges(&found, flags)))
    }
}

/// As the kernel has them: in a set of intervals an interval's end is an element of its own.
struct Raw {
    key: Vec<u8>,
    last: Option<Vec<u8>>,
    is_end: bool,
    verdict: Option<String>,
}

impl Raw {
    fn of(element: &[u8]) -> Self {
        let value = |kind| Some(attribute(attribute(element, kind)?, NFTA_DATA_VALUE)?.to_vec());
        // NFTA_SET_ELEM_KEY, _DATA, _FLAGS, _KEY_END.
        Self {
            key: value(1).unwrap_or_default(),
            last: value(10),
            is_end: number(element, 3).unwrap_or_default() & NFT_SET_ELEM_INTERVAL_END != 0,
            verdict: attribute(element, 2).and_then(|data| verdict(attribute(data, NFTA_DATA_VERDICT)?)),
        }
    }
}

fn ranges(elements: &[Raw], flags: u32) -> Vec<Element> {
    let pairs = flags & NFT_SET_INTERVAL != 0 && flags & NFT_SET_CONCAT == 0;
    let mut ends: Vec<&[u8]> =
        elements.iter().filter(|element| element.is_end).map(|element| &element.key[..]).collect();
    ends.sort_unstable();
    let range = |element: &Raw| {
        let key = &element.key[..];
        let last = match &element.last {
            Some(last) => last.clone(),
            None if pairs => match ends.get(ends.partition_point(|end| *end <= key)) {
                Some(end) => before(end),
                None => vec![u8::MAX; key.len()],
            },
            None => key.to_vec(),
        };
        Element { first: key.to_vec(), last, verdict: element.verdict.clone() }
    };
    elements.iter().filter(|element| !element.is_end).map(range).collect()
}

/// The number before, of those in network order.
fn before(key: &[u8]) -> Vec<u8> {
    let mut key = key.to_vec();
    for byte in key.iter_mut().rev() {
        let (less, borrows) = byte.overflowing_sub(1);
        *byte = less;
        if !borrows {
            break;
        }
    }
    key
}

/// As nft prints it. None: the rule goes on.
pub(super) fn verdict(attributes: &[u8]) -> Option<String> {
    // NFTA_VERDICT_CODE, _CHAIN.
    let chain = || text(attributes, 2).unwrap_or_default();
    match number(attributes, 1)?.cast_signed() {
        0 => Some("drop".to_owned()),
        1 => Some("accept".to_owned()),
        3 => Some("queue".to_owned()),
        -3 => Some(format!("jump {}", chain())),
        -4 => Some(format!("goto {}", chain())),
        -5 => Some("return".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(key: &[u8], is_end: bool) -> Raw {
        Raw { key: key.to_vec(), last: None, is_end, verdict: None }
    }

    fn shown(elements: &[Element]) -> Vec<(&[u8], &[u8])> {
        elements.iter().map(|element| (&element.first[..], &element.last[..])).collect()
    }

    #[test]
    fn intervals_begin_and_end_with_elements() {
        // As the kernel dumps { 22, 9000-9200, 65000-65535 }.
        let elements = [
            raw(&[0xfd, 0xe8], false),
            raw(&[0x23, 0xf1], true),
            raw(&[0x23, 0x28], false),
            raw(&[0, 23], true),
            raw(&[0, 22], false),
            raw(&[0, 0], true),
        ];
        let found = ranges(&elements, 7);
        let expected: [(&[u8], &[u8]); 3] =
            [(&[0xfd, 0xe8], &[0xff, 0xff]), (&[0x23, 0x28], &[0x23, 0xf0]), (&[0, 22], &[0, 22])];
        assert_eq!(shown(&found), expected);
        // Without intervals each is one.
        assert_eq!(shown(&ranges(&elements[4..5], 3)), [(&[0, 22][..], &[0, 22][..])]);
        // With several fields the element itself has its end.
        let both = Raw { last: Some(vec![9, 9]), ..raw(&[1, 1], false) };
        assert_eq!(
            shown(&ranges(&[both, raw(&[2, 2], false)], 0x8c)),
            [(&[1, 1][..], &[9, 9][..]), (&[2, 2], &[2, 2])]
        );
        assert_eq!(before(&[1, 0, 0]), [0, 255, 255]);
    }

    #[test]
    fn an_element_has_its_verdict() {
        // Of { tcp . 9100 : goto external-WEB }.
        let element = [
            &[16, 0, 1, 0, 12, 0, 1, 0, 6, 0, 0, 0, 0x23, 0x8c, 0, 0][..],
            &[36, 0, 2, 0, 32, 0, 2, 0, 8, 0, 1, 0, 255, 255, 255, 252],
            &named(2, "external-WEB"),
        ]
        .concat();
        let element = Raw::of(&element);
        assert_eq!(element.key, [6, 0, 0, 0, 0x23, 0x8c, 0, 0]);
        assert_eq!(element.verdict.as_deref(), Some("goto external-WEB"));
        assert!(!element.is_end);
        assert_eq!(verdict(&[8, 0, 1, 0, 255, 255, 255, 255]), None, "it goes on");
        assert_eq!(verdict(&[]), None);
    }
}

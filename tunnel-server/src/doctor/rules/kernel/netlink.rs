//! Dumps of nf_tables by netlink. Numbers are those of linux/netfilter/nf_tables.h.

use std::io;

use netlink_packet_core::{
    DefaultNla, Emitable as _, NLA_HEADER_SIZE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE,
    NLMSG_ERROR, NetlinkBuffer, NlasIterator,
};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};

/// The upper byte of a message's type.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
pub(super) const NFT_MSG_GETCHAIN: u16 = 4;
pub(super) const NFT_MSG_GETRULE: u16 = 7;
pub(super) const NFT_MSG_GETSET: u16 = 10;
pub(super) const NFT_MSG_GETSETELEM: u16 = 13;
/// Size of `nlmsghdr`, and of `nfgenmsg` behind it.
const HEADER: usize = 16;
const FAMILY: usize = 4;

/// An object of a dump.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) family: u8,
    pub(super) attributes: Vec<u8>,
}

pub(super) struct Connection(Socket);

impl Connection {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Every object of a kind, of all families if `family` is 0.
    ///
    /// # Errors
    /// [`io::ErrorKind::Interrupted`]: they have changed meanwhile. A new connection is needed then.
    pub(super) fn dump(&self, kind: u16, family: u8, attributes: &[u8]) -> io::Result<Vec<Object>> {
        let length = HEADER + FAMILY + attributes.len();
        let mut request = vec![0; length];
        let mut header = NetlinkBuffer::new(&mut request[..]);
        header.set_length(u32::try_from(length).map_err(io::Error::other)?);
        header.set_message_type(NFNL_SUBSYS_NFTABLES << 8 | kind);
        header.set_flags(NLM_F_REQUEST | NLM_F_DUMP);
        request[HEADER] = family;
        request[HEADER + FAMILY..].copy_from_slice(attributes);
        self.0.send(&request, 0)?;
        let mut objects = Vec::new();
        loop {
            let (datagram, _) = self.0.recv_from_full()?;
            if take(&datagram, &mut objects)? {
                return Ok(objects);
            }
        }
    }
}

/// Takes the objects out of a datagram. True: it was the last one.
fn take(datagram: &[u8], objects: &mut Vec<Object>) -> io::Result<bool> {
    let mut rest = datagram;
    while !rest.is_empty() {
        let message = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?;
        if message.flags() & NLM_F_DUMP_INTR != 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match (message.message_type(), message.payload().split_at_checked(FAMILY)) {
            (NLMSG_DONE, end) => return errno(end).map(|()| true),
            (NLMSG_ERROR, end) => errno(end)?,
            (_, Some((header, attributes))) => {
                objects.push(Object { family: header[0], attributes: attributes.to_vec() });
            }
            (_, None) => {}
        }
        let length = usize::try_from(message.length()).map_err(io::Error::other)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// The error whose negative number a message begins with; 0 is none.
fn errno(payload: Option<(&[u8], &[u8])>) -> io::Result<()> {
    let number = payload.and_then(|(number, _)| Some(i32::from_ne_bytes(number.try_into().ok()?)));
    match number {
        Some(number) if number != 0 => Err(io::Error::from_raw_os_error(-number)),
        _ => Ok(()),
    }
}

/// The kinds and values of attributes, up to the first that is damaged.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|attribute| {
        let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
        (kind, &attribute.into_inner()[NLA_HEADER_SIZE..length])
    })
}

pub(super) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

pub(super) fn number(bytes: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_be_bytes(attribute(bytes, kind)?.try_into().ok()?))
}

pub(super) fn text(bytes: &[u8], kind: u16) -> Option<String> {
    let text = String::from_utf8_lossy(attribute(bytes, kind)?);
    Some(text.trim_end_matches('\0').to_owned())
}

/// An attribute with a text.
pub(super) fn named(kind: u16, text: &str) -> Vec<u8> {
    packed(kind, &[text.as_bytes(), b"\0"].concat())
}

pub(super) fn packed(kind: u16, value: &[u8]) -> Vec<u8> {
    let attribute = DefaultNla::new(kind, value.to_vec());
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes.extend_from_slice(payload);
        let mut header = NetlinkBuffer::new(&mut bytes[..]);
        header.set_length(u32::try_from(HEADER + payload.len()).unwrap());
        header.set_message_type(kind);
        header.set_flags(flags);
        bytes
    }

    #[test]
    fn a_dump_is_taken_apart_up_to_its_end() {
        let object = [&[10, 0, 0, 0][..], &named(1, "nat")].concat();
        let done = message(NLMSG_DONE, 0, &0_i32.to_ne_bytes());
        let mut objects = Vec::new();
        assert!(!take(&message(0xa06, 2, &object), &mut objects).unwrap());
        assert!(take(&[message(0xa06, 2, &object), done].concat(), &mut objects).unwrap());
        assert_eq!((objects.len(), objects[0].family), (2, 10));
        assert_eq!(text(&objects[1].attributes, 1).as_deref(), Some("nat"));
        assert_eq!(text(&objects[1].attributes, 2), None);
        let refused = message(NLMSG_ERROR, 0, &(-1_i32).to_ne_bytes());
        assert_eq!(take(&refused, &mut objects).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let changed = message(0xa06, NLM_F_DUMP_INTR, &object);
        assert_eq!(take(&changed, &mut objects).unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert!(take(&[1, 2, 3], &mut objects).is_err());
    }

    #[test]
    fn damaged_attributes_end_the_list() {
        let good = named(7, "filter");
        let both = [&good[..], &[3, 0, 1, 0]].concat();
        assert_eq!(attributes(&both).collect::<Vec<_>>(), [(7, &b"filter\0"[..])]);
        assert_eq!(number(&good, 7), None);
        assert_eq!(number(&[8, 0, 2, 0, 0, 0, 1, 2], 2), Some(258));
    }
}

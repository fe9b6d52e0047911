//! Parses `LISTEN=NODE/TARGET[,CIDR…]`.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use ipnet::IpNet;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::value::{cidrs, clients_of};

use super::{Map, Target};

impl Map {
    /// # Errors
    /// The map names no clients, and its listener can be reached from other hosts.
    pub(super) fn new(
        listen: SocketAddr,
        node: NodeName,
        target: Target,
        clients: Option<Vec<IpNet>>,
    ) -> Result<Self, String> {
        Ok(Self { listen, node, target, clients: clients_of(listen, clients)? })
    }
}

/// Parses the value of `--map`.
///
/// # Errors
/// Names the invalid part.
pub(crate) fn parse_flag(text: &str) -> Result<Map, String> {
    const FORM: &str = "not LISTEN=NODE/TARGET, such as 127.0.0.1:2222=edge-7/22 or 0.0.0.0:2222=edge-7/127.0.0.1:22,10.0.0.0/8";
    let (listen, rest) = text.split_once('=').ok_or(FORM)?;
    let (node, rest) = rest.split_once('/').ok_or(FORM)?;
    let (target, clients) = match rest.split_once(',') {
        Some((target, clients)) => (target, Some(clients)),
        None => (rest, None),
    };
    let clients = clients.map(cidrs).transpose()?;
    if clients.as_ref().is_some_and(Vec::is_empty) {
        return Err("no client after the comma".to_owned());
    }
    Map::new(
        parse_listen(listen)?,
        node.parse().map_err(|error| format!("{node:?}: {error}"))?,
        target.parse()?,
        clients,
    )
}

/// Parses the address of a listener. Its port is never 0, for which the kernel would pick one.
pub(super) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let listen = text.trim().parse::<SocketAddr>().ok().filter(|listen| listen.port() != 0);
    listen.ok_or_else(|| format!("{text:?} is not ADDRESS:PORT to listen on, such as 127.0.0.1:2222"))
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let port = text.parse::<u16>().ok().map(Self::Port);
        let target = port.or_else(|| text.parse().ok().map(Self::Address));
        let target = target.filter(|target| !matches!(target, Self::Port(0)) && target.port() != 0);
        target.ok_or_else(|| format!("{text:?} is not a port of the node, nor ADDRESS:PORT"))
    }
}

impl Target {
    fn port(self) -> u16 {
        match self {
            Self::Port(port) => port,
            Self::Address(address) => address.port(),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => port.fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// Writes the format that [`parse_flag`] reads.
impl fmt::Display for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}/{}", self.listen, self.node, self.target)?;
        self.clients.iter().try_for_each(|range| write!(f, ",{range}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::check;
    use proptest::prelude::*;

    #[test]
    fn maps_of_flags() {
        let map = parse_flag("0.0.0.0:2222=edge-7/127.0.0.1:22,10.0.0.0/8,fd00::/8").unwrap();
        assert_eq!(map.target, Target::Address("127.0.0.1:22".parse().unwrap()));
        let permits = |map: &Map, client: &str| map.permits(client.parse().unwrap());
        assert!(permits(&map, "10.1.2.3") && permits(&map, "::ffff:10.1.2.3") && permits(&map, "fd00::1"));
        assert!(!permits(&map, "11.1.2.3"));
        let local = parse_flag("127.0.0.1:2222=edge-7/22").unwrap();
        assert!(permits(&local, "127.0.0.1") && !permits(&local, "10.0.0.1"));
        assert_eq!(local.target, Target::Port(22));
        assert_eq!(parse_flag("[::1]:2222=edge-7/[fd00::1]:22").unwrap().target.to_string(), "[fd00::1]:22");
    }

    #[test]
    fn errors_name_the_part() {
        for (text, reason) in [
            ("2222", "not LISTEN=NODE/TARGET"),
            ("127.0.0.1:22=edge-7", "not LISTEN=NODE/TARGET"),
            ("2222=edge-7/22", "\"2222\" is not ADDRESS:PORT to listen on"),
            ("127.0.0.1:0=edge-7/22", "is not ADDRESS:PORT to listen on"),
            ("localhost:22=edge-7/22", "is not ADDRESS:PORT to listen on"),
            ("127.0.0.1:22=Edge_7/22", "\"Edge_7\""),
            ("127.0.0.1:22=edge-7/0", "\"0\" is not a port of the node"),
            ("127.0.0.1:22=edge-7/ssh", "\"ssh\" is not a port of the node"),
            ("127.0.0.1:22=edge-7/10.0.0.1", "is not a port of the node"),
            ("0.0.0.0:22=edge-7/22", "0.0.0.0:22 is reached from elsewhere"),
            ("0.0.0.0:22=edge-7/22,", "no client after the comma"),
            ("0.0.0.0:22=edge-7/22,10.0.0.1/8", "did you mean 10.0.0.0/8"),
        ] {
            let error = parse_flag(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
        let maps = ["127.0.0.1:1=a/1", "127.0.0.1:2=a/1", "0.0.0.0:1=b/1,10.0.0.0/8"]
            .map(|map| parse_flag(map).unwrap());
        assert_eq!(check(&maps[..2]), Ok(()));
        assert_eq!(check(&maps).unwrap_err(), "0.0.0.0:1 to b: 127.0.0.1:1 to a has that port already");
    }

    proptest! {
        #[test]
        fn no_text_panics_and_printed_maps_parse(text in "[0-9.:=/,a-e\\[\\]]{0,40}") {
            if let Ok(map) = parse_flag(&text) {
                prop_assert_eq!(parse_flag(&map.to_string()).unwrap(), map);
            }
        }
    }
}

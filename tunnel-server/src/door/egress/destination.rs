//! What a caller wants to reach: an edge node's address, or something that is none and that this server may dial itself.

use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use ipnet::IpNet;
use tunnel_core::identity::NodeName;
use tunnel_core::net::may_dial;
use tunnel_core::text::printable;

use crate::door::context::OpenRequest;
use crate::door::resolve::Host;
use crate::route::{ByAddress, Router};

/// Where a connection goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// Through the tunnel of an edge node.
    Edge(OpenRequest),
    /// Dialled by this server: an address that may be, or a name that has to be resolved first.
    Direct(String, u16),
}

/// What a destination means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meant {
    Known(Destination),
    /// Nothing on an edge node: it may be a Service's, or one that this server may dial.
    Elsewhere(SocketAddr),
}

/// Addresses that are not edge nodes', and that this server dials itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Direct(pub(super) Vec<IpNet>);

impl Direct {
    pub(super) fn allows(&self, address: IpAddr) -> bool {
        may_dial(&self.0, address)
    }
}

/// What `HOST:PORT` means, with an IPv6 address in brackets.
///
/// # Errors
/// It is none, or a name that is neither an edge node's nor one that this server may look up.
pub(super) fn find(text: &str, router: &Router, direct: &Direct) -> Result<Meant, String> {
    let (host, port) = split(text)?;
    let name = match Host::of(&host) {
        Host::Address(address) => return of_address(SocketAddr::new(address, port), router),
        Host::Name(name) => name,
    };
    if let Some(found) = router.snapshot().by_name(&name) {
        let target = router.target(found.address, port);
        return Ok(Meant::Known(through_tunnel(found.node, target)));
    }
    if direct.0.is_empty() {
        return Err(format!(
            "lookup {}: no such host among the edge nodes, and --egress-direct allows no others",
            printable(&name, 100)
        ));
    }
    Ok(Meant::Known(Destination::Direct(name, port)))
}

fn of_address(address: SocketAddr, router: &Router) -> Result<Meant, String> {
    Ok(on_edge(address, None, router)?.map_or(Meant::Elsewhere(address), Meant::Known))
}

/// Through which tunnel an address is reached; None: it is not an edge node's or its pod's.
///
/// # Errors
/// Several nodes have it, and `node` is none of them.
pub(super) fn on_edge(
    address: SocketAddr,
    node: Option<&str>,
    router: &Router,
) -> Result<Option<Destination>, String> {
    let (snapshot, port) = (router.snapshot(), address.port());
    match snapshot.by_address(address.ip()) {
        ByAddress::Unique(found) => {
            let target = router.target(found.address, port);
            return Ok(Some(through_tunnel(found.node, target)));
        }
        ByAddress::Ambiguous(mut nodes) => {
            if let Some(at) = nodes.iter().position(|known| Some(known.as_str()) == node) {
                let target = router.target(address.ip(), port);
                return Ok(Some(through_tunnel(nodes.swap_remove(at), target)));
            }
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            let nodes = nodes.join(", ");
            return Err(format!("{} is the address of {nodes}: name the node instead", address.ip()));
        }
        ByAddress::Unknown => {}
    }
    let pod = snapshot.by_pod(address.ip());
    Ok(pod.map(|pod| through_tunnel(pod.node, SocketAddr::new(pod.address, port))))
}

fn through_tunnel(node: NodeName, target: SocketAddr) -> Destination {
    Destination::Edge(OpenRequest::new(node, target, Bytes::new()))
}

pub(super) fn not_allowed(address: IpAddr) -> String {
    format!(
        "{address} is not an edge node's or its pod's, and --egress-direct does not allow this server to dial it"
    )
}

fn split(text: &str) -> Result<(String, u16), String> {
    let wrong = || format!("{:?} is not a host and a port", printable(text, 100));
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = match port.parse::<u16>() {
        Ok(number) if number > 0 && port.bytes().all(|byte| byte.is_ascii_digit()) => number,
        _ => return Err(wrong()),
    };
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => host,
        None if host.contains(':') => return Err(wrong()),
        None => host,
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if host.is_empty() || host.len() > 255 || !host.bytes().all(plain) {
        return Err(wrong());
    }
    Ok((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::door::resolve::tests::{HOSTS, crossed};

    #[test]
    fn a_destination_is_a_host_and_a_port() {
        for (text, host, port) in [
            ("edge-1:10250", "edge-1", 10250),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("[fd00::1]:443", "fd00::1", 443),
            ("webhook.shop.svc:443", "webhook.shop.svc", 443),
        ] {
            assert_eq!(split(text), Ok((host.to_owned(), port)), "{text}");
        }
        for text in [
            "",
            ":",
            "edge-1",
            "edge-1:",
            "edge-1:0",
            "edge-1:+1",
            "edge-1:65536",
            ":443",
            "fd00::1:443",
            "a b:1",
            "a\r\n:1",
        ] {
            assert!(split(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_address_is_an_address_before_it_is_a_name() {
        let router = crossed();
        let anything = Direct(vec!["0.0.0.0/0".parse().unwrap()]);
        for (host, address) in HOSTS {
            let found = match find(&format!("{host}:9100"), &router, &anything).unwrap() {
                Meant::Known(Destination::Edge(request)) => Some(request.target.ip().to_string()),
                Meant::Known(Destination::Direct(..)) | Meant::Elsewhere(_) => None,
            };
            assert_eq!(found.as_deref(), address, "{host}");
        }
    }
}

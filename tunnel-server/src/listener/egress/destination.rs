//! Resolves a caller's destination: an address on an edge node, or one that this server may dial itself.

use std::fmt::Display;
use std::net::SocketAddr;

use ipnet::IpNet;
use tunnel_routing::{NodeAddress, Resolved, Router, split_host};
use tunnel_runtime::net::may_dial;
use tunnel_runtime::text::printable;

use crate::listener::cluster::Endpoint;
use crate::listener::context::{OpenRequest, Reached};

/// Result of resolving a destination.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Resolution {
    Known(Reached),
    /// A name that this server may look up.
    Name(String, u16),
    /// An address that is not on an edge node: it may be a Service's, or one that this server may dial.
    Elsewhere(SocketAddr),
}

/// Address ranges that this server may dial itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Direct(pub(super) Vec<IpNet>);

impl Direct {
    pub(super) fn allows(&self, target: SocketAddr, router: &Router) -> bool {
        may_dial(&self.0, target.ip(), router.is_own_port(target))
    }

    /// Returns `None` if this server may not dial the address.
    pub(super) fn destination(&self, address: SocketAddr, router: &Router) -> Option<Reached> {
        self.allows(address, router).then_some(Reached::Cloud(address))
    }
}

/// Resolves `HOST:PORT`.
///
/// # Errors
/// The text is not a host and a port, or the name is neither an edge node's nor one that this server may look up.
pub(super) fn find(text: &str, router: &Router, direct: &Direct) -> Result<Resolution, String> {
    let (host, Some(port)) = split_host(text)? else {
        return Err(format!("{:?} is not a host and a port", printable(text, 100)));
    };
    match router.resolve(host) {
        Resolved::Edge(found) | Resolved::Pod(found) => {
            Ok(Resolution::Known(through_tunnel(found, port, router)))
        }
        Resolved::Here(address) | Resolved::Elsewhere(address) => {
            Ok(Resolution::Elsewhere(SocketAddr::new(address, port)))
        }
        Resolved::VirtualAddress(address) => Err(not_allowed(address)),
        Resolved::Service { .. } | Resolved::Unknown(_) if direct.0.is_empty() => Err(format!(
            "lookup {}: no such host among the edge nodes, and --egress-direct allows no others",
            printable(host, 100)
        )),
        Resolved::Service { .. } | Resolved::Unknown(_) => Ok(Resolution::Name(host.to_owned(), port)),
        unclear @ (Resolved::Ambiguous { .. } | Resolved::WithoutAddress(_)) => Err(unclear.to_string()),
    }
}

/// Resolves an endpoint of a Service. Returns `None` if it cannot be reached.
pub(super) fn of_endpoint(endpoint: &Endpoint, router: &Router, direct: &Direct) -> Option<Reached> {
    let address = endpoint.address;
    match router.resolve_endpoint(address, endpoint.node.as_deref()) {
        Resolved::Edge(found) | Resolved::Pod(found) => Some(through_tunnel(found, address.port(), router)),
        Resolved::Here(_) | Resolved::Elsewhere(_) => direct.destination(address, router),
        _ => None,
    }
}

fn through_tunnel(found: NodeAddress, port: u16, router: &Router) -> Reached {
    Reached::Edge(OpenRequest::to_port(found, port, router))
}

pub(super) fn not_allowed(what: impl Display) -> String {
    format!(
        "{what} is not an edge node's or its pod's, and --egress-direct does not allow this server to dial it"
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns the destination of a host if this server may dial everything.
    pub(in crate::listener) fn leads_at_egress(host: &str, port: u16, router: &Router) -> String {
        let anything = Direct(vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()]);
        let reached = match find(&format!("{host}:{port}"), router, &anything) {
            Ok(Resolution::Name(host, port)) => return format!("direct {host}:{port}"),
            Ok(Resolution::Known(reached)) => Some(reached),
            Ok(Resolution::Elsewhere(address)) => anything.destination(address, router),
            Err(_) => None,
        };
        match reached {
            Some(Reached::Edge(request)) => format!("{} {}", request.node, request.target),
            Some(Reached::Cloud(target)) => format!("direct {}:{}", target.ip(), target.port()),
            None => "refused".to_owned(),
        }
    }
}

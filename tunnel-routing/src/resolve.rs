//! Resolves hosts as clients name them. This is the only place that maps a name, an address or a pod to a node, but for the
//! redirect, whose addresses the snapshot translates. Each listener decides which results it permits.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

use super::router::Router;
use super::snapshot::{ByAddress, NodeAddress};

/// Maximum length of a host; longer ones are not DNS names.
const LONGEST: usize = 255;

/// Result of resolving a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// An edge node, by its name or one of its addresses.
    Edge(NodeAddress),
    /// A pod on an edge node, in a range that the redirect also routes.
    Pod(NodeAddress),
    /// `SERVICE.NAMESPACE`.
    Service { name: String, namespace: String },
    /// A loopback or unspecified address: this host, whose listeners trust any client there.
    Here(IpAddr),
    /// A virtual address, which stands for an edge node at the redirect only.
    VirtualAddress(IpAddr),
    /// Any other address.
    Elsewhere(IpAddr),
    /// Several edge nodes have the address.
    Ambiguous { address: IpAddr, nodes: Vec<NodeName> },
    /// An edge node without a known address.
    WithoutAddress(NodeName),
    /// Any other name.
    Unknown(String),
}

impl Router {
    /// Resolves a name or an address, with or without brackets or a trailing dot. Addresses take precedence over names:
    /// whoever registers a Node could name it like another node's address.
    pub fn resolve(&self, host: &str) -> Resolved {
        let bare = bare(host);
        let literal = bare.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(bare);
        match literal.parse() {
            Ok(address) => self.resolve_address(address),
            Err(_) => self.resolve_name(bare.to_ascii_lowercase()),
        }
    }

    fn resolve_name(&self, name: String) -> Resolved {
        let service = service_of(&name);
        // No host has such a name, but whoever registers a Node could choose it.
        if let (Some(service), Some("svc" | "svc.cluster.local")) = (&service, name.splitn(3, '.').nth(2)) {
            return service.clone();
        }
        let snapshot = self.snapshot();
        if let Some(found) = snapshot.by_name(&name) {
            return Resolved::Edge(found);
        }
        if let Some(node) = snapshot.inventory().get(&name).filter(|node| node.edge) {
            return Resolved::WithoutAddress(node.name.clone());
        }
        service.unwrap_or(Resolved::Unknown(name))
    }

    /// The Service that the host names, even if an edge node has the same name.
    pub fn resolve_service(&self, host: &str) -> Option<Resolved> {
        match self.resolve(host) {
            found @ Resolved::Service { .. } => Some(found),
            Resolved::Edge(_) | Resolved::WithoutAddress(_) => service_of(&bare(host).to_ascii_lowercase()),
            _ => None,
        }
    }

    pub fn resolve_address(&self, address: IpAddr) -> Resolved {
        let address = address.to_canonical();
        if address.is_loopback() || address.is_unspecified() {
            return Resolved::Here(address);
        }
        if self.is_virtual(address) {
            return Resolved::VirtualAddress(address);
        }
        let snapshot = self.snapshot();
        match snapshot.by_address(address) {
            ByAddress::Unique(found) => Resolved::Edge(found),
            ByAddress::Ambiguous(nodes) => Resolved::Ambiguous { address, nodes },
            ByAddress::Unknown => {
                snapshot.by_pod(address).map_or(Resolved::Elsewhere(address), Resolved::Pod)
            }
        }
    }

    /// Resolves an endpoint of a Service. `node` is the name in its EndpointSlice, if it has one, and decides, whatever edge
    /// nodes say of themselves: an edge node's endpoint is behind that node's tunnel, any other behind none.
    pub fn resolve_endpoint(&self, endpoint: SocketAddr, node: Option<&str>) -> Resolved {
        let address = endpoint.ip().to_canonical();
        let resolved = self.resolve_address(address);
        let Some(node) = node else { return resolved };
        let snapshot = self.snapshot();
        let known = snapshot.inventory().get(node);
        // This server's own connect would be redirected.
        let redirected = match &resolved {
            Resolved::Here(_) | Resolved::VirtualAddress(_) => return resolved,
            Resolved::Edge(found) if self.tunnels(endpoint.port()) => vec![found.node.clone()],
            Resolved::Ambiguous { nodes, .. } if self.tunnels(endpoint.port()) => nodes.clone(),
            Resolved::Pod(found) => vec![found.node.clone()],
            _ => Vec::new(),
        };
        match known.filter(|node| node.edge) {
            Some(node) => {
                let found = snapshot.at(node, address);
                if found.pod { Resolved::Pod(found) } else { Resolved::Edge(found) }
            }
            None if redirected.is_empty() => Resolved::Elsewhere(address),
            None => {
                Resolved::Ambiguous { address, nodes: node.parse().into_iter().chain(redirected).collect() }
            }
        }
    }
}

impl Resolved {
    /// The edge node or pod, for a listener that relays to nothing else.
    ///
    /// # Errors
    /// Names the host and the reason.
    pub fn on_edge(self) -> Result<NodeAddress, String> {
        match self {
            Self::Edge(found) | Self::Pod(found) => Ok(found),
            other => Err(other.to_string()),
        }
    }
}

/// Names the host and the reason that it is not an edge node.
impl fmt::Display for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Edge(found) => write!(f, "{} is the address of {}", found.address, found.node),
            Self::Pod(found) => write!(f, "{} is the address of a pod on {}", found.address, found.node),
            Self::Service { name, namespace } => no_node(&format!("{name}.{namespace}"), f),
            Self::Unknown(name) => no_node(name, f),
            Self::Here(address) | Self::VirtualAddress(address) | Self::Elsewhere(address) => {
                write!(f, "{address} is not the address of an edge node")
            }
            Self::Ambiguous { address, nodes } => {
                let nodes: Vec<_> = nodes.iter().map(NodeName::as_str).collect();
                write!(f, "{address} is the address of {}: name the node instead", nodes.join(", "))
            }
            Self::WithoutAddress(node) => write!(f, "node {node} has no address"),
        }
    }
}

fn bare(host: &str) -> &str {
    host.strip_suffix('.').unwrap_or(host)
}

/// The Service with this name, `SERVICE.NAMESPACE` with or without `.svc` and what follows.
fn service_of(name: &str) -> Option<Resolved> {
    let mut labels = name.split('.');
    match (labels.next(), labels.next(), labels.next()) {
        (Some(service), Some(namespace), None | Some("svc"))
            if !service.is_empty() && !namespace.is_empty() =>
        {
            Some(Resolved::Service { name: service.to_owned(), namespace: namespace.to_owned() })
        }
        _ => None,
    }
}

fn no_node(name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{:?} is not the name of an edge node", printable(name, 100))
}

/// Splits `HOST` or `HOST:PORT`, with an IPv6 address in brackets. Does not use `http::uri::Authority`, which drops
/// user information and treats an unusable port as none.
///
/// # Errors
/// Names the text.
pub fn split_host(text: &str) -> Result<(&str, Option<u16>), String> {
    let wrong = || format!("{:?} is not a host and a port", printable(text, 100));
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(wrong)?) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    // `u16::from_str` accepts a sign too.
    let number = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok())?;
    let port = port.map(|port| number(port).filter(|port| *port != 0).ok_or_else(wrong)).transpose()?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if host.is_empty() || host.len() > LONGEST || !host.bytes().all(plain) {
        return Err(wrong());
    }
    Ok((host, port))
}

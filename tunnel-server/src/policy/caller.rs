//! Callers and destinations, as the rules see them.

use std::fmt;
use std::net::IpAddr;

use tunnel_routing::inventory::InventoryNode;
use tunnel_runtime::NodeName;

use crate::caller::Caller;

/// Identity that a caller has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Identity {
    /// No identity.
    #[default]
    None,
    /// From its certificate: the common name and the organisations.
    Certificate(Caller),
    /// From its token.
    Token(Caller),
    /// A workload on an edge node, whose agent has the node's certificate.
    Node(NodeName),
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("nobody"),
            Self::Certificate(caller) => write!(f, "certificate {caller}"),
            Self::Token(caller) => write!(f, "user {caller}"),
            Self::Node(node) => write!(f, "node {node}"),
        }
    }
}

/// A caller as the rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    pub identity: &'a Identity,
    /// Address from which it connects; for a workload on an edge node, its agent's.
    pub client: IpAddr,
    /// The node of [`Identity::Node`], if the inventory has it.
    pub node: Option<&'a InventoryNode>,
}

/// Destination that a caller wants to reach.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a> {
    /// An address on an edge node, or of a pod there.
    Edge { node: &'a InventoryNode, address: IpAddr },
    /// An address that a server dials itself.
    Cloud {
        address: IpAddr,
        /// True for a port of one of Postern's own listeners.
        own: bool,
    },
    /// A Service, `NAME.NAMESPACE` in lower case, wherever its endpoints are.
    Service(&'a str),
}

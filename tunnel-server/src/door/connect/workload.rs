//! Connections of workloads on edge nodes, which come through their node's agent and lead to the cloud or to another
//! edge node.

use std::net::SocketAddr;

use tokio::net::TcpStream;
use tunnel_core::identity::NodeName;
use tunnel_core::outcome::Outcome;

use super::head::{Asked, Kind};
use super::reception::Reception;
use crate::door::answer::{refuse, status_of};
use crate::door::context::OpenError;
use crate::door::open::{Door, Opened};
use crate::policy::Identity;
use crate::route::{Router, split_host};

/// The listener's name in logs and metrics.
pub(crate) const EDGE: &str = "edge";

/// A workload that speaks to a proxy.
pub(crate) struct Workload {
    pub(crate) reception: Reception,
    pub(crate) node: NodeName,
    /// Address from which the node's agent connects.
    pub(crate) agent: SocketAddr,
}

impl Door for Workload {
    const NAME: &'static str = EDGE;

    async fn open(&self, socket: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        let identity = Identity::Node(self.node.clone());
        self.reception.receive(EDGE, socket, self.agent, identity, true).await
    }

    async fn failed(socket: &mut TcpStream, outcome: Outcome, detail: &str) {
        refuse(socket, status_of(outcome), "", detail).await;
    }
}

/// A workload whose target, `HOST:PORT`, comes from its agent's static map.
pub(crate) struct WorkloadMap {
    pub(crate) workload: Workload,
    pub(crate) target: String,
}

impl Door for WorkloadMap {
    const NAME: &'static str = EDGE;

    async fn open(&self, socket: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        let Workload { reception, node, agent } = &self.workload;
        let (host, port) = split_host(&self.target).map_err(OpenError::Client)?;
        let port = port.ok_or_else(|| OpenError::Client(format!("{:?} has no port", self.target)))?;
        let asked = Asked { host: host.to_owned(), port, length: 0, token: None, kind: Kind::Map };
        let decided = reception.decide(&asked, Identity::Node(node.clone()), *agent, true).await;
        let (reached, caller) = decided.map_err(|refused| OpenError::Client(refused.reason))?;
        reception.begin((EDGE, *agent, caller), socket, &asked, &[], reached).await
    }
}

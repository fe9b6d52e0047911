//! Connections of workloads on edge nodes, which come through their node's agent and lead to the cloud or to another
//! edge node.

use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_routing::{Router, split_host};
use tunnel_runtime::NodeName;

use super::access_log::AccessLogGuard;
use super::connect::{Asked, Reception};
use super::context::{OpenError, OpenRequest, Reached};
use super::direct;
use super::open::{Listener, Opened};
use super::proxy::front;
use crate::caller::Shown;

/// The listener's name in logs and metrics.
pub(crate) const EDGE: &str = "edge";

/// A workload that speaks to a proxy.
pub(crate) struct Workload {
    pub(crate) reception: Reception,
    pub(crate) node: NodeName,
    /// Address from which the node's agent connects.
    pub(crate) agent: SocketAddr,
}

impl Listener for Workload {
    const NAME: &'static str = EDGE;

    async fn open(&self, _: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        Ok(front(&self.reception, EDGE, None, Some(self.node.clone())))
    }
}

/// A workload whose target, `HOST:PORT`, comes from its agent's static map.
pub(crate) struct WorkloadMap {
    pub(crate) workload: Workload,
    pub(crate) target: String,
}

impl Listener for WorkloadMap {
    const NAME: &'static str = EDGE;

    async fn open(&self, socket: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        let Workload { reception, node, agent } = &self.workload;
        let (host, port) = split_host(&self.target).map_err(OpenError::Client)?;
        let port = port.ok_or_else(|| OpenError::Client(format!("{:?} has no port", self.target)))?;
        let asked = Asked { host: host.to_owned(), port, token: None };
        let decided = reception.decide(&asked, Shown::Node(node.clone()), agent.ip(), true).await;
        let (reached, caller, permit) = decided.map_err(|refused| OpenError::Client(refused.reason))?;
        let target = match reached {
            Reached::Edge(request) => {
                return Ok(Opened::Permitted(OpenRequest { caller: Some(caller), ..request }, permit));
            }
            Reached::Cloud(target) => target,
        };
        let record = AccessLogGuard::direct(EDGE, *agent, target, &reception.context);
        record.called_by(&caller);
        record.admitted_by(permit);
        let ended = match direct::connect(target).await {
            Ok(to) => direct::relay(socket, to, Bytes::new(), &record).await,
            Err(failed) => Err(failed),
        };
        record.finish(&ended);
        Ok(Opened::Ended)
    }
}

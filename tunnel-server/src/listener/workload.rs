//! Connections of workloads on edge nodes, which come through their node's agent and lead to the cloud or to another
//! edge node.

use std::net::SocketAddr;

use tunnel_link::outcome::Outcome;
use tunnel_link::relay::TunnelStream;
use tunnel_routing::split_host;
use tunnel_runtime::NodeName;

use super::access_log::{AccessLogGuard, turned_away};
use super::connect::{ProxyRequest, Reception};
use super::context::{Failed, OpenError};
use super::proxy::front;
use super::upstream::Upstream;
use crate::admission::{Share, Shares};
use crate::caller::Shown;

/// The listener's name in logs and metrics.
pub(crate) const EDGE: &str = "edge";

/// A workload that speaks to a proxy, or whose target comes from its agent's static map.
pub(crate) struct Workload {
    pub(crate) reception: Reception,
    pub(crate) node: NodeName,
    /// Address from which the node's agent connects.
    pub(crate) agent: SocketAddr,
}

impl Workload {
    /// Serves one connection until it ends. `target` is `HOST:PORT`; without it the workload names that itself.
    pub(crate) async fn serve(
        self,
        stream: TunnelStream,
        target: Option<String>,
        shares: Shares,
        place: Share,
    ) {
        let context = self.reception.context.clone();
        let agent = self.agent;
        let served = match target {
            Some(target) => self.lead(stream, &target, place).await,
            None => {
                let front = front(&self.reception, EDGE, None, Some(self.node));
                // Boxed: otherwise those of a map would hold its memory too.
                Box::pin(front.serve_piped(stream, agent, context.clone(), shares, place)).await
            }
        };
        if let Err(error) = served {
            turned_away(&context.metrics, EDGE, agent, None, &error);
        }
    }

    /// Leads the connection to the target of a map.
    async fn lead(self, stream: TunnelStream, target: &str, mut place: Share) -> Result<(), OpenError> {
        let Self { reception, node, agent } = self;
        let (host, port) = split_host(target).map_err(OpenError::Client)?;
        let port = port.ok_or_else(|| OpenError::Client(format!("{target:?} has no port")))?;
        let request = ProxyRequest { host: host.to_owned(), port, token: None };
        let decided = reception.decide(&request, Shown::Node(node), agent.ip(), true).await;
        let (reached, caller, permit) = decided.map_err(|refused| OpenError::Client(refused.reason))?;
        place.known();
        let mut record = AccessLogGuard::reaching(EDGE, agent, &reached, &reception.context);
        record.called_by(&caller);
        record.admitted_by(permit);
        let pipe = stream.status();
        let gone = async || {
            pipe.failed().await;
        };
        let opened = tokio::select! {
            biased;
            opened = Upstream::open(&reception.context, &reached, agent, Ok(place), &mut record) => opened,
            () = gone() => {
                let reason = "the workload did not wait for the answer".to_owned();
                Err(Failed { outcome: Outcome::ClientReset, reason })
            }
        };
        let ended = match opened {
            Ok(upstream) => {
                let (mut read, mut write) = tokio::io::split(stream);
                let ended = upstream.pump(&record, &mut read, &mut write, gone()).await;
                if ended.is_err() {
                    // Also if one direction has ended well before.
                    pipe.reset_on_drop();
                }
                ended
            }
            Err(failed) => Err(failed),
        };
        record.finish(&ended);
        Ok(())
    }
}

//! Control calls of the server: Attach and Notify.

use std::collections::BTreeSet;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::link::{BBR_FEATURE, MAX_LINKS};
use tunnel_link::proto::agent_server::Agent;
use tunnel_link::proto::{self, AgentEvent, Hello, NoticeAck, Segment, Welcome, agent_event, notice};

use super::session_end::Refusal;
use super::shared::Shared;
use super::state::{SessionPhase, SessionState};

type Events = Pin<Box<dyn Stream<Item = Result<AgentEvent, Status>> + Send>>;

pub(super) struct AgentService(pub(super) Arc<SessionState>);

#[tonic::async_trait]
impl Agent for AgentService {
    type AttachStream = Events;
    type RelayStream = ReceiverStream<Result<Segment, Status>>;

    async fn attach(&self, request: Request<Welcome>) -> Result<Response<Self::AttachStream>, Status> {
        let session = &self.0;
        let welcome = request.into_inner();
        session.claim(&welcome.server_id).map_err(Status::already_exists)?;
        let events = session
            .take_event_stream()
            .ok_or_else(|| Status::failed_precondition("this session is attached already"))?;
        if session.link == 0 {
            session.name_loopback_ports(ports(&welcome.loopback_ports));
            if !welcome.trust_bundle.is_empty() {
                session.announce(welcome.trust_bundle);
            }
        }
        let hello = Hello {
            node: session.shared.runtime.config.node_name.to_string(),
            epoch: session.epoch,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            addresses: session.shared.runtime.addresses.borrow().iter().map(ToString::to_string).collect(),
            max_links: session.shared.runtime.config.given.links.max_links.unwrap_or(MAX_LINKS),
            link: session.link,
            features: features(&session.shared),
            successor: session.shared.runtime.handover.is_successor(),
            finishing: session.finishing.clone(),
        };
        // The queue may already hold events: the machine was resumed, or this agent leaves, since then.
        let hello = AgentEvent { event: Some(agent_event::Event::Hello(hello)) };
        let events = stream::once(ready(Ok(hello))).chain(ReceiverStream::new(events));
        if session.link == 0 {
            session.shared.runtime.metrics.sessions_started.inc();
            tracing::info!(server = %session.server, server_id = %welcome.server_id, server_version = %welcome.server_version, epoch = session.epoch, "attached");
        }
        session
            .phase
            .send_replace(SessionPhase::Attached { server_id: welcome.server_id, since: Instant::now() });
        let farewell = session.farewell.clone().cancelled_owned();
        Ok(Response::new(Box::pin(events.take_until(farewell))))
    }

    async fn relay(&self, _: Request<Streaming<Segment>>) -> Result<Response<Self::RelayStream>, Status> {
        // `serve` takes Relay streams out before tonic sees them.
        Err(Status::internal("Relay is served without a codec"))
    }

    async fn notify(&self, request: Request<proto::Notice>) -> Result<Response<NoticeAck>, Status> {
        let phase = match request.into_inner().notice {
            Some(notice::Notice::Draining(draining)) => {
                if !draining.serving {
                    self.0.served.cancel();
                }
                SessionPhase::Draining
            }
            Some(notice::Notice::Refused(refused)) => {
                SessionPhase::Refused(match (refused.enroll_again, refused.retry_soon) {
                    (true, _) => Refusal::Certificate(refused.reason),
                    (false, true) => Refusal::ForNow(refused.reason),
                    (false, false) => Refusal::Session(refused.reason),
                })
            }
            // If this agent knows of no successor, the other one is unknown and has a copy of the identity.
            Some(notice::Notice::Replaced(replaced))
                if replaced.by_successor && self.0.shared.runtime.handover.knows_successor() =>
            {
                self.0.served.cancel();
                self.0.superseded.cancel();
                // The server tells standby links next.
                self.0.shared.runtime.handover.succeeded_at(&self.0.server);
                SessionPhase::Succeeded
            }
            Some(notice::Notice::Replaced(replaced)) => {
                SessionPhase::Refused(Refusal::Replaced(replaced.peer))
            }
            Some(notice::Notice::TrustBundle(bundle)) => {
                self.0.announce(bundle.pem);
                return Ok(Response::new(NoticeAck {}));
            }
            Some(notice::Notice::LoopbackPorts(named)) => {
                self.0.name_loopback_ports(ports(&named.ports));
                return Ok(Response::new(NoticeAck {}));
            }
            Some(notice::Notice::OpenLinks(wanted)) => {
                let Some(asked) = &self.0.asked else {
                    return Err(Status::invalid_argument("only the first link of a session asks for others"));
                };
                for link in wanted.links {
                    // A full queue already holds as many links as there may be.
                    let _ = asked.try_send(link);
                }
                return Ok(Response::new(NoticeAck {}));
            }
            None => return Err(Status::invalid_argument("a notice of a kind that this agent does not know")),
        };
        self.0.phase.send_replace(phase);
        Ok(Response::new(NoticeAck {}))
    }
}

/// Features to announce to the server.
fn features(shared: &Shared) -> Vec<String> {
    let config = &shared.runtime.config;
    let bbr = config.given.links.max_links.is_none() && config.reach.congestion.is_bbr();
    bbr.then(|| BBR_FEATURE.to_owned()).into_iter().collect()
}

/// Skips invalid ports.
fn ports(named: &[u32]) -> BTreeSet<u16> {
    named.iter().filter_map(|port| u16::try_from(*port).ok()).collect()
}

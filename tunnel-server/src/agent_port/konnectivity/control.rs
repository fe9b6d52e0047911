//! Answers the session's control calls for an agent that does not know them.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::proto::agent_server::Agent as Calls;
use tunnel_link::proto::{AgentEvent, Notice, NoticeAck, Segment, Welcome, notice};

use super::state::Agent;

pub(super) struct Control(pub(super) Arc<Agent>);

#[tonic::async_trait]
impl Calls for Control {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<AgentEvent, Status>> + Send>>;
    type RelayStream = ReceiverStream<Result<Segment, Status>>;

    async fn attach(&self, _: Request<Welcome>) -> Result<Response<Self::AttachStream>, Status> {
        let events = self.0.event_stream.lock().take();
        let events = events.ok_or_else(|| Status::failed_precondition("attached already"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn relay(&self, _: Request<Streaming<Segment>>) -> Result<Response<Self::RelayStream>, Status> {
        // `agent` handles Relay streams before tonic sees them.
        Err(Status::internal("Relay is served without a codec"))
    }

    async fn notify(&self, request: Request<Notice>) -> Result<Response<NoticeAck>, Status> {
        match request.into_inner().notice {
            // The agent finds another server, or this one's successor, once its stream has ended.
            Some(notice::Notice::Draining(_)) => self.0.leave(),
            Some(notice::Notice::Refused(refused)) => {
                self.0.refuse(Status::permission_denied(refused.reason));
            }
            Some(notice::Notice::Replaced(replaced)) if replaced.by_successor => self.0.leave(),
            Some(notice::Notice::Replaced(replaced)) => {
                let reason = format!("another agent of the node has attached from {}", replaced.peer);
                self.0.refuse(Status::already_exists(reason));
            }
            // konnectivity's agents have their own roots, dial the targets they are given, and have one link.
            Some(
                notice::Notice::TrustBundle(_)
                | notice::Notice::LoopbackPorts(_)
                | notice::Notice::OpenLinks(_),
            )
            | None => {}
        }
        Ok(Response::new(NoticeAck {}))
    }
}

//! The agent's end of a session's link, in this process.

use std::sync::Arc;

use bytes::Bytes;
use tokio::io::DuplexStream;
use tokio::task::JoinSet;
use tonic::{Status, Streaming};
use tunnel_link::bench::BENCH_PATH;
use tunnel_link::konnectivity::Packet;
use tunnel_link::link::HANDSHAKE_TIMEOUT;
use tunnel_link::proto::agent_server::AgentServer;
use tunnel_link::relay::RELAY_PATH;
use tunnel_link::{grpc, link};

use super::control::Control;
use super::relay::relay;
use super::state::Agent;

/// Serves the link until it or the agent's stream ends.
///
/// # Errors
/// The status for the agent.
pub(super) async fn serve(
    agent: Arc<Agent>,
    io: DuplexStream,
    packets: Streaming<Packet>,
) -> Result<(), Status> {
    let handshake = link::server_builder().handshake::<_, Bytes>(io);
    let Ok(Ok(mut link)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await else {
        return Err(Status::internal("no session was made"));
    };
    let service = AgentServer::new(Control(agent.clone()));
    let mut reading = std::pin::pin!(agent.read(packets));
    let mut left = std::pin::pin!(agent.left());
    let mut under_way = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            ended = &mut reading => return ended,
            status = agent.refused.wait() => return Err(status.clone()),
            () = &mut left => return Ok(()),
            Some(_) = under_way.join_next() => {}
            accepted = link.accept() => match accepted {
                Some(Ok((request, mut respond))) => match request.uri().path() {
                    RELAY_PATH => drop(under_way.spawn(relay(agent.clone(), request, respond))),
                    BENCH_PATH => {
                        let reason = "konnectivity's agents cannot be measured";
                        grpc::refuse(&mut respond, &Status::permission_denied(reason));
                    }
                    _ => drop(under_way.spawn(grpc::serve(service.clone(), request, respond))),
                },
                Some(Err(error)) => return Err(Status::unavailable(link::reason(&error))),
                None => return Ok(()),
            },
        }
    }
}

//! A stream to a target through its node's tunnel.

use std::net::SocketAddr;

use tunnel_core::carry::{Pipe, RelayError, Side, TunnelStream, pipe};
use tunnel_core::outcome::Outcome;

use super::answer::Failure;
use crate::door::access_log::AccessLogGuard;
use crate::door::context::{DoorContext, OpenRequest};
use crate::door::way::Way;

/// Has the node's agent dial the target.
///
/// # Errors
/// There is no tunnel, or the agent could not.
pub(super) async fn open(
    context: &DoorContext,
    request: &OpenRequest,
    client: SocketAddr,
    record: &AccessLogGuard,
) -> Result<TunnelStream, Failure> {
    let mut way = Way::find(context, request, client)
        .await
        .map_err(|reason| Failure::of_outcome(Outcome::NoTunnel, reason))?;
    if let Some(server_id) = way.server_id() {
        record.via(server_id);
    }
    let failed = |error: RelayError| Failure::of_outcome(error.outcome(Side::Server), error.to_string());
    let asked = way.ask(request.target).await.map_err(failed)?;
    let (mut send, answer) = asked.answer(way.on(), request.target, |took| record.dialled(took));
    let stream = answer.await.map_err(failed)?;
    let (abort, traffic) = record.carrying(Some(way.link()), way.carried());
    let (near, far) = pipe();
    let forced = context.drain.shutdown().clone();
    // To the thread that owns the link.
    let worker = way.link().worker.clone();
    worker.spawn(async move {
        let over = way.link().over.clone();
        let on = way.on();
        let pipe = Pipe { flow: &on.link.flow, stalls: on.stalls, traffic: &traffic };
        let over = async {
            tokio::select! {
                (outcome, _) = abort.triggered() => outcome,
                () = over.cancelled() => {
                    if forced.is_forced() { Outcome::Shutdown } else { Outcome::TunnelLost }
                }
            }
        };
        far.run(pipe, &mut send, stream, over).await;
    });
    Ok(near)
}

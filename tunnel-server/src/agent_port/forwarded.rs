//! A connection that another server forwards to a node that is attached here. It is not forwarded again: only this
//! server's own sessions are asked.

use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response, StatusCode};
use tonic::{Code, Status};
use tunnel_link::grpc;
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{CLIENT_HEADER, Ended, Forward, NODE_HEADER, TARGET_HEADER, UNLESS_SILENT_HEADER};
use tunnel_runtime::NodeName;

use crate::admission::{Share, Shares, source_key};
use crate::listener::{AccessLogGuard, ListenerContext, OpenRequest};
use crate::session::{PendingStream, Sessions, dialled};

/// Name in the access log and in metrics.
pub(super) const LISTENER: &str = "peer";

/// The server or redirector that forwards connections.
pub(super) struct Forwarder {
    pub(super) server_id: String,
    pub(super) peer: SocketAddr,
    pub(super) redirector: bool,
    pub(super) shares: Shares,
    /// The state of its link.
    pub(super) flow: Arc<Flow>,
}

impl Forwarder {
    /// Takes a place for a connection. What a redirector says of its clients is not believed: it is one source, and has no
    /// other way to a node than the redirect.
    ///
    /// # Errors
    /// The outcome and its reason.
    fn admit(
        &self,
        listeners: &ListenerContext,
        wanted: &OpenRequest,
        client: SocketAddr,
    ) -> Result<Share, (Outcome, String)> {
        let share = if self.redirector {
            let OpenRequest { node, target, .. } = wanted;
            if !listeners.router.redirects(node, *target) {
                let reason =
                    format!("a redirector reaches tunnelled ports only, and {target} on {node} is none");
                return Err((Outcome::Denied, reason));
            }
            self.shares.admit(self.peer.ip())
        } else {
            let source = match client.ip() {
                // The client is on the other server's host, not on this one.
                local if local.is_loopback() || listeners.router.is_virtual(local) => self.peer.ip(),
                other => other,
            };
            self.shares.admit_forwarded(source_key(source))
        };
        share.map_err(|full| {
            listeners.metrics.over_limit(LISTENER, &full);
            (Outcome::Busy, full.to_string())
        })
    }
}

/// The connection that a request asks for, and its client.
fn wanted(
    headers: &HeaderMap,
    caller: &Forwarder,
    sessions: &Sessions,
) -> Result<(OpenRequest, SocketAddr), Status> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let bad = |header: &str, error: &dyn Display| Status::invalid_argument(format!("{header}: {error}"));
    let node: NodeName = text(NODE_HEADER).parse().map_err(|error| bad(NODE_HEADER, &error))?;
    let target = text(TARGET_HEADER).parse().map_err(|error| bad(TARGET_HEADER, &error))?;
    let client = text(CLIENT_HEADER).parse().unwrap_or(caller.peer);
    let silent = || sessions.get(&node).is_some_and(|session| session.links.are_silent());
    if headers.contains_key(UNLESS_SILENT_HEADER) && silent() {
        return Err(Status::unavailable(format!("its own links with {node} are silent")));
    }
    Ok((OpenRequest::new(node, target), client))
}

/// Takes a place for one Relay stream of another server. The future serves it to the end of both directions; there is none if
/// it was refused.
pub(super) fn serve_forwarded(
    listeners: &ListenerContext,
    caller: &Arc<Forwarder>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Option<impl Future<Output = ()> + Send + use<>> {
    // Outside the future, which would keep room for the request's headers until the end.
    let (wanted, client) = match wanted(request.headers(), caller, &listeners.sessions) {
        Ok(wanted) => wanted,
        Err(status) => {
            grpc::refuse(&mut respond, &status);
            return None;
        }
    };
    match caller.admit(listeners, &wanted, client) {
        Ok(share) => {
            let stream = (request.into_body(), respond);
            Some(forward(listeners.clone(), caller.clone(), (wanted, client, share), stream))
        }
        Err(refusal) => {
            turn_away(listeners, caller, &wanted, client, respond, refusal);
            None
        }
    }
}

async fn forward(
    listeners: ListenerContext,
    caller: Arc<Forwarder>,
    (wanted, client, mut share): (OpenRequest, SocketAddr, Share),
    (body, mut respond): (RecvStream, SendResponse<Bytes>),
) {
    let Some(session) = listeners.sessions.get(&wanted.node) else {
        let reason = format!("no agent of {} is attached to this server", wanted.node);
        return refuse(&mut respond, Code::FailedPrecondition, reason);
    };
    if let Err(full) = share.reaches(&wanted.node).and_then(|()| share.reaches_agent(&session.places())) {
        listeners.metrics.over_limit(LISTENER, &full);
        let refusal = (Outcome::Busy, full.to_string());
        return turn_away(&listeners, &caller, &wanted, client, respond, refusal);
    }
    let link = session.links.take();
    // Boxed, like the answer below: its memory is freed once it is done.
    let pending = match Box::pin(session.ask(&link, wanted.target)).await {
        Ok(pending) => pending,
        Err(error) => return refuse(&mut respond, Code::FailedPrecondition, error.to_string()),
    };
    let mut record = AccessLogGuard::new(LISTENER, client, &wanted, &listeners);
    record.via(&caller.server_id);
    record.hold(share);
    if let Err(error) = respond.send_informational(proceed()) {
        return record.end(Outcome::ClientReset, &error);
    }

    let (abort, traffic) = record.relaying(Some(&*link), &session.relayed);
    let forward = Forward {
        client: &caller.flow,
        agent: &link.flow,
        stalls: &session.stalls,
        abort: &abort,
        traffic: &traffic,
    };
    let PendingStream { response, mut send, since } = pending;
    let ended = {
        let answer = Box::pin(async {
            let answer = dialled(wanted.node.as_str(), wanted.target, &link, response).await;
            record.dialled(since.elapsed());
            answer
        });
        let client = (body, &mut respond);
        let mut passing = std::pin::pin!(forward.run(client, &mut send, answer));
        record.until_over(&link.over, passing.as_mut()).await
    };
    match ended {
        Ok(outcome) => record.end(outcome, &""),
        Err(ended) => {
            if let Ended::Dial(error) = &ended {
                refuse(&mut respond, ended.outcome().code(), error.to_string());
            }
            record.end(ended.outcome(), &ended);
        }
    }
}

/// Answers as if the agent had refused: no other server has more places for this session, or another rule.
fn turn_away(
    listeners: &ListenerContext,
    caller: &Forwarder,
    wanted: &OpenRequest,
    client: SocketAddr,
    mut respond: SendResponse<Bytes>,
    (outcome, reason): (Outcome, String),
) {
    let record = AccessLogGuard::new(LISTENER, client, wanted, listeners);
    record.via(&caller.server_id);
    match respond.send_informational(proceed()) {
        Ok(()) => {
            record.end(outcome, &reason);
            refuse(&mut respond, outcome.code(), reason);
        }
        Err(error) => record.end(Outcome::ClientReset, &error),
    }
}

fn proceed() -> Response<()> {
    let mut proceed = Response::new(());
    *proceed.status_mut() = StatusCode::CONTINUE;
    proceed
}

/// Answers with a status only.
pub(super) fn refuse(respond: &mut SendResponse<Bytes>, code: Code, reason: String) {
    grpc::refuse(respond, &Status::new(code, reason));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::tests::size_of_future;

    /// Every forwarded connection holds this much until its end. Measured: 3,496 bytes.
    #[test]
    fn the_future_of_a_connection_stays_small() {
        let size = size_of_future(forward);
        assert!(size <= 3504, "{size} bytes");
    }
}

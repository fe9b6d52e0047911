//! The doors: where connections come in, and how each finds its node.
//!
//! A door is one file behind the trait [`Door`]: it reads from an accepted connection which node and target it is for.
//! Everything after that (the session, the bytes, the access log, the metrics) is the same for all.

mod access_log;
pub mod client_hello;
mod context;
mod http;
pub mod http_head;
mod https;
mod preface;
mod redirect;
mod resolve;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tunnel_core::carry::{Abort, RelayError, Side, end_on_drop, prepare_socket};
use tunnel_core::identity::NodeName;
use tunnel_core::outcome::Outcome;

pub use context::{Door, DoorContext, OpenError, OpenRequest};
pub use http::Http;
pub use https::Https;
pub use redirect::Redirected;

use crate::accept::accept;
use crate::admission::{Admission, Admitted};
use crate::session::{Session, Sessions};
use access_log::AccessLogGuard;

/// Serves a door until the drain starts.
///
/// `limit` bounds the connections of a door that other hosts can reach, for as long as they last.
pub(crate) async fn serve<D: Door>(
    door: D,
    listener: TcpListener,
    context: DoorContext,
    limit: Option<Admission>,
) {
    let door = Arc::new(door);
    context.metrics.door(D::NAME);
    loop {
        let (socket, client) = tokio::select! {
            accepted = accept(&listener, D::NAME) => accepted,
            () = context.drain.shutdown().draining() => return,
        };
        let place = limit.as_ref().map(|limit| limit.admit(client.ip()));
        if let Some(None) = place {
            context.metrics.turned_away(D::NAME);
            continue;
        }
        context.drain.spawn(receive(door.clone(), socket, client, context.clone(), place.flatten()));
    }
}

async fn receive<D: Door>(
    door: Arc<D>,
    mut socket: TcpStream,
    client: SocketAddr,
    context: DoorContext,
    place: Option<Admitted>,
) {
    // Armed here, once for every accepted connection: whatever goes wrong, the client sees a reset, not an end of file.
    if let Err(error) = prepare_socket(&socket) {
        return turned_away::<D>(&context, client, &error);
    }
    let request = match door.open(&mut socket, &context.router).await {
        Ok(request) => request,
        // A reset could overtake the end of the self-test's connect().
        Err(OpenError::SelfTest) => return end_on_drop(&socket),
        Err(error) => return turned_away::<D>(&context, client, &error),
    };
    let record = AccessLogGuard::new(D::NAME, client, &request, &context, place);
    let Some(session) = context.sessions.get(&request.node) else {
        let reason = no_tunnel(&context.sessions, &request.node);
        D::failed(&mut socket, Outcome::NoTunnel, &reason).await;
        record.end(Outcome::NoTunnel, &reason);
        return;
    };
    // From the accepting thread to the one that owns the link; both sides of the pump stay there.
    let worker = session.worker.clone();
    match socket.into_std() {
        Ok(socket) => {
            worker.spawn(carry::<D>(socket, request, session, record));
        }
        Err(error) => record.end(Outcome::ClientReset, &error),
    }
}

fn turned_away<D: Door>(context: &DoorContext, client: SocketAddr, reason: &dyn std::fmt::Display) {
    context.metrics.turned_away(D::NAME);
    tracing::warn!(door = D::NAME, %client, %reason, "client turned away");
}

async fn carry<D: Door>(
    socket: std::net::TcpStream,
    request: OpenRequest,
    session: Arc<Session>,
    mut record: AccessLogGuard,
) {
    let mut socket = match TcpStream::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => return record.end(Outcome::ClientReset, &error),
    };
    let (abort, traffic) = (Arc::new(Abort::default()), record.traffic(&session));
    let ended = {
        let forced = record.forced();
        let connected = |took| record.dialled(took);
        let mut carrying = std::pin::pin!(session.carry(
            &mut socket,
            request.prefix,
            request.target,
            &abort,
            &traffic,
            connected
        ));
        tokio::select! {
            biased;
            ended = &mut carrying => ended,
            () = forced.cancelled() => {
                abort.trigger(Outcome::Shutdown);
                carrying.await
            }
            () = session.closed.cancelled() => {
                abort.trigger(Outcome::TunnelLost);
                carrying.await
            }
        }
    };
    record.carried(&traffic);
    if let Err(broken) = &ended
        && traffic.to_socket() == 0
    {
        D::failed(&mut socket, broken.outcome(Side::Server), &broken.to_string()).await;
    }
    match ended {
        Ok(()) => record.end(Outcome::Ok, &""),
        Err(RelayError::Aborted(outcome, reason)) => record.end(outcome, &reason),
        Err(broken) => record.end(broken.outcome(Side::Server), &broken),
    }
}

fn no_tunnel(sessions: &Sessions, node: &NodeName) -> String {
    match sessions.last_seen(node) {
        Some(ago) => format!("no tunnel to node {node} (last seen {} s ago)", ago.as_secs()),
        None => format!("no tunnel to node {node} (not seen since this server started)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, B, C, D, F>(_: fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    /// Every connection holds this much until its end. Moving a future into another one doubles its memory, which shows
    /// here. Measured: 3456 and 3592 bytes.
    #[test]
    fn the_future_of_a_connection_stays_small() {
        let sizes = [size_of_future(carry::<Redirected>), size_of_future(carry::<Http>)];
        assert!(sizes.iter().all(|size| *size < 3712), "{sizes:?}");
    }
}

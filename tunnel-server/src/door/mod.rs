//! The doors: where connections come in, and how each finds its node.
//!
//! A door is one module behind [`Door`]: it looks at an accepted connection and names the destination. Everything
//! after that (the session, the bytes, the access log, the metrics) is the same for all.

pub mod hello;
mod http;
mod https;
mod record;
mod redirect;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tokio::net::{TcpListener, TcpStream};
use tunnel_core::carry::{Abort, RelayError, Side, end_on_drop, prepare_socket};
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::Drain;
use tunnel_core::outcome::Outcome;

pub use http::Http;
pub use https::Https;
pub use redirect::Redirected;

use crate::accept::accept;
use crate::admission::{Admission, Admitted};
use crate::metrics::Metrics;
use crate::route::Router;
use crate::session::{Session, Sessions};
use record::Record;

/// Where a caller wants to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The node whose agent shall dial.
    pub node: NodeName,
    /// What it shall dial.
    pub target: SocketAddr,
    /// What was read from the caller meanwhile, to be carried first.
    pub prefix: Bytes,
}

/// The door turned the caller away: the connection is closed, or will be reset.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Not a caller at all: nothing is logged.
    #[error("a connection of the server to itself")]
    Own,
    /// What the caller wants is not served.
    #[error("{0}")]
    Caller(String),
    /// The caller's socket failed.
    #[error("{0}")]
    Socket(#[from] std::io::Error),
}

/// Names the destination of a connection.
pub trait Door: Send + Sync + 'static {
    /// The door's name in logs and metrics.
    const NAME: &'static str;

    /// Finds out where the caller wants to go.
    fn open(
        &self,
        socket: &mut TcpStream,
        router: &Router,
    ) -> impl Future<Output = Result<Opening, Refusal>> + Send;

    /// Tells a caller to which nothing was sent yet why its connection ends, where the door's protocol has words for it.
    fn failed(_socket: &mut TcpStream, _outcome: Outcome, _detail: &str) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// What every door works with.
#[derive(Clone)]
pub struct Hall {
    /// Who is where.
    pub router: Arc<Router>,
    /// Which nodes have a session.
    pub sessions: Arc<Sessions>,
    /// Counters.
    pub metrics: Metrics,
    /// Connections in flight.
    pub drain: Drain,
}

/// Serves a door until the drain starts.
///
/// `strangers` bounds the connections of a door that anybody may dial, for as long as they last.
pub(crate) async fn serve<D: Door>(door: D, listener: TcpListener, hall: Hall, strangers: Option<Admission>) {
    let door = Arc::new(door);
    hall.metrics.door(D::NAME);
    loop {
        let (socket, client) = tokio::select! {
            accepted = accept(&listener, D::NAME) => accepted,
            () = hall.drain.shutdown().draining() => return,
        };
        let place = strangers.as_ref().map(|strangers| strangers.admit(client.ip()));
        if let Some(None) = place {
            hall.metrics.turned_away(D::NAME);
            continue;
        }
        hall.drain.spawn(receive(door.clone(), socket, client, hall.clone(), place.flatten()));
    }
}

async fn receive<D: Door>(
    door: Arc<D>,
    mut socket: TcpStream,
    client: SocketAddr,
    hall: Hall,
    place: Option<Admitted>,
) {
    if let Err(error) = prepare_socket(&socket) {
        hall.metrics.turned_away(D::NAME);
        tracing::warn!(door = D::NAME, %client, reason = %error, "caller turned away");
        return;
    }
    let opening = match door.open(&mut socket, &hall.router).await {
        Ok(opening) => opening,
        // A reset could overtake the end of the self-test's connect.
        Err(Refusal::Own) => return end_on_drop(&socket),
        Err(refusal) => {
            hall.metrics.turned_away(D::NAME);
            tracing::warn!(door = D::NAME, %client, reason = %refusal, "caller turned away");
            return;
        }
    };
    let record = Record::new(D::NAME, client, &opening, &hall, place);
    let Some(session) = hall.sessions.of(&opening.node) else {
        let reason = no_tunnel(&hall.sessions, &opening.node);
        D::failed(&mut socket, Outcome::NoTunnel, &reason).await;
        record.end(Outcome::NoTunnel, &reason);
        return;
    };
    // From the accepting thread to the one that owns the link; both sides of the pump stay there.
    let worker = session.worker().clone();
    match socket.into_std() {
        Ok(socket) => {
            worker.spawn(carry::<D>(socket, opening, session, record));
        }
        Err(error) => record.end(Outcome::ClientReset, &error),
    }
}

async fn carry<D: Door>(
    socket: std::net::TcpStream,
    opening: Opening,
    session: Arc<Session>,
    mut record: Record,
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
            opening.prefix,
            opening.target,
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
        Err(error @ RelayError::Aborted(_)) => record.end(error.outcome(Side::Server), &""),
        Err(broken) => record.end(broken.outcome(Side::Server), &broken),
    }
}

fn no_tunnel(sessions: &Sessions, node: &NodeName) -> String {
    match sessions.last_seen(node) {
        Some(ago) => format!("no tunnel to node {node} (last seen {} s ago)", ago.as_secs()),
        None => format!("no tunnel to node {node} (not seen since this server started)"),
    }
}

/// How long ago something started, for logs.
fn millis_since(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX)
}

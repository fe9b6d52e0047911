//! Listeners for clients, and the ways in which each finds the node of a connection.
//!
//! Each is one file behind the trait [`Listener`], which reads from an accepted connection its node and target. Everything
//! after that (the session, the bytes, the access log, the metrics) is the same for all. A [`Listener`] may also hand a
//! connection to `front/`, which speaks HTTP with the client and with the targets of its requests.

mod access_log;
mod answer;
pub mod client_hello;
mod config;
mod connect;
mod context;
mod direct;
mod egress;
mod first_request;
mod front;
#[cfg(test)]
mod hosts_tests;
mod http;
mod https;
mod judge;
mod map;
mod moved;
mod open;
mod preface;
mod proxy;
mod redirect;
mod upstream;
mod way;
mod workload;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{end_on_drop, prepare_socket, reset_on_drop};

pub(crate) use access_log::AccessLogGuard;
pub use config::{ConnectConfig, ListenerConfig, parse_secure_ports};
pub(crate) use config::{MOST_SECURE_PORTS, Others};
pub(crate) use connect::{Gatekeeper, Reception, Services};
pub use context::{ListenerContext, OpenError, OpenRequest};
pub use egress::EgressConfig;
pub(crate) use egress::{
    ClusterServices, Egress, EgressTls, NAME as EGRESS, Socket as EgressSocket, check_files as check_egress,
};
pub(crate) use front::{Admission, Front, Material, MetricsPage, Pods, TargetTls};
pub use front::{Wanted, parse_destination, target_head};
pub(crate) use http::{HTTP, METRICS, PLAIN};
pub(crate) use https::{HTTPS, Https};
pub(crate) use judge::{judge_open, until_withdrawn};
pub(crate) use map::{MAP, Maps};
pub(crate) use moved::end_moved;
pub(crate) use open::{Listener, Opened};
pub(crate) use proxy::{CONNECT, Connect};
pub(crate) use redirect::{REDIRECT, Redirected};
pub(crate) use workload::{EDGE, Workload};

use crate::admission::{Gated, Share, Shares};
use access_log::over_limit;
use context::Failed;
use way::Way;

/// Serves a listener until the drain starts. `shares` bounds its connections, for as long as they last.
pub(crate) async fn serve<D: Listener>(
    listener: D,
    mut gated: Gated,
    context: ListenerContext,
    shares: Shares,
) {
    let name = listener.name();
    let listener = Arc::new(listener);
    context.metrics.listener(name);
    // Accepted sockets inherit these: six system calls less for each.
    prepare_socket(&gated);
    loop {
        let (socket, client) = tokio::select! {
            biased;
            () = context.drain.shutdown().draining() => return,
            accepted = gated.accept(name) => accepted,
        };
        let place = match D::READS.then(|| shares.admit_unauthenticated(client.ip())).transpose() {
            Ok(place) => place,
            Err(full) => {
                over_limit(&context.metrics, name, client, &full);
                context.metrics.turned_away(name);
                // A reset: the client could take an end of file for an answer.
                reset_on_drop(&socket);
                continue;
            }
        };
        context.drain.spawn(receive(
            listener.clone(),
            socket,
            client,
            context.clone(),
            shares.clone(),
            place,
        ));
    }
}

/// Handles one accepted connection until it ends.
pub(crate) async fn receive<D: Listener>(
    listener: Arc<D>,
    mut socket: TcpStream,
    accepted: SocketAddr,
    context: ListenerContext,
    shares: Shares,
    mut place: Option<Share>,
) {
    let client = listener.client(&socket, accepted, &context.router);
    // Armed here, once for every accepted connection: after any failure the client sees a reset, not an end of file. One that
    // came before the listener was prepared has not inherited it.
    reset_on_drop(&socket);
    let (request, permit) = match listener.open(&mut socket, &context.router).await {
        Ok(Opened::Relayed(request)) => (request, None),
        Ok(Opened::Permitted(request, permit)) => (request, Some(permit)),
        Ok(Opened::Served { front, prefix }) => {
            // Boxed: otherwise relayed connections would hold its memory too.
            let served = Box::pin(front.serve(socket, prefix, client, &context, &shares, place));
            if let Err(error) = served.await {
                turned_away(listener.name(), &context, client, &error);
            }
            return;
        }
        // A reset could arrive before the self-test's connect() has returned.
        Err(OpenError::SelfTest) => return end_on_drop(&socket),
        Err(error) => return turned_away(listener.name(), &context, client, &error),
    };
    if let Some(place) = &mut place {
        place.known();
    }
    let mut record = AccessLogGuard::new(listener.name(), client, &request, &context);
    if let Some(permit) = permit {
        record.admitted_by(permit);
    }
    let place = place.map_or_else(|| shares.admit_as(D::source(&socket, client.ip(), &context.router)), Ok);
    let way = match upstream::way(&context, &request, client, place, &mut record).await {
        Ok(way) => way,
        Err(failed) => return record.finish(&Err(failed)),
    };
    // Moves from the accepting thread to the one that owns the link, which relays both directions.
    let worker = way.link().worker.clone();
    match socket.into_std() {
        Ok(socket) => {
            worker.spawn(relay(socket, request, way, record));
        }
        Err(error) => record.end(Outcome::ClientReset, &error),
    }
}

fn turned_away(
    listener: &'static str,
    context: &ListenerContext,
    client: SocketAddr,
    reason: &dyn std::fmt::Display,
) {
    context.metrics.turned_away(listener);
    tracing::warn!(listener, %client, %reason, "connection rejected");
}

#[expect(clippy::manual_async_fn, reason = "an async fn's future has room for each argument twice")]
fn relay(
    socket: std::net::TcpStream,
    request: OpenRequest,
    mut way: Way,
    record: AccessLogGuard,
) -> impl Future<Output = ()> + Send {
    async move {
        let mut socket = match TcpStream::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => return record.end(Outcome::ClientReset, &error),
        };
        let (abort, traffic) = record.relaying(Some(way.link()), way.relayed());
        let ended = {
            let over = way.link().over.clone();
            let connected = |took| record.dialled(took);
            let mut relaying = std::pin::pin!(async {
                let asked = way.ask(request.target).await?;
                let on = way.on();
                let (mut send, answer) = asked.answer(on, request.target, connected);
                on.relay(&abort, &traffic).run(&mut socket, request.prefix, &mut send, answer).await
            });
            record.until_over(&over, relaying.as_mut()).await
        };
        record.finish(&ended.map_err(|error| Failed::of(&error)));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn size_of_future<A, B, C, D, F>(_: fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    /// Every connection holds this much memory until it ends. Moving a future into another one doubles it, which this
    /// test detects. Measured: 2,688 bytes, 3,000 through the https listener.
    #[test]
    fn the_future_of_a_connection_stays_small() {
        let size = size_of_future(relay);
        assert!(size <= 3112, "{size}");
    }
}

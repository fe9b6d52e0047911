//! A connection's access log line and metrics, recorded however the connection ends.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Totals, Traffic};
use tunnel_runtime::lifecycle::DrainGuard;
use tunnel_runtime::live::Present;

use super::context::{Failed, ListenerContext, OpenRequest, Reached};
use super::moved::end_if_moved;
use crate::admission::{Full, Share, Shares};
use crate::metrics::{Connection, FailedConnection, HeldPermit, Metrics, Permit, Relayed};
use crate::session::Link;

/// The `tracing` target of the access log's events.
const ACCESS: &str = "tunnel_server::access";

/// A connection from the moment its node is known. Dropping it without [`AccessLogGuard::end`], as when its task is
/// cancelled or panics, also records it.
pub(crate) struct AccessLogGuard {
    connection: Present<Connection>,
    outcome: Outcome,
    detail: String,
    metrics: Metrics,
    in_flight: DrainGuard,
    /// Boxed: the future of a connection holds several copies of this struct's size.
    place: Option<Box<Share>>,
}

impl AccessLogGuard {
    pub(crate) fn new(
        listener: &'static str,
        client: SocketAddr,
        request: &OpenRequest,
        context: &ListenerContext,
    ) -> Self {
        // A client that named both meant the address too if it is the node's.
        let is_nodes = |address: &IpAddr| context.router.snapshot().has(&request.node, *address);
        let found_by = request.found_by.or_else(|| Some(request.target.ip()).filter(is_nodes));
        let connection = Connection::new(listener, client, Some(request.node.clone()), request.target);
        let record = Self::start(connection.with_found_by(found_by), context);
        // A change since the node was found has passed this connection by.
        end_if_moved(&record.connection, &context.router.snapshot());
        record
    }

    /// Starts the record of a connection for an authenticated caller's request, which may lead to either.
    pub(super) fn reaching(
        listener: &'static str,
        client: SocketAddr,
        reached: &Reached,
        context: &ListenerContext,
    ) -> Self {
        match reached {
            Reached::Edge(request) => Self::new(listener, client, request, context),
            Reached::Cloud(target) => Self::start(Connection::new(listener, client, None, *target), context),
        }
    }

    fn start(connection: Connection, context: &ListenerContext) -> Self {
        context.metrics.opened(connection.listener);
        Self {
            connection: context.metrics.live.enter(connection),
            outcome: Outcome::Shutdown,
            detail: String::new(),
            metrics: context.metrics.clone(),
            in_flight: context.drain.guard(),
            place: None,
        }
    }

    /// Notes the other server that has the node, or the client.
    pub(crate) fn via(&self, server_id: &str) {
        // There is only one other server.
        let _ = self.connection.via.set(server_id.into());
    }

    /// Sets the outcome to record if this is dropped.
    pub(crate) fn presume(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Notes the caller.
    pub(crate) fn called_by(&self, caller: &dyn Display) {
        // A listener identifies the caller only once.
        let _ = self.connection.caller.set(caller.to_string().into());
    }

    /// Keeps what the connection was admitted by, to judge it again while it is open.
    pub(crate) fn admitted_by(&self, permit: Arc<dyn Permit>) {
        // It is admitted only once.
        let _ = self.connection.permit.set(Box::new(HeldPermit::new(permit)));
    }

    /// Names the connection to the client, which ends with this one if that does not end by itself when its right is gone.
    pub(crate) fn cuts(&self, client: &CancellationToken) {
        // There is only one.
        let _ = self.connection.cut.set(client.clone());
    }

    /// Cancelled when the connection has to end.
    pub(crate) fn forced(&self) -> &CancellationToken {
        self.in_flight.shutdown().forced_token()
    }

    /// Keeps the connection's place until it ends.
    pub(crate) fn hold(&mut self, place: Share) {
        self.place = Some(Box::new(place));
    }

    /// Takes one of the places of the node's agent too.
    pub(super) fn reaches_agent(&mut self, places: &Shares) -> Result<(), Full> {
        self.place.as_mut().map_or(Ok(()), |place| place.reaches_agent(places))
    }

    /// Counts the connection as refused at a limit.
    pub(super) fn refused(&self, full: &Full) -> Failed {
        over_limit(&self.metrics, self.connection.listener, self.connection.client, full);
        Failed { outcome: Outcome::Busy, reason: full.to_string() }
    }

    /// Outcome of a connection whose link's [`crate::session::Link::over`] is cancelled.
    pub(crate) fn why_over(&self) -> Outcome {
        if self.in_flight.shutdown().is_forced() { Outcome::Shutdown } else { Outcome::TunnelLost }
    }

    /// Waits until the connection, which another task relays, has to end. `link`: as in [`Self::relaying`].
    pub(crate) fn over(&self, link: Option<&Link>) -> impl Future<Output = Outcome> + use<> {
        let (abort, forced) = (self.connection.abort.clone(), self.forced().clone());
        let over = link.map_or_else(|| forced.clone(), |link| link.over.clone());
        async move {
            tokio::select! {
                (outcome, _) = abort.triggered() => outcome,
                () = over.cancelled() => {
                    if forced.is_cancelled() { Outcome::Shutdown } else { Outcome::TunnelLost }
                }
            }
        }
    }

    /// Waits until the connection is ended from outside, before it is relayed.
    pub(crate) fn aborted(&self) -> impl Future<Output = Failed> + use<> {
        let abort = self.connection.abort.clone();
        async move {
            let (outcome, reason) = abort.triggered().await;
            Failed { outcome, reason: reason.to_owned() }
        }
    }

    /// Does the last work for the client, unless the connection is ended from outside meanwhile.
    pub(crate) fn unless_ended<F>(&self, work: F) -> impl Future<Output = ()> + use<F>
    where
        F: Future<Output = ()>,
    {
        let (aborted, forced) = (self.aborted(), self.forced().clone());
        async move {
            tokio::select! {
                () = work => {}
                _ = aborted => {}
                () = forced.cancelled() => {}
            }
        }
    }

    /// Relays until the end, and aborts that once the link is over.
    #[expect(clippy::manual_async_fn, reason = "an async fn's future has room for each argument twice")]
    pub(crate) fn until_over<T>(
        &self,
        over: &CancellationToken,
        mut relaying: Pin<&mut impl Future<Output = T>>,
    ) -> impl Future<Output = T> {
        async move {
            tokio::select! {
                biased;
                ended = &mut relaying => return ended,
                () = over.cancelled() => {}
            }
            self.connection.abort.trigger(self.why_over());
            relaying.await
        }
    }

    pub(crate) fn dialled(&self, took: Duration) {
        self.connection.answered();
        self.metrics.dialled(took);
    }

    /// Starts counting the connection's bytes, also in the totals of the session or of the other server, and of all
    /// connections. `link`: the link that relays it; `None` if this server has dialled the target itself. The [`Abort`]
    /// that it returns ends the connection from outside.
    pub(crate) fn relaying(&self, link: Option<&Link>, relayed: &Totals) -> (Arc<Abort>, Arc<Traffic>) {
        let begin = || Relayed {
            traffic: Arc::new(Traffic::part_of(vec![relayed.clone(), self.metrics.relayed.clone()])),
            link: link.map(|link| (link.number, link.flow.clone())),
        };
        let relayed = self.connection.relayed.get_or_init(begin);
        (self.connection.abort.clone(), relayed.traffic.clone())
    }

    pub(crate) fn finish(self, ended: &Result<(), Failed>) {
        match ended {
            Ok(()) => self.end(Outcome::Ok, &""),
            Err(failed) => self.end(failed.outcome, &failed.reason),
        }
    }

    pub(crate) fn end(mut self, outcome: Outcome, detail: &dyn Display) {
        self.outcome = outcome;
        self.detail = detail.to_string();
    }
}

/// Counts a connection that was refused at a limit.
pub(super) fn over_limit(metrics: &Metrics, listener: &'static str, client: SocketAddr, full: &Full) {
    metrics.over_limit(listener, full);
    // At debug level, because clients can cause any number of these. The operator sees the metric.
    tracing::debug!(listener, %client, reason = %full, "connection rejected at a limit");
}

/// Counts and logs a client that was turned away before its connection had a record.
pub(super) fn turned_away(
    metrics: &Metrics,
    listener: &'static str,
    client: SocketAddr,
    caller: Option<&dyn Display>,
    reason: &dyn Display,
) {
    metrics.turned_away(listener);
    if metrics.warns_of(client.ip()) {
        tracing::warn!(listener, %client, caller = caller.map(display), %reason, "connection rejected");
    } else {
        tracing::debug!(listener, %client, caller = caller.map(display), %reason, "connection rejected");
    }
}

impl Drop for AccessLogGuard {
    fn drop(&mut self) {
        let connection = &*self.connection;
        if let Some(reason) = connection.permit.get().and_then(|held| held.withdrawn())
            && self.outcome != Outcome::Ok
        {
            // However far its end has come: the relay, the target and the client each have words of their own for it.
            self.outcome = Outcome::Denied;
            reason.clone_into(&mut self.detail);
        }
        let (to_node, from_node) = connection.bytes();
        let took = connection.started.elapsed();
        self.metrics.closed(connection.listener, self.outcome, took);
        tracing::info!(
            target: ACCESS,
            listener = connection.listener,
            client = %connection.client,
            node = connection.node.as_ref().map(display),
            destination = %connection.target,
            to_node,
            from_node,
            duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            outcome = %self.outcome,
            via = connection.via.get().map(|via| &**via),
            caller = connection.caller.get().map(|caller| &**caller),
            error = (!self.detail.is_empty()).then_some(self.detail.as_str()),
            "connection"
        );
        if self.outcome != Outcome::Ok {
            self.metrics.failures.add(FailedConnection {
                at: Instant::now(),
                listener: connection.listener,
                client: connection.client,
                node: connection.node.clone(),
                destination: connection.target,
                outcome: self.outcome,
                detail: std::mem::take(&mut self.detail),
            });
        }
    }
}

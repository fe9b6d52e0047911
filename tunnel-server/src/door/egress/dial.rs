//! Dials what a caller asks for, and carries the connection.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tunnel_core::carry::{Abort, Pump, RelayError};
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use super::destination::{Destination, Direct, find, not_allowed};
use crate::admission::Shares;
use crate::door::access_log::AccessLogGuard;
use crate::door::context::{DoorContext, OpenRequest};
use crate::door::direct::{self, Failed};
use crate::door::way::Way;

/// The door's name in logs and metrics.
pub(crate) const NAME: &str = "egress";

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// A Unix socket has no address: then it is that of the loopback, port 0.
    pub(super) address: SocketAddr,
    /// From its certificate, or what the kernel says about its process.
    pub(super) name: Arc<str>,
}

/// What dialling needs.
#[derive(Clone)]
pub(super) struct Dialler {
    pub(super) context: DoorContext,
    pub(super) shares: Shares,
    pub(super) direct: Direct,
}

/// A connection that is up. It is recorded when this is dropped.
pub(super) struct Connected {
    record: AccessLogGuard,
    to: Target,
}

enum Target {
    Edge(Box<Edge>),
    Direct(TcpStream),
}

struct Edge {
    way: Way,
    send: SendStream<Bytes>,
    stream: RecvStream,
}

impl Dialler {
    /// Connects to `HOST:PORT`. Ends early, and is recorded as the caller's doing, when `gone` ends.
    pub(super) async fn dial(
        &self,
        address: &str,
        caller: &Caller,
        gone: impl Future<Output = ()>,
    ) -> Result<Connected, Failed> {
        let destination = find(address, &self.context.router, &self.direct);
        match destination {
            Ok(Destination::Edge(request)) => self.edge(request, caller, gone).await,
            Ok(Destination::Direct(host, port)) => self.direct(host, port, caller, gone).await,
            Err(reason) => Err(self.turned_away(reason, caller)),
        }
    }

    fn turned_away(&self, reason: String, caller: &Caller) -> Failed {
        self.context.metrics.turned_away(NAME);
        tracing::warn!(door = NAME, client = %caller.address, caller = %caller.name, reason, "client turned away");
        Failed { outcome: Outcome::Denied, reason }
    }

    async fn edge(
        &self,
        request: OpenRequest,
        caller: &Caller,
        gone: impl Future<Output = ()>,
    ) -> Result<Connected, Failed> {
        let mut record = AccessLogGuard::new(NAME, caller.address, &request, &self.context);
        record.called_by(&caller.name);
        let dialled = tokio::select! {
            biased;
            dialled = self.through_tunnel(&request, caller, &mut record) => dialled,
            () = gone => Err(not_waited()),
        };
        match dialled {
            Ok(edge) => Ok(Connected { record, to: Target::Edge(Box::new(edge)) }),
            Err(failed) => {
                record.end(failed.outcome, &failed.reason);
                Err(failed)
            }
        }
    }

    async fn through_tunnel(
        &self,
        request: &OpenRequest,
        caller: &Caller,
        record: &mut AccessLogGuard,
    ) -> Result<Edge, Failed> {
        let admitted = self.shares.admit(caller.address.ip()).and_then(|mut place| {
            let reached = place.reaches(&request.node);
            record.hold(place);
            reached
        });
        if let Err(full) = admitted {
            self.context.metrics.over_limit(NAME, &full);
            return Err(Failed { outcome: Outcome::Busy, reason: full.to_string() });
        }
        let found = Way::find(&self.context, request, caller.address).await;
        let mut way = found.map_err(|reason| Failed { outcome: Outcome::NoTunnel, reason })?;
        if let Some(server_id) = way.server_id() {
            record.via(server_id);
        }
        let over = way.link().over.clone();
        let asked = async {
            let asked = way.ask(request.target).await?;
            let (send, answer) = asked.answer(way.on(), request.target, |took| record.dialled(took));
            Ok((send, answer.await?))
        };
        let answered: Result<_, RelayError> = tokio::select! {
            biased;
            answered = asked => answered,
            () = over.cancelled() => Err(RelayError::Aborted(record.why_over(), "the tunnel was lost")),
        };
        let (send, stream) = answered.map_err(|error| Failed::of(&error))?;
        Ok(Edge { way, send, stream })
    }

    async fn direct(
        &self,
        host: String,
        port: u16,
        caller: &Caller,
        gone: impl Future<Output = ()>,
    ) -> Result<Connected, Failed> {
        tokio::select! {
            biased;
            connected = self.by_this_server(&host, port, caller) => connected,
            () = gone => Err(not_waited()),
        }
    }

    async fn by_this_server(&self, host: &str, port: u16, caller: &Caller) -> Result<Connected, Failed> {
        let resolved =
            tokio::time::timeout(direct::DIAL_TIMEOUT, tokio::net::lookup_host((host, port))).await;
        let targets: Vec<_> = match resolved {
            Ok(Ok(targets)) => targets.collect(),
            Ok(Err(error)) => {
                let reason = format!("lookup {}: no such host: {error}", printable(host, 100));
                return Err(self.turned_away(reason, caller));
            }
            Err(_) => {
                let reason = format!("lookup {}: i/o timeout", printable(host, 100));
                return Err(self.turned_away(reason, caller));
            }
        };
        let Some(target) = targets.iter().copied().find(|target| self.direct.allows(target.ip())) else {
            let reason = targets.first().map_or_else(
                || format!("lookup {}: no such host", printable(host, 100)),
                |target| not_allowed(target.ip()),
            );
            return Err(self.turned_away(reason, caller));
        };
        let mut record = AccessLogGuard::direct(NAME, caller.address, target, &self.context);
        record.called_by(&caller.name);
        let failed = match self.shares.admit(caller.address.ip()) {
            Ok(place) => {
                record.hold(place);
                match direct::connect(target).await {
                    Ok(socket) => return Ok(Connected { record, to: Target::Direct(socket) }),
                    Err(failed) => failed,
                }
            }
            Err(full) => {
                self.context.metrics.over_limit(NAME, &full);
                Failed { outcome: Outcome::Busy, reason: full.to_string() }
            }
        };
        record.end(failed.outcome, &failed.reason);
        Err(failed)
    }
}

fn not_waited() -> Failed {
    Failed { outcome: Outcome::ClientReset, reason: "the caller did not wait for the answer".to_owned() }
}

impl Connected {
    /// Carries the connection until both directions have ended, or `gone` ends: then it is reset.
    pub(super) async fn run(
        self,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
        gone: impl Future<Output = ()>,
    ) -> Result<(), Failed> {
        let Self { mut record, to } = self;
        let ended = match to {
            Target::Edge(edge) => carry(*edge, &mut record, read, write, gone).await,
            Target::Direct(socket) => direct::carry(socket, &mut record, read, write, gone).await,
        };
        match &ended {
            Ok(()) => record.end(Outcome::Ok, &""),
            Err(failed) => record.end(failed.outcome, &failed.reason),
        }
        ended
    }
}

async fn carry(
    edge: Edge,
    record: &mut AccessLogGuard,
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    gone: impl Future<Output = ()>,
) -> Result<(), Failed> {
    let Edge { way, mut send, stream } = edge;
    let (abort, traffic) = (Arc::new(Abort::default()), record.traffic(way.carried()));
    let ended = {
        let on = way.on();
        let pump = Pump { flow: &on.link.flow, stalls: on.stalls, abort: &abort, traffic: &traffic };
        let mut carrying = std::pin::pin!(pump.run(read, write, &mut send, stream));
        tokio::select! {
            biased;
            ended = &mut carrying => ended,
            () = on.link.over.cancelled() => {
                abort.trigger(record.why_over());
                carrying.await
            }
            () = gone => {
                abort.trigger(Outcome::ClientReset);
                carrying.await
            }
        }
    };
    record.carried(&traffic);
    ended.map_err(|error| match error {
        RelayError::Aborted(outcome, "") => {
            let reason = match outcome {
                Outcome::ClientReset => "the caller has gone",
                Outcome::Shutdown => "this server stops",
                _ => "the tunnel was lost",
            };
            Failed { outcome, reason: reason.to_owned() }
        }
        error => Failed::of(&error),
    })
}

//! Dials what a caller asks for, and carries the connection.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use rand::seq::SliceRandom as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tunnel_core::carry::{Pump, RelayError};
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use super::destination::{Destination, Direct, Meant, find, not_allowed, of_endpoint};
use super::services::{ClusterServices, Wanted};
use crate::admission::Shares;
use crate::door::access_log::AccessLogGuard;
use crate::door::context::{DoorContext, OpenRequest};
use crate::door::direct::{self, Failed};
use crate::door::way::Way;
use crate::kube::Endpoint;

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
    /// None: cluster IPs mean nothing to this door.
    pub(super) services: Option<Arc<ClusterServices>>,
}

/// Endpoints of a Service that one caller is led to, at most, where none can be reached.
const TRIED: usize = 3;

/// Where a connection can go.
enum Choice {
    One(Destination),
    /// To one of the Service's endpoints, those that are not out of reach, in the order in which they are tried.
    Service(Wanted, Vec<(SocketAddr, Destination)>, Arc<[Endpoint]>),
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
        let mut gone = pin!(gone);
        let choice = tokio::select! {
            biased;
            choice = self.choose(address) => choice,
            () = gone.as_mut() => return Err(not_waited()),
        };
        let (wanted, reached, all) = match choice {
            Ok(Choice::One(destination)) => return self.reach(destination, caller, gone).await,
            Ok(Choice::Service(wanted, reached, all)) => (wanted, reached, all),
            Err(failed) => return Err(self.turned_away(failed, caller)),
        };
        let mut last = wanted.no_endpoint();
        for (endpoint, destination) in reached {
            match self.reach(destination, caller, gone.as_mut()).await {
                Ok(connected) => return Ok(connected),
                Err(failed) if failed.outcome == Outcome::ClientReset => return Err(failed),
                Err(failed) => last = wanted.at(endpoint, &failed),
            }
        }
        if let Some(services) = &self.services {
            services.doubt(&wanted, all);
        }
        Err(last)
    }

    async fn choose(&self, address: &str) -> Result<Choice, Failed> {
        let denied = |reason| Failed { outcome: Outcome::Denied, reason };
        let address = match find(address, &self.context.router, &self.direct).map_err(denied)? {
            Meant::Known(destination) => return Ok(Choice::One(destination)),
            Meant::Elsewhere(address) => address,
        };
        let direct = self.direct.destination(address);
        if let Some(services) = &self.services {
            let reached = |endpoint: &Endpoint| self.endpoint(endpoint).is_some();
            match services.find(address, direct.is_none(), reached).await {
                Ok(Some((wanted, endpoints))) => {
                    let first = endpoints.first().ok_or_else(|| wanted.no_endpoint())?.address;
                    let mut found: Vec<_> = endpoints
                        .iter()
                        .filter_map(|endpoint| Some((endpoint.address, self.endpoint(endpoint)?)))
                        .collect();
                    found.shuffle(&mut rand::rng());
                    found.truncate(TRIED);
                    match direct {
                        // kube-proxy leads there, or nothing does.
                        Some(direct) if found.is_empty() => return Ok(Choice::One(direct)),
                        None if found.is_empty() => return Err(wanted.out_of_reach(first)),
                        _ => return Ok(Choice::Service(wanted, found, endpoints)),
                    }
                }
                Ok(None) => {}
                // kube-proxy knows the endpoints too.
                Err(failed) if direct.is_some() && failed.outcome == Outcome::TimedOut => {
                    tracing::debug!(reason = failed.reason, "this server dials the Service's address itself");
                }
                Err(failed) => return Err(failed),
            }
        }
        direct.map(Choice::One).ok_or_else(|| denied(not_allowed(address.ip())))
    }

    /// None: it is out of reach.
    fn endpoint(&self, endpoint: &Endpoint) -> Option<Destination> {
        of_endpoint(endpoint, &self.context.router, &self.direct)
    }

    async fn reach(
        &self,
        destination: Destination,
        caller: &Caller,
        gone: impl Future<Output = ()>,
    ) -> Result<Connected, Failed> {
        match destination {
            Destination::Edge(request) => self.edge(request, caller, gone).await,
            Destination::Direct(host, port) => self.direct(host, port, caller, gone).await,
        }
    }

    fn turned_away(&self, failed: Failed, caller: &Caller) -> Failed {
        let (client, caller, reason) = (caller.address, &caller.name, &failed.reason);
        self.context.metrics.turned_away(NAME);
        tracing::warn!(door = NAME, %client, %caller, reason, "client turned away");
        failed
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
        let denied = |reason| Failed { outcome: Outcome::Denied, reason };
        let targets = match direct::resolve(host, port).await {
            Ok(targets) => targets,
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                let reason = format!("lookup {}: i/o timeout", printable(host, 100));
                return Err(self.turned_away(denied(reason), caller));
            }
            Err(error) => {
                let reason = format!("lookup {}: no such host: {error}", printable(host, 100));
                return Err(self.turned_away(denied(reason), caller));
            }
        };
        let Some(target) = targets.iter().copied().find(|target| self.direct.allows(target.ip())) else {
            let reason = targets.first().map_or_else(
                || format!("lookup {}: no such host", printable(host, 100)),
                |target| not_allowed(target.ip()),
            );
            return Err(self.turned_away(denied(reason), caller));
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
        let Self { record, to } = self;
        let ended = match to {
            Target::Edge(edge) => carry(*edge, &record, read, write, gone).await,
            Target::Direct(socket) => direct::carry(socket, &record, read, write, gone).await,
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
    record: &AccessLogGuard,
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    gone: impl Future<Output = ()>,
) -> Result<(), Failed> {
    let Edge { way, mut send, stream } = edge;
    let (abort, traffic) = record.carrying(Some(way.link()), way.carried());
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

//! Dials the targets that callers ask for, and relays the connections.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use rand::seq::SliceRandom as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tunnel_link::outcome::Outcome;
use tunnel_runtime::text::printable;

use super::destination::{Direct, Resolution, find, not_allowed, of_endpoint};
use super::services::{ClusterServices, RequestedService};
use crate::admission::Shares;
use crate::caller::Certified;
use crate::listener::access_log::{AccessLogGuard, turned_away};
use crate::listener::cluster::Endpoint;
use crate::listener::context::{Failed, ListenerContext, Reached};
use crate::listener::direct;
use crate::listener::upstream::Upstream;

/// The listener's name in logs and metrics.
pub(crate) const NAME: &str = "egress";

/// The client that asks for a connection.
#[derive(Clone, Debug)]
pub(super) struct EgressClient {
    /// Loopback, port 0, for a client of the Unix socket, which has no address.
    pub(super) address: SocketAddr,
    /// From its certificate, or its process's credentials from the kernel.
    pub(super) name: Arc<str>,
    /// `None` at the Unix socket, where nobody's right is judged.
    pub(super) certified: Option<Arc<Certified>>,
}

impl EgressClient {
    fn noted_in(&self, record: &AccessLogGuard) {
        record.called_by(&self.name);
        if let Some(certified) = &self.certified {
            record.admitted_by(certified.clone());
        }
    }

    /// Waits until the caller's certificate is accepted no longer.
    pub(super) async fn lapsed(&self) {
        match &self.certified {
            Some(certified) => certified.lapsed().await,
            None => std::future::pending().await,
        }
    }
}

/// State for dialling.
#[derive(Clone)]
pub(super) struct Dialler {
    pub(super) context: ListenerContext,
    pub(super) shares: Shares,
    pub(super) direct: Direct,
    /// `None` if cluster IPs are not resolved to Services here.
    pub(super) services: Option<Arc<ClusterServices>>,
}

/// Maximum number of a Service's endpoints to try for one caller.
const TRIED: usize = 3;

/// Possible destinations of a connection.
enum Choice {
    One(Reached),
    /// The endpoints of a Service that can be reached, in the order in which they are tried, and all endpoints.
    Service(RequestedService, Vec<(SocketAddr, Reached)>, Arc<[Endpoint]>),
}

/// A connection that is up. It is recorded when this is dropped.
pub(super) struct Connected {
    record: AccessLogGuard,
    to: Upstream,
}

impl Dialler {
    /// Connects to `HOST:PORT`. Fails early when `gone` completes; once the target is known, that is recorded as a
    /// reset by the client.
    pub(super) async fn dial(
        &self,
        address: &str,
        caller: &EgressClient,
        gone: impl Future<Output = ()>,
    ) -> Result<Connected, Failed> {
        let mut gone = pin!(gone);
        if let Some(Err(reason)) = caller.certified.as_ref().map(|certified| certified.check()) {
            return Err(self.turned_away(Failed { outcome: Outcome::Denied, reason }, caller));
        }
        let choice = tokio::select! {
            biased;
            choice = self.choose(address) => choice,
            () = gone.as_mut() => return Err(not_waited()),
        };
        let (wanted, reached, all) = match choice {
            Ok(Choice::One(reached)) => return self.reach(reached, caller, gone).await,
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
            services.doubt(&wanted, &all);
        }
        Err(last)
    }

    async fn choose(&self, address: &str) -> Result<Choice, Failed> {
        let denied = |reason| Failed { outcome: Outcome::Denied, reason };
        let address = match find(address, &self.context.router, &self.direct).map_err(denied)? {
            Resolution::Known(reached) => return Ok(Choice::One(reached)),
            Resolution::Name(host, port) => {
                return Ok(Choice::One(Reached::Cloud(self.look_up(&host, port).await?)));
            }
            Resolution::Elsewhere(address) => address,
        };
        let direct = self.direct.destination(address, &self.context.router);
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
                        // kube-proxy leads to an endpoint, or nothing does.
                        Some(direct) if found.is_empty() => return Ok(Choice::One(direct)),
                        None if found.is_empty() => return Err(wanted.out_of_reach(first)),
                        _ => return Ok(Choice::Service(wanted, found, endpoints)),
                    }
                }
                Ok(None) => {}
                // kube-proxy knows the endpoints too.
                Err(failed) if direct.is_some() && failed.outcome == Outcome::TimedOut => {
                    tracing::debug!(
                        reason = failed.reason,
                        "failed to find the Service's endpoints, dialling its address"
                    );
                }
                Err(failed) => return Err(failed),
            }
        }
        direct.map(Choice::One).ok_or_else(|| denied(not_allowed(address.ip())))
    }

    /// Returns `None` if the endpoint cannot be reached.
    fn endpoint(&self, endpoint: &Endpoint) -> Option<Reached> {
        of_endpoint(endpoint, &self.context.router, &self.direct)
    }

    async fn reach(
        &self,
        reached: Reached,
        caller: &EgressClient,
        gone: impl Future<Output = ()>,
    ) -> Result<Connected, Failed> {
        let mut record = AccessLogGuard::reaching(NAME, caller.address, &reached, &self.context);
        caller.noted_in(&record);
        let place = self.shares.admit(caller.address.ip());
        let opened = tokio::select! {
            biased;
            opened = Upstream::open(&self.context, &reached, caller.address, place, &mut record) => opened,
            () = gone => Err(not_waited()),
        };
        match opened {
            Ok(to) => Ok(Connected { record, to }),
            Err(failed) => {
                record.end(failed.outcome, &failed.reason);
                Err(failed)
            }
        }
    }

    fn turned_away(&self, failed: Failed, caller: &EgressClient) -> Failed {
        let metrics = &self.context.metrics;
        turned_away(metrics, NAME, caller.address, Some(&caller.name), &failed.reason);
        failed
    }

    /// Returns the first address of the host that this server may dial.
    async fn look_up(&self, host: &str, port: u16) -> Result<SocketAddr, Failed> {
        let denied = |reason| Failed { outcome: Outcome::Denied, reason };
        let shown = printable(host, 100);
        let targets = direct::resolve(host, port).await.map_err(|error| not_resolved(&shown, &error))?;
        let allowed = targets.iter().find(|target| self.direct.allows(**target, &self.context.router));
        match (allowed, targets.first()) {
            (Some(allowed), _) => Ok(*allowed),
            (None, Some(target)) => Err(denied(not_allowed(target.ip()))),
            (None, None) => Err(denied(format!("lookup {shown}: no such host"))),
        }
    }
}

/// A name server that does not answer is a failure of the moment, unlike a name that does not exist.
fn not_resolved(host: &str, error: &std::io::Error) -> Failed {
    // EAI_AGAIN, as the standard library shows it with glibc and with musl.
    const AGAIN: [&str; 2] = ["Temporary failure in name resolution", "Try again"];
    let text = error.to_string();
    if error.kind() == std::io::ErrorKind::TimedOut || AGAIN.iter().any(|again| text.ends_with(again)) {
        return Failed { outcome: Outcome::TimedOut, reason: format!("lookup {host}: i/o timeout") };
    }
    Failed { outcome: Outcome::Denied, reason: format!("lookup {host}: no such host: {text}") }
}

fn not_waited() -> Failed {
    Failed { outcome: Outcome::ClientReset, reason: "the caller did not wait for the answer".to_owned() }
}

impl Connected {
    /// Relays until both directions have ended. Resets the connection when `gone` completes.
    pub(super) async fn run(
        self,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
        gone: impl Future<Output = ()>,
    ) -> Result<(), Failed> {
        let Self { record, to } = self;
        let ended = to.pump(&record, read, write, gone).await;
        record.finish(&ended);
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::listener::answer::status_of;

    #[test]
    fn a_name_server_that_does_not_answer_is_no_refusal() {
        let found = |error: io::Error| {
            let failed = not_resolved("example.org", &error);
            (status_of(failed.outcome).as_u16(), failed.reason)
        };
        let prefix = "failed to lookup address information: ";
        let late = (504, "lookup example.org: i/o timeout".to_owned());
        assert_eq!(found(io::Error::new(io::ErrorKind::TimedOut, "i/o timeout")), late);
        for again in ["Temporary failure in name resolution", "Try again"] {
            assert_eq!(found(io::Error::other(format!("{prefix}{again}"))), late);
        }
        let (status, reason) = found(io::Error::other(format!("{prefix}Name or service not known")));
        assert_eq!(status, 403);
        assert!(reason.starts_with("lookup example.org: no such host"), "{reason}");
    }
}

//! The server's own certificate: issued at the start, renewed, and reissued when its names or the CA change.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustls::ClientConfig;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tunnel_pki::{ServerTls, TrustBundle, Validity, peer_tls, validity};
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::net::{InterfaceAddress, interface_addresses};

use super::ca::Ca;
use super::ca_state::{CaState, IssuedCertificate, dns_name};
use super::error::PkiError;
use super::metrics::PkiMetrics;

/// Interval of the checks for changes of the CA's files and of this host's addresses.
const POLL: Duration = Duration::from_secs(2);
/// Limit for hosts with very many addresses (one per Service under IPVS): clients may refuse a larger certificate.
const MAX_LOCAL_ADDRESSES: usize = 64;

/// Names in the server's certificate besides `SERVER_NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerNames {
    pub dns: Vec<String>,
    pub addresses: Vec<IpAddr>,
    /// True to add this host's own addresses, and follow their changes.
    pub local_addresses: bool,
}

impl ServerNames {
    fn sans(&self) -> (Vec<String>, Vec<IpAddr>) {
        let dns: BTreeSet<_> = self.dns.iter().cloned().collect();
        let mut addresses: BTreeSet<_> = self.addresses.iter().copied().collect();
        if self.local_addresses {
            addresses.extend(local_addresses());
        }
        (dns.into_iter().collect(), addresses.into_iter().collect())
    }
}

/// This host's addresses; empty if the kernel does not list them.
fn local_addresses() -> Vec<IpAddr> {
    let listed = interface_addresses().inspect_err(
        |error| tracing::warn!(%error, "failed to list this host's addresses for the server's certificate"),
    );
    nameable(listed.unwrap_or_default())
}

fn nameable(listed: Vec<InterfaceAddress>) -> Vec<IpAddr> {
    // IPv6 link-local addresses mean nothing without a scope, which a certificate cannot have.
    let usable = |address: &IpAddr| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    // kube-proxy in IPVS mode gives the addresses of all Services to an interface that is down.
    let up = listed.into_iter().filter(|entry| entry.up).map(|entry| entry.address);
    let addresses: BTreeSet<_> = up.filter(usable).collect();
    addresses.into_iter().take(MAX_LOCAL_ADDRESSES).collect()
}

/// The server's own certificate and CA, kept current: renewed at 80 % of the lifetime, and reissued when the names, the
/// host's addresses or the CA's files change. The key is never stored: each start generates a new one.
pub struct ServerCertificate {
    /// The TLS settings of the agent port, kept current.
    pub tls: Arc<ServerTls>,
    /// The TLS settings for connections to other servers, kept current: load them for each connection.
    pub peer_tls: Arc<ArcSwap<ClientConfig>>,
    /// The current CA.
    pub ca: watch::Receiver<Arc<CaState>>,
    /// The roots of the current CA, which are sent to the agents. It is notified only if they differ, not on every change
    /// of the CA.
    pub roots: watch::Receiver<Arc<TrustBundle>>,
    names: watch::Sender<ServerNames>,
    _task: AbortOnDropHandle<()>,
}

impl ServerCertificate {
    /// Issues the first certificate and starts renewing it. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the CA is unusable, or a name cannot be in a certificate.
    pub fn start(ca: Ca, names: ServerNames, server_id: &str, metrics: PkiMetrics) -> Result<Self, PkiError> {
        let fingerprint = ca.fingerprint()?;
        let state = Arc::new(ca.state()?);
        let sans = names.sans();
        let (issued, key) = state.issue_server(&sans.0, &sans.1)?;
        let validity = leaf_validity(&issued)?;
        let (tickets, clock) = (Some(state.tickets()?), state.clock());
        let tls = Arc::new(ServerTls::new(issued.chain, &key.to_der(), state.bundle(), tickets, clock)?);
        let peer_tls = Arc::new(ArcSwap::from(peer_config(&state, server_id)?));
        let (names_sender, names) = watch::channel(names);
        let (roots_sender, roots) = watch::channel(Arc::new(state.bundle().clone()));
        let (state_sender, state_receiver) = watch::channel(state);
        let renewal = Renewal {
            ca,
            metrics,
            tls: Arc::clone(&tls),
            peer_tls: Arc::clone(&peer_tls),
            server_id: server_id.to_owned(),
            state: state_sender,
            roots: roots_sender,
            names,
            fingerprint,
            sans,
            validity,
            failing: LogOnce::default(),
        };
        renewal.report();
        let task = AbortOnDropHandle::new(tokio::spawn(renewal.run()));
        Ok(Self { tls, peer_tls, ca: state_receiver, roots, names: names_sender, _task: task })
    }

    /// Changes the certificate's names; it is reissued in the background if they differ.
    ///
    /// # Errors
    /// If a name cannot be in a certificate; then the present names stay.
    pub fn set_names(&self, names: ServerNames) -> Result<(), PkiError> {
        for name in &names.dns {
            dns_name(name)?;
        }
        self.names.send_replace(names);
        Ok(())
    }
}

fn leaf_validity(issued: &IssuedCertificate) -> Result<Validity, PkiError> {
    let leaf = issued.chain.first().ok_or_else(|| PkiError::Sign("an empty chain".into()))?;
    Ok(validity(leaf)?)
}

fn peer_config(state: &CaState, server_id: &str) -> Result<Arc<ClientConfig>, PkiError> {
    let (issued, key) = state.issue_peer(server_id)?;
    Ok(peer_tls(issued.chain, &key.to_der(), state.bundle(), state.clock())?)
}

struct Renewal {
    ca: Ca,
    metrics: PkiMetrics,
    tls: Arc<ServerTls>,
    peer_tls: Arc<ArcSwap<ClientConfig>>,
    server_id: String,
    state: watch::Sender<Arc<CaState>>,
    roots: watch::Sender<Arc<TrustBundle>>,
    names: watch::Receiver<ServerNames>,
    fingerprint: String,
    sans: (Vec<String>, Vec<IpAddr>),
    validity: Validity,
    failing: LogOnce,
}

impl Renewal {
    async fn run(mut self) {
        let mut turn = tokio::time::interval(POLL);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = turn.tick() => {}
                changed = self.names.changed() => if changed.is_err() { return },
            }
            match self.refresh().await {
                Ok(()) => {
                    if self.failing.clear() {
                        tracing::info!("server certificate and CA up to date again");
                    }
                }
                Err(error) => {
                    if self.failing.is_new(&error) {
                        tracing::error!(%error, "failed to refresh the server's certificate and CA, keeping the present ones");
                    }
                }
            }
        }
    }

    /// Reissues the certificate if necessary. After an error the last good state stays.
    async fn refresh(&mut self) -> Result<(), PkiError> {
        let (ca, present) = (self.ca.clone(), self.fingerprint.clone());
        // Listeners wait on this thread, and a disk may not answer.
        let read = blocking(move || {
            let fingerprint = ca.fingerprint()?;
            let changed = (fingerprint != present).then(|| ca.state()).transpose()?;
            Ok::<_, PkiError>((fingerprint, changed))
        });
        let interrupted = |stopped| Err(PkiError::Sign(format!("reading the CA was interrupted: {stopped}")));
        let (fingerprint, changed) = read.await.unwrap_or_else(interrupted)?;
        let ca_changed = changed.is_some();
        let state = changed.map_or_else(|| self.state.borrow().clone(), Arc::new);
        let sans = self.names.borrow_and_update().sans();
        // It is not valid yet if the clock was ahead when it was issued.
        let current = (self.validity.not_before..self.validity.renew_at()).contains(&state.clock().now());
        if !ca_changed && sans == self.sans && current {
            return Ok(());
        }
        let (issued, key) = state.issue_server(&sans.0, &sans.1)?;
        let validity = leaf_validity(&issued)?;
        let peer_tls = peer_config(&state, &self.server_id)?;
        self.tls.replace(issued.chain, &key.to_der(), state.bundle(), Some(state.tickets()?))?;
        self.peer_tls.store(peer_tls);
        (self.validity, self.sans, self.fingerprint) = (validity, sans, fingerprint);
        tracing::info!(
            ca_changed,
            ca_hash = state.hash(),
            roots = state.roots().len(),
            "issued the server's certificate"
        );
        if ca_changed {
            let roots = Arc::new(state.bundle().clone());
            self.state.send_replace(state);
            self.roots.send_if_modified(|current| std::mem::replace(current, roots.clone()) != roots);
        }
        self.report();
        Ok(())
    }

    fn report(&self) {
        let end = self.validity.not_after.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.metrics.server_not_after.set(i64::try_from(end.as_secs()).unwrap_or(i64::MAX));
        self.metrics.roots.set(i64::try_from(self.state.borrow().roots().len()).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_services_take_no_places() {
        let entry = |address: [u8; 4], up| InterfaceAddress { address: address.into(), prefix: 32, up };
        // As on kube-ipvs0.
        let services = (0..200).map(|n| entry([10, 96, 0, n], false));
        let listed = services.chain([entry([192, 168, 1, 10], true), entry([127, 0, 0, 1], true)]);
        assert_eq!(nameable(listed.collect()), [IpAddr::from([127, 0, 0, 1]), [192, 168, 1, 10].into()]);
    }
}

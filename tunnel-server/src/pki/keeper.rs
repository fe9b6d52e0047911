use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tunnel_core::identity::{ServerTls, Validity, validity};

use super::authority::dns_name;
use super::{Ca, CaState, PkiError, PkiMetrics};

/// How soon a change of the CA's files or of this host's addresses is seen.
const POLL: Duration = Duration::from_secs(2);
/// A host with very many addresses (one per Service under IPVS) must not make a certificate that no client takes.
const MAX_LOCAL_ADDRESSES: usize = 64;

/// What the server's certificate names besides `SERVER_NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerNames {
    /// DNS names.
    pub dns: Vec<String>,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
    /// Also this host's own addresses, as they come and go.
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

fn local_addresses() -> Vec<IpAddr> {
    let interfaces = match nix::ifaddrs::getifaddrs() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            tracing::warn!(%error, "this host's addresses are not in the server's certificate");
            return Vec::new();
        }
    };
    let mut found: Vec<IpAddr> = interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            if let Some(v4) = address.as_sockaddr_in() {
                return Some(IpAddr::V4(v4.ip()));
            }
            // Link-local addresses mean nothing without a scope, which a certificate cannot carry.
            let v6 = address.as_sockaddr_in6()?.ip();
            (!v6.is_unicast_link_local()).then_some(IpAddr::V6(v6))
        })
        .collect();
    found.sort();
    found.dedup();
    found.truncate(MAX_LOCAL_ADDRESSES);
    found
}

/// Keeps the server's own certificate and the CA as the server knows it: renews at 80 % of life, and follows the
/// names, the host's addresses and the CA's files. The key never touches the disk: a start makes a new one.
pub struct ServerCertificate {
    tls: Arc<ServerTls>,
    ca: watch::Receiver<Arc<CaState>>,
    names: watch::Sender<ServerNames>,
    _task: AbortOnDropHandle<()>,
}

impl ServerCertificate {
    /// Issues the first certificate and starts to keep it. Needs a tokio runtime.
    ///
    /// # Errors
    /// An unusable CA, or a name that cannot be in a certificate.
    pub fn start(ca: Ca, names: ServerNames, metrics: PkiMetrics) -> Result<Self, PkiError> {
        let fingerprint = ca.fingerprint()?;
        let state = Arc::new(ca.state()?);
        let sans = names.sans();
        let (issued, key) = state.issue_server(&sans.0, &sans.1)?;
        let validity = leaf_validity(&issued)?;
        let tls = Arc::new(ServerTls::new(issued.chain, key, state.bundle())?);
        let (names_sender, names) = watch::channel(names);
        let (state_sender, state_receiver) = watch::channel(state);
        let keeper = Keeper {
            ca,
            metrics,
            tls: Arc::clone(&tls),
            state: state_sender,
            names,
            fingerprint,
            sans,
            validity,
            complaint: None,
        };
        keeper.report();
        let task = AbortOnDropHandle::new(tokio::spawn(keeper.run()));
        Ok(Self { tls, ca: state_receiver, names: names_sender, _task: task })
    }

    /// The TLS settings of the agent port, which this keeps current.
    pub fn tls(&self) -> Arc<ServerTls> {
        Arc::clone(&self.tls)
    }

    /// The CA as it is now; a change is to be told to the agents.
    pub fn ca(&self) -> watch::Receiver<Arc<CaState>> {
        self.ca.clone()
    }

    /// Other names for the certificate; it is issued anew within a moment when they differ.
    ///
    /// # Errors
    /// A name that cannot be in a certificate; the present names stay then.
    pub fn set_names(&self, names: ServerNames) -> Result<(), PkiError> {
        for name in &names.dns {
            dns_name(name)?;
        }
        self.names.send_replace(names);
        Ok(())
    }
}

fn leaf_validity(issued: &super::IssuedCertificate) -> Result<Validity, PkiError> {
    let leaf = issued.chain.first().ok_or_else(|| PkiError::Sign("an empty chain".into()))?;
    Ok(validity(leaf)?)
}

struct Keeper {
    ca: Ca,
    metrics: PkiMetrics,
    tls: Arc<ServerTls>,
    state: watch::Sender<Arc<CaState>>,
    names: watch::Receiver<ServerNames>,
    fingerprint: String,
    sans: (Vec<String>, Vec<IpAddr>),
    validity: Validity,
    /// The error that was logged last: the same one is not logged at every turn.
    complaint: Option<String>,
}

impl Keeper {
    async fn run(mut self) {
        let mut turn = tokio::time::interval(POLL);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = turn.tick() => {}
                changed = self.names.changed() => if changed.is_err() { return },
            }
            match self.refresh() {
                Ok(()) => {
                    if self.complaint.take().is_some() {
                        tracing::info!("the server's certificate and CA are in order again");
                    }
                }
                Err(error) => {
                    let text = error.to_string();
                    if self.complaint.as_ref() != Some(&text) {
                        tracing::error!(error = text, "keeping the present certificate and CA");
                        self.complaint = Some(text);
                    }
                }
            }
        }
    }

    /// An error changes nothing: the last good state stays. The files are a few kilobytes, so reading them here
    /// holds nobody up.
    fn refresh(&mut self) -> Result<(), PkiError> {
        let fingerprint = self.ca.fingerprint()?;
        let ca_changed = fingerprint != self.fingerprint;
        let state = if ca_changed { Arc::new(self.ca.state()?) } else { Arc::clone(&self.state.borrow()) };
        let sans = self.names.borrow_and_update().sans();
        if !ca_changed && sans == self.sans && SystemTime::now() < self.validity.renew_at() {
            return Ok(());
        }
        let (issued, key) = state.issue_server(&sans.0, &sans.1)?;
        let validity = leaf_validity(&issued)?;
        self.tls.replace(issued.chain, key, state.bundle())?;
        (self.validity, self.sans, self.fingerprint) = (validity, sans, fingerprint);
        tracing::info!(
            ca_changed,
            ca_hash = state.hash(),
            roots = state.roots().len(),
            "issued the server's certificate"
        );
        if ca_changed {
            self.state.send_replace(state);
        }
        self.report();
        Ok(())
    }

    fn report(&self) {
        let end = self.validity.not_after.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.metrics.set_server_not_after(i64::try_from(end.as_secs()).unwrap_or(i64::MAX));
        self.metrics.set_roots(self.state.borrow().roots().len());
    }
}

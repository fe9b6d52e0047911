//! What a door that speaks HTTP is made of.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::IpNet;

use super::metrics::MetricsPage;
use super::pods::Pods;
use super::target_tls::TargetTls;
use crate::admission::Share;
use crate::caller::{Caller, CallerTls, Reviewer};

/// The most bytes of a request's head.
pub(super) const MAX_HEAD: usize = 64 << 10;

/// Who may use a door.
pub(crate) enum Admission {
    /// Whoever reaches it: it listens on loopback.
    Everyone,
    /// Callers that the cluster's rules allow, or, without a cluster, whoever has a certificate.
    Callers(Option<Arc<Reviewer>>),
    /// Clients in these ranges, to these ports (none: every tunnelled one); others as callers with a token.
    Listed { clients: Vec<IpNet>, ports: Vec<u16>, reviewer: Option<Arc<Reviewer>> },
}

/// A door that speaks HTTP.
pub(crate) struct Front {
    pub(crate) door: &'static str,
    pub(crate) admission: Admission,
    /// The TLS that it ends; None: it is plain HTTP.
    pub(crate) tls: Option<Arc<CallerTls>>,
    /// TLS to targets; None: they are plain too.
    pub(crate) targets: Option<Arc<TargetTls>>,
    /// Finds pods' nodes; None: paths with a pod mean nothing.
    pub(crate) pods: Option<Arc<Pods>>,
    /// What it answers itself; None: its requests are for edge nodes.
    pub(crate) metrics: Option<MetricsPage>,
}

/// Who is at the other end of a connection.
pub(super) struct Peer {
    pub(super) client: SocketAddr,
    /// By its certificate.
    pub(super) caller: Option<Caller>,
    /// The connection's place, if its door has given it one.
    place: Mutex<Option<Share>>,
}

impl Peer {
    pub(super) fn new(client: SocketAddr, caller: Option<Caller>, place: Option<Share>) -> Self {
        Self { client, caller, place: Mutex::new(place) }
    }

    /// A request of its was admitted: it is no newcomer any more.
    pub(super) fn admitted(&self) {
        if let Some(place) = &mut *self.place.lock().unwrap_or_else(PoisonError::into_inner) {
            place.known();
        }
    }
}

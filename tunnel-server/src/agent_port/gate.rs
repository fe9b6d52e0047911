//! Who may have a connection to the agent port: a place for each stage that it passes.
//!
//! Until the end of its handshake a connection competes by its address, in places of its own where agents have attached
//! before. With a certificate it competes with those of the same node only, for a link or for a renewal. Without one it
//! can only be an enrolment, and these have places of their own.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use tunnel_core::identity::NodeName;

use super::known::KnownSources;
use crate::admission::{Budget, Place, Places, source_key};

/// Connections with one node's certificate at a time that are not attached: an agent needs one for its link to each
/// address of this server, and one to renew.
const PER_NODE: u32 = 16;

pub(super) struct Gate {
    strangers: Places<IpAddr>,
    known: Places<IpAddr>,
    certified: Places<NodeName>,
    enrolments: Places<IpAddr>,
    sources: Arc<KnownSources>,
}

impl Gate {
    pub(super) fn new(budget: &Budget) -> Self {
        Self {
            strangers: Places::new(budget.strangers, u32::MAX),
            known: Places::new(budget.known, u32::MAX),
            certified: Places::new(budget.certified, PER_NODE),
            enrolments: Places::new(budget.enrolments, u32::MAX),
            sources: Arc::default(),
        }
    }

    /// A place for a handshake.
    pub(super) fn handshake(&self, address: IpAddr) -> Option<Place<IpAddr>> {
        let (source, now) = (source_key(address), Instant::now());
        let known = self.sources.contains(source).then(|| self.known.admit(source, now)).flatten();
        known.or_else(|| self.strangers.admit(source, now))
    }

    /// A place for a connection with the certificate of `node`, until it is a session.
    pub(super) fn certified(&self, node: &NodeName, address: IpAddr) -> Option<Certified> {
        let place = self.certified.admit(node.clone(), Instant::now())?;
        Some(Certified { place, address, node: node.clone(), sources: self.sources.clone() })
    }

    /// A place for a connection without a certificate.
    pub(super) fn enrolment(&self, address: IpAddr) -> Option<Place<IpAddr>> {
        self.enrolments.admit(source_key(address), Instant::now())
    }
}

/// The place of a connection with a certificate.
pub(super) struct Certified {
    pub(super) place: Place<NodeName>,
    address: IpAddr,
    node: NodeName,
    sources: Arc<KnownSources>,
}

impl Certified {
    /// Gives the place back: the connection is a session now.
    pub(super) fn attached(self) {
        self.sources.remember(&self.node, self.address);
    }
}

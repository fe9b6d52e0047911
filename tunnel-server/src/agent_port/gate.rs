//! Limits the connections to the agent port, with a place for each stage that they pass.
//!
//! Until the end of its handshake a connection competes by its address; addresses from which agents have attached have
//! separate places. With a certificate it competes only with those of the same node, for a link or for a renewal.
//! Without one it can only be an enrolment, and these have separate places.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tunnel_link::link::HANDSHAKE_TIMEOUT;
use tunnel_runtime::NodeName;

use super::known::KnownSources;
use crate::admission::{Budget, Part, Place, Places, source_key};

/// Maximum number of unattached connections with one node's certificate: an agent needs one for its link to each
/// address of this server, and one to renew.
const PER_NODE: u32 = 16;

/// More concurrent handshakes would only wait for each other's signatures.
const MOST_HANDSHAKES: u32 = 4096;
/// An enrolment takes tens of milliseconds.
const MOST_ENROLMENTS: u32 = 1024;

/// Handshakes from sources from which no agent has attached yet.
const UNAUTHENTICATED: Part = Part::new(1, 16).at_most(MOST_HANDSHAKES);
/// Handshakes from sources from which an agent has attached before.
const KNOWN: Part = Part::new(1, 32).at_most(MOST_HANDSHAKES);
/// Connections that have shown a certificate: links until they are attached, and renewals.
const CERTIFIED: Part = Part::new(1, 32).at_most(MOST_HANDSHAKES);
/// Connections for an enrolment, which need no certificate.
const ENROLMENTS: Part = Part::new(1, 64).at_most(MOST_ENROLMENTS);
/// Links of busy nodes beyond the first one.
const ADDITIONAL: Part = Part::new(1, 32);

/// The parts of the agents' ports.
pub(crate) const PARTS: [(&str, Part); 5] = [
    ("handshakes", UNAUTHENTICATED),
    ("known", KNOWN),
    ("certified", CERTIFIED),
    ("enrolments", ENROLMENTS),
    ("additional", ADDITIONAL),
];

pub(super) struct Gate {
    unauthenticated: Places<IpAddr>,
    known: Places<IpAddr>,
    certified: Places<NodeName>,
    enrolments: Places<IpAddr>,
    additional: Arc<Semaphore>,
    sources: Arc<KnownSources>,
}

impl Gate {
    pub(super) fn new(budget: &Budget) -> Self {
        Self {
            unauthenticated: Places::new(budget.places(&UNAUTHENTICATED), u32::MAX),
            known: Places::new(budget.places(&KNOWN), u32::MAX),
            certified: Places::new(budget.places(&CERTIFIED), PER_NODE).undisturbed_for(HANDSHAKE_TIMEOUT),
            enrolments: Places::new(budget.places(&ENROLMENTS), u32::MAX),
            additional: Arc::new(Semaphore::new(budget.places(&ADDITIONAL) as usize)),
            sources: Arc::default(),
        }
    }

    /// Takes a place for a handshake.
    pub(super) fn handshake(&self, address: IpAddr) -> Option<Place<IpAddr>> {
        let (source, now) = (source_key(address), Instant::now());
        let known = self.sources.contains(source).then(|| self.known.admit(source, now)).flatten();
        known.or_else(|| self.unauthenticated.admit(source, now))
    }

    /// Takes a place for a connection with the certificate of `node`, until it is a session.
    pub(super) fn certified(&self, node: &NodeName, address: IpAddr) -> Option<Certified> {
        let place = self.certified.admit(node.clone(), Instant::now())?;
        let (additional, sources) = (self.additional.clone(), self.sources.clone());
        Some(Certified { place, address, node: node.clone(), additional, sources })
    }

    /// Takes a place for a connection without a certificate.
    pub(super) fn enrolment(&self, address: IpAddr) -> Option<Place<IpAddr>> {
        self.enrolments.admit(source_key(address), Instant::now())
    }
}

/// The place of a connection with a certificate.
pub(super) struct Certified {
    pub(super) place: Place<NodeName>,
    address: IpAddr,
    node: NodeName,
    additional: Arc<Semaphore>,
    sources: Arc<KnownSources>,
}

impl Certified {
    /// Takes a place for an additional link of a session; `None` if all nodes together have too many.
    pub(super) fn additional(&self) -> Option<OwnedSemaphorePermit> {
        self.additional.clone().try_acquire_owned().ok()
    }

    /// Frees the place, as the connection is a session now, and remembers its source.
    pub(super) fn attached(self) {
        self.sources.remember(&self.node, self.address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unauthenticated(gate: &Gate) -> Vec<Place<IpAddr>> {
        (0..100_000u32).filter_map(|n| gate.handshake([192, 0, 2, (n % 16) as u8].into())).collect()
    }

    #[test]
    fn a_thousand_agents_of_one_site_come_back_beside_unauthenticated() {
        let gate = Gate::new(&Budget::of(20_000, 1 << 30));
        let site = IpAddr::from([10, 0, 0, 1]);
        let node: NodeName = "edge-1".parse().unwrap();
        gate.certified(&node, site).unwrap().attached();
        let _unauthenticated = unauthenticated(&gate);
        let (mut left, mut rounds) = (1000, 0);
        while left > 0 {
            let held: Vec<_> = (0..left).map_while(|_| gate.handshake(site)).collect();
            assert!(held.iter().all(|place| !place.is_evicted()));
            left -= held.len();
            rounds += 1;
            assert!(rounds <= 3, "{left} of 1000 are left after three attempts of each");
        }
    }

    #[test]
    fn additional_links_leave_open_files_to_first_ones() {
        let budget = Budget::of(2_000, 1 << 30);
        let gate = Gate::new(&budget);
        let link = || gate.certified(&"edge-1".parse().unwrap(), [10, 0, 0, 1].into()).unwrap().additional();
        let mut links: Vec<_> = (0..budget.places(&ADDITIONAL)).map(|_| link().unwrap()).collect();
        assert!(budget.places(&ADDITIONAL) > 0 && link().is_none());
        links.pop();
        assert!(link().is_some());
    }

    #[test]
    fn unauthenticated_leave_places_to_certificates_and_to_other_enrolments() {
        let gate = Gate::new(&Budget::of(2_000, 1 << 30));
        let _handshakes = unauthenticated(&gate);
        let _enrolments: Vec<_> =
            (0..1000u32).filter_map(|n| gate.enrolment([192, 0, 2, (n % 16) as u8].into())).collect();
        let unauthenticated = IpAddr::from([10, 0, 0, 1]);
        assert!(gate.handshake(unauthenticated).is_some());
        assert!(gate.enrolment(unauthenticated).is_some());
        // Nor can one node's certificate take the places of the others.
        let copied: NodeName = "edge-1".parse().unwrap();
        let held: Vec<_> = (0..100).filter_map(|_| gate.certified(&copied, unauthenticated)).collect();
        assert_eq!(held.len(), PER_NODE as usize);
        assert!(gate.certified(&"edge-2".parse().unwrap(), unauthenticated).is_some());
    }
}

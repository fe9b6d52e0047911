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

#[cfg(test)]
mod tests {
    use super::*;

    fn strangers(gate: &Gate) -> Vec<Place<IpAddr>> {
        (0..100_000u32).filter_map(|n| gate.handshake([192, 0, 2, (n % 16) as u8].into())).collect()
    }

    #[test]
    fn a_thousand_agents_of_one_site_come_back_beside_strangers() {
        let gate = Gate::new(&Budget::of(20_000));
        let site = IpAddr::from([10, 0, 0, 1]);
        let node: NodeName = "edge-1".parse().unwrap();
        gate.certified(&node, site).unwrap().attached();
        let _strangers = strangers(&gate);
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
    fn strangers_leave_places_to_certificates_and_to_other_enrolments() {
        let gate = Gate::new(&Budget::of(2_000));
        let _handshakes = strangers(&gate);
        let _enrolments: Vec<_> =
            (0..1000u32).filter_map(|n| gate.enrolment([192, 0, 2, (n % 16) as u8].into())).collect();
        let newcomer = IpAddr::from([10, 0, 0, 1]);
        assert!(gate.handshake(newcomer).is_some());
        assert!(gate.enrolment(newcomer).is_some());
        // One node's certificate cannot take the places of the others' either.
        let copied: NodeName = "edge-1".parse().unwrap();
        let held: Vec<_> = (0..100).filter_map(|_| gate.certified(&copied, newcomer)).collect();
        assert_eq!(held.len(), PER_NODE as usize);
        assert!(gate.certified(&"edge-2".parse().unwrap(), newcomer).is_some());
    }
}

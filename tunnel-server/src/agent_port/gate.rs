//! Limits the connections to the agent port, with a place for each stage that they pass.
//!
//! Until the end of its handshake a connection competes by its address; addresses from which agents have attached, or
//! servers and redirectors have linked, have separate places. With a certificate it competes only with those of the same
//! node, for a link or for a renewal.
//! Without one it can only be an enrolment, and these have separate places.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tunnel_link::link::HANDSHAKE_TIMEOUT;
use tunnel_runtime::NodeName;

use super::known::KnownSources;
use crate::admission::{Budget, Part, Place, Places, Shares, SourceBuckets, source_key};

/// Maximum number of unattached connections with one node's certificate: an agent needs one for its link to each
/// address of this server, and one to renew.
const PER_NODE: u32 = 16;

/// Maximum number of outbound links of one agent, and of links of one server or redirector, however many addresses of this
/// server it knows: one each, again while its successor starts, and those that are used up or lost and not over yet.
const LINKS_OF_ONE: u32 = 8;
/// Links of other servers and of redirectors, in what the parts of all kinds leave.
const LINKED: Part = Part::new(1, 16);
/// Connections that other servers and redirectors have forwarded at a time: as many as all listeners of one may have.
const FORWARDED: Part = Part::new(37, 64);

/// Handshakes at once from an unknown source: all agents behind one NAT come back when this server starts.
const BURST: u32 = 1024;
/// Time until one more is allowed.
const REFILL: Duration = Duration::from_millis(20);
const MOST_SOURCES: usize = 1 << 14;

/// More concurrent handshakes would only wait for each other's signatures.
const MOST_HANDSHAKES: u32 = 4096;
/// An enrolment takes tens of milliseconds.
const MOST_ENROLMENTS: u32 = 1024;

/// Handshakes from unknown sources.
const UNAUTHENTICATED: Part = Part::new(1, 16).at_most(MOST_HANDSHAKES);
/// Handshakes from sources from which an agent has attached before, or a server or redirector has linked.
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
    /// How many handshakes an unknown source may begin in a time: each costs a signature.
    rate: Mutex<SourceBuckets>,
    /// Links of servers and redirectors, by what they are called in the log.
    peers: Places<String>,
    /// Outbound links. Their shares at the listener bound all of them together.
    outbound: Places<NodeName>,
    /// Connections on the links of servers and redirectors.
    pub(super) forwarded: Shares,
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
            rate: Mutex::new(SourceBuckets::new(BURST, REFILL, MOST_SOURCES)),
            // A link that works does not make room for another one's.
            peers: Places::new(budget.places(&LINKED), LINKS_OF_ONE).undisturbed_for(Duration::MAX),
            outbound: Places::new(u32::MAX, LINKS_OF_ONE).undisturbed_for(Duration::MAX),
            forwarded: Shares::new(budget.places(&FORWARDED)),
        }
    }

    /// Takes a place for a handshake.
    pub(super) fn handshake(&self, address: IpAddr) -> Option<Place<IpAddr>> {
        let (source, now) = (source_key(address), Instant::now());
        let known = self.sources.contains(source);
        if let Some(place) = known.then(|| self.known.admit(source, now)).flatten() {
            return Some(place);
        }
        if !known && !self.rate.lock().take(source, now) {
            return None;
        }
        self.unauthenticated.admit(source, now)
    }

    /// Takes a place for the link of a server or a redirector; its oldest one makes room if it has too many.
    pub(super) fn peer(&self, caller: &str, address: IpAddr) -> Option<Place<String>> {
        let place = self.peers.admit(caller.to_owned(), Instant::now())?;
        self.sources.remember(caller, address);
        Some(place)
    }

    /// The same for the outbound link of an agent.
    pub(super) fn outbound(&self, node: &NodeName) -> Option<Place<NodeName>> {
        self.outbound.admit(node.clone(), Instant::now())
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
        self.sources.remember(&format!("agent of {}", self.node), self.address);
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
    fn an_unknown_source_gets_so_many_handshakes_at_once_and_a_known_one_any_number() {
        let gate = Gate::new(&Budget::of(20_000, 1 << 30));
        let (unknown, other): (IpAddr, IpAddr) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        // Each is over at once.
        let handshakes = |source: IpAddr| (0..5000).filter(|_| gate.handshake(source).is_some()).count();
        assert!(handshakes(unknown) < 2000);
        assert!(gate.handshake(unknown).is_none() && gate.handshake(other).is_some());
        gate.certified(&"edge-1".parse().unwrap(), unknown).unwrap().attached();
        assert_eq!(handshakes(unknown), 5000);
        let (server, host) = ("server cloud-2", [192, 0, 2, 3].into());
        let _link = gate.peer(server, host).unwrap();
        assert_eq!(handshakes(host), 5000, "a server dials again whatever a neighbour of it does");
    }

    // On a clock that stands still: an old place makes room for a new one.
    #[tokio::test(start_paused = true)]
    async fn one_server_or_agent_has_few_links_and_its_oldest_makes_room() {
        let gate = Gate::new(&Budget::of(20_000, 1 << 30));
        let held: Vec<_> =
            (0..100).filter_map(|_| gate.peer("redirector of cloud-2", [10, 0, 0, 2].into())).collect();
        assert_eq!(held.len(), LINKS_OF_ONE as usize, "none is a second old");
        let node = "edge-1".parse().unwrap();
        let outbound: Vec<_> = (0..100).filter_map(|_| gate.outbound(&node)).collect();
        assert_eq!(outbound.len(), LINKS_OF_ONE as usize);
        // Many others have theirs too: if all places are taken, the one with the most makes room.
        let others: Vec<_> = (0..10_000)
            .filter_map(|n| gate.peer(&format!("redirector of host-{n}"), [10, 0, 0, 3].into()))
            .collect();
        assert!(others.len() > 500, "{}", others.len());
        assert!(others.iter().all(|place| !place.is_evicted()));
        assert_eq!(held.iter().filter(|place| !place.is_evicted()).count(), 1);
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

    // On a clock that stands still: an old place makes room for a new one.
    #[tokio::test(start_paused = true)]
    async fn unauthenticated_leave_places_to_certificates_and_to_other_enrolments() {
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

//! Limits the connections to the agent port, with a place for each stage that they pass.
//!
//! Until the end of its handshake a connection competes by its address; addresses from which agents have attached, or
//! servers and redirectors have linked, have separate places. Handshakes get their turn by their address too, those of one
//! address in the order in which they came: a connection that waits costs a file, and one that is turned away comes again.
//! With a certificate it competes only with those of the same node, for a link or for a renewal. Without one it can only be an
//! enrolment, and these have separate places.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tunnel_link::link::HANDSHAKE_TIMEOUT;
use tunnel_runtime::NodeName;
use tunnel_runtime::fair::{FairShare, Turn};

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

/// Handshakes at once from an unknown source: all agents behind one NAT come back when this server starts, and the first has
/// to attach before the source is known.
const BURST: u32 = 4096;
/// Time until one more is allowed.
const REFILL: Duration = Duration::from_millis(20);
const MOST_SOURCES: usize = 1 << 14;

/// More would wait longer than their clients do.
const MOST_WAITING: u32 = 8192;
/// More would only wait for each other's disks and lines.
const MOST_CERTIFIED: u32 = 4096;
/// An enrolment takes tens of milliseconds.
const MOST_ENROLMENTS: u32 = 1024;

/// Handshakes from unknown sources, and those that wait for their turn.
const UNAUTHENTICATED: Part = Part::new(1, 16).at_most(MOST_WAITING);
/// The same from sources from which an agent has attached before, or a server or redirector has linked: in what the parts of
/// all kinds leave, because they are about to become the first links for which it is left.
const KNOWN: Part = Part::new(1, 4).at_most(MOST_WAITING);
/// Connections that have shown a certificate: links until they are attached, and renewals.
const CERTIFIED: Part = Part::new(1, 16).at_most(MOST_CERTIFIED);
/// Maximum wait of a handshake for a place of its certificate, before it begins: it may need none.
const NO_ROOM: Duration = Duration::from_millis(250);
/// Connections for an enrolment, which need no certificate.
const ENROLMENTS: Part = Part::new(1, 64).at_most(MOST_ENROLMENTS);
/// Links of busy nodes beyond the first one.
const ADDITIONAL: Part = Part::new(1, 32);

/// The parts of the agents' ports.
pub(crate) const PARTS: [(&str, Part); 4] = [
    ("handshakes", UNAUTHENTICATED),
    ("certified", CERTIFIED),
    ("enrolments", ENROLMENTS),
    ("additional", ADDITIONAL),
];

/// The places of each stage, and the turns of handshakes.
pub(super) struct ConnectionLimits {
    unauthenticated: Places<IpAddr>,
    known: Places<IpAddr>,
    certified: Places<NodeName>,
    freed: Arc<Freed>,
    enrolments: Places<IpAddr>,
    additional: Arc<Semaphore>,
    sources: Arc<KnownSources>,
    /// Handshakes on places of `known`, and others, that get this server's first answer at a time.
    turns: [FairShare<IpAddr>; 2],
    /// How many handshakes an unknown source may begin in a time: each costs a signature.
    rate: Mutex<SourceBuckets>,
    /// Links of servers and redirectors, by what they are called in the log.
    peers: Places<String>,
    /// Outbound links. Their shares at the listener bound all of them together.
    outbound: Places<NodeName>,
    /// Connections on the links of servers and redirectors.
    pub(super) forwarded: Shares,
}

impl ConnectionLimits {
    /// `threads`: number of those that do handshakes.
    pub(super) fn new(budget: &Budget, threads: usize) -> Self {
        Self {
            unauthenticated: Places::new(budget.places(&UNAUTHENTICATED), u32::MAX),
            known: Places::new(budget.places(&KNOWN), u32::MAX),
            certified: Places::new(budget.places(&CERTIFIED), PER_NODE).undisturbed_for(HANDSHAKE_TIMEOUT),
            freed: Arc::default(),
            enrolments: Places::new(budget.places(&ENROLMENTS), u32::MAX),
            additional: Arc::new(Semaphore::new(budget.places(&ADDITIONAL) as usize)),
            sources: Arc::default(),
            // One source alone gets half of them: as many as there are threads.
            turns: std::array::from_fn(|_| FairShare::new(2 * threads, 4 * MOST_WAITING as usize)),
            rate: Mutex::new(SourceBuckets::new(BURST, REFILL, MOST_SOURCES)),
            // A link that works does not make room for another one's.
            peers: Places::new(budget.places(&LINKED), LINKS_OF_ONE).undisturbed_for(Duration::MAX),
            outbound: Places::new(u32::MAX, LINKS_OF_ONE).undisturbed_for(Duration::MAX),
            forwarded: Shares::new(budget.places(&FORWARDED)),
        }
    }

    /// Takes a place for a handshake, which waits for its turn.
    pub(super) fn handshake(&self, address: IpAddr) -> Option<(Place<IpAddr>, Queue)> {
        let (source, now) = (source_key(address), Instant::now());
        let queue = |turns: &FairShare<IpAddr>| Queue { turns: turns.clone(), source };
        let [of_known, of_others] = &self.turns;
        let known = self.sources.contains(source);
        if !known && !self.rate.lock().take(source, now) {
            return None;
        }
        // When this server has just started all agents come back, and it knows none of them.
        let known = known || self.sources.is_empty();
        if let Some(place) = known.then(|| self.known.admit(source, now)).flatten() {
            return Some((place, queue(of_known)));
        }
        Some((self.unauthenticated.admit(source, now)?, queue(of_others)))
    }

    /// Waits for a moment until a handshake that begins now will find a place of its certificate. More of them would hold
    /// memory, and wait there.
    pub(super) async fn room(&self) {
        let room = async {
            loop {
                let mut freed = pin!(self.freed.handshakes.notified());
                freed.as_mut().enable();
                if self.certified.admits_new_source() {
                    return;
                }
                freed.await;
            }
        };
        let _ = timeout(NO_ROOM, room).await;
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
    pub(super) fn certified(&self, node: &NodeName, address: IpAddr) -> Option<CertifiedPlace> {
        let place = self.certified.admit(node.clone(), Instant::now())?;
        let (additional, sources) = (self.additional.clone(), self.sources.clone());
        let freed = OnDrop(self.freed.clone());
        Some(CertifiedPlace { place, _freed: freed, address, node: node.clone(), additional, sources })
    }

    /// The same; waits for a place of any node while none is free: a connection that is turned away has to do its handshake
    /// again.
    pub(super) async fn certified_when_free(
        &self,
        node: &NodeName,
        address: IpAddr,
    ) -> Option<CertifiedPlace> {
        let free = async {
            loop {
                let mut freed = pin!(self.freed.certified.notified());
                freed.as_mut().enable();
                let place = self.certified(node, address);
                if place.is_some() {
                    return place;
                }
                if !self.certified.is_full() {
                    // This node has too many: the free place is for another one.
                    self.freed.certified.notify_one();
                    return None;
                }
                freed.await;
            }
        };
        timeout(HANDSHAKE_TIMEOUT, free).await.ok().flatten()
    }

    /// Takes a place for a connection without a certificate.
    pub(super) fn enrolment(&self, address: IpAddr) -> Option<Place<IpAddr>> {
        self.enrolments.admit(source_key(address), Instant::now())
    }
}

/// Where a handshake waits for its turn.
pub(super) struct Queue {
    turns: FairShare<IpAddr>,
    source: IpAddr,
}

impl Queue {
    pub(super) async fn turn(&self) -> Option<Turn<IpAddr>> {
        self.turns.take(self.source).await
    }
}

/// The place of a connection with a certificate.
pub(super) struct CertifiedPlace {
    pub(super) place: Place<NodeName>,
    // Dropped after the place.
    _freed: OnDrop,
    address: IpAddr,
    node: NodeName,
    additional: Arc<Semaphore>,
    sources: Arc<KnownSources>,
}

/// Told of each place of a certificate that is free again.
#[derive(Default)]
struct Freed {
    /// Handshakes that are about to begin.
    handshakes: Notify,
    /// Connections that have shown a certificate.
    certified: Notify,
}

struct OnDrop(Arc<Freed>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.handshakes.notify_waiters();
        self.0.certified.notify_one();
    }
}

impl CertifiedPlace {
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
    use futures_util::FutureExt as _;

    use super::*;

    fn handshake(limits: &ConnectionLimits, source: IpAddr) -> Option<Place<IpAddr>> {
        limits.handshake(source).map(|(place, _)| place)
    }

    fn unauthenticated(limits: &ConnectionLimits) -> Vec<Place<IpAddr>> {
        (0..100_000u32).filter_map(|n| handshake(limits, [192, 0, 2, (n % 16) as u8].into())).collect()
    }

    #[test]
    fn a_thousand_agents_of_one_site_come_back_beside_unauthenticated() {
        let limits = ConnectionLimits::new(&Budget::of(20_000, 1 << 30), 1);
        let site = IpAddr::from([10, 0, 0, 1]);
        let node: NodeName = "edge-1".parse().unwrap();
        limits.certified(&node, site).unwrap().attached();
        let _unauthenticated = unauthenticated(&limits);
        let (mut left, mut rounds) = (1000, 0);
        while left > 0 {
            let held: Vec<_> = (0..left).map_while(|_| handshake(&limits, site)).collect();
            assert!(held.iter().all(|place| !place.is_evicted()));
            left -= held.len();
            rounds += 1;
            assert!(rounds <= 3, "{left} of 1000 are left after three attempts of each");
        }
    }

    #[test]
    fn an_unknown_source_gets_so_many_handshakes_at_once_and_a_known_one_any_number() {
        let limits = ConnectionLimits::new(&Budget::of(20_000, 1 << 30), 1);
        let (unknown, other): (IpAddr, IpAddr) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        // Each is over at once.
        let handshakes = |source: IpAddr| (0..5000).filter(|_| limits.handshake(source).is_some()).count();
        assert!(handshakes(unknown) < 4500);
        assert!(limits.handshake(unknown).is_none() && limits.handshake(other).is_some());
        limits.certified(&"edge-1".parse().unwrap(), unknown).unwrap().attached();
        assert_eq!(handshakes(unknown), 5000);
        let (server, host) = ("server cloud-2", [192, 0, 2, 3].into());
        let _link = limits.peer(server, host).unwrap();
        assert_eq!(handshakes(host), 5000, "a server dials again whatever a neighbour of it does");
    }

    #[test]
    fn before_anybody_is_known_all_have_the_places_of_the_known() {
        let at_once = |limits: &ConnectionLimits| {
            let source = IpAddr::from([192, 0, 2, 1]);
            (0..5000).map_while(|_| handshake(limits, source)).collect::<Vec<_>>().len()
        };
        let budget = Budget::of(20_000, 1 << 30);
        let (started, later) = (ConnectionLimits::new(&budget, 1), ConnectionLimits::new(&budget, 1));
        later.certified(&"edge-1".parse().unwrap(), [10, 0, 0, 1].into()).unwrap().attached();
        assert!(at_once(&started) > 2 * at_once(&later));
    }

    #[tokio::test(start_paused = true)]
    async fn handshakes_and_certificates_wait_for_a_place_and_each_that_is_free_serves_one() {
        let limits = ConnectionLimits::new(&Budget::of(2_000, 1 << 30), 1);
        let node = |n: usize| format!("edge-{n}").parse::<NodeName>().unwrap();
        let source = IpAddr::from([10, 0, 0, 1]);
        let mut held: Vec<_> = (0..100_000).map_while(|n| limits.certified(&node(n), source)).collect();
        let (one, other) = (node(200_000), node(200_001));
        let mut waiting = pin!(limits.certified_when_free(&one, source));
        let mut second = pin!(limits.certified_when_free(&other, source));
        let mut room = pin!(limits.room());
        assert!(waiting.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        assert!(room.as_mut().now_or_never().is_none());
        drop(held.pop());
        let first = waiting.as_mut().now_or_never().unwrap();
        assert!(first.is_some() && second.as_mut().now_or_never().is_none());
        // The first one took it before the handshake saw it.
        assert!(room.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.as_mut().now_or_never().unwrap().is_some());
        assert!(room.now_or_never().is_some());
        // Neither waits for ever.
        held.extend((300_000..400_000).map_while(|n| limits.certified(&node(n), source)));
        limits.room().await;
        assert!(limits.certified_when_free(&one, source).await.is_none());
        // Nor does one whose node has too many wait for the places of others.
        drop(held.pop());
        let own: Vec<_> = (0..PER_NODE).filter_map(|_| limits.certified(&other, source)).collect();
        assert_eq!(own.len(), 1, "there was one");
    }

    // On a clock that stands still: an old place makes room for a new one.
    #[tokio::test(start_paused = true)]
    async fn one_server_or_agent_has_few_links_and_its_oldest_makes_room() {
        let limits = ConnectionLimits::new(&Budget::of(20_000, 1 << 30), 1);
        let held: Vec<_> =
            (0..100).filter_map(|_| limits.peer("redirector of cloud-2", [10, 0, 0, 2].into())).collect();
        assert_eq!(held.len(), LINKS_OF_ONE as usize, "none is a second old");
        let node = "edge-1".parse().unwrap();
        let outbound: Vec<_> = (0..100).filter_map(|_| limits.outbound(&node)).collect();
        assert_eq!(outbound.len(), LINKS_OF_ONE as usize);
        // Many others have theirs too: if all places are taken, the one with the most makes room.
        let others: Vec<_> = (0..10_000)
            .filter_map(|n| limits.peer(&format!("redirector of host-{n}"), [10, 0, 0, 3].into()))
            .collect();
        assert!(others.len() > 500, "{}", others.len());
        assert!(others.iter().all(|place| !place.is_evicted()));
        assert_eq!(held.iter().filter(|place| !place.is_evicted()).count(), 1);
    }

    #[test]
    fn additional_links_leave_open_files_to_first_ones() {
        let budget = Budget::of(2_000, 1 << 30);
        let limits = ConnectionLimits::new(&budget, 1);
        let link =
            || limits.certified(&"edge-1".parse().unwrap(), [10, 0, 0, 1].into()).unwrap().additional();
        let mut links: Vec<_> = (0..budget.places(&ADDITIONAL)).map(|_| link().unwrap()).collect();
        assert!(budget.places(&ADDITIONAL) > 0 && link().is_none());
        links.pop();
        assert!(link().is_some());
    }

    // On a clock that stands still: an old place makes room for a new one.
    #[tokio::test(start_paused = true)]
    async fn unauthenticated_leave_places_to_certificates_and_to_other_enrolments() {
        let limits = ConnectionLimits::new(&Budget::of(2_000, 1 << 30), 1);
        let _handshakes = unauthenticated(&limits);
        let _enrolments: Vec<_> =
            (0..1000u32).filter_map(|n| limits.enrolment([192, 0, 2, (n % 16) as u8].into())).collect();
        let unauthenticated = IpAddr::from([10, 0, 0, 1]);
        assert!(limits.handshake(unauthenticated).is_some());
        assert!(limits.enrolment(unauthenticated).is_some());
        // Nor can one node's certificate take the places of the others.
        let copied: NodeName = "edge-1".parse().unwrap();
        let held: Vec<_> = (0..100).filter_map(|_| limits.certified(&copied, unauthenticated)).collect();
        assert_eq!(held.len(), PER_NODE as usize);
        assert!(limits.certified(&"edge-2".parse().unwrap(), unauthenticated).is_some());
    }
}

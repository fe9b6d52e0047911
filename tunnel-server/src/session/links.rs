//! The links of one session. A second TCP connection keeps small messages and other transfers from waiting behind a
//! bulk transfer, or behind a lost segment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tunnel_link::link::MAX_LINKS;

use super::link::{Link, Taken};

/// With a round-trip time below this a line is short: queues drain at once, and fewer links send larger records.
const FAR: Duration = Duration::from_millis(3);
/// A link that moves more bytes per second is busy with bulk transfers.
const BUSY: u64 = 64 << 10;
/// Minimum time over which the rate is measured.
const SHORTEST_SPAN: Duration = Duration::from_millis(50);
/// Time to wait for a requested link before it is requested again; doubled each time up to the maximum.
const PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_PATIENCE: Duration = Duration::from_secs(300);
/// Time for which a link without connections is kept, because it is likely to be needed again.
const IDLE: Duration = Duration::from_secs(60);
/// Connections that begin within this time are one client's: layers of an image, or a page's files.
const BURST: Duration = Duration::from_millis(100);

/// Places of new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// Each on the least loaded link. A loss slows only those down that share the link.
    Apart,
    /// Those that begin together on one link, because a loss slows nothing down. With BBR two bulk links share a line unevenly, and
    /// the second one has first to find the line's rate.
    Together,
}

/// The links of one session. The first one always exists.
#[derive(Debug)]
pub struct Links {
    state: Mutex<State>,
    /// Desired number of links, for the task that asks the agent.
    wanted: watch::Sender<u32>,
    /// Maximum number of links.
    most: u32,
    placing: Placing,
    /// Connections on all links, including those that take no more.
    connections: Arc<AtomicU32>,
}

#[derive(Debug)]
struct State {
    links: Vec<Measured>,
    asked: Option<Instant>,
    patience: Duration,
    /// Number of the link that was last chosen by its load, and the time.
    chosen: Option<(u32, Instant)>,
}

impl State {
    fn up(&self) -> u32 {
        u32::try_from(self.links.len()).unwrap_or(u32::MAX)
    }

    fn is_up(&self, number: u32) -> bool {
        self.links.iter().any(|link| link.link.number == number)
    }

    /// The link of those that began just before, if it can take more.
    fn of_burst(&self, now: Instant) -> Option<usize> {
        let (number, since) = self.chosen?;
        if now.saturating_duration_since(since) >= BURST {
            return None;
        }
        let index = self.links.iter().position(|link| link.link.number == number)?;
        let (silent, spent, busy, ..) = self.links[index].load();
        (!silent && !spent && !busy).then_some(index)
    }

    fn least_loaded(&mut self, now: Instant) -> usize {
        let least = (0..self.links.len()).min_by_key(|index| self.links[*index].load()).unwrap_or_default();
        self.chosen = Some((self.links[least].link.number, now));
        least
    }
}

#[derive(Debug)]
struct Measured {
    link: Arc<Link>,
    /// Time of the last measurement, and the bytes moved until then.
    last: (Instant, u64),
    /// Bytes per second.
    rate: u64,
    idle_since: Option<Instant>,
    /// Bytes received when another link of the session was found to be silent. Until more arrive, this one may be as dead.
    suspected: Option<u64>,
}

impl Measured {
    fn new(link: Arc<Link>, now: Instant) -> Self {
        let moved = link.flow.moved();
        Self { link, last: (now, moved), rate: 0, idle_since: Some(now), suspected: None }
    }

    fn measure(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.last.0);
        let moved = self.link.flow.moved();
        if self.link.connections() == 0 {
            // The transfer has ended, whatever its rate was.
            (self.rate, self.last) = (0, (now, moved));
        } else if elapsed >= SHORTEST_SPAN {
            let bytes = u128::from(moved.saturating_sub(self.last.1));
            self.rate = u64::try_from(bytes * 1000 / elapsed.as_millis()).unwrap_or(u64::MAX);
            self.last = (now, moved);
        }
    }

    /// Sort key, least loaded first. Silent links come last: the connections that they lose would make them look idle.
    fn load(&self) -> (bool, bool, bool, u32, u64) {
        let busy = self.rate > BUSY;
        (self.link.is_silent(), self.link.is_spent(), busy, self.link.connections(), self.rate)
    }
}

impl Links {
    /// `most` is the maximum number of links that the agent opens on request.
    pub(crate) fn new(first: Arc<Link>, most: u32, placing: Placing) -> Self {
        let links = vec![Measured::new(first, Instant::now())];
        let state = Mutex::new(State { links, asked: None, patience: PATIENCE, chosen: None });
        Self {
            state,
            wanted: watch::Sender::new(1),
            most: most.clamp(1, MAX_LINKS),
            placing,
            connections: Arc::default(),
        }
    }

    /// Returns the link for a new connection. On a long path that is the least loaded one, or that of a burst, and another
    /// link is requested when all are in use.
    pub(crate) fn take(&self) -> Taken {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> Taken {
        let mut state = self.state.lock();
        // The first link always exists.
        let first = &state.links[0].link;
        if first.is_spent() {
            // Seen by the task that asks the agent.
            self.wanted.send_modify(|_| ());
        }
        if self.most == 1 || first.flow.distance().is_none_or(|rtt| rtt < FAR) {
            return Taken::new(first, &self.connections);
        }
        state.links.iter_mut().for_each(|link| link.measure(now));
        let of_burst = if self.placing == Placing::Together { state.of_burst(now) } else { None };
        let index = of_burst.unwrap_or_else(|| state.least_loaded(now));
        state.links[index].idle_since = None;
        let taken = Taken::new(&state.links[index].link, &self.connections);
        self.want_more(&mut state, now);
        taken
    }

    /// Requests as many links as there are connections, and a spare one.
    fn want_more(&self, state: &mut State, now: Instant) {
        let connections: u32 = state.links.iter().map(|link| link.link.connections()).sum();
        let wanted = self.most.min(connections.saturating_add(1));
        let all_in_use = state.links.iter().all(|link| link.link.connections() > 0);
        if wanted <= state.up() || !all_in_use {
            return;
        }
        if let Some(asked) = state.asked {
            if now.saturating_duration_since(asked) >= state.patience {
                // They arrive elsewhere, as behind a load balancer, or not at all.
                state.patience = LONGEST_PATIENCE.min(state.patience * 2);
            } else if wanted <= *self.wanted.borrow() {
                return;
            }
        }
        state.asked = Some(now);
        self.wanted.send_replace(wanted);
    }

    /// The desired number of links; a change is also a request to ask again, or to replace the first one, which may have been
    /// made before.
    pub(crate) fn wanted(&self) -> watch::Receiver<u32> {
        let mut wanted = self.wanted.subscribe();
        if self.are_used_up() {
            wanted.mark_changed();
        }
        wanted
    }

    /// True if the first link is spent: its agent has to attach again.
    pub(crate) fn are_used_up(&self) -> bool {
        // The first link always exists.
        self.state.lock().links[0].link.is_spent()
    }

    /// Has the agent attach again, as if the first link were spent.
    pub(crate) fn use_up(&self) {
        self.state.lock().links[0].link.spend();
        self.wanted.send_modify(|_| ());
    }

    /// Numbers of the links to request. Must not be called during a borrow of [`Self::wanted`], which is locked under
    /// the state.
    pub(crate) fn missing(&self) -> Vec<u32> {
        let state = self.state.lock();
        let wanted = *self.wanted.borrow();
        let free = (1..MAX_LINKS).filter(|number| !state.is_up(*number));
        free.take(wanted.saturating_sub(state.up()) as usize).collect()
    }

    /// Adds a link.
    ///
    /// # Errors
    /// If a link with this number exists, or none was requested; says so.
    pub(crate) fn join(&self, link: Arc<Link>) -> Result<(), String> {
        let mut state = self.state.lock();
        let wanted = *self.wanted.borrow();
        if link.number >= MAX_LINKS || state.is_up(link.number) || state.up() >= wanted {
            return Err(format!("link {} of this session was not asked for, or is up already", link.number));
        }
        state.links.push(Measured::new(link, Instant::now()));
        if state.up() >= wanted {
            (state.asked, state.patience) = (None, PATIENCE);
        }
        Ok(())
    }

    /// Removes a link. The first one stays: without it there is no session.
    pub(crate) fn part(&self, link: &Link) {
        self.state.lock().links.retain(|other| other.link.number == 0 || !std::ptr::eq(&*other.link, link));
    }

    /// Removes a link without connections if it is spent, or has been idle for a while and is not the spare one of a
    /// session with connections. Returns true if it is removed.
    pub(crate) fn part_if_idle(&self, link: &Link) -> bool {
        self.part_if_idle_at(link, Instant::now())
    }

    fn part_if_idle_at(&self, link: &Link, now: Instant) -> bool {
        let mut state = self.state.lock();
        let relays = state.links.iter().any(|link| link.link.connections() > 0);
        let idle = |link: &Measured| link.link.connections() == 0;
        let spare = state.links.iter().filter(|link| idle(link)).count() == 1;
        let Some(index) = state.links.iter().position(|other| std::ptr::eq(&*other.link, link)) else {
            return true;
        };
        let this = &mut state.links[index];
        if !idle(this) {
            this.idle_since = None;
            return false;
        }
        let since = *this.idle_since.get_or_insert(now);
        let of_use = now.saturating_duration_since(since) < IDLE || (relays && spare);
        if link.number == 0 || (of_use && !link.is_spent()) {
            return false;
        }
        state.links.remove(index);
        let up = state.up();
        // So that it can be requested again, without a notification to request it now.
        self.wanted.send_if_modified(|wanted| {
            *wanted = up;
            false
        });
        true
    }

    /// All links.
    pub fn all(&self) -> Vec<Arc<Link>> {
        self.state.lock().links.iter().map(|link| link.link.clone()).collect()
    }

    /// Round-trip time of the first link.
    pub fn rtt(&self) -> Option<Duration> {
        // The first link always exists.
        self.state.lock().links[0].link.flow.rtt.last()
    }

    /// Number of streams that the agent accepts on a link, one per connection and some for calls, as reported so far.
    pub(super) fn most_streams(&self) -> u32 {
        // The first link always exists.
        u32::try_from(self.state.lock().links[0].link.send.current_max_send_streams()).unwrap_or(u32::MAX)
    }

    /// True if a link is silent and no other has received anything since that was first asked: a connection should take
    /// another path. All links lead along the same line as a rule, and one connection is enough to find it dead.
    pub(crate) fn are_silent(&self) -> bool {
        let mut state = self.state.lock();
        if !state.links.iter().any(|link| link.link.is_silent()) {
            state.links.iter_mut().for_each(|link| link.suspected = None);
            return false;
        }
        state.links.iter_mut().all(|link| {
            let received = link.link.flow.received();
            link.link.is_silent() || *link.suspected.get_or_insert(received) == received
        })
    }

    /// Connections on all links, including those that take no more.
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
pub(super) mod tests;

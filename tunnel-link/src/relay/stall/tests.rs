//! Tests which receivers are cut, and when.

use futures_util::FutureExt as _;

use super::*;

const WINDOW: usize = 1 << 20;

fn outcomes(aborts: &[Arc<Abort>]) -> Vec<bool> {
    aborts.iter().map(|abort| abort.0.get().is_some()).collect()
}

fn aborts(number: usize) -> Vec<Arc<Abort>> {
    (0..number).map(|_| Arc::default()).collect()
}

/// For connections that no test inspects.
static WAITING: LazyLock<Waiting> = LazyLock::new(Waiting::default);

fn enter<'a>(bound: &'a StallBound, abort: &Arc<Abort>) -> StallTicket<'a> {
    bound.enter(abort, &WAITING, Waker::noop(), WINDOW)
}

fn answer(tickets: &mut [StallTicket<'_>], idle: impl Fn(usize) -> Duration) {
    for (number, ticket) in tickets.iter_mut().enumerate() {
        ticket.update(Waker::noop(), WINDOW, || Some(idle(number)));
    }
}

#[test]
fn far_above_the_bound_nobody_is_asked() {
    let budget = StallBudget::new(4 * WINDOW);
    let bound = StallBound::within(100 * WINDOW, WINDOW, &budget);
    let aborts = aborts(8);
    let tickets: Vec<_> = aborts.iter().take(6).map(|abort| enter(&bound, abort)).collect();
    assert_eq!(outcomes(&aborts), [false; 8], "the first was only asked");
    let more: Vec<_> = aborts.iter().skip(6).map(|abort| enter(&bound, abort)).collect();
    assert_eq!(outcomes(&aborts), [true, true, false, false, false, false, false, false]);
    assert_eq!(budget.held(), 6 * WINDOW);
    drop((tickets, more));
}

#[test]
fn young_stalls_are_spared_until_there_are_far_too_many() {
    let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
    let aborts = aborts(5);
    let mut tickets: Vec<_> = aborts.iter().take(4).map(|abort| enter(&bound, abort)).collect();
    answer(&mut tickets, |_| Duration::MAX);
    assert_eq!(outcomes(&aborts), [false; 5]);
    tickets.push(enter(&bound, &aborts[4]));
    assert_eq!(outcomes(&aborts), [false; 5], "the longest blocked is asked first");
    answer(&mut tickets, |_| Duration::MAX);
    assert_eq!(outcomes(&aborts), [true, false, false, false, false]);
    assert_eq!((bound.blocked(), bound.held()), (4, 4 * WINDOW));
    drop(tickets);
    assert_eq!((bound.blocked(), bound.held(), bound.0.budget.held()), (0, 0, 0));
}

#[test]
fn a_blocked_receiver_is_seen_as_waiting() {
    let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
    let waiting = Waiting::default();
    let held = || waiting.now().map(|(_, held)| held);
    let mut ticket = bound.enter(&Arc::default(), &waiting, Waker::noop(), 4096);
    assert_eq!(held(), Some(4096));
    ticket.update(Waker::noop(), 8192, || None);
    assert_eq!(held(), Some(8192));
    drop(ticket);
    assert_eq!(held(), None);
}

#[test]
fn a_receiver_counts_what_is_held_for_it() {
    let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
    let aborts = aborts(500);
    let tickets: Vec<_> =
        aborts.iter().map(|abort| bound.enter(abort, &WAITING, Waker::noop(), 4096)).collect();
    bound.sweep();
    assert_eq!(bound.held(), 500 * 4096);
    assert!(outcomes(&aborts).iter().all(|cut| !cut));
    drop(tickets);
}

#[test]
fn one_that_made_progress_is_spared_before_those_that_made_none() {
    let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
    let aborts = aborts(5);
    let mut tickets: Vec<_> = aborts.iter().map(|abort| enter(&bound, abort)).collect();
    // The first has been blocked for longest, but its socket sends.
    answer(&mut tickets, |number| if number == 0 { Duration::ZERO } else { Duration::MAX });
    answer(&mut tickets, |number| if number == 0 { Duration::ZERO } else { Duration::MAX });
    assert_eq!(outcomes(&aborts), [false, true, false, false, false]);
}

#[test]
fn at_the_bound_of_the_process_the_link_that_holds_most_pays() {
    let budget = StallBudget::new(8 * WINDOW);
    let greedy = StallBound::within(100 * WINDOW, WINDOW, &budget);
    let modest = StallBound::within(100 * WINDOW, WINDOW, &budget);
    let (few, many) = (aborts(2), aborts(20));
    let mut kept: Vec<_> = few.iter().map(|abort| enter(&modest, abort)).collect();
    let mut tickets = Vec::new();
    for abort in &many {
        tickets.push(enter(&greedy, abort));
        // The next search of all links may have to pause; this one does not.
        greedy.sweep();
        answer(&mut tickets, |_| Duration::MAX);
        assert!(budget.held() <= 11 * WINDOW, "{} windows", budget.held() / WINDOW);
    }
    answer(&mut kept, |_| Duration::MAX);
    assert_eq!(outcomes(&few), [false; 2], "the modest link was there first, and keeps its part");
    let cut = outcomes(&many);
    assert!(cut[0] && !cut[19] && cut.is_sorted_by(|a, b| a >= b), "oldest first: {cut:?}");
    assert_eq!(many[0].0.get(), Some(&(Outcome::Stalled, PROCESS_FULL)));
    drop((tickets, kept));
    assert_eq!(budget.held(), 0);
}

/// Makes the only receiver blocked since `since`, and forgets whether its task was asked.
fn blocked_since(ticket: &mut StallTicket<'_>, since: Instant) {
    let mut blocked = ticket.link.blocked.lock();
    let mut receiver = blocked.remove(&ticket.key).unwrap();
    (receiver.asked, receiver.answered) = (None, None);
    ticket.key.0 = since;
    blocked.insert(ticket.key, receiver);
}

fn is_asked(ticket: &StallTicket<'_>) -> bool {
    ticket.link.blocked.lock()[&ticket.key].asked.is_some()
}

#[test]
fn a_receiver_is_cut_after_its_grace_or_at_the_hard_bound_but_asked_before() {
    #[derive(Debug, PartialEq)]
    enum Then {
        Spared,
        Asked,
        Cut,
    }
    use Then::{Asked, Cut, Spared};
    let (ms, none) = (Duration::from_millis(1), None);
    // Need, time blocked, time since its task was asked, time since it answered, expected result.
    for (need, since, asked, answered, then) in [
        (Need::Soft, GRACE - ms, none, none, Spared),
        (Need::Soft, GRACE, none, none, Asked),
        (Need::Soft, GRACE, Some(ANSWER - ms), none, Spared),
        (Need::Soft, GRACE, Some(ANSWER), none, Asked),
        (Need::Soft, GRACE, none, Some(FRESH - ms), Cut),
        (Need::Soft, GRACE, none, Some(FRESH), Asked),
        (Need::Hard, Duration::ZERO, none, none, Asked),
        (Need::Hard, Duration::ZERO, Some(ANSWER - ms), none, Spared),
        (Need::Hard, Duration::ZERO, Some(ANSWER), none, Cut),
        (Need::Hard, Duration::ZERO, none, Some(FRESH - ms), Cut),
        (Need::Hard, Duration::ZERO, none, Some(FRESH), Asked),
        (Need::Extreme, Duration::ZERO, none, none, Cut),
        (Need::Extreme, Duration::ZERO, Some(ANSWER - ms), none, Cut),
    ] {
        let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
        let abort = Arc::default();
        let mut ticket = enter(&bound, &abort);
        let now = Instant::now() + Duration::from_secs(3600);
        blocked_since(&mut ticket, now - since);
        if let Some(receiver) = bound.0.blocked.lock().get_mut(&ticket.key) {
            receiver.asked = asked.map(|ago| now - ago);
            receiver.answered = answered.map(|ago| now - ago);
        }
        let cut = bound.0.relieve(need, now, LINK_FULL);
        assert_eq!(cut, abort.0.get().is_some());
        let found = match bound.0.blocked.lock().get(&ticket.key) {
            None => Cut,
            Some(receiver) if receiver.asked == Some(now) => Asked,
            Some(_) => Spared,
        };
        assert_eq!(found, then, "{need:?}, blocked for {since:?}, {asked:?} {answered:?}");
    }
}

#[test]
fn both_bounds_are_exact() {
    const LIMIT: usize = 8 * WINDOW;
    let (now, hour) = (Instant::now(), Duration::from_secs(3600));
    let (young, old) = (now + hour, now + hour - GRACE);
    for (of_link, of_process, held, since, asked) in [
        (LIMIT, 100 * LIMIT, LIMIT, old, false),
        (LIMIT, 100 * LIMIT, LIMIT + 1, old, true),
        (LIMIT, 100 * LIMIT, 2 * LIMIT, young, false),
        (LIMIT, 100 * LIMIT, 2 * LIMIT + 1, young, true),
        (100 * LIMIT, LIMIT, LIMIT, old, false),
        (100 * LIMIT, LIMIT, LIMIT + 1, old, true),
        (100 * LIMIT, LIMIT, LIMIT + LIMIT / 4, young, false),
        (100 * LIMIT, LIMIT, LIMIT + LIMIT / 4 + 1, young, true),
    ] {
        let budget = StallBudget::new(of_process);
        assert_eq!(budget.limit(), of_process);
        let bound = StallBound::within(of_link, WINDOW, &budget);
        let mut ticket = bound.enter(&Arc::default(), &WAITING, Waker::noop(), held);
        blocked_since(&mut ticket, since);
        bound.0.check(now + hour, true);
        assert_eq!(is_asked(&ticket), asked, "{held} of {of_link} and {of_process}");
    }
}

#[test]
fn after_a_search_in_vain_only_an_urgent_one_follows_at_once() {
    let budget = StallBudget::new(8 * WINDOW);
    let bound = StallBound::within(100 * WINDOW, WINDOW, &budget);
    let mut ticket = bound.enter(&Arc::default(), &WAITING, Waker::noop(), 9 * WINDOW);
    let now = Instant::now() + Duration::from_secs(3600);
    blocked_since(&mut ticket, now);
    budget.check(now, true);
    assert!(!is_asked(&ticket), "it is young");
    blocked_since(&mut ticket, now - GRACE);
    let almost = now + SCAN_PAUSE - Duration::from_millis(1);
    budget.check(almost, false);
    assert!(!is_asked(&ticket));
    budget.check(almost, true);
    assert!(is_asked(&ticket));
    // This search finds nothing to cut either.
    blocked_since(&mut ticket, now - GRACE);
    budget.check(almost + SCAN_PAUSE, false);
    assert!(is_asked(&ticket));
    // The search before each PING is urgent.
    blocked_since(&mut ticket, Instant::now().checked_sub(GRACE).unwrap());
    bound.sweep();
    assert!(is_asked(&ticket));
    drop(ticket);
    drop(bound);
    assert!(budget.links.lock().is_empty(), "a link that is gone is not searched");
}

#[test]
fn an_abort_before_the_wait_is_seen() {
    let abort = Abort::default();
    assert_eq!(abort.triggered().now_or_never(), None);
    abort.trigger(Outcome::Shutdown);
    abort.trigger(Outcome::Stalled);
    assert_eq!(abort.triggered().now_or_never(), Some((Outcome::Shutdown, "")));
}

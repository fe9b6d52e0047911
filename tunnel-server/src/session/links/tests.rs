use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tunnel_link::link::Flow;

use super::super::link::{MOST_STREAMS, Streams};
use super::*;

const MS: Duration = Duration::from_millis(1);

/// A link over a path with this round-trip time.
pub(crate) async fn link(number: u32, rtt: Duration) -> Arc<Link> {
    link_with(number, rtt, Streams::new(MOST_STREAMS)).await
}

pub(crate) async fn link_with(number: u32, rtt: Duration, streams: Streams) -> Arc<Link> {
    let (near, far) = tokio::io::duplex(1 << 16);
    let preface = tokio::spawn(h2::server::handshake(far));
    let (send, _) = h2::client::handshake(near).await.unwrap();
    drop(preface);
    let flow = Arc::new(Flow::default());
    flow.set_path_rtt(rtt);
    Link::new(number, flow, CancellationToken::new(), send, Handle::current(), streams)
}

async fn links(rtt: Duration, most: u32) -> Links {
    Links::new(link(0, rtt).await, most, Placing::Apart)
}

fn numbers(taken: &[Taken]) -> Vec<u32> {
    taken.iter().map(|taken| taken.number).collect()
}

#[tokio::test]
async fn a_near_node_and_an_old_agent_have_one_link() {
    for links in [links(MS, 8).await, links(50 * MS, 1).await, links(50 * MS, 0).await] {
        let taken: Vec<_> = (0..10).map(|_| links.take()).collect();
        assert_eq!(numbers(&taken), [0; 10]);
        assert_eq!(*links.wanted().borrow(), 1);
        assert!(links.join(link(1, MS).await).is_err());
    }
}

#[tokio::test]
async fn each_connection_gets_a_link_of_its_own_while_there_are_some() {
    let links = links(50 * MS, 8).await;
    let wanted = links.wanted();
    let mut taken = vec![links.take()];
    assert_eq!((*wanted.borrow(), links.missing()), (2, vec![1]), "a spare one");
    links.join(link(1, 50 * MS).await).unwrap();
    taken.push(links.take());
    assert_eq!((*wanted.borrow(), links.missing()), (3, vec![2]));
    // They are being opened; until they are up, connections share links.
    taken.extend([links.take(), links.take()]);
    assert_eq!((*wanted.borrow(), links.missing()), (5, vec![2, 3, 4]));
    for number in [4, 2, 3] {
        links.join(link(number, 50 * MS).await).unwrap();
    }
    taken.extend([links.take(), links.take(), links.take()]);
    assert_eq!(numbers(&taken), [0, 1, 0, 1, 4, 2, 3]);
    assert_eq!((links.connections(), *wanted.borrow()), (7, 8), "no more than there may be");
    drop(taken);
    assert_eq!(links.connections(), 0);
}

#[tokio::test]
async fn connections_that_begin_together_share_a_link_until_it_is_busy() {
    let links = Links::new(link(0, 50 * MS).await, 2, Placing::Together);
    let start = Instant::now();
    let typing = links.take_at(start);
    links.join(link(1, 50 * MS).await).unwrap();
    let at = |ms| start + ms * MS;
    let burst: Vec<_> = [1000, 1001, 1099].map(|ms| links.take_at(at(ms))).into();
    assert_eq!((typing.number, numbers(&burst)), (0, vec![1; 3]), "none beside the one that types");
    let next = [links.take_at(at(1100)), links.take_at(at(1101))];
    assert_eq!(numbers(&next), [0, 0], "the least loaded one");
    next[0].flow.add_sent(1_000_000);
    assert_eq!(links.take_at(at(1190)).number, 1, "the other one is busy");
    burst[0].note_unanswered();
    assert_eq!(links.take_at(at(1191)).number, 0, "silent is worse than busy");
}

#[tokio::test]
async fn a_busy_link_is_left_to_those_it_has() {
    let links = links(50 * MS, 2).await;
    let bulk = links.take();
    links.join(link(1, 50 * MS).await).unwrap();
    let others = [links.take(), links.take()];
    assert_eq!(numbers(&others), [1, 0]);
    let start = Instant::now();
    for moved in 1..=3 {
        bulk.flow.add_sent(1_000_000);
        drop(links.take_at(start + moved * 1000 * MS));
    }
    let more: Vec<_> = (0..3).map(|_| links.take_at(start + 3001 * MS)).collect();
    assert_eq!(numbers(&more), [1, 1, 1]);
    // Later it is idle again.
    drop(links.take_at(start + 60_000 * MS));
    assert_eq!(links.take_at(start + 60_001 * MS).number, 0);
}

#[tokio::test]
async fn a_link_whose_bulk_transfer_has_ended_is_used_again() {
    let links = Links::new(link(0, 50 * MS).await, 2, Placing::Together);
    let start = Instant::now();
    let bulk = links.take_at(start);
    links.join(link(1, 50 * MS).await).unwrap();
    bulk.flow.add_sent(10_000_000);
    drop(bulk);
    let next = [3000, 3001, 3060].map(|ms| links.take_at(start + ms * MS));
    assert_eq!(numbers(&next), [0; 3], "it has found the line's rate already");
}

#[tokio::test]
async fn a_silent_link_gets_what_no_other_can_take() {
    let links = links(50 * MS, 8).await;
    let _held = [links.take(), links.take()];
    let one = link(1, 50 * MS).await;
    links.join(one.clone()).unwrap();
    assert_eq!(links.take().number, 1);
    one.note_unanswered();
    assert_eq!(links.take().number, 0);
    assert!(links.are_silent(), "nothing was heard on the other one since");
    links.all()[0].flow.add_received(1);
    assert!(!links.are_silent());
    links.all()[0].note_unanswered();
    assert!(links.are_silent());
    assert_eq!(links.take().number, 1, "of silent ones the one with the least load");
}

#[tokio::test]
async fn only_what_was_asked_for_joins_and_once() {
    let links = links(50 * MS, 8).await;
    assert!(links.join(link(1, MS).await).is_err());
    let _taken = links.take();
    assert!(links.join(link(0, MS).await).is_err());
    assert!(links.join(link(8, MS).await).is_err());
    assert_eq!(links.join(link(5, MS).await), Ok(()), "any number");
    assert!(links.join(link(5, MS).await).is_err());
    assert!(links.join(link(6, MS).await).is_err(), "one was asked for");
}

#[tokio::test]
async fn who_does_not_come_is_asked_ever_more_rarely() {
    let links = links(50 * MS, 2).await;
    let (start, mut wanted) = (Instant::now(), links.wanted());
    let mut asked = Vec::new();
    let _first = links.take_at(start);
    for second in 0..100 {
        let _taken = links.take_at(start + Duration::from_secs(second));
        if wanted.has_changed().unwrap() {
            asked.push(second);
            wanted.mark_unchanged();
        }
    }
    assert_eq!(asked, [0, 5, 15, 35, 75]);
    links.join(link(1, MS).await).unwrap();
    assert_eq!(links.state.lock().patience, PATIENCE);
}

#[tokio::test]
async fn idle_links_end_but_for_the_first_and_a_spare_one() {
    let links = links(50 * MS, 8).await;
    let held = links.take();
    let (one, two) = (link(1, MS).await, link(2, MS).await);
    links.join(one.clone()).unwrap();
    let _second = links.take();
    links.join(two.clone()).unwrap();
    drop(_second);
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    assert!(!links.part_if_idle_at(&one, start) && !links.part_if_idle_at(&two, start));
    assert!(!links.part_if_idle_at(&one, after(59)));
    assert!(links.part_if_idle_at(&one, after(61)));
    assert!(!links.part_if_idle_at(&two, after(1000)), "the spare one");
    drop(held);
    assert!(!links.part_if_idle_at(&links.all()[0], after(1000)), "the first");
    assert!(links.part_if_idle_at(&two, after(1000)));
    assert_eq!(links.all().len(), 1);
    // They can be requested again.
    let mut wanted = links.wanted();
    let _taken = links.take();
    assert!(wanted.has_changed().unwrap() && *wanted.borrow_and_update() == 2);
}

#[tokio::test]
async fn a_spent_link_gets_what_no_other_can_take_and_ends_once_it_is_idle() {
    let links = links(50 * MS, 8).await;
    let _held = [links.take(), links.take()];
    let one = link_with(1, 50 * MS, Streams::new(1000)).await;
    links.join(one.clone()).unwrap();
    one.opened(1999);
    let on_one = links.take();
    assert!(on_one.number == 1 && !one.is_spent());
    one.opened(2001);
    assert!(one.is_spent());
    assert_eq!(links.take().number, 0);
    assert!(!links.part_if_idle(&one), "it relays something");
    drop(on_one);
    assert_eq!(links.take().number, 0);
    assert!(links.part_if_idle(&one), "although it was the spare one");
}

#[tokio::test]
async fn a_link_that_ends_takes_no_more() {
    let links = links(50 * MS, 8).await;
    let held = links.take();
    let one = link(1, MS).await;
    links.join(one.clone()).unwrap();
    let on_one = links.take();
    links.part(&one);
    assert_eq!((on_one.number, links.connections()), (1, 2), "what it has counts until its end");
    drop(on_one);
    assert_eq!(links.connections(), 1);
    links.part(&links.all()[0]);
    assert_eq!(links.all().len(), 1, "the first stays");
    assert_eq!(links.take().number, 0);
    assert_eq!(links.missing(), [1, 2]);
    drop(held);
}

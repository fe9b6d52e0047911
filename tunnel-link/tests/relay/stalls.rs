//! Tests receivers that do not read.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_link::link;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{StallBound, StallBudget};

use crate::support::{MakeLink, over_both, pattern, relay, stalls, within};

over_both! {
    stalled_receivers_do_not_affect_other_connections,
    one_that_does_not_read_is_reset_above_the_bound,
    a_slow_reader_is_spared_before_those_that_do_not_read,
    the_memory_of_the_process_is_bounded_across_links,
    bytes_gathered_for_a_slow_reader_arrive_in_order,
}

/// Receivers that do not read neither slow nor break other connections of their link, with large and with tiny writes.
async fn stalled_receivers_do_not_affect_other_connections(link: MakeLink) {
    let link = link().await;
    let stalls = stalls();
    let mut stalled = Vec::new();
    for index in 0..40 {
        let (client, end) = relay(&link.send, stalls.clone(), b"").await;
        let (target, _) = within(link.targets.accept()).await.unwrap();
        target.set_nodelay(true).unwrap();
        let piece = if index % 2 == 0 { 1 } else { 64 << 10 };
        let writer = tokio::spawn(async move {
            let mut target = target;
            let piece = vec![7; piece];
            for _ in 0..200_000 {
                if target.write_all(&piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        });
        stalled.push((client, end, writer));
    }
    within(async {
        while stalls.blocked() < 10 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    for _ in 0..50 {
        let (mut client, end) = relay(&link.send, stalls.clone(), b"").await;
        // The link's targets are accepted in order; all stalled ones are accepted already.
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        client.write_all(b"ping").await.unwrap();
        let mut got = [0; 4];
        within(target.read_exact(&mut got)).await.unwrap();
        target.write_all(b"pong").await.unwrap();
        within(client.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, b"pong");
        drop((client, target));
        assert_eq!(within(end).await.unwrap().0, Ok(()));
    }
    assert!(stalled.iter().all(|(_, end, _)| !end.is_finished()), "stalled is not failed");
    for (_, end, writer) in &stalled {
        end.abort();
        writer.abort();
    }
}

/// Stalled receivers may hold a limited number of bytes; above it, the one without progress for longest is reset.
async fn one_that_does_not_read_is_reset_above_the_bound(link: MakeLink) {
    let mut link = link().await;
    let window = link::STREAM_WINDOW as usize;
    // Room for one, and twice that within the grace period.
    let stalls = Arc::new(StallBound::new(window, window));
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let (client, end) = relay(&link.send, stalls.clone(), b"").await;
        let (target, _) = within(link.targets.accept()).await.unwrap();
        let writer = tokio::spawn(async move {
            let mut target = target;
            let piece = vec![7; 64 << 10];
            while target.write_all(&piece).await.is_ok() {}
        });
        within(async {
            let before = stalled.len().min(1);
            while stalls.blocked() <= before {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        stalled.push((client, end, writer));
    }
    // The one without progress for longest is the first, unless the kernel took more for it meanwhile.
    let (ended, index, _) = within(select_all(stalled.iter_mut().map(|(_, end, _)| end))).await;
    assert_eq!(ended.unwrap().0, Err(Outcome::Stalled));
    let (mut client, _, writer) = stalled.remove(index);
    let mut rest = Vec::new();
    assert_eq!(within(client.read_to_end(&mut rest)).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::Stalled)));
    within(writer).await.unwrap();
    within(async {
        while stalls.blocked() > 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for (_, end, writer) in &stalled {
        end.abort();
        writer.abort();
    }
}

/// A socket whose receiver reads 10 KB/s becomes writable about every ten seconds. That is slow, not stalled.
async fn a_slow_reader_is_spared_before_those_that_do_not_read(link: MakeLink) {
    let link = link().await;
    let window = link::STREAM_WINDOW as usize;
    let budget = StallBudget::new(64 * window);
    let stalls = Arc::new(StallBound::within(2 * window, window, &budget));
    let mut open = Vec::new();
    for blocked in 1..=4 {
        let (client, end) = relay(&link.send, stalls.clone(), b"").await;
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        let writer = tokio::spawn(async move { while target.write_all(&[7; 64 << 10]).await.is_ok() {} });
        within(async {
            while stalls.blocked() < blocked {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        open.push((client, end, writer));
    }
    // The slow one has been blocked for longest.
    let (mut slow, slow_end, slow_writer) = open.remove(0);
    let mut piece = [0; 1000];
    let reading = async {
        while open.iter().filter(|(_, end, _)| end.is_finished()).count() < 2 {
            slow.read_exact(&mut piece).await.expect("the slow reader is not reset");
            assert_eq!(piece, [7; 1000]);
            stalls.sweep();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    within(reading).await;
    assert!(!slow_end.is_finished());
    slow_end.abort();
    slow_writer.abort();
    let mut stalled = 0;
    for (client, end, writer) in open {
        if end.is_finished() {
            assert_eq!(end.await.unwrap().0, Err(Outcome::Stalled));
            stalled += 1;
        } else {
            end.abort();
        }
        writer.abort();
        drop(client);
    }
    assert_eq!(stalled, 2);
}

/// If links fill the memory together, the one that holds most is cut, whatever its own limit.
async fn the_memory_of_the_process_is_bounded_across_links(link: MakeLink) {
    let window = link::STREAM_WINDOW as usize;
    let budget = StallBudget::new(8 * window);
    let (greedy, modest) = (link().await, link().await);
    let bound = || Arc::new(StallBound::within(64 * window, window, &budget));
    let (much, little) = (bound(), bound());
    let mut open = Vec::new();
    for number in 0..24 {
        let (link, stalls) = if number < 2 { (&modest, &little) } else { (&greedy, &much) };
        let (client, end) = relay(&link.send, stalls.clone(), b"").await;
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        tokio::spawn(async move { while target.write_all(&[7; 64 << 10]).await.is_ok() {} });
        open.push((client, end));
    }
    within(async {
        loop {
            let cut = open.iter().filter(|(_, end)| end.is_finished()).count();
            // Recently blocked receivers may hold a quarter more.
            if cut > 0 && cut + much.blocked() + little.blocked() == 24 && budget.held() <= 10 * window {
                break;
            }
            // As before each PING.
            much.sweep();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert!(open[..2].iter().all(|(_, end)| !end.is_finished()), "the modest link's are spared");
    for (client, end) in open {
        if end.is_finished() {
            assert_eq!(end.await.unwrap().0, Err(Outcome::Stalled));
        } else {
            end.abort();
        }
        drop(client);
    }
}

/// While the client does not read, small pieces are gathered, and arrive in order among large ones.
async fn bytes_gathered_for_a_slow_reader_arrive_in_order(link: MakeLink) {
    let link = link().await;
    let stalls = stalls();
    let (mut client, end) = relay(&link.send, stalls.clone(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.set_nodelay(true).unwrap();
    let data = pattern(12 << 20, 3);
    let sent = data.clone();
    let writer = tokio::spawn(async move {
        let mut rest = &sent[..];
        let mut turn = 0;
        while !rest.is_empty() {
            // Runs of small pieces between large ones.
            let size = if turn % 200 < 180 { 1 + turn % 900 } else { 100_000 };
            let (piece, after) = rest.split_at(size.min(rest.len()));
            target.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
            (rest, turn) = (after, turn + 1);
        }
    });
    within(async {
        while stalls.blocked() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let mut got = Vec::new();
    within(client.read_to_end(&mut got)).await.unwrap();
    assert!(got == data, "{} of {} bytes, or others", got.len(), data.len());
    within(writer).await.unwrap();
    drop(client);
    assert_eq!(within(end).await.unwrap(), (Ok(()), 0, data.len() as u64));
}

//! Checks that a link is alive, by HTTP/2 PINGs, which also measure the round-trip time.

use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::Instant;
use tunnel_runtime::backoff::jittered;

use super::error::LinkDead;
use super::flow::Flow;
use super::settings::{PING_INTERVAL, PING_TIMEOUT};

/// A round-trip time from which on the next measurement follows at once, because the line may have been down
/// meanwhile. Code that waits for the peer waits for a few round trips, and would notice the next outage only after a
/// multiple of the last one.
const LONG: Duration = Duration::from_secs(1);
/// Maximum silence between servers.
const SILENCE: Duration = Duration::from_millis(2500);
/// Interval of the checks for it.
const CHECK: Duration = Duration::from_millis(500);

/// Sends PINGs until the link is dead, measures the round-trip time, and calls `tick` before each PING. On a slow link
/// an answer may take long; other data arriving meanwhile shows that the peer is alive.
pub async fn keep_alive(mut pings: PingPong, flow: &Flow, mut tick: impl FnMut()) -> LinkDead {
    loop {
        tick();
        let sent = Instant::now();
        let mut pong = std::pin::pin!(pings.ping(Ping::opaque()));
        loop {
            let received = flow.received();
            match tokio::time::timeout(PING_TIMEOUT, &mut pong).await {
                Err(_) if flow.received() == received => {
                    flow.give_up();
                    return LinkDead::Timeout;
                }
                Err(_) => tick(),
                Ok(Err(error)) => return LinkDead::Failed(error),
                Ok(Ok(_)) => break,
            }
        }
        let took = sent.elapsed();
        flow.rtt.add(took);
        if took < LONG {
            // Jitter, so that thousands of links do not ping in step.
            tokio::time::sleep(jittered(PING_INTERVAL, 0.1)).await;
        }
    }
}

/// [`keep_alive`] of a link between two servers, at either end: it is dead too once the other kernel has answered nothing for
/// [`SILENCE`] and two round trips. Servers are near each other, and another one may have the node as well.
///
/// Both ends look: segments that the peer sends again count as heard, so the end that still receives may not notice that
/// nothing of its own arrives.
pub async fn keep_alive_of_server(pings: PingPong, flow: &Flow, tick: impl FnMut()) -> LinkDead {
    tokio::select! {
        biased;
        dead = keep_alive(pings, flow, tick) => dead,
        silence = silent(flow) => LinkDead::Silent(silence),
    }
}

/// Ends once the other kernel has answered nothing for too long.
async fn silent(flow: &Flow) -> Duration {
    loop {
        tokio::time::sleep(CHECK).await;
        let patience = SILENCE + flow.rtt.last().unwrap_or_default() * 2;
        if let Some(silence) = flow.silence().await.filter(|silence| silence.lasts >= patience) {
            flow.give_up();
            return silence.lasts;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_not_the_round_trip_time_for_long() {
        const OUTAGE: Duration = Duration::from_secs(5);
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut link = h2::server::handshake(far).await.unwrap();
            tokio::time::sleep(OUTAGE).await;
            while let Some(Ok(_)) = link.accept().await {}
        });
        let (_send, mut link) = h2::client::handshake(near).await.unwrap();
        let pings = link.ping_pong().unwrap();
        tokio::spawn(link);
        let (flow, start) = (Flow::default(), Instant::now());
        let mut before_each = Vec::new();
        let pinging = keep_alive(pings, &flow, || before_each.push((start.elapsed(), flow.rtt.last())));
        assert!(tokio::time::timeout(PING_INTERVAL * 2, pinging).await.is_err(), "the link is alive");
        let [(_, None), (again, Some(long)), (later, Some(short)), ..] = before_each[..] else {
            panic!("{before_each:?}")
        };
        assert!(long >= OUTAGE && short < LONG, "{before_each:?}");
        assert!(again < OUTAGE + LONG, "not measured again at once: {before_each:?}");
        assert!(later >= again + PING_INTERVAL / 2, "no pause after a short one: {before_each:?}");
    }
}

//! Connections of a pod, taken by route and at connect(), and a flow through the host that has nothing to do with edge nodes.
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use postern_testbed::inventory::Inventory;
use postern_testbed::netns::Namespace;
use postern_testbed::percentiles::Times;
use postern_testbed::{CLOUD, Testbed};

use crate::catalogue::ROUTES;
use crate::connect;
use crate::dial::Dialer;
use crate::line::Peer;
use crate::load::{self, Effort, micros};
use crate::peers::{BEHIND_NAT, postern};
use crate::record::Record;
use crate::scale::Size;

/// A host of the cloud's network, to which the pod's packets are forwarded.
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 6);
/// Its route back to the pod.
const BACK: &str = "10.71.0.0/24";
/// Maximum time until all nodes are in effect.
const READ: Duration = Duration::from_secs(180);

pub(crate) async fn measure(
    testbed: &Testbed,
    effort: &Effort,
    size: Size,
    record: &mut Record,
) -> Result<()> {
    Inventory::of(testbed)?;
    let pod = testbed.add_pod()?;
    let node = Dialer::Tcp(testbed.edge(BEHIND_NAT).ip());
    for (line, way) in [("pods-connect", "connect"), ("pods-route", "route")] {
        let running = postern::start_with(testbed, &format!("--redirect-pods={way}")).await?;
        let visits = pod.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(load::visits(&node, 16, effort))
        });
        running.stop().await?;
        record.value(line, Peer::Postern, visits?.rate());
    }

    let other = testbed.add_to_cloud_lan("other", OTHER)?;
    other.ip(&format!("route add {BACK} via {CLOUD}"))?;
    testbed.cloud.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("ip_forward"))?;
    record.value("pods-forward-none", Peer::Postern, round_trip(&pod, &other, effort)?);
    let running = postern::start_with(testbed, "--redirect-pods=route").await?;
    let server = running.server().context("Postern without a server")?;
    for nodes in [ROUTES[0], ROUTES[ROUTES.len() - 1]] {
        connect::with_nodes(testbed, server, size.part(nodes), READ).await?;
        record.value(&format!("pods-forward-{nodes}"), Peer::Postern, round_trip(&pod, &other, effort)?);
    }
    Inventory::of(testbed)?;
    running.stop().await
}

/// The least of seven medians of a UDP echo from the pod, in microseconds: two packets that this host forwards.
fn round_trip(pod: &Namespace, other: &Namespace, effort: &Effort) -> Result<f64> {
    const TIMES: usize = 7;
    let echo = other.run(|| UdpSocket::bind((OTHER, 0)).context("the echo's socket"))?;
    let to = echo.local_addr()?;
    let client = pod.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("the client's socket"))?;
    client.connect(to)?;
    client.set_read_timeout(Some(Duration::from_secs(5)))?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| reflect(&echo, &over));
        let mut least = f64::MAX;
        for _ in 0..TIMES {
            let median = trips(&client, effort);
            if median.is_err() {
                over.store(true, Ordering::Relaxed);
            }
            least = least.min(median?);
        }
        over.store(true, Ordering::Relaxed);
        client.send(&[0])?;
        Ok(least)
    })
}

fn trips(client: &UdpSocket, effort: &Effort) -> Result<f64> {
    let mut times = Times::default();
    let end = Instant::now() + effort.span / 4;
    while Instant::now() < end {
        let start = Instant::now();
        client.send(&[0; 64])?;
        client.recv(&mut [0; 64]).context("no echo")?;
        times.add(start.elapsed());
    }
    micros(&mut times, 0.5)
}

/// Sends every packet back, until `over` and one more.
fn reflect(echo: &UdpSocket, over: &AtomicBool) {
    let mut packet = [0; 64];
    // Without a limit a failed client would leave it waiting.
    let limited = echo.set_read_timeout(Some(Duration::from_secs(1)));
    while limited.is_ok() && !over.load(Ordering::Relaxed) {
        let Ok((length, from)) = echo.recv_from(&mut packet) else { continue };
        let _: Result<usize, _> = echo.send_to(&packet[..length], from);
    }
}

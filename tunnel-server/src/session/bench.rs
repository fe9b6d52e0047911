//! `tunnel-server bench`: measures the way to an agent over the links of its session.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tunnel_link::bench::{BENCH_PATH, LONGEST, MODE_HEADER, Mode, send, swallow};
use tunnel_link::relay::{Pipe, RelayError, Traffic, TunnelStream, pipe};
use tunnel_runtime::admin::{Bench, BenchAnswer};

use crate::session::{On, Session, Sessions};

/// Number of small messages that go to the agent and back.
const ECHOES: usize = 20;
/// Maximum time for all of them; on a slow line there are fewer.
const ECHO_TIME: Duration = Duration::from_secs(3);
const MESSAGE: usize = 64;
/// Placeholder: there is no target, the agent itself answers.
const NO_TARGET: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Results of a measurement. The field names are an interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    pub node: String,
    /// Round-trip times of 64-byte messages through the tunnel, in milliseconds.
    pub rtt_ms: Vec<f64>,
    /// Payload, in MB (10^6 bytes) per second.
    pub to_node_mb_s: f64,
    pub from_node_mb_s: f64,
    /// Bytes transferred for the measurement.
    pub to_node_bytes: u64,
    pub from_node_bytes: u64,
}

/// Returns the function for the admin endpoint. It runs one measurement at a time: two would affect each other.
pub fn endpoint(sessions: Arc<Sessions>) -> Arc<Bench> {
    let one = Arc::new(Semaphore::new(1));
    Arc::new(move |node: String| -> BenchAnswer {
        let (sessions, one) = (sessions.clone(), one.clone());
        Box::pin(async move {
            let _one = one.try_acquire().map_err(|_| "another measurement is under way".to_owned())?;
            let name = node.parse().map_err(|_| format!("{node:?} is not the name of a node"))?;
            let session = sessions.get(&name).ok_or_else(|| {
                format!(
                    "no agent of {node} is attached to this server; if another one has it, run this there"
                )
            })?;
            let report = tokio::time::timeout(LONGEST, measure(&session)).await;
            let report = report.map_err(|_| format!("no end within {} s", LONGEST.as_secs()))??;
            serde_json::to_value(report).map_err(|error| error.to_string())
        })
    })
}

async fn measure(session: &Arc<Session>) -> Result<BenchReport, String> {
    let failed = |error: std::io::Error| error.to_string();
    let rtt_ms = echo(begin(session, Mode::Echo).await?).await.map_err(failed)?;
    let sink = begin(session, Mode::Sink).await?;
    let (to_node_mb_s, to_node_bytes) = to_node(sink).await.map_err(failed)?;
    let source = begin(session, Mode::Source).await?;
    let (from_node_mb_s, from_node_bytes) = from_node(source).await.map_err(failed)?;
    let node = session.node.to_string();
    Ok(BenchReport { node, rtt_ms, to_node_mb_s, from_node_mb_s, to_node_bytes, from_node_bytes })
}

/// Opens a stream to the agent, relayed on a link's thread as a client's is.
async fn begin(session: &Arc<Session>, mode: Mode) -> Result<TunnelStream, String> {
    let (link, session) = (session.links.take(), session.clone());
    let header = (http::HeaderName::from_static(MODE_HEADER), HeaderValue::from_static(mode.as_str()));
    let to = session.node.as_str();
    let failed = |error: RelayError| error.to_string();
    let more = HeaderMap::from_iter([header]);
    let pending = link.ask(to, BENCH_PATH, NO_TARGET, more).await.map_err(failed)?;
    let on = On { link: &link, to, stalls: &session.stalls };
    let (mut send, answer) = pending.answer(on, NO_TARGET, |_| {});
    let stream = answer.await.map_err(failed)?;
    let (near, far) = pipe();
    let worker = link.worker.clone();
    worker.spawn(async move {
        let pipe = Pipe { flow: &link.flow, stalls: &session.stalls, traffic: &Traffic::default() };
        far.run(pipe, &mut send, stream, std::future::pending()).await;
    });
    Ok(near)
}

async fn echo(mut stream: TunnelStream) -> std::io::Result<Vec<f64>> {
    let (started, mut times) = (Instant::now(), Vec::new());
    let mut message = [7; MESSAGE];
    // The first round also opens the stream, and does not count.
    for round in 0..=ECHOES {
        let begun = Instant::now();
        stream.write_all(&message).await?;
        stream.read_exact(&mut message).await?;
        if round > 0 {
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        if round > 2 && started.elapsed() > ECHO_TIME {
            break;
        }
    }
    stream.shutdown().await?;
    Ok(times)
}

async fn to_node(mut stream: TunnelStream) -> std::io::Result<(f64, u64)> {
    let started = Instant::now();
    let sent = send(&mut stream).await?;
    stream.shutdown().await?;
    // The agent sends this once it has received everything.
    let arrived = stream.read_u64().await?;
    if arrived != sent {
        return Err(std::io::Error::other(format!("{sent} bytes were sent, and {arrived} arrived")));
    }
    Ok((rate(sent, started.elapsed()), sent))
}

async fn from_node(mut stream: TunnelStream) -> std::io::Result<(f64, u64)> {
    stream.read_exact(&mut [0]).await?;
    let started = Instant::now();
    let read = swallow(&mut stream).await? + 1;
    stream.shutdown().await?;
    Ok((rate(read, started.elapsed()), read))
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64().max(1e-6)
}

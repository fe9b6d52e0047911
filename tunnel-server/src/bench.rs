//! `tunnel-server bench`: measures the way to an agent, over the links of its session.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tunnel_core::admin::{Bench, BenchAnswer};
use tunnel_core::bench::{BENCH_PATH, LONGEST, MODE_HEADER, Mode, pair, send, swallow};
use tunnel_core::carry::{Abort, Relay, RelayError, Side, Traffic, prepare_socket};

use crate::session::{On, Session, Sessions, ask};

/// How often a small message goes to the agent and back.
const ECHOES: usize = 20;
/// All of them; on a slow line fewer have to do.
const ECHO_TIME: Duration = Duration::from_secs(3);
const MESSAGE: usize = 64;
/// There is none: the agent itself answers.
const NO_TARGET: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// What was measured. Its field names are an interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    pub node: String,
    /// Round trips through the tunnel of 64 bytes, in milliseconds.
    pub rtt_ms: Vec<f64>,
    /// Payload, MB (10^6 bytes) a second.
    pub to_node_mb_s: f64,
    pub from_node_mb_s: f64,
    /// Bytes that were sent for that.
    pub to_node_bytes: u64,
    pub from_node_bytes: u64,
}

/// What the admin endpoint calls. One at a time: two would measure each other.
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
    let (mut stream, carrying) = begin(session, Mode::Echo).await?;
    let rtt_ms = explained(echo(&mut stream).await, carrying).await?;
    let (mut stream, carrying) = begin(session, Mode::Sink).await?;
    let (to_node_mb_s, to_node_bytes) = explained(to_node(&mut stream).await, carrying).await?;
    let (mut stream, carrying) = begin(session, Mode::Source).await?;
    let (from_node_mb_s, from_node_bytes) = explained(from_node(&mut stream).await, carrying).await?;
    let node = session.node.to_string();
    Ok(BenchReport { node, rtt_ms, to_node_mb_s, from_node_mb_s, to_node_bytes, from_node_bytes })
}

type Carrying = JoinHandle<Result<(), RelayError>>;

/// A stream that leads to the agent.
async fn begin(session: &Arc<Session>, mode: Mode) -> Result<(TcpStream, Carrying), String> {
    let begun = async {
        let (stream, relayed) = pair().await?;
        prepare_socket(&relayed);
        Ok::<_, std::io::Error>((stream, carry(session.clone(), mode, relayed)?))
    };
    begun.await.map_err(|error| error.to_string())
}

/// The relay knows why a stream was reset.
async fn explained<T>(measured: std::io::Result<T>, carrying: Carrying) -> Result<T, String> {
    match measured {
        Ok(measured) => Ok(measured),
        Err(error) => Err(match carrying.await {
            Ok(Err(reason)) => reason.to_string(),
            _ => error.to_string(),
        }),
    }
}

/// Carries a socket to the agent on the thread of a link, as a door does with a client's.
fn carry(session: Arc<Session>, mode: Mode, socket: TcpStream) -> std::io::Result<Carrying> {
    let link = session.links.take();
    let (worker, socket) = (link.worker.clone(), socket.into_std()?);
    Ok(worker.spawn(async move {
        let mut socket = TcpStream::from_std(socket).map_err(RelayError::Socket)?;
        let header = (http::HeaderName::from_static(MODE_HEADER), HeaderValue::from_static(mode.as_str()));
        let to = session.node.as_str();
        let asked = ask(&link, to, BENCH_PATH, NO_TARGET, HeaderMap::from_iter([header])).await?;
        let on = On { link: &link, to, stalls: &session.stalls };
        let (mut sending, answer) = asked.answer(on, NO_TARGET, |_| {});
        let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
        let relay = Relay {
            side: Side::Server,
            flow: &link.flow,
            stalls: &session.stalls,
            abort: &abort,
            traffic: &traffic,
        };
        relay.run(&mut socket, Bytes::new(), &mut sending, answer).await
    }))
}

async fn echo(stream: &mut TcpStream) -> std::io::Result<Vec<f64>> {
    stream.set_nodelay(true)?;
    let (started, mut times) = (Instant::now(), Vec::new());
    let mut message = [7; MESSAGE];
    // The first one also opens the stream.
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

async fn to_node(stream: &mut TcpStream) -> std::io::Result<(f64, u64)> {
    let started = Instant::now();
    let sent = send(stream).await?;
    stream.shutdown().await?;
    // The agent says it once it has all.
    let arrived = stream.read_u64().await?;
    if arrived != sent {
        return Err(std::io::Error::other(format!("{sent} bytes were sent, and {arrived} arrived")));
    }
    Ok((rate(sent, started.elapsed()), sent))
}

async fn from_node(stream: &mut TcpStream) -> std::io::Result<(f64, u64)> {
    stream.read_exact(&mut [0]).await?;
    let started = Instant::now();
    let read = swallow(stream).await? + 1;
    stream.shutdown().await?;
    Ok((rate(read, started.elapsed()), read))
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64().max(1e-6)
}

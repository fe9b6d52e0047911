//! Checks the connections to the servers: names, proxy, TCP, TLS and packet size.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use tunnel_doctor::{
    Checkup, Finding, Outcome, Running, Trusted, codes, judge_chain, judge_handshake_error, resolves,
};
use tunnel_pki::{ALPN_GRPC, AgentIdentity, presented_chain};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::error::chain;
use tunnel_runtime::net::lookup;

use crate::config::Config;
use crate::reach::{ProxyFault, Server, proxy_fault};
use crate::status::AgentStatus;

const CONNECT: Duration = Duration::from_secs(8);
const HANDSHAKE: Duration = Duration::from_secs(8);
/// TCP segment size of a packet that every host accepts: 576 bytes with headers (RFC 791 section 3.1).
const SMALL_SEGMENT: u32 = 536;

/// Returns this node's address on the connection to a server that was reached directly.
pub(super) async fn check(
    checkup: &mut Checkup,
    config: &Config,
    running: Option<&Running<AgentStatus>>,
    held: Option<&AgentIdentity>,
    now: SystemTime,
) -> Option<IpAddr> {
    let given = config.servers.iter().map(ToString::to_string);
    let found =
        running.into_iter().flat_map(|running| &running.status.servers).map(|link| link.address.clone());
    let servers: Vec<String> = if config.servers.is_empty() { found.collect() } else { given.collect() };
    if servers.is_empty() {
        checkup.add("servers", Outcome::Skipped("none is known: the running agent finds them".to_owned()));
        return None;
    }
    let direct: Vec<&String> =
        servers.iter().filter(|server| !config.reach.goes_through_proxy(server)).collect();
    checkup
        .run("names", &[], async || {
            let mut faults = Vec::new();
            for server in &direct {
                faults.extend(resolves("--server", server).await);
            }
            Outcome::of(faults, format!("{} of {} servers are dialled directly", direct.len(), servers.len()))
        })
        .await;
    let trusted = match (held, &config.ca_hash) {
        (Some(identity), _) => Some(Trusted::Roots(identity.bundle.clone())),
        (None, Some(hash)) => Some(Trusted::Hash(hash.clone())),
        (None, None) => None,
    };
    let (mut faults, mut own, mut fine) = (Vec::new(), None, Vec::new());
    // A name that does not resolve has been reported already. The other servers are still tried.
    for server in &servers {
        match reach(config, server, &mut own).await {
            Ok(presented) => {
                let judged =
                    trusted.as_ref().and_then(|trusted| judge_chain(server, &presented, trusted, now));
                match judged {
                    Some(finding) => faults.push(finding),
                    None => fine.push(server.as_str()),
                }
            }
            Err(Some(finding)) => faults.push(finding),
            Err(None) => {}
        }
    }
    let trust = if trusted.is_some() { " and is trusted" } else { "; which CA to trust is not known yet" };
    if faults.is_empty() && fine.is_empty() {
        checkup.add("servers", Outcome::Skipped("`names` is broken".to_owned()));
    } else {
        checkup.add("servers", Outcome::of(faults, format!("{} answers{trust}", fine.join(", "))));
    }
    own
}

/// Returns the certificates that the server presents. `Err(None)` if its name does not resolve, which another check
/// reports.
async fn reach(
    config: &Config,
    server: &str,
    own: &mut Option<IpAddr>,
) -> Result<Vec<CertificateDer<'static>>, Option<Finding>> {
    if !config.reach.goes_through_proxy(server) && addresses(server).await.is_err() {
        return Err(None);
    }
    let named = Server::Named(server.to_owned());
    let connect = config.reach.connect(&named);
    let reached = match tokio::time::timeout(CONNECT, connect).await {
        Ok(Ok(reached)) => reached,
        Ok(Err(error)) => return Err(Some(not_reached(server, &error))),
        Err(_) => {
            let reason = format!("no answer within {} s", CONNECT.as_secs());
            return Err(Some(not_reached(server, &io::Error::new(io::ErrorKind::TimedOut, reason))));
        }
    };
    if reached.proxy.is_none() {
        *own = reached.stream.local_addr().ok().map(|address| address.ip().to_canonical());
    }
    let through = reached.proxy.clone();
    match tokio::time::timeout(HANDSHAKE, presented_chain(reached.stream, ALPN_GRPC)).await {
        Ok(Ok(presented)) => Ok(presented),
        // A server closes when it gets nothing for a few seconds: the first segment of a ClientHello may be one of those
        // that are lost.
        Ok(Err(error))
            if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) =>
        {
            let found = format!("{server}: connected, and the handshake was cut off");
            let lost = black_hole(server, through.as_deref(), &found).await;
            Err(Some(lost.unwrap_or_else(|| judge_handshake_error(server, &error))))
        }
        Ok(Err(error)) => Err(Some(judge_handshake_error(server, &error))),
        Err(_) => Err(Some(silent(server, through.as_deref()).await)),
    }
}

fn not_reached(server: &str, error: &io::Error) -> Finding {
    let reason = chain(error);
    let port = server.rsplit(':').next().unwrap_or_default();
    match proxy_fault(error) {
        Some(ProxyFault::Unreachable) => {
            let fix = "correct HTTPS_PROXY or --proxy, or name the servers in NO_PROXY if they are reached directly";
            Finding::new(&codes::PROXY_UNREACHABLE, format!("{server}: {reason}"), fix)
        }
        Some(ProxyFault::Refuses) => {
            let fix = format!(
                "have the proxy permit CONNECT to port {port}, and give the user and the password that it asks for: \
                 HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
            );
            Finding::new(&codes::PROXY_REFUSES, format!("{server}: {reason}"), fix)
        }
        None => {
            let fix = format!(
                "is the server up (`tunnel-server doctor` there), and is TCP port {port} open on the way: `nc -vz {}`",
                server.rsplit_once(':').map_or(server.to_owned(), |(host, port)| format!("{host} {port}"))
            );
            Finding::new(&codes::SERVER_UNREACHABLE, format!("{server}: {reason}"), fix)
        }
    }
}

/// Handles a handshake without an answer on an open connection.
async fn silent(server: &str, proxy: Option<&str>) -> Finding {
    let found =
        format!("{server}: connected, and no answer in the handshake within {} s", HANDSHAKE.as_secs());
    if let Some(lost) = black_hole(server, proxy, &found).await {
        return lost;
    }
    let fix = "a firewall or a load balancer accepts the connection and holds it: have it pass TCP through unchanged, and \
               look at the server's log";
    Finding::new(&codes::HANDSHAKE_SILENT, found, fix)
}

/// Tries again with small packets. If these get through, larger ones are lost.
async fn black_hole(server: &str, proxy: Option<&str>, found: &str) -> Option<Finding> {
    let small = async { presented_chain(connect_small(server).await?, ALPN_GRPC).await };
    if proxy.is_none() && matches!(tokio::time::timeout(HANDSHAKE, small).await, Ok(Ok(_))) {
        let found = format!("{found}; one with segments of {SMALL_SEGMENT} bytes works");
        let fix = "find the real MTU with `tracepath -n HOST` and set it: `ip link set dev DEV mtu 1400`; or \
                   `sysctl -w net.ipv4.tcp_mtu_probing=1` on both ends, or clamp the MSS on the router";
        return Some(Finding::new(&codes::MTU_BLACK_HOLE, found, fix));
    }
    None
}

async fn addresses(server: &str) -> io::Result<Vec<SocketAddr>> {
    let HostPort { host, port } = server.parse().map_err(io::Error::other)?;
    lookup(&host, port).await
}

async fn connect_small(server: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses(server).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // Also makes the peer send no larger segments.
        SockRef::from(&socket).set_tcp_mss(SMALL_SEGMENT)?;
        match socket.connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

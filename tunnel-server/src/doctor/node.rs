//! `tunnel-server test NODE`: the path to a node, step by step, as seen from this server's host.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel_doctor::{Checkup, Finding, Outcome, Report, Running, codes, validity_of};
use tunnel_link::link::limited_by;
use tunnel_link::outcome::{OUTCOME_HEADER, Outcome as TunnelOutcome};
use tunnel_pki::{HttpsAnswer, ask_https, describe_certificate, validity};
use tunnel_routing::inventory::{DEFAULT_KUBELET_PORT, READ_ONLY_KUBELET_PORT};

use super::firewall::{shown, tunnelled};
use super::host;
use super::service::reachable;
use crate::config::Config;
use crate::listener::{HTTP, HTTPS};
use crate::status::{NodeStatus, RedirectState, StatusReport};

const CONNECT: Duration = Duration::from_secs(5);
/// An agent's dial may take up to 5 s, and the answer needs time in the tunnel.
const ANSWER: Duration = Duration::from_secs(10);
/// Time for which a connection must stay open to count as connected, plus twice the round-trip time: a refusal arrives
/// after one round trip.
const OPEN: Duration = Duration::from_millis(500);
/// Maximum number of nodes, and of their kubelets' ports, that a finding shows.
const SHOWN: usize = 5;

/// Tests the path to `name`. Tests `ports`, or all that the server tunnels if it is empty.
pub async fn test(
    mut checkup: Checkup,
    config: &Config,
    running: &Running<StatusReport>,
    name: &str,
    ports: &[u16],
) -> Report {
    let status = &running.status;
    let node = status.nodes.iter().find(|node| node.name.as_str() == name);
    checkup.run("node", &[], async || judge_node(name, node)).await;
    let rtt = node.and_then(|node| node.session.as_ref()?.rtt_ms).unwrap_or(200.0);
    let patience = OPEN + Duration::from_secs_f64(rtt.clamp(0.0, 10_000.0) / 500.0);
    checkup
        .run("tunnel", &["node"], async || node.map_or(Outcome::Skipped(String::new()), judge_tunnel))
        .await;
    let probe = NodeProbe::of(status, name, node, patience);
    checkup.run("kubelet", &["tunnel"], async || probe.kubelet().await).await;
    let redirected = tunnelled(&config.redirect.redirect_ports, Some(running));
    let all = tested(ports, &redirected, probe.kubelet_port, &status.nodes);
    checkup
        .run("ports", &["tunnel"], async || {
            let (mut open, mut faults) = (Vec::new(), Vec::new());
            let by_redirect = node.filter(|_| probe.address.is_some());
            let missed = not_tunnelled(by_redirect, &status.nodes, &redirected, &config.kube.names.configmap);
            for port in all {
                let reached = match &missed {
                    Some(finding) if port == probe.kubelet_port => Err(finding.clone()),
                    _ => probe.port(port).await,
                };
                match reached {
                    Ok(()) => open.push(port.to_string()),
                    Err(finding) => faults.push(finding),
                }
            }
            Outcome::of(faults, format!("open: {}", open.join(", ")))
        })
        .await;
    checkup.report("tunnel-server", env!("CARGO_PKG_VERSION"))
}

/// Returns the ports to test: the given ones, or all tunnelled ones but those of other nodes' kubelets. Kubelets' default
/// port stands for `own`, that of this node's.
fn tested(given: &[u16], redirected: &[u16], own: u16, nodes: &[NodeStatus]) -> BTreeSet<u16> {
    let of_this = |port: &u16| if *port == DEFAULT_KUBELET_PORT { own } else { *port };
    if !given.is_empty() {
        return given.iter().map(of_this).collect();
    }
    let of_another = |port: u16| port != own && nodes.iter().any(|node| node.kubelet_port == port);
    let all = redirected.iter().map(of_this);
    // Tunnelled by default, but most kubelets do not listen there.
    all.filter(|port| *port != READ_ONLY_KUBELET_PORT && !of_another(*port)).collect()
}

/// Checks that the ports of all kubelets are tunnelled.
pub(super) fn kubelet_ports(config: &Config, running: Option<&Running<StatusReport>>) -> Outcome {
    let Some(running) = running else { return host::unknown() };
    let status = &running.status;
    if status.redirect.state == RedirectState::Off {
        return Outcome::Skipped("the running server has --redirect=off".to_owned());
    }
    let redirected = tunnelled(&config.redirect.redirect_ports, Some(running));
    let nodes = status.nodes.iter().filter(|node| node.in_inventory);
    let missed = not_tunnelled(nodes, &status.nodes, &redirected, &config.kube.names.configmap);
    Outcome::of(missed.into_iter().collect(), "each is tunnelled, or none is")
}

/// Returns the fault of the nodes whose kubelets have other ports than the tunnelled ones, if there are any. Servers never
/// tunnel a port because a kubelet names it: ports are tunnelled for all nodes. If neither the default port nor that
/// of a kubelet is tunnelled, none is meant to be.
fn not_tunnelled<'a>(
    nodes: impl IntoIterator<Item = &'a NodeStatus>,
    all: &[NodeStatus],
    redirected: &[u16],
    configmap: &str,
) -> Option<Finding> {
    let mut ports = all.iter().map(|node| node.kubelet_port).chain([DEFAULT_KUBELET_PORT]);
    let missed: Vec<&NodeStatus> =
        nodes.into_iter().filter(|node| !redirected.contains(&node.kubelet_port)).collect();
    if missed.is_empty() || !ports.any(|port| redirected.contains(&port)) {
        return None;
    }
    let ports: BTreeSet<u16> = missed.iter().map(|node| node.kubelet_port).collect();
    let ports = shown(ports.into_iter(), SHOWN, ",");
    let names = shown(missed.iter().map(|node| &node.name), SHOWN, ", ");
    let found = format!("{names}: the Node names port {ports} for its kubelet, which is not tunnelled");
    let fix = format!(
        "if the kubelet listens there, add the port, which is then tunnelled for all edge nodes, to https-proxy-ports of the ConfigMap \
         {configmap} (in the chart tunnelledPorts.https), or without a cluster to --redirect-ports, which then names all ports"
    );
    Some(Finding::new(&codes::KUBELET_NOT_TUNNELLED, found, fix))
}

fn judge_node(name: &str, node: Option<&NodeStatus>) -> Outcome {
    match node {
        Some(node) if node.in_inventory => {
            let addresses: Vec<String> = node.addresses.iter().map(ToString::to_string).collect();
            Outcome::fine(format!("{name}, {}", addresses.join(", ")))
        }
        _ => {
            let fix = format!(
                "kubectl get node {name} --show-labels: it needs a label of --edge-selector, and an address"
            );
            Finding::new(&codes::NODE_UNKNOWN, format!("the inventory has no edge node {name}"), fix).into()
        }
    }
}

fn judge_tunnel(node: &NodeStatus) -> Outcome {
    if let Some(session) = &node.session {
        let rtt = session.rtt_ms.map(|rtt| format!(", round trip {rtt:.1} ms")).unwrap_or_default();
        let limited = session
            .links
            .iter()
            .find_map(|link| limited_by(link.window_limited?, link.buffer_limited?))
            .map(|by| format!(", limited by {by}"))
            .unwrap_or_default();
        let found = format!(
            "agent {} from {}, {} links{rtt}{limited}",
            session.agent_version,
            session.peer,
            session.links.len()
        );
        return Outcome::Fine(found);
    }
    if !node.via.is_empty() {
        return Outcome::fine(format!("attached to {}, which forwards connections", node.via.join(", ")));
    }
    let seen = match (node.last_seen_s, &node.last_end) {
        (Some(seconds), end) => format!(
            "last seen {} ago{}",
            tunnel_runtime::text::age(seconds),
            end.as_ref().map(|end| format!(": {end}")).unwrap_or_default()
        ),
        (None, _) => "not seen since this server started".to_owned(),
    };
    let fix = format!("on {}: `tunnel-agent doctor`", node.name);
    Finding::new(&codes::NODE_WITHOUT_TUNNEL, seen, fix).into()
}

/// Probes a node's ports from this host, through the redirect and the listeners.
struct NodeProbe<'a> {
    name: &'a str,
    addresses: &'a [IpAddr],
    /// Address for the redirect.
    address: Option<IpAddr>,
    kubelet_port: u16,
    http: Option<SocketAddr>,
    https: Option<SocketAddr>,
    patience: Duration,
}

impl<'a> NodeProbe<'a> {
    fn of(status: &StatusReport, name: &'a str, node: Option<&'a NodeStatus>, patience: Duration) -> Self {
        let listener = |name: &str| {
            let listener = status.listeners.iter().find(|listener| listener.name == name)?;
            Some(reachable(listener.address))
        };
        let addresses = node.map_or(&[][..], |node| node.addresses.as_slice());
        Self {
            name,
            addresses,
            address: addresses.first().copied().filter(|_| status.redirect.state != RedirectState::Off),
            kubelet_port: node.map_or(DEFAULT_KUBELET_PORT, |node| node.kubelet_port),
            http: listener(HTTP),
            https: listener(HTTPS),
            patience,
        }
    }

    /// Checks the kubelet's TLS, and that it requires credentials.
    async fn kubelet(&self) -> Outcome {
        let (to, shown) = match (self.https, self.address) {
            (Some(listener), _) => (listener, format!("https listener {listener}")),
            (None, Some(address)) => (SocketAddr::new(address, self.kubelet_port), "redirect".to_owned()),
            (None, None) => {
                return Outcome::Skipped("there is neither an https listener nor the redirect".to_owned());
            }
        };
        let Ok(name) = ServerName::try_from(self.name.to_owned()) else {
            return Outcome::Skipped(format!("{} is no DNS name", self.name));
        };
        let ask = async {
            let stream = TcpStream::connect(to).await?;
            ask_https(stream, name, "/healthz").await
        };
        let fault = |reason: String| {
            let fix = format!(
                "on {}: `systemctl status kubelet`, and `curl -k https://127.0.0.1:{}/healthz`",
                self.name, self.kubelet_port
            );
            Finding::new(&codes::KUBELET_UNEXPECTED, format!("through the {shown}: {reason}"), fix).into()
        };
        match tokio::time::timeout(ANSWER, ask).await {
            Ok(Ok(answer)) => judge_kubelet(&answer, self.name, self.addresses).unwrap_or_else(fault),
            Ok(Err(error)) => fault(error.to_string()),
            Err(_) => fault(format!("no answer within {} s", ANSWER.as_secs())),
        }
    }

    /// Checks that a connection to a port is accepted and stays open.
    async fn port(&self, port: u16) -> Result<(), Finding> {
        let reason = match self.address {
            Some(address) => match self.stays_open(SocketAddr::new(address, port)).await {
                Ok(()) => return Ok(()),
                // The http listener reports the reason.
                Err(error) => self.ask_listener(port).await.err().unwrap_or_else(|| error.to_string()),
            },
            None => match self.ask_listener(port).await {
                Ok(()) => return Ok(()),
                Err(reason) => reason,
            },
        };
        let fix = format!(
            "on {}: does something listen there (`ss -ltn sport = :{port}`), and does `tunnel-agent status` allow it? If not \
             wanted, leave it out of --redirect-ports or the ConfigMap",
            self.name
        );
        Err(Finding::new(&codes::PORT_NOT_REACHED, format!("port {port}: {reason}"), fix))
    }

    async fn stays_open(&self, to: SocketAddr) -> io::Result<()> {
        let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "connect() has no answer");
        let mut stream =
            tokio::time::timeout(CONNECT, TcpStream::connect(to)).await.map_err(|_| timed_out())??;
        // A failed dial resets the connection. Data from the service, or silence, counts as success.
        match tokio::time::timeout(self.patience, stream.read_u8()).await {
            Ok(Err(error)) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error),
            _ => Ok(()),
        }
    }

    /// Asks the http listener for the port: it reports the reason of a failure as text.
    async fn ask_listener(&self, port: u16) -> Result<(), String> {
        let Some(listener) = self.http else {
            return Err("there is no http listener that could say why".to_owned());
        };
        let request = format!("GET / HTTP/1.1\r\nHost: {}:{port}\r\nConnection: close\r\n\r\n", self.name);
        let ask = async {
            let mut stream = TcpStream::connect(listener).await?;
            stream.write_all(request.as_bytes()).await?;
            let mut answer = Vec::new();
            stream.take(4 << 10).read_to_end(&mut answer).await.map(|_| answer)
        };
        match tokio::time::timeout(ANSWER, ask).await {
            Ok(Ok(answer)) => failure_of(&String::from_utf8_lossy(&answer)),
            Ok(Err(error)) => Err(error.to_string()),
            // The target has the request and is still working on it.
            Err(_) => Ok(()),
        }
    }
}

/// Returns the reason if the listener itself has answered.
fn failure_of(answer: &str) -> Result<(), String> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let outcome = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case(OUTCOME_HEADER).then(|| value.trim())
    });
    // A target that was reached but breaks off or does not speak HTTP is not a fault of the tunnel.
    match outcome {
        None => Ok(()),
        Some(outcome) if outcome == TunnelOutcome::TargetReset.as_str() => Ok(()),
        Some(_) => Err(body.trim().trim_start_matches("tunnel-server: ").to_owned()),
    }
}

/// Returns the outcome, or the problem with the kubelet's answer.
fn judge_kubelet(answer: &HttpsAnswer, name: &str, addresses: &[IpAddr]) -> Result<Outcome, String> {
    let Some(leaf) = answer.chain.first() else { return Err("it shows no certificate".to_owned()) };
    let shown = describe_certificate(leaf);
    if let Some(reason) = validity(leaf).ok().and_then(|validity| validity_of(&validity, SystemTime::now())) {
        return Err(format!("{shown} is {reason}"));
    }
    let names = &answer.names;
    let is_named =
        names.iter().any(|own| own == name || addresses.iter().any(|address| *own == address.to_string()));
    if !is_named {
        return Err(format!("{shown} names {}, neither the node nor its addresses", names.join(", ")));
    }
    match answer.status {
        Some(401 | 403) => {
            Ok(Outcome::fine(format!("{shown}; it asks for credentials ({})", answer.status_line())))
        }
        Some(200) => {
            Err("it answers /healthz without credentials: switch `authentication.anonymous` off".to_owned())
        }
        _ => Err(format!("it answers {:?} instead of 401", answer.status_line())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nodes() -> Vec<NodeStatus> {
        let nodes = [("edge-1", 10250), ("edge-2", 10350), ("edge-3", 10351)];
        let nodes = nodes.map(|(name, port)| {
            json!({"name": name, "addresses": [], "kubelet_port": port, "in_inventory": true, "connected": true})
        });
        serde_json::from_value(json!(nodes)).unwrap()
    }

    #[test]
    fn all_tunnelled_ports_are_tested_unless_others_are_given() {
        let tested = |given: &[u16], own: u16| {
            let ports = tested(given, &[9200, 10250, 10255, 10350], own, &nodes());
            ports.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(tested(&[], 10250), [9200, 10250]);
        assert_eq!(tested(&[22, 10255], 10250), [22, 10255]);
        // Of a kubelet that has another port than most.
        assert_eq!(tested(&[], 10350), [9200, 10350]);
        assert_eq!(tested(&[9100, 10250], 10350), [9100, 10350]);
    }

    #[test]
    fn a_kubelets_port_that_is_not_tunnelled_is_found() {
        let found = |redirected: &[u16]| {
            let nodes = nodes();
            not_tunnelled(&nodes, &nodes, redirected, "tunnel-server-cfg").map(|finding| finding.found)
        };
        let text = found(&[10250, 10255]).unwrap();
        assert!(text.starts_with("edge-2, edge-3: the Node names port 10350,10351"), "{text}");
        let text = found(&[10250, 10350]).unwrap();
        assert!(text.starts_with("edge-3: the Node names port 10351"), "{text}");
        assert_eq!(found(&[10250, 10350, 10351]), None);
        let text = found(&[10351]).unwrap();
        assert!(text.starts_with("edge-1, edge-2: the Node names port 10250,10350"), "{text}");
        assert_eq!(found(&[9100]), None, "no kubelet is tunnelled");
    }

    #[test]
    fn a_target_that_was_reached_counts_whatever_it_speaks() {
        let of = |head: &str| failure_of(&format!("{head}\r\n\r\ntunnel-server: because\n"));
        assert_eq!(of("HTTP/1.1 200 OK"), Ok(()));
        assert_eq!(of("HTTP/1.1 502 Bad Gateway\r\npostern-outcome: target_reset"), Ok(()));
        assert_eq!(of("HTTP/1.1 502 Bad Gateway\r\nPostern-Outcome: refused"), Err("because".to_owned()));
        assert_eq!(of("HTTP/1.1 403 Forbidden\r\npostern-outcome: denied"), Err("because".to_owned()));
        assert_eq!(failure_of("\x15\x03\x03"), Ok(()));
    }
}

//! Limits that protect other clients from unauthenticated clients, greedy clients and bursts.
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, connect, echo, visit};
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::netns::Namespace;
use postern_testbed::report::figure;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::tls;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed, load_target};
use rustls::RootCertStore;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tunnel_link::proto::RenewRequest;
use tunnel_link::proto::enrollment_client::EnrollmentClient;
use tunnel_pki::{SERVER_NAME, create_csr};

use crate::common::{HEALTHY, alongside, at_once, expect_reset, hold, server_and_agent, take_all, target};
use crate::egress::client::over;
use crate::hostile_peer::Credentials;
use crate::web::{Authority, Web};

scenarios! {
    silent_handshakes_of_twenty_sources_lock_nobody_out(edges = 2, limit = 240),
    idle_enrolments_of_twenty_sources_lock_nobody_out(edges = 2, limit = 240),
    greedy_clients_leave_open_files_to_the_others(edges = 2, limit = 240),
    this_host_is_another_source_at_each_node_by_ipv6(edges = 2),
    silent_clients_at_the_https_listener_leave_the_http_listener(quick),
    silent_clients_at_the_egress_port_leave_the_http_listener,
    two_thousand_connects_at_once(limit = 180),
    black_holed_dials_leave_turns_to_others,
}

const SOURCES: u8 = 20;
/// Open files of a server that is to reach its limits.
const FEW_FILES: u32 = 2_000;

/// Behaviour of an unauthenticated client on its connections.
#[derive(Clone)]
enum Client {
    Silent,
    /// Makes a TLS handshake for an enrolment, and sends no request.
    Idle(RootCertStore),
}

/// Unauthenticated clients that open connections as fast as they can, and a new one whenever one is closed.
struct Flood {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Flood {
    /// Starts [`SOURCES`] sources on a new machine next to the cloud host, with `each` connections each.
    fn start(ns: &Namespace, server: SocketAddr, each: usize, client: &Client) -> Result<Self> {
        let (stop, opened) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (ns, client) = (ns.clone(), client.clone());
        let (stopped, count) = (stop.clone(), opened.clone());
        let thread = std::thread::spawn(move || {
            ns.enter()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut all = JoinSet::new();
                for source in sources() {
                    for _ in 0..each {
                        all.spawn(hold_connections(source, server, client.clone(), count.clone()));
                    }
                }
                while !stopped.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
            Ok(())
        });
        Ok(Self { stop, opened, thread: Some(thread) })
    }

    /// Waits until this number of connections was opened.
    async fn wait_opened(&self, count: u64) -> Result<()> {
        let opened = async || Ok(self.opened.load(Ordering::Relaxed));
        wait_until("the silent clients' connections", Duration::from_secs(60), opened, |opened| {
            *opened >= count
        })
        .await?;
        Ok(())
    }

    fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("stopped twice")?;
        thread.join().map_err(|_| anyhow::anyhow!("the clients' thread panicked"))?
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn sources() -> impl Iterator<Item = Ipv4Addr> {
    (0..SOURCES).map(|number| Ipv4Addr::new(10, 70, 0, 100 + number))
}

/// Adds a machine with the addresses of all sources.
fn clients_host(testbed: &Testbed) -> Result<Namespace> {
    let ns = testbed.add_neighbour()?;
    for source in sources() {
        ns.ip(&format!("addr add {source}/24 dev eth0"))?;
    }
    Ok(ns)
}

async fn connect_as(source: Ipv4Addr, server: SocketAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((source, 0).into())?;
    Ok(tokio::time::timeout(client::PATIENCE, socket.connect(server)).await??)
}

async fn hold_connections(source: Ipv4Addr, server: SocketAddr, client: Client, opened: Arc<AtomicU64>) {
    loop {
        let attempt = async {
            let mut stream = connect_as(source, server).await?;
            let mut byte = [0];
            match &client {
                Client::Silent => {
                    opened.fetch_add(1, Ordering::Relaxed);
                    while stream.read(&mut byte).await? > 0 {}
                }
                Client::Idle(roots) => {
                    let mut stream =
                        tls::handshake(stream, SERVER_NAME, roots.clone(), None, Some(b"h2")).await?;
                    opened.fetch_add(1, Ordering::Relaxed);
                    // The server's HTTP/2 settings arrive first.
                    while stream.read(&mut byte).await? > 0 {}
                }
            }
            anyhow::Ok(())
        };
        if attempt.await.is_err() {
            // Refused: try again, but without a busy loop.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Renews the certificate with an agent's credentials as an agent does, in one attempt.
async fn renew(testbed: &Testbed, own: &Credentials) -> Result<()> {
    let stream = own.dial_for(&testbed.edge(1).ns, agent_port(), b"h2").await?;
    let mut enrollment = EnrollmentClient::new(over(stream).await?);
    let csr = create_csr(&rcgen::KeyPair::generate()?)?;
    let renewed = tokio::time::timeout(client::PATIENCE, enrollment.renew(RenewRequest { csr })).await;
    renewed.context("Renew was not answered")?.context("Renew")?;
    Ok(())
}

fn agent_port() -> SocketAddr {
    (CLOUD, 10262).into()
}

/// During a flood of unauthenticated clients an agent comes back, one enrols, one renews, and a restarted server, which
/// has no sessions, gets its agents back.
async fn nobody_is_locked_out(
    testbed: &Testbed,
    mut server: Server<'_>,
    mut agent: Agent<'_>,
    flood: Flood,
) -> Result<()> {
    wait_full(&server, &flood).await?;
    let start = Instant::now();
    agent.process.crash().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    agent.return_to(&server).await.context("an agent that comes back")?;
    figure(&format!("an agent is back after {:.1?}", start.elapsed()));

    let start = Instant::now();
    let _second = Agent::enrol(&server, 2).await.context("an agent that enrols")?;
    figure(&format!("an agent is enrolled after {:.1?}", start.elapsed()));

    let start = Instant::now();
    let own = Credentials::of_agent(&agent.state_dir())?;
    renew(testbed, &own).await.context("a renewal")?;
    figure(&format!("a renewal took {:.1?}", start.elapsed()));

    server.process.crash().await?;
    server.start_again().await?;
    wait_full(&server, &flood).await?;
    let start = Instant::now();
    agent.process.crash().await?;
    agent.return_to(&server).await.context("an agent of a server that knows nobody")?;
    figure(&format!("an agent is back at a restarted server after {:.1?}", start.elapsed()));
    flood.stop()
}

/// Waits until the flood has reached its limit: many connections were evicted or refused since the server's start, by
/// either limit.
async fn wait_full(server: &Server<'_>, flood: &Flood) -> Result<()> {
    flood.wait_opened(flood.opened.load(Ordering::Relaxed) + 500).await?;
    let sent_away = async || {
        let metrics = server.metrics().await?;
        let sum = |name, results: [&str; 3]| -> Result<f64> {
            results.iter().map(|result| metrics.sum_or_zero(name, &[("result", result)])).sum()
        };
        let handshakes = sum("postern_agent_handshakes_total", ["turned_away", "evicted", "failed"])?;
        let enrolments = sum("postern_enrollment_connections_total", ["evicted", "refused", "idle"])?;
        Ok(handshakes / 20.0 + enrolments)
    };
    wait_until("the bound to be reached", Duration::from_secs(60), sent_away, |count| *count >= 250.0)
        .await?;
    Ok(())
}

async fn silent_handshakes_of_twenty_sources_lock_nobody_out(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let clients = clients_host(testbed)?;
    let flood = Flood::start(&clients, agent_port(), 300, &Client::Silent)?;
    nobody_is_locked_out(testbed, server, agent, flood).await
}

async fn idle_enrolments_of_twenty_sources_lock_nobody_out(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let roots = tls::roots(&agent.state_dir().join("ca.crt"))?;
    let clients = clients_host(testbed)?;
    let flood = Flood::start(&clients, agent_port(), 40, &Client::Idle(roots))?;
    nobody_is_locked_out(testbed, server, agent, flood).await
}

/// Like by IPv4, where this host's packets have the nodes' virtual addresses as their source.
async fn this_host_is_another_source_at_each_node_by_ipv6(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).open_files(FEW_FILES).start().await?;
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let mut held = Vec::new();
    for n in [1, 2] {
        let edge = testbed.edge(n);
        let on_edge = Target::start(&edge.ns, edge.address_v6, 9100, Behaviour::Echo)?;
        held.push((take_all(&testbed.cloud, on_edge.address, FEW_FILES as usize).await?, on_edge));
    }
    let [first, second] = [held[0].0.len(), held[1].0.len()];
    figure(&format!(
        "of {FEW_FILES} open files this host got {first} at one node, then {second} at the other"
    ));
    // A third of the files, and then a third of the rest.
    ensure!(first >= 100 && second >= first / 2, "{first} connections to edge-1, {second} to edge-2");
    let (over, reason) = ("postern_connections_over_limit_total", [("reason", "source")]);
    server.wait_metric(over, &reason, |refused| refused >= 20.0).await.map(drop)
}

async fn greedy_clients_leave_open_files_to_the_others(testbed: &Testbed) -> Result<()> {
    let pod = testbed.add_pod()?;
    let server = Builder::new(testbed).open_files(FEW_FILES).start().await?;
    let _first = Agent::enrol(&server, 1).await?;
    let on_first = target(testbed, 1, 9100, Behaviour::Echo)?;
    let on_second = target(testbed, 2, 9100, Behaviour::Echo)?;
    let by_pod = take_all(&pod, on_first.address, FEW_FILES as usize).await?;
    // This process, whose packets have the node's virtual address as their source.
    let by_host = take_all(&testbed.cloud, on_first.address, FEW_FILES as usize).await?;
    figure(&format!(
        "of {FEW_FILES} open files a pod got {}, this host then {}",
        by_pod.len(),
        by_host.len()
    ));
    ensure!(by_pod.len() >= 200, "the pod got only {} connections", by_pod.len());
    ensure!(!by_host.is_empty(), "the pod has taken all connections to edge-1");

    for path in ["/readyz", "/healthz", "/metrics", "/status"] {
        let answer = tokio::time::timeout(client::PATIENCE, server.get(path)).await;
        ensure!(answer.with_context(|| format!("{path} does not answer"))??.0 == 200, "{path}");
    }
    let _second = Agent::enrol(&server, 2).await.context("another node's agent attaches")?;
    visit(on_second.address).await.context("another client reaches another node")?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("edge-9", true, &[Ipv4Addr::new(192, 168, 99, 9).into()], &[]));
    inventory.write()?;
    server.expect_metric("postern_inventory_nodes", &[("role", "edge")], 3.0).await?;
    server
        .wait_access("of a refused client", |line| {
            line.text("outcome") == "busy" && line.text("error").contains("connections open")
        })
        .await?;
    for reason in ["source", "node"] {
        let over = "postern_connections_over_limit_total";
        server.wait_metric(over, &[("reason", reason)], |refused| refused >= 1.0).await?;
    }
    ensure!(!server.settled_log().await?.contains("failed to accept"), "the open files were used up");
    // Held connections still work, and released ones make room for new ones.
    for mut stream in by_pod {
        echo(&mut stream, b"still mine").await?;
    }
    drop(by_host);
    // Waits until the server has seen their ends.
    let visited = async || visit(on_first.address).await;
    wait_until("a place among those given back", client::PATIENCE, visited, |_| true).await?;
    Ok(())
}

async fn silent_clients_at_the_https_listener_leave_the_http_listener(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).open_files(FEW_FILES).start().await?;
    the_http_listener_answers_beside_silent_clients(testbed, &server, 10263, "https").await
}

async fn silent_clients_at_the_egress_port_leave_the_http_listener(testbed: &Testbed) -> Result<()> {
    let callers = Authority::new(testbed, "callers")?;
    let server = Builder::new(testbed)
        .open_files(FEW_FILES)
        .flag("--egress-port=8132")
        .flag(format!("--egress-client-ca={}", callers.file().display()))
        .start()
        .await?;
    the_http_listener_answers_beside_silent_clients(testbed, &server, 8132, "egress").await
}

/// Checks the http listener while unauthenticated clients hold all that another listener gives them.
async fn the_http_listener_answers_beside_silent_clients(
    testbed: &Testbed,
    server: &Server<'_>,
    port: u16,
    full: &str,
) -> Result<()> {
    let _agent = Agent::enrol(server, 1).await?;
    let _web = Web::start(testbed, 1, 9100)?;
    let clients = clients_host(testbed)?;
    let flood = Flood::start(&clients, (CLOUD, port).into(), 100, &Client::Silent)?;
    let (over, listener) = ("postern_connections_over_limit_total", [("listener", full)]);
    server.wait_metric(over, &listener, |refused| refused >= 100.0).await?;
    let listener: SocketAddr = ([127, 0, 0, 1], 10264).into();
    for _ in 0..20 {
        let mut stream = connect(listener).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n").await?;
        let answer = client::text(&mut stream, "the http listener does not answer").await?;
        ensure!(
            answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("body=0\n"),
            "the http listener answered {answer:?}"
        );
    }
    ensure!(!server.settled_log().await?.contains("failed to accept"), "the open files were used up");
    flood.stop()
}

async fn two_thousand_connects_at_once(testbed: &Testbed) -> Result<()> {
    const COUNT: usize = 2_000;
    let (server, agent) = server_and_agent(testbed).await?;
    let target = load_target::Target::start(testbed, 1).await?;
    let address = target.at(load_target::ECHO);
    visit(address).await?;
    let (server_before, agent_before) = (server.process.resident_bytes()?, agent.process.resident_bytes()?);
    let start = Instant::now();
    let mut open = at_once(COUNT, || hold(address, b"one of many")).await?;
    figure(&format!("{COUNT} connects at once were all relayed after {:.1?}", start.elapsed()));
    #[expect(clippy::cast_precision_loss, reason = "2000 fits")]
    let count = COUNT as f64;
    agent.expect_metric("postern_agent_connections_active", &[], count).await?;
    server.expect_metric("postern_connections_active", &[], count).await?;
    let kib = |now: u64, before: u64| now.saturating_sub(before) / 1024 / COUNT as u64;
    figure(&format!(
        "each open connection holds {} KiB in the server and {} KiB in the agent",
        kib(server.process.resident_bytes()?, server_before),
        kib(agent.process.resident_bytes()?, agent_before)
    ));
    for stream in &mut open {
        echo(stream, b"still there").await?;
    }
    drop(open);
    target.settle(client::PATIENCE).await?;
    server.expect_metric("postern_connections_active", &[], 0.0).await?;
    // A visit was dialled too.
    agent.wait_metric("postern_agent_dials_total", &[("outcome", "ok")], |dials| dials > count).await?;
    server.settled().await?;
    let busy = server.metric_or_zero("postern_connections_total", &[("outcome", "busy")]).await?;
    ensure!(busy == 0.0, "{busy} of them were refused");
    Ok(())
}

async fn black_holed_dials_leave_turns_to_others(testbed: &Testbed) -> Result<()> {
    const COUNT: usize = 1_500;
    let (_server, agent) = server_and_agent(testbed).await?;
    testbed.black_hole(1, 9105)?;
    let hole = SocketAddr::new(testbed.edge(1).ip(), 9105);
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let holed = at_once(COUNT, || expect_reset(hole));
    let reached = async {
        // Dials count when they end: the first ones to the black hole after five seconds.
        let outcome = [("outcome", "timed_out")];
        agent.wait_metric("postern_agent_dials_total", &outcome, |ended| ended >= 1.0).await.map(drop)
    };
    alongside("1,500 black-holed dials", healthy.address, async {
        let (_, ()) = tokio::try_join!(holed, reached)?;
        Ok(())
    })
    .await?;
    // Dials that did not start in time count as busy, the others as timed out.
    #[expect(clippy::cast_precision_loss, reason = "1500 fits")]
    let count = COUNT as f64;
    let ended = async || {
        let metrics = agent.metrics().await?;
        let ended = |outcome| metrics.sum_or_zero("postern_agent_dials_total", &[("outcome", outcome)]);
        Ok(ended("timed_out")? + ended("busy")?)
    };
    wait_until("every dial to be counted", client::PATIENCE, ended, |all| *all == count).await.map(drop)
}

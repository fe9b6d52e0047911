//! An operator's view: flags, exit codes, admin pages, status.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, connect, digest, pattern_digest, visit};
use postern_testbed::process::{Process, program};
use postern_testbed::server::{self, Builder};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::common::{hold, server, server_and_agent, target};

scenarios! {
    redirect_off_serves_the_other_listeners,
    status_and_admin_pages(edges = 2, quick),
    what_has_settled_is_shown(quick),
    connections_show_what_waits,
    port_already_in_use,
}

async fn redirect_off_serves_the_other_listeners(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).flag("--redirect=off").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let error = client::connect_error((testbed.edge(1).address, 10250), Duration::from_secs(1)).await?;
    ensure!(error.kind() == std::io::ErrorKind::TimedOut, "redirected although off: {error}");
    connect((CLOUD, 10263)).await.context("the https listener")?;
    let routes = testbed.cloud.output("ip", "route show table all")?;
    ensure!(!routes.contains("198.18."), "a redirect route although the redirect is off");
    Ok(())
}

async fn status_and_admin_pages(testbed: &Testbed) -> Result<()> {
    let server_ = server(testbed).await?;
    let agent = Agent::enrol(&server_, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;

    let text = server::run(testbed, &["status"])?;
    let shown = String::from_utf8_lossy(&text.stdout).into_owned();
    ensure!(
        text.status.success(),
        "status ended with {}: {}",
        text.status,
        String::from_utf8_lossy(&text.stderr)
    );
    for word in ["edge-1", "edge-2", "192.168.50.2"] {
        ensure!(shown.contains(word), "{word} is not in the status:\n{shown}");
    }
    let json = server::run(testbed, &["status", "-o", "json"])?;
    let json: Value = serde_json::from_slice(&json.stdout).context("status -o json")?;
    let nodes = json["nodes"].as_array().context("nodes")?;
    let connected: Vec<_> =
        nodes.iter().filter(|node| node["connected"] == true).map(|node| &node["name"]).collect();
    ensure!(connected == ["edge-1"], "connected in the JSON: {connected:?}");

    for (path, expected) in
        [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/status", 200), ("/nowhere", 404)]
    {
        let (status, body) = server_.get(path).await?;
        ensure!(status == expected, "{path} answered {status}: {body}");
    }
    let admin = || async { connect(std::net::SocketAddr::from(([127, 0, 0, 1], 10265))).await };
    let (level, body) = client::http(admin().await?, "PUT", "/debug/flags/v", "4").await?;
    ensure!(level == 200, "PUT /debug/flags/v answered {level}: {body}");
    let (level, _) = client::http(admin().await?, "PUT", "/debug/flags/v", "loud").await?;
    ensure!(level == 400, "an invalid level was answered {level}");

    // Labels have few values: none is an address or a node's name.
    let metrics = server_.metrics().await?;
    ensure!(!metrics.samples.is_empty(), "no metrics");
    for sample in &metrics.samples {
        let name = &sample.name;
        ensure!(!name.starts_with("postern_postern_"), "{name} has its prefix twice");
        ensure!(name.starts_with("postern_") || name.starts_with("process_"), "{name} has a foreign prefix");
        for value in sample.labels.values() {
            ensure!(
                !value.contains("edge-") && !value.contains("192.168."),
                "unbounded label {value:?} on {name}"
            );
        }
    }
    let readiness = async || Ok(agent.get("/readyz").await?.0);
    wait_until("the agent to be ready", client::PATIENCE, readiness, |status| *status == 200).await?;
    drop(server_);
    agent.wait_metric("postern_agent_sessions_ended_total", &[], |ended| ended >= 1.0).await?;
    let (ready, body) = agent.get("/readyz").await?;
    ensure!(ready == 200, "/readyz of an agent that was attached answered {ready}: {body}");
    let without = server::run(testbed, &["status"])?;
    ensure!(without.status.code() == Some(1), "status without a server ended with {}", without.status);
    ensure!(!without.stderr.is_empty(), "status without a server prints no error");
    Ok(())
}

/// After each connection both programs settle; then metrics and access log are read once.
async fn what_has_settled_is_shown(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let (_, body) = server.get("/debug/settled").await?;
    ensure!(body == r#"{"settled":["threads","routes","log"]}"#, "{body}");
    for count in 1..=200_u32 {
        visit(on_edge.address).await?;
        agent.settled().await?;
        server.settled().await?;
        let lines = server.access_log()?.len();
        ensure!(lines == count as usize, "{lines} access lines of {count} connections");
        let counted = server.metric("postern_connections_total", &[("outcome", "ok")]).await?;
        ensure!(counted == f64::from(count), "{counted} of {count} connections counted");
        let dialled = agent.metric("postern_agent_connections_total", &[("outcome", "ok")]).await?;
        ensure!(dialled == f64::from(count), "the agent counted {dialled} of {count} connections");
    }
    Ok(())
}

/// Returns the row of a target's connection in an answer of `/connections`.
fn row<'a>(report: &'a Value, target: &Target) -> Option<&'a Value> {
    let address = target.address.to_string();
    let is_its = |row: &&Value| row["destination"] == address || row["target"] == address;
    report["connections"].as_array()?.iter().find(is_its)
}

/// Reports whether this receiver of the target's connection has taken nothing for a second.
fn is_blocked(report: &Value, target: &Target, receiver: &str) -> bool {
    let time = row(report, target).and_then(|row| row[receiver].as_u64());
    time.is_some_and(|time| time >= 1000)
}

fn json((status, body): (u16, String)) -> Result<Value> {
    ensure!(status == 200, "answered {status}: {body}");
    serde_json::from_str(&body).with_context(|| format!("not JSON: {body}"))
}

/// Writes until a write fails.
async fn fill(stream: &mut TcpStream) -> Result<()> {
    let block = vec![0; 64 << 10];
    loop {
        stream.write_all(&block).await.context("writing to a target that never reads")?;
    }
}

/// Number of bytes that stay unread for a while.
const UNREAD: u64 = 64_000_000;

async fn connections_show_what_waits(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(5, UNREAD))?;
    let deaf = target(testbed, 1, 9101, Behaviour::NeverReads)?;
    let echo = target(testbed, 1, 10250, Behaviour::Echo)?;
    let _held = hold(echo.address, b"hello").await?;
    let mut reader = connect(source.address).await?;
    let mut writer = connect(deaf.address).await?;
    let patience = 2 * client::PATIENCE;
    let seen = async {
        let at_server = async || json(server.get("/connections?node=edge-1").await?);
        let report = wait_until("both receivers to be named", patience, at_server, |report| {
            is_blocked(report, &source, "client_blocked_ms") && is_blocked(report, &deaf, "node_blocked_ms")
        });
        let report = report.await?;
        let at_agent = async || json(agent.get("/connections").await?);
        let at_agent = wait_until("the same at the agent", patience, at_agent, |report| {
            is_blocked(report, &source, "server_blocked_ms") && is_blocked(report, &deaf, "target_blocked_ms")
        });
        Ok::<_, anyhow::Error>((report, at_agent.await?))
    };
    let (report, at_agent) = tokio::select! {
        seen = seen => seen?,
        ended = fill(&mut writer) => return ended,
    };
    let unread = row(&report, &source).context("the reader's row")?;
    // The node has sent until it was blocked by the window.
    let (held, left) = (unread["held_for_client"].as_u64(), unread["window_left"].as_u64());
    ensure!(held >= Some(512 << 10), "held for a client that does not read: {unread}");
    ensure!(left.is_some_and(|left| left <= 512 << 10), "left of its window: {unread}");
    ensure!(unread["listener"] == "redirect" && unread["node"] == "edge-1", "{unread}");
    ensure!(unread["node_blocked_ms"].is_null(), "nothing goes to the node: {unread}");
    let idle = row(&report, &echo).context("the idle connection's row")?;
    ensure!(
        idle["bytes_to_node"] == 5 && idle["bytes_from_node"] == 5 && idle["link"] == 0,
        "an idle connection: {idle}"
    );
    ensure!(
        idle["dialling"] == false && idle["client_blocked_ms"].is_null() && idle["node_blocked_ms"].is_null(),
        "an idle connection: {idle}"
    );
    ensure!(report["connections"][2] == *idle && report["more"] == 0, "stalled ones come first: {report}");
    let unwanted = row(&at_agent, &deaf).context("the deaf target's row")?;
    ensure!(unwanted["held_for_target"] != 0, "held for a target that does not read: {unwanted}");

    let shown = server::run(testbed, &["status", "--connections", "edge-1"])?;
    let text = String::from_utf8_lossy(&shown.stdout);
    ensure!(shown.status.success(), "status --connections: {}", String::from_utf8_lossy(&shown.stderr));
    for part in ["connections: 3, 2 of them stalled", "client takes nothing for", "node takes nothing for"] {
        ensure!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let none = server::run(testbed, &["status", "--connections=edge-9", "-o", "json"])?;
    let none: Value = serde_json::from_slice(&none.stdout).context("status --connections -o json")?;
    ensure!(none["connections"].as_array().is_some_and(Vec::is_empty), "of a node that has none: {none}");

    // Once it is read, nothing waits, and an ended connection is not shown.
    let got = digest(&mut reader).await?;
    ensure!(got == (UNREAD, pattern_digest(5, UNREAD)), "{} bytes came, changed or incomplete", got.0);
    drop(reader);
    let all = async || json(server.get("/connections").await?);
    wait_until("the read connection to be gone", client::PATIENCE, all, |report| {
        row(report, &source).is_none() && row(report, &deaf).is_some()
    })
    .await?;
    Ok(())
}

async fn port_already_in_use(testbed: &Testbed) -> Result<()> {
    let (mut first, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let inventory = format!("--inventory={}", testbed.dir().join("nodes.yaml").display());
    let state = format!("--state-dir={}", testbed.dir().join("second").display());
    let cgroup = format!("--redirect-cgroup={}", testbed.cloud_cgroup.path().display());
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    command.args([&inventory, &state, &cgroup]);
    let mut second = Process::spawn(testbed.dir(), "tunnel-server-second", command)?;
    let status = second.wait_exit(Duration::from_secs(15)).await?;
    let said = second.output()?;
    ensure!(status.code() == Some(1), "the second server ended with {status}: {said}");
    ensure!(said.contains("1026"), "the port in use is not named: {said}");
    // Its failure does not affect the first server.
    ensure!(first.process.ended()?.is_none(), "the first server ended");
    visit(on_edge.address).await?;
    Ok(())
}

//! The steps of the demo; each is announced before it is done.
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::client;
use postern_testbed::process::Process;
use postern_testbed::prometheus::{self, query};
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, Testbed};

const STEPS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Running<'a> {
    server: Server<'a>,
    agents: Vec<Agent<'a>>,
    others: Vec<Process>,
}

impl super::Running for Running<'_> {
    const SHELL: &'static str =
        "A shell on the cloud host (its cgroup too, which the redirect is attached to):";

    fn print_examples(&self, bin: &str) {
        let testbed = self.server.testbed();
        for edge in testbed.edges() {
            println!("  curl -s http://{}:9100/metrics | grep node_uname_info", edge.address);
        }
        println!("  {bin}/tunnel-server status");
        println!("  curl -s 127.0.0.1:10265/metrics | grep ^postern_");
        println!("  curl -s 'http://127.0.0.1:9090/api/v1/query?query=up'");
        println!("A shell on an edge:");
        for edge in testbed.edges() {
            println!("  sudo nsenter --net={} bash", edge.ns.path().display());
        }
    }

    async fn stop(mut self) -> Result<()> {
        self.others.clear();
        for agent in &mut self.agents {
            let status = agent.process.stop().await?;
            ensure!(status.success(), "an agent ended with {status}");
        }
        let status = self.server.process.stop().await?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

fn step(number: usize, text: &str) {
    println!("\n[{number}/{STEPS}] {text}");
}

fn indented(text: &str) {
    for line in text.trim_end().lines() {
        println!("      {line}");
    }
}

/// `pace`: seconds between scrapes, and the factor by which waits for them are longer than usual.
pub(super) async fn run(testbed: &Testbed, pace: u32) -> Result<Running<'_>> {
    step(1, "a cloud host, a router with NAT, two edge hosts, each a network namespace");
    indented(&format!(
        "cloud   {CLOUD}\nrouter  masquerades what the edges send, drops new connections towards them"
    ));
    for edge in testbed.edges() {
        indented(&format!("{}  {} (a LAN of its own behind the router)", edge.name, edge.address));
    }

    step(2, "prometheus-node-exporter on each edge");
    let mut others = Vec::new();
    for (at, edge) in testbed.edges().iter().enumerate() {
        let mut exporter = prometheus::start_exporter(testbed, at + 1)?;
        let address = (edge.address, 9100).into();
        wait_for("the node exporter to answer on its own host", PATIENCE, async || {
            ensure!(exporter.ended()?.is_none(), "the node exporter ended:\n{}", exporter.output()?);
            Ok(client::connect_from(&edge.ns, address, Duration::from_secs(1)).await.ok())
        })
        .await?;
        indented(&format!("{} listens on {address}", edge.name));
        others.push(exporter);
    }

    step(3, "without the tunnel, from the cloud: the edges cannot be reached");
    for edge in testbed.edges() {
        let start = Instant::now();
        let error = client::connect_error((edge.address, 9100), Duration::from_secs(3)).await?;
        ensure!(
            error.kind() == std::io::ErrorKind::TimedOut,
            "connect() failed with {error}, expected no answer"
        );
        indented(&format!("connect {}:9100: no answer after {:.1?}", edge.address, start.elapsed()));
    }

    step(4, "tunnel-server on the cloud host; its eBPF programs see the connects of the cloud's cgroup");
    let server = Builder::new(testbed).ports("10250,10255,9100").start().await?;
    indented(&format!("attached to {}", testbed.cloud_cgroup.path().display()));
    for edge in testbed.edges() {
        let start = Instant::now();
        let ended = without_agent((edge.address, 9100).into()).await?;
        indented(&format!(
            "connect {}:9100: {ended}, after {:.1?} (no agent yet)",
            edge.address,
            start.elapsed()
        ));
    }

    step(5, "tunnel-agent on each edge, enrolled with a token");
    let agents = start_agents(&server, testbed).await?;

    step(6, "Prometheus on the cloud host, configured with the edges' own addresses and nothing else:");
    let configuration = configuration(testbed, pace);
    indented(&configuration);
    others.push(prometheus::start(testbed, &configuration)?);

    step(7, "what Prometheus' own API reports");
    show_figures(testbed, pace).await?;

    step(8, "tunnel-server status");
    let output = server::run(testbed, &["status"])?;
    ensure!(output.status.success(), "status: {}", String::from_utf8_lossy(&output.stderr));
    indented(&String::from_utf8_lossy(&output.stdout));
    Ok(Running { server, agents, others })
}

/// Connects to a node that has no agent; returns the result.
async fn without_agent(address: SocketAddr) -> Result<&'static str> {
    let connected = client::attempt(address, client::PATIENCE).await;
    if connected.as_ref().is_err_and(client::is_unreachable) {
        return Ok("No route to host");
    }
    // Below Linux 6.1 a program cannot choose the error of a connect.
    let end = client::end_at_once(connected).await.with_context(|| format!("connect {address}"))?;
    ensure!(end == client::End::Reset, "connect {address} ended with {end:?}");
    Ok("accepted and reset")
}

/// The whole configuration: addresses, as for any host that can be reached directly.
fn configuration(testbed: &Testbed, pace: u32) -> String {
    let mut text = format!(
        "global:\n  scrape_interval: {pace}s\nscrape_configs:\n  - job_name: edges\n    static_configs:\n      - targets:\n"
    );
    for edge in testbed.edges() {
        // Writing to a String cannot fail.
        writeln!(text, "          - {}:9100", edge.address).ok();
    }
    text
}

async fn start_agents<'a>(server: &Server<'a>, testbed: &'a Testbed) -> Result<Vec<Agent<'a>>> {
    let mut agents = Vec::new();
    for (at, edge) in testbed.edges().iter().enumerate() {
        let token = server.token(&edge.name)?;
        indented(&format!("$ tunnel-server token create --node {}", edge.name));
        let secret = token.token.split_once('.').map_or("", |(_, secret)| secret);
        indented(&format!("$ {}", token.command.replace(secret, "…")));
        let start = Instant::now();
        agents.push(agent::Builder::new(server, at + 1).token(token).spawn()?);
        server.wait_connected(&edge.name, true, agent::START).await?;
        indented(&format!("enrolled and attached after {:.1?}", start.elapsed()));
    }
    Ok(agents)
}

/// Waits until every edge has been scraped several times, then prints what the API reports.
async fn show_figures(testbed: &Testbed, pace: u32) -> Result<()> {
    let edges = testbed.edges().len();
    let wait = format!("{edges} edges to be up in Prometheus");
    let series = async || query(&format!("sum_over_time(up[{pace}m])")).await;
    wait_until(&wait, PATIENCE * pace, series, |series| {
        series.len() == edges && series.iter().all(|one| one.number() >= 5.0)
    })
    .await?;
    for edge in testbed.edges() {
        let instance = format!("{}:9100", edge.address);
        let value = async |metric: &str| {
            let series = query(&format!("{metric}{{instance=\"{instance}\"}}")).await?;
            series.into_iter().next().with_context(|| format!("Prometheus has no {metric} of {instance}"))
        };
        let up = value("up").await?.number();
        let samples = value("scrape_samples_scraped").await?.number();
        let took = value("scrape_duration_seconds").await?.number();
        let uname = value("node_uname_info").await?;
        indented(&format!(
            "{instance}  up {up}, {samples} samples in {:.1} ms, node_uname_info has nodename={:?}",
            took * 1e3,
            uname.label("nodename")
        ));
        ensure!(up == 1.0 && samples > 100.0, "{instance}: up {up}, {samples} samples");
        ensure!(
            uname.label("nodename") == edge.name,
            "{instance} was answered by {:?}",
            uname.label("nodename")
        );
    }
    Ok(())
}

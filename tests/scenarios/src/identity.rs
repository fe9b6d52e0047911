//! Enrolment tokens, certificates, renewal and rotation of the CA.
use std::fs;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent, Builder};
use postern_testbed::authority::Authority;
use postern_testbed::client::{self, echo, visit};
use postern_testbed::inventory::Inventory;
use postern_testbed::process::{Process, program};
use postern_testbed::server::{self, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until};
use rcgen::KeyPair;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::common::{hold, never, refusals_counted, server, server_and_agent, target};
use crate::hostile_peer::{Behaviour as Hostility, Credentials, HostileAgent};

scenarios! {
    enrols_once_and_keeps_its_key(quick),
    printed_command_works_unchanged,
    bad_tokens_are_refused,
    renewal_drops_no_connection(waits),
    rotating_the_ca_loses_no_agent(edges = 2, waits, limit = 300),
    copied_identity_is_shut_out(limit = 240),
    agent_of_an_unknown_node_is_refused(limit = 300),
}

async fn enrols_once_and_keeps_its_key(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    ensure!(token.node == "edge-1" && token.ca_hash.starts_with("sha256:"), "{token:?}");
    // The printed command has everything: server, node, token and hash.
    for part in ["tunnel-agent", &server.agent_address(), "edge-1", &token.token, &token.ca_hash] {
        ensure!(token.command.contains(part), "{part:?} is not in the printed command {:?}", token.command);
    }
    let secret = token.token.clone();
    let mut agent = Builder::new(&server, 1).token(token).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let key = agent.state_dir().join("agent.key");
    let mode = fs::metadata(&key).context("agent.key")?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "agent.key has mode {mode:o}");
    let before = fs::read(&key)?;
    agent.crash(&server).await?;
    agent.return_to(&server).await?;
    ensure!(fs::read(&key)? == before, "a restart made another key");
    // Neither the key nor a means to dump it is shown.
    let line = String::from_utf8(before)?.lines().nth(1).context("a line of the key")?.to_owned();
    let shown = [
        server.get("/status").await?.1,
        agent.get("/status").await?.1,
        server.process.output_of_all()?,
        agent.process.output_of_all()?,
    ];
    ensure!(
        shown.iter().all(|text| !text.contains(&line) && !text.contains("PRIVATE KEY")),
        "a key is shown"
    );
    for pid in [server.process.pid(), agent.process.pid()] {
        let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).context("its limit")?;
        let values: Vec<_> = core.split_whitespace().skip(4).take(2).collect();
        ensure!(values == ["0", "0"], "process {pid} may dump its keys: {core:?}");
    }
    // The secret is in no log and none of the server's files.
    let (_, secret) = secret.split_once('.').context("ID.SECRET")?;
    let found = testbed
        .on_cloud()
        .command("grep".as_ref())
        .args(["-rl", secret])
        .arg(testbed.dir().join("server"))
        .arg(testbed.dir().join("logs"))
        .output()?;
    ensure!(found.stdout.is_empty(), "the token's secret is in {}", String::from_utf8_lossy(&found.stdout));
    Ok(())
}

async fn printed_command_works_unchanged(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    // The printed command unchanged, except for a state folder of this run.
    let (name, arguments) = token.command.split_once(' ').context("a command with arguments")?;
    let mut command = testbed.on_edge(1).command(&program(name)?);
    command.args(arguments.split_whitespace());
    command.arg(format!("--state-dir={}", testbed.dir().join("printed").display()));
    let mut agent = Process::spawn(testbed.dir(), "tunnel-agent-printed", command)?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"held").await?;
    // The server has several addresses: the agent's sessions must not replace each other.
    never("a break", Duration::from_secs(15), async || {
        Ok(!server.is_connected("edge-1").await? || echo(&mut held, b"still").await.is_err())
    })
    .await?;
    ensure!(agent.ended()?.is_none(), "the agent ended");
    Ok(())
}

/// Starts an agent with a token that must not work, and expects the reason in its log or in the server's.
async fn refused<'a>(server: &Server<'a>, builder: Builder<'a>, reason: &str) -> Result<()> {
    server.testbed().expect_error("enrolment refused");
    let mut agent = builder.spawn()?;
    wait_for(&format!("the agent's log to contain {reason:?}"), agent::START, async || {
        Ok(agent.process.output()?.to_lowercase().contains(reason).then_some(()))
    })
    .await?;
    ensure!(!server.is_connected("edge-1").await?, "the agent is attached all the same");
    // A retry would not help: it exits with an error.
    let status = agent.process.wait_exit(client::PATIENCE).await?;
    ensure!(status.code().is_some_and(|code| code != 0), "the agent ended with {status}");
    Ok(())
}

async fn bad_tokens_are_refused(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    // Expired.
    let expired = server.token_with("edge-1", &["--ttl", "1s"])?;
    let listed = async || tokens(&server);
    wait_until("the token to expire", client::PATIENCE, listed, |list| {
        list.iter().any(|token| token["state"] == "expired")
    })
    .await?;
    refused(&server, Builder::new(&server, 1).named("agent-expired").token(expired), "expired").await?;
    // Revoked.
    let revoked = server.token("edge-1")?;
    let (id, _) = revoked.token.split_once('.').context("ID.SECRET")?;
    server.run(&["token", "revoke", id])?;
    refused(&server, Builder::new(&server, 1).named("agent-revoked").token(revoked), "revoked").await?;
    Ok(())
}

fn tokens(server: &Server<'_>) -> Result<Vec<Value>> {
    let text = server.run(&["token", "list", "-o", "json"])?;
    serde_json::from_str(&text).with_context(|| format!("`token list -o json` printed {text:?}"))
}

/// Puts another certificate for the agent's own key into its state folder.
fn replace_certificate(testbed: &Testbed, agent: &Agent<'_>, valid: Range<SystemTime>) -> Result<String> {
    let authority = Authority::open(&testbed.dir().join("server"))?;
    let key =
        KeyPair::from_pem(&fs::read_to_string(agent.state_dir().join("agent.key"))?).context("agent.key")?;
    let certificate = authority.agent("edge-1", &key, valid)?;
    fs::write(agent.state_dir().join("agent.crt"), &certificate)?;
    Ok(certificate)
}

/// Time until a certificate of [`renewed_soon`] expires, which is enough for an agent's start on a busy machine.
pub(crate) const EXPIRES: Duration = Duration::from_secs(60);

/// The time of a certificate that is renewed in 5 to 19 s: certificates begin 300 s before they are issued; of this one's
/// 275 s, 215 have passed; it is renewed after 80 %, and up to a twentieth later.
pub(crate) fn renewed_soon() -> Range<SystemTime> {
    let now = SystemTime::now();
    now - Duration::from_secs(515)..now + EXPIRES
}

/// Lets an agent renew a certificate that ends soon, beside an open connection, which is returned.
pub(crate) async fn renewed<'a>(
    testbed: &Testbed,
    server: &Server<'a>,
    agent: &mut Agent<'a>,
    on_edge: SocketAddr,
) -> Result<TcpStream> {
    agent.crash(server).await?;
    let old = replace_certificate(testbed, agent, renewed_soon())?;
    agent.return_to(server).await?;
    let mut held = hold(on_edge, b"under the old certificate").await?;
    let file = agent.state_dir().join("agent.crt");
    let stored = async || Ok(fs::read_to_string(&file)?);
    wait_until("a renewed certificate on disk", Duration::from_secs(60), stored, |now| *now != old).await?;
    echo(&mut held, b"across the renewal").await?;
    Ok(held)
}

async fn renewal_drops_no_connection(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = renewed(testbed, &server, &mut agent, on_edge.address).await?;
    // The old certificate expires without effect.
    never("a break after the old certificate expired", EXPIRES, async || {
        Ok(!server.is_connected("edge-1").await? || echo(&mut held, b"still").await.is_err())
    })
    .await?;
    // The connection that proves the session's link dead uses the new certificate.
    testbed.forget_mappings()?;
    wait_for("a new connection", Duration::from_secs(60), async || Ok(visit(on_edge.address).await.ok()))
        .await?;
    agent.wait_log("it is silent, and another connection to the server works").await?;
    agent.crash(&server).await?;
    agent.return_to(&server).await?;
    let renewed = [("call", "renew"), ("outcome", "issued")];
    server.wait_metric("postern_enrollments_total", &renewed, |count| count >= 1.0).await.map(drop)
}

async fn rotating_the_ca_loses_no_agent(testbed: &Testbed) -> Result<()> {
    // Renewals are spread over a twentieth of a certificate's life, or a minute.
    let server =
        server::Builder::new(testbed).flag("--drain-timeout=5s").env("POSTERN_AGENT_CERTIFICATE_LIFE", "5m");
    let server = server.start().await?;
    let mut first = Agent::enrol(&server, 1).await?;
    let second = Agent::enrol(&server, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"under the first root").await?;
    let agents = [first.state_dir(), second.state_dir()];
    let certificates = |file: &str| -> Result<Vec<String>> {
        agents.iter().map(|dir| Ok(fs::read_to_string(dir.join(file))?)).collect()
    };
    let before = certificates("agent.crt")?;

    server.run(&["ca", "introduce"])?;
    let trusted = async || certificates("ca.crt");
    wait_until("both agents to trust two roots", Duration::from_secs(30), trusted, |roots| {
        roots.iter().all(|pem| pem.matches("BEGIN CERTIFICATE").count() == 2)
    })
    .await?;
    server.run(&["ca", "activate"])?;
    wait_until(
        "both agents to hold certificates of the new root",
        Duration::from_secs(150),
        async || certificates("agent.crt"),
        |now| now.iter().zip(&before).all(|(now, before)| now != before),
    )
    .await?;
    echo(&mut held, b"across the activation").await?;
    let status: Value =
        serde_json::from_str(&server.run(&["ca", "status", "-o", "json"])?).context("ca status")?;
    let retiring =
        status["roots"].as_array().context("roots")?.iter().find(|root| root["role"] == "retiring");
    let nodes = retiring.context("no retiring root")?["nodes"].as_array().context("nodes")?.len();
    ensure!(nodes == 0, "{nodes} nodes still hold certificates of the old root: {status}");
    server.run(&["ca", "retire"])?;
    let trusted = async || certificates("ca.crt");
    wait_until("both agents to trust one root", Duration::from_secs(30), trusted, |roots| {
        roots.iter().all(|pem| pem.matches("BEGIN CERTIFICATE").count() == 1)
    })
    .await?;
    // The agent links again with its renewed certificate, which vouches for the link of the connection. Others of the old root
    // end after the server's --drain-timeout.
    first.wait_log("the server is draining").await?;
    wait_for("the next session", client::PATIENCE, async || Ok(visit(on_edge.address).await.ok())).await?;
    never("a break after the retirement", Duration::from_secs(10), async || {
        Ok(echo(&mut held, b"after the retirement").await.is_err())
    })
    .await?;
    first.crash(&server).await?;
    first.return_to(&server).await?;
    visit(on_edge.address).await?;
    ensure!(server.is_connected("edge-2").await?, "edge-2 was lost");
    Ok(())
}

/// Dials as the agent whose credentials were copied, with the highest session number.
async fn copy_of(server: &Server<'_>, credentials: &Credentials) -> Result<HostileAgent> {
    let address: SocketAddr = server.agent_address().parse()?;
    let stream = credentials.dial(&server.testbed().edge(1).ns, address).await?;
    Ok(HostileAgent::serve(stream, "edge-1", (u64::MAX - 1, 0), Hostility::Quiet))
}

/// Waits until the server has refused the copy's session for this reason and has ended it.
async fn shut_out(copy: &HostileAgent, reason: &str) -> Result<()> {
    wait_for(&format!("the copy to be refused: {reason}"), client::PATIENCE, async || {
        Ok(copy.observed(|seen| seen.refused.iter().any(|refusal| refusal.contains(reason))).then_some(()))
    })
    .await
    .with_context(|| copy.observed(|seen| format!("{seen:?}")))?;
    copy.wait_ended("the copy's link to end", client::PATIENCE).await
}

async fn wait_visit(address: SocketAddr) -> Result<()> {
    wait_for("the node's own agent to relay", agent::START, async || Ok(visit(address).await.ok())).await?;
    Ok(())
}

async fn copied_identity_is_shut_out(testbed: &Testbed) -> Result<()> {
    let (mut server, mut real) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let unused = server.token("edge-1")?;
    let credentials = Credentials::of_agent(&real.state_dir())?;
    real.crash(&server).await?;

    // A session number that no clock can give does not lock out the node's own agent.
    let copy = copy_of(&server, &credentials).await?;
    server.wait_connected("edge-1", true, client::PATIENCE).await?;
    real.start_again()?;
    wait_visit(on_edge.address).await?;
    let late = copy_of(&server, &credentials).await?;
    shut_out(&late, "newer session").await?;
    visit(on_edge.address).await?;
    real.crash(&server).await?;
    drop((copy, late));

    let copy = copy_of(&server, &credentials).await?;
    server.wait_connected("edge-1", true, client::PATIENCE).await?;
    server.run(&["agent", "revoke", "edge-1"])?;
    shut_out(&copy, "was revoked at").await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    shut_out(&copy_of(&server, &credentials).await?, "was revoked at").await?;
    refused(&server, Builder::new(&server, 1).named("agent-void").token(unused.clone()), "was revoked")
        .await?;

    server.process.stop().await?;
    server.start_again().await?;
    shut_out(&copy_of(&server, &credentials).await?, "was revoked at").await?;
    refusals_counted(&server, "revoked", 1.0).await?;

    server.run(&["agent", "readmit", "edge-1"])?;
    let listed = server.run(&["agent", "list"])?;
    ensure!(listed.contains("edge-1") && listed.contains("readmitted"), "{listed}");
    wait_for("the readmission to be in effect", client::PATIENCE, async || {
        let copy = copy_of(&server, &credentials).await?;
        copy.wait_ended("the copy's link to end", client::PATIENCE).await?;
        let older = |refusal: &String| refusal.contains("older than its readmission");
        Ok(copy.observed(|seen| seen.refused.iter().any(older)).then_some(()))
    })
    .await?;
    refused(&server, Builder::new(&server, 1).named("agent-void").token(unused), "void").await?;
    let token = server.token("edge-1")?;
    let _new = Builder::new(&server, 1).named("agent-new").token(token).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    wait_visit(on_edge.address).await?;
    shut_out(&copy_of(&server, &credentials).await?, "older than its readmission").await?;
    server.process.stop().await?;
    server.start_again().await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    shut_out(&copy_of(&server, &credentials).await?, "older than its readmission").await?;
    visit(on_edge.address).await?;
    Ok(())
}

async fn agent_of_an_unknown_node_is_refused(testbed: &Testbed) -> Result<()> {
    let mut inventory = Inventory::of(testbed)?;
    let (server, agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let all = inventory.nodes.clone();
    inventory.nodes.retain(|node| node["metadata"]["name"] != "edge-1");
    inventory.write()?;
    let refused = [("result", "unknown_node")];
    server.wait_metric("postern_agent_sessions_refused_total", &refused, |count| count >= 1.0).await?;
    server.expect_metric("postern_tunnels", &[], 0.0).await?;
    wait_for("the agent to say why", client::PATIENCE, async || {
        Ok(agent.process.output()?.contains("not in the server's inventory").then_some(()))
    })
    .await?;
    // It comes back by itself, after the pause of a refused agent.
    inventory.nodes = all;
    inventory.write()?;
    wait_until(
        "the node to be known again",
        client::PATIENCE,
        async || server.status().await,
        |status| {
            status["nodes"].as_array().is_some_and(|nodes| nodes.iter().any(|node| node["name"] == "edge-1"))
        },
    )
    .await?;
    server.wait_connected("edge-1", true, Duration::from_secs(150)).await?;
    wait_visit(on_edge.address).await
}

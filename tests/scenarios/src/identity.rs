//! Enrolment tokens, certificates, renewal, rotation of the CA.
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
use postern_testbed::process::{Process, program};
use postern_testbed::server::Server;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until};
use rcgen::KeyPair;
use serde_json::Value;

use crate::common::{hold, never, server, server_and_agent, target};
use crate::hostile_peer::{Behaviour as Hostility, Credentials, HostileAgent};

scenarios! {
    enrols_once_and_keeps_its_key(quick),
    printed_command_works_unchanged,
    bad_tokens_are_refused(edges = 2),
    wrong_ca_hash_is_refused,
    token_from_a_file,
    renewal_drops_no_connection,
    expired_certificate_is_refused,
    rotating_the_ca_loses_no_agent(edges = 2, limit = 300),
}

async fn enrols_once_and_keeps_its_key(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    ensure!(token.node == "edge-1" && token.ca_hash.starts_with("sha256:"), "{token:?}");
    // The printed command names everything: server, node, token and hash.
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
    // The secret is neither in a log nor in the server's files.
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
    // Word for word, but with a state folder of this run.
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

/// Starts an agent with a token that must not work, and expects the reason in its log or the server's.
async fn refused<'a>(server: &Server<'a>, builder: Builder<'a>, reason: &str) -> Result<()> {
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
    // For another node.
    let other = server.token("edge-2")?;
    refused(&server, Builder::new(&server, 1).named("agent-other").token(other), "edge-2").await?;
    // Mistyped.
    let mut mistyped = server.token("edge-1")?;
    mistyped.token = mistyped.token.chars().rev().collect::<String>().replace('.', "") + ".x";
    refused(&server, Builder::new(&server, 1).named("agent-mistyped").token(mistyped), "token").await?;
    // Used by another agent.
    let token = server.token("edge-1")?;
    let mut first = Builder::new(&server, 1).named("agent-first").token(token.clone()).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    first.crash(&server).await?;
    refused(&server, Builder::new(&server, 1).named("agent-second").token(token), "already used").await?;
    let metrics = server.metrics().await?;
    metrics.expect("postern_enrollments_total", &[("outcome", "issued")], 1.0)?;
    Ok(())
}

fn tokens(server: &Server<'_>) -> Result<Vec<Value>> {
    let text = server.run(&["token", "list", "-o", "json"])?;
    serde_json::from_str(&text).with_context(|| format!("`token list -o json` printed {text:?}"))
}

async fn wrong_ca_hash_is_refused(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let mut token = server.token("edge-1")?;
    token.ca_hash = format!("sha256:{}", "ab".repeat(32));
    refused(&server, Builder::new(&server, 1).token(token), "hash").await?;
    let list = tokens(&server)?;
    ensure!(
        list.iter().all(|token| token["state"] == "unused" || token["used_at"].is_null()),
        "the token was sent to an impostor: {list:?}"
    );
    Ok(())
}

async fn token_from_a_file(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    let file = testbed.dir().join("token");
    fs::write(&file, format!("{}\n", token.token))?;
    let agent = Builder::new(&server, 1)
        .flag(format!("--token-file={}", file.display()))
        .flag(format!("--ca-hash={}", token.ca_hash))
        .spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    ensure!(agent.status().await?.is_object(), "the agent's /status");
    Ok(())
}

/// Puts another certificate of the agent's own key into its state folder.
fn replace_certificate(testbed: &Testbed, agent: &Agent<'_>, valid: Range<SystemTime>) -> Result<String> {
    let authority = Authority::open(&testbed.dir().join("server"))?;
    let key =
        KeyPair::from_pem(&fs::read_to_string(agent.state_dir().join("agent.key"))?).context("agent.key")?;
    let certificate = authority.agent("edge-1", &key, valid)?;
    fs::write(agent.state_dir().join("agent.crt"), &certificate)?;
    Ok(certificate)
}

async fn renewal_drops_no_connection(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    agent.crash(&server).await?;
    // Certificates begin 300 s before they are issued; of this one's 100 s, 75 are over: 80 % is 5 s away.
    let now = SystemTime::now();
    let old =
        replace_certificate(testbed, &agent, now - Duration::from_secs(375)..now + Duration::from_secs(25))?;
    agent.return_to(&server).await?;
    let mut held = hold(on_edge.address, b"under the old certificate").await?;
    let file = agent.state_dir().join("agent.crt");
    let stored = async || Ok(fs::read_to_string(&file)?);
    wait_until("a renewed certificate on disk", Duration::from_secs(30), stored, |now| *now != old).await?;
    echo(&mut held, b"across the renewal").await?;
    // The old certificate expires, without effect.
    never("a break after the old certificate expired", Duration::from_secs(25), async || {
        Ok(!server.is_connected("edge-1").await? || echo(&mut held, b"still").await.is_err())
    })
    .await?;
    agent.crash(&server).await?;
    agent.return_to(&server).await?;
    let metrics = server.metrics().await?;
    ensure!(
        metrics.sum("postern_enrollments_total", &[("call", "renew"), ("outcome", "issued")]) >= 1.0,
        "{metrics:?}"
    );
    Ok(())
}

async fn expired_certificate_is_refused(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    agent.crash(&server).await?;
    let hour = Duration::from_secs(3600);
    replace_certificate(testbed, &agent, SystemTime::now() - 2 * hour..SystemTime::now() - hour)?;
    agent.start_again()?;
    wait_for("the agent to report that its certificate has expired", agent::START, async || {
        Ok(agent.process.output()?.contains("the certificate has expired").then_some(()))
    })
    .await?;
    ensure!(!server.is_connected("edge-1").await?, "attached with an expired certificate");
    // The server refuses it too.
    let credentials = Credentials::of_agent(&agent.state_dir())?;
    let address: SocketAddr = server.agent_address().parse()?;
    let dialled = credentials.dial(&testbed.edge(1).ns, address).await;
    if let Ok(stream) = dialled {
        let expired = HostileAgent::serve(stream, "edge-1", u64::MAX, Hostility::Quiet);
        expired.wait_ended("the server to end the connection", client::PATIENCE).await?;
        ensure!(expired.observed(|seen| seen.attached) == 0, "attached with an expired certificate");
    }
    Ok(())
}

async fn rotating_the_ca_loses_no_agent(testbed: &Testbed) -> Result<()> {
    let (server, mut first) = server_and_agent(testbed).await?;
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
    echo(&mut held, b"after the retirement").await?;
    first.crash(&server).await?;
    first.return_to(&server).await?;
    visit(on_edge.address).await?;
    ensure!(server.is_connected("edge-2").await?, "edge-2 was lost");
    Ok(())
}

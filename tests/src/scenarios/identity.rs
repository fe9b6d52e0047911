//! Who may attach: tokens, certificates, renewal, rotation of the CA.
use std::fs;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use rcgen::KeyPair;
use serde_json::Value;

use super::Scenario;
use super::common::{never, server, server_and_agent, target};
use crate::agent::{self, Agent, Builder};
use crate::authority::Authority;
use crate::client::{self, connect, echo, visit};
use crate::server::Server;
use crate::target::Behaviour;
use crate::testbed::Testbed;
use crate::testbed::process::{Process, program};
use crate::wait::{wait_for, wait_until};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new("identity::enrols_once_and_keeps_its_key", 1, |t| Box::pin(enrols_once(t))).quick(),
    Scenario::new("identity::printed_command_works_as_it_is", 1, |t| Box::pin(printed_command(t))),
    Scenario::new("identity::tokens_that_are_refused", 2, |t| Box::pin(refused_tokens(t))),
    Scenario::new("identity::another_ca_hash_is_refused", 1, |t| Box::pin(another_ca(t))),
    Scenario::new("identity::token_from_a_file", 1, |t| Box::pin(token_from_a_file(t))),
    Scenario::new("identity::renewal_drops_no_connection", 1, |t| Box::pin(renewal(t))),
    Scenario::new("identity::an_expired_certificate_is_refused", 1, |t| Box::pin(expired_certificate(t))),
    Scenario::new("identity::rotating_the_ca_loses_no_agent", 2, |t| Box::pin(rotation(t))).limit(300),
];

async fn enrols_once(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    ensure!(token.node == "edge-1" && token.ca_hash.starts_with("sha256:"), "{token:?}");
    // The printed command is complete: server, node, token and hash are what this agent is started with.
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
    agent.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    agent.start_again()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    ensure!(fs::read(&key)? == before, "a restart made another key");
    // The secret is nowhere in logs or in the server's files.
    let (_, secret) = secret.split_once('.').context("ID.SECRET")?;
    let found = testbed
        .on_cloud()
        .command("grep".as_ref())
        .args(["-rl", secret])
        .arg(testbed.dir().join("server"))
        .arg(testbed.dir().join("logs"))
        .output()?;
    ensure!(
        found.stdout.is_empty(),
        "the token's secret stands in {}",
        String::from_utf8_lossy(&found.stdout)
    );
    Ok(())
}

async fn printed_command(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    // Word for word, with a state folder of this run's.
    let (name, arguments) = token.command.split_once(' ').context("a command with arguments")?;
    let mut command = testbed.on_edge(1).command(&program(name)?);
    command.args(arguments.split_whitespace());
    command.arg(format!("--state-dir={}", testbed.dir().join("printed").display()));
    let mut agent = Process::spawn(testbed, "tunnel-agent-printed", command)?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = connect(on_edge.address).await?;
    echo(&mut held, b"held").await?;
    // The server has several addresses: its sessions must not chase each other away.
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
    wait_for(&format!("the agent's log to say {reason:?}"), agent::START, async || {
        Ok(agent.process.output()?.to_lowercase().contains(reason).then_some(()))
    })
    .await?;
    ensure!(!server.is_connected("edge-1").await?, "the agent is attached all the same");
    // Trying again would not help: it ends and says so, rather than hammering the server.
    let status = agent.process.wait_exit(client::PATIENCE).await?;
    ensure!(status.code().is_some_and(|code| code != 0), "the agent ended with {status}");
    Ok(())
}

async fn refused_tokens(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    // Expired.
    let expired = server.token_with("edge-1", &["--ttl", "1s"])?;
    wait_until(
        "the token to expire",
        client::PATIENCE,
        async || tokens(&server),
        |list| list.iter().any(|token| token["state"] == "expired"),
    )
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
    // Used by somebody else.
    let token = server.token("edge-1")?;
    let mut first = Builder::new(&server, 1).named("agent-first").token(token.clone()).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    first.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    refused(&server, Builder::new(&server, 1).named("agent-second").token(token), "already used").await?;
    let metrics = server.metrics().await?;
    metrics.expect("postern_enrollments_total", &[("outcome", "issued")], 1.0)?;
    Ok(())
}

fn tokens(server: &Server<'_>) -> Result<Vec<Value>> {
    let text = server.run(&["token", "list", "-o", "json"])?;
    serde_json::from_str(&text).with_context(|| format!("`token list -o json` printed {text:?}"))
}

async fn another_ca(testbed: &Testbed) -> Result<()> {
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

async fn renewal(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    agent.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    // Certificates begin 300 s before they are issued; of this one's 100 s, 75 are over: 80 % is 5 s away.
    let now = SystemTime::now();
    let old =
        replace_certificate(testbed, &agent, now - Duration::from_secs(375)..now + Duration::from_secs(25))?;
    agent.start_again()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let mut held = connect(on_edge.address).await?;
    echo(&mut held, b"under the old certificate").await?;
    let file = agent.state_dir().join("agent.crt");
    wait_until(
        "a renewed certificate on disk",
        Duration::from_secs(30),
        async || Ok(fs::read_to_string(&file)?),
        |now| *now != old,
    )
    .await?;
    echo(&mut held, b"across the renewal").await?;
    // The old certificate ends: nothing happens.
    never("a break after the old certificate's end", Duration::from_secs(25), async || {
        Ok(!server.is_connected("edge-1").await? || echo(&mut held, b"still").await.is_err())
    })
    .await?;
    agent.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    agent.start_again()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let metrics = server.metrics().await?;
    ensure!(
        metrics.sum("postern_enrollments_total", &[("call", "renew"), ("outcome", "issued")]) >= 1.0,
        "{metrics:?}"
    );
    Ok(())
}

async fn expired_certificate(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    agent.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    let hour = Duration::from_secs(3600);
    replace_certificate(testbed, &agent, SystemTime::now() - 2 * hour..SystemTime::now() - hour)?;
    agent.start_again()?;
    wait_for("the agent to report that its certificate has expired", agent::START, async || {
        Ok(agent.process.output()?.contains("the certificate has expired").then_some(()))
    })
    .await?;
    ensure!(!server.is_connected("edge-1").await?, "attached with an expired certificate");
    // And the server refuses it on its own account.
    let credentials = crate::evil::Credentials::of_agent(&agent.state_dir())?;
    let address: SocketAddr = server.agent_address().parse()?;
    let dialled = credentials.dial(&testbed.edge(1).ns, address).await;
    if let Ok(stream) = dialled {
        let evil = crate::evil::EvilAgent::serve(stream, "edge-1", u64::MAX, crate::evil::Manner::Quiet);
        wait_for("the server to end the connection", client::PATIENCE, async || {
            Ok(evil.ended().then_some(()))
        })
        .await?;
        ensure!(evil.told(|told| told.attached) == 0, "attached with an expired certificate");
    }
    Ok(())
}

async fn rotation(testbed: &Testbed) -> Result<()> {
    let (server, mut first) = server_and_agent(testbed).await?;
    let second = Agent::enrol(&server, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = connect(on_edge.address).await?;
    echo(&mut held, b"under the first root").await?;
    let agents = [first.state_dir(), second.state_dir()];
    let certificates = |file: &str| -> Result<Vec<String>> {
        agents.iter().map(|dir| Ok(fs::read_to_string(dir.join(file))?)).collect()
    };
    let before = certificates("agent.crt")?;

    server.run(&["ca", "introduce"])?;
    wait_until(
        "both agents to trust two roots",
        Duration::from_secs(30),
        async || certificates("ca.crt"),
        |roots| roots.iter().all(|pem| pem.matches("BEGIN CERTIFICATE").count() == 2),
    )
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
    wait_until(
        "both agents to trust one root",
        Duration::from_secs(30),
        async || certificates("ca.crt"),
        |roots| roots.iter().all(|pem| pem.matches("BEGIN CERTIFICATE").count() == 1),
    )
    .await?;
    echo(&mut held, b"after the retirement").await?;
    first.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    first.start_again()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    visit(on_edge.address).await?;
    ensure!(server.is_connected("edge-2").await?, "edge-2 was lost");
    Ok(())
}

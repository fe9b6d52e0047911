//! `kubectl postern` as an administrator has it: a file in a folder of PATH, and a kubeconfig.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client;
use postern_testbed::cluster::EDGE_NODE;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::manifests::deploy;
use postern_testbed::report::progress;
use postern_testbed::wait::wait_until;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

/// What a command of the plugin did.
#[derive(Debug)]
struct Said {
    code: i32,
    out: String,
    errors: String,
}

impl Said {
    fn ends_with(&self, code: i32) -> Result<&str> {
        ensure!(self.code == code, "exit code {} instead of {code}: {}{}", self.code, self.out, self.errors);
        Ok(&self.out)
    }
}

fn command(kubectl: &Kubectl, args: &[&str]) -> Result<Command> {
    let folder = kubectl.files().0.parent().context("kubectl is in no folder")?;
    let others = std::env::var("PATH").context("PATH")?;
    let path = format!("{}:{}:{others}", folder.display(), deploy().join("krew").display());
    let mut command = kubectl.command(&[&["postern"], args].concat());
    command.env("PATH", path);
    Ok(command)
}

async fn postern(kubectl: &Kubectl, args: &[&str]) -> Result<Said> {
    let output = tokio::time::timeout(Duration::from_secs(60), command(kubectl, args)?.output());
    let output = output.await.with_context(|| format!("kubectl postern {args:?} does not end"))??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().context("killed")?;
    Ok(Said { code, out: text(&output.stdout), errors: text(&output.stderr) })
}

/// Every command, on a cluster with so many servers and an agent on the edge node.
pub(super) async fn every_command(kubectl: &Kubectl, servers: usize) -> Result<()> {
    let said = postern(kubectl, &["status"]).await?;
    let table = said.ends_with(0)?;
    let row = table.lines().find(|line| line.starts_with(EDGE_NODE)).with_context(|| table.to_owned())?;
    ensure!(row.contains(" up "), "{table}");
    if servers > 1 {
        let heading = table.lines().next().unwrap_or_default();
        ensure!(heading.starts_with("SERVER") && table.contains("nodes: 1 of 1 connected"), "{table}");
        ensure!(table.lines().filter(|line| line.contains(" server ")).count() == servers, "{table}");
    }
    let said = postern(kubectl, &["status", "-o", "json"]).await?;
    let documents: Vec<Value> = serde_json::from_str(said.ends_with(0)?)?;
    ensure!(documents.len() == servers && documents[0]["nodes"][0]["name"] == EDGE_NODE, "{documents:?}");

    let said = postern(kubectl, &["test", EDGE_NODE, "--port=10250"]).await?;
    let reports = said.ends_with(0)?;
    ensure!(
        said.errors.matches("== tunnel-server-").count() == servers && reports.contains("401"),
        "{said:?}"
    );
    let said = postern(kubectl, &["test", "no-such-node"]).await?;
    ensure!(said.ends_with(2)?.contains("node-unknown"), "{said:?}");

    for args in [&["doctor", "-o", "json"][..], &["doctor", EDGE_NODE, "-o", "json"]] {
        let said = postern(kubectl, args).await?;
        let reports: Result<Vec<Value>, _> =
            serde_json::Deserializer::from_str(&said.out).into_iter().collect();
        let reports = reports.with_context(|| format!("{said:?}"))?;
        let broken = reports.iter().any(|report| report["result"] == "broken");
        ensure!(!reports.is_empty() && !broken && said.code < 2, "{said:?}");
    }

    let said = postern(kubectl, &["bench", EDGE_NODE]).await?;
    ensure!(said.ends_with(0)?.contains("round trip"), "{said:?}");

    let said = postern(kubectl, &["logs", EDGE_NODE, "--since=1h"]).await?;
    let lines = said.ends_with(0)?;
    let of = |pod: &str, text: &str| {
        lines.lines().any(|line| line.starts_with(&format!("[pod/{pod}-")) && line.contains(text))
    };
    ensure!(of("tunnel-server", "session attached") && of("tunnel-agent", "attached"), "{said:?}");
    ensure!(
        lines.lines().all(|line| !line.starts_with("[pod/tunnel-server") || line.contains(EDGE_NODE)),
        "{said:?}"
    );

    for (args, code, reason) in [
        (&["test"][..], 64, "needs the name of a node"),
        (&["logs", "../x"], 64, "is not the name of a node"),
        (&["--namespace=default", "status"], 1, "runs in namespace default"),
        (&["--namespace=default", "page"], 1, "runs in namespace default"),
        (&["doctor", "no-such-node"], 1, "no agent's pod runs on node no-such-node"),
    ] {
        let said = postern(kubectl, args).await?;
        let is_last = said.errors.lines().next_back().is_some_and(|line| line.contains(reason));
        ensure!(said.code == code && is_last, "{args:?}: {said:?}");
    }
    page(kubectl).await?;
    progress(&format!("kubectl postern: every command, with {servers} servers"));
    Ok(())
}

/// The status page of a server, on a port of this host.
async fn page(kubectl: &Kubectl) -> Result<()> {
    let free = TcpListener::bind("127.0.0.1:0").await?;
    let address = free.local_addr()?;
    drop(free);
    let mut forward = command(kubectl, &["page", &address.port().to_string()])?.spawn()?;
    let shown = async || {
        let stream = TcpStream::connect(address).await?;
        let (status, body) = client::http(stream, "GET", "/ui/", "").await?;
        Ok((status, body.contains("<title>tunnel-server</title>")))
    };
    wait_until("the status page", client::PATIENCE, shown, |seen| *seen == (200, true)).await?;
    forward.kill().await.context("ending kubectl port-forward")
}

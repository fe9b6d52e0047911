//! `kubectl postern` as an administrator has it: a file in a folder of PATH, and a kubeconfig.
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use postern_testbed::client;
use postern_testbed::cluster::EDGE_NODE;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::manifests::deploy;
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::report::progress;
use postern_testbed::wait::wait_until;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

/// Result of a command of the plugin.
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

/// Runs every command on a cluster with this number of servers and an agent on the edge node.
pub(super) async fn every_command(kubectl: &Kubectl, servers: usize) -> Result<()> {
    checks(kubectl, servers).await?;
    let said = postern(kubectl, &["status"]).await?;
    let table = said.ends_with(0)?;
    let row = table.lines().find(|line| line.starts_with(EDGE_NODE)).with_context(|| table.to_owned())?;
    // A server alone shows its own table.
    ensure!(row.contains(if servers > 1 { " connected " } else { " here " }), "{table}");
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
    let said = postern(kubectl, &["test", "--all", "--port=10250"]).await?;
    let row = format!("ok       {EDGE_NODE}\n1 nodes: 1 ok, 0 with warnings, 0 broken");
    ensure!(said.ends_with(0)?.matches(&row).count() == servers, "{said:?}");
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
        (&["status", "-n", "default"], 1, "runs in namespace default"),
        (&["page", "--namespace=default"], 1, "runs in namespace default"),
        (&["--namespace=default", "bundle"], 1, "no pods of Postern in namespace default"),
        (&["bundle", "../x"], 64, "is not the name of a node"),
        (&["bundle", "--all"], 64, "--all is not known"),
        (&["doctor", "no-such-node"], 2, "no agent's pod runs on node no-such-node"),
    ] {
        let said = postern(kubectl, args).await?;
        let is_last = said.errors.lines().next_back().is_some_and(|line| line.contains(reason));
        ensure!(said.code == code && is_last, "{args:?}: {said:?}");
    }
    page(kubectl).await?;
    bundle(kubectl, servers).await?;
    progress(&format!("kubectl postern: every command, with {servers} servers"));
    Ok(())
}

/// Runs what is about the cluster as a whole, and what works on it, with flags of kubectl's behind the command.
async fn checks(kubectl: &Kubectl, servers: usize) -> Result<()> {
    let said = postern(kubectl, &["check", "--pre"]).await?;
    // The testbed's nodes have the kernel of this machine.
    ensure!(said.code < 2 && said.out.contains("ok       rights to install"), "{said:?}");
    let said = postern(kubectl, &["check", "--wait=50s"]).await?;
    ensure!(said.code < 2, "{said:?}");
    for line in [
        format!("ok       {:<18} {servers} of {servers} nodes\n", "tunnel-server"),
        format!("ok       {:<18} 1 of 1 nodes\n", "tunnel-agent"),
        format!("ok       {:<18} 1 of 1 connected\n", "nodes"),
        format!("ok       {:<18} {}\n", "versions", env!("CARGO_PKG_VERSION")),
    ] {
        ensure!(said.out.contains(&line), "no {line:?}: {said:?}");
    }
    ensure!(said.out.matches(" doctor: ").count() == servers, "{said:?}");
    let said = postern(kubectl, &["check", "--namespace", "default"]).await?;
    ensure!(said.ends_with(2)?.contains("no such DaemonSet in namespace default"), "{said:?}");

    let said = postern(kubectl, &["version", "--request-timeout", "30s"]).await?;
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!("tunnel-agent {version}: 1\ntunnel-server {version}: {servers}\n");
    ensure!(said.ends_with(0)?.ends_with(&expected), "{said:?}");

    for (args, shown) in [
        (&["agent", "revoke", "no-such-node"][..], "revoked: "),
        (&["agent", "list"], "no-such-node"),
        (&["agent", "readmit", "no-such-node"], "readmitted: "),
        (&["ca", "status"], "sha256:"),
    ] {
        let said = postern(kubectl, args).await?;
        ensure!(said.ends_with(0)?.contains(shown), "{args:?}: {said:?}");
    }
    let mut watch = command(kubectl, &["status", "--watch"])?.spawn()?;
    let mut lines = BufReader::new(watch.stdout.take().context("no standard output")?).lines();
    let mut drawn = 0;
    let twice = async {
        while drawn < 2 {
            let line = lines.next_line().await?.context("it ended")?;
            drawn += usize::from(line.contains("1 of 1 connected"));
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(60), twice).await.context("status --watch")??;
    watch.kill().await.context("ending kubectl postern")
}

/// Opens the status page of a server on a port of this host.
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

/// The secret part of an enrolment token.
const SECRET: &str = "0a1b2c3d4e5f6g7h8i9j0k1l2m";

/// Checks that one archive has all pods and no secret.
async fn bundle(kubectl: &Kubectl, servers: usize) -> Result<()> {
    // A leaked secret where `kubectl get events` shows it.
    let event = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "name": "careless", "namespace": NAMESPACE },
        "involvedObject": { "kind": "Namespace", "name": NAMESPACE, "namespace": NAMESPACE },
        "type": "Normal",
        "reason": "Careless",
        "message": format!("started with q7w8e9.{SECRET}"),
    });
    kubectl.run_with_input(&["apply", "--filename=-"], event.to_string().as_bytes()).await?;
    let mut secrets = keys_of_the_ca(kubectl).await?;
    secrets.push(SECRET.to_owned());

    let dir = kubectl.files().1.parent().context("the kubeconfig is in no folder")?;
    let (file, unpacked) = (dir.join("bundle.tar.gz"), dir.join("bundle"));
    let flag = format!("--file={}", file.display());
    let said = postern(kubectl, &["bundle", &flag]).await?;
    ensure!(said.ends_with(0)?.contains(&format!(": {} pods", servers + 1)), "{said:?}");
    let again = postern(kubectl, &["bundle", &flag]).await?;
    ensure!(again.code == 64 && again.errors.contains("is there already"), "{again:?}");

    unpack(&file, &unpacked).await?;
    let folder = fs::read_dir(&unpacked)?.next().context("an empty archive")??.path();
    let (mut pods, mut all) = (Vec::new(), String::new());
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
        match name.strip_suffix(".tar.gz") {
            Some(pod) => {
                let parts = dir.join(format!("bundle-of-{pod}"));
                unpack(&path, &parts).await?;
                let text = texts(&parts)?;
                for part in ["doctor.json", "status.json", "metrics.txt", "log-1.txt", "kernel.txt"] {
                    ensure!(text.contains(&format!("==> {part}\n")), "no {part} of {pod}: {text}");
                }
                ensure!(text.contains(EDGE_NODE), "{pod}: {text}");
                all += &text;
                pods.push(pod.to_owned());
            }
            None => all += &fs::read_to_string(&path)?,
        }
    }
    let of = |program: &str| pods.iter().filter(|pod| pod.starts_with(&format!("{program}-"))).count();
    ensure!(of("tunnel-server") == servers && of("tunnel-agent") == 1, "bundles of {pods:?}");
    ensure!(all.contains("Careless") && all.contains("started with ***"), "no events: {all}");
    for secret in &secrets {
        ensure!(!all.contains(secret.as_str()), "a secret of {} letters is in the archive", secret.len());
    }
    Ok(())
}

/// Returns the lines of the CA's keys, in PEM.
async fn keys_of_the_ca(kubectl: &Kubectl) -> Result<Vec<String>> {
    let get = ["get", "secret", "tunnel-server-ca", "--namespace", NAMESPACE, "--output=json"];
    let secret: Value = serde_json::from_str(&kubectl.run(&get).await?)?;
    let mut lines = Vec::new();
    for (name, value) in secret["data"].as_object().context("a Secret without data")? {
        if name.ends_with(".key") {
            let pem = STANDARD.decode(value.as_str().context("no text")?)?;
            let pem = String::from_utf8(pem)?;
            lines.extend(pem.lines().filter(|line| !line.starts_with("-----")).map(str::to_owned));
        }
    }
    ensure!(lines.len() > 1, "the CA has no keys: {:?}", secret["data"]);
    Ok(lines)
}

async fn unpack(file: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to).with_context(|| to.display().to_string())?;
    let done = Command::new("tar").arg("xzf").arg(file).arg("-C").arg(to).status().await?;
    ensure!(done.success(), "tar of {} ended with {done}", file.display());
    Ok(())
}

/// Returns the texts of all files below a folder, each after its name.
fn texts(dir: &Path) -> Result<String> {
    let mut all = String::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            all += &texts(&path)?;
        } else {
            let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
            all += &format!("==> {name}\n{}\n", fs::read_to_string(&path)?);
        }
    }
    Ok(all)
}

//! logs, exec, attach and cp, over both transports.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, Pattern};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::kubectl::{Kubectl, Transport, said};
use postern_testbed::cluster::pods::{IDLE, TALK, shell, with_stdin};
use postern_testbed::cluster::terminal::Terminal;
use postern_testbed::report::figure;
use tokio::fs::File;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use super::checks::Checks;
use super::following::Following;

const PATIENCE: Duration = Duration::from_secs(20);
/// Megabytes copied.
pub(super) const MEGABYTES: u64 = 200;

/// Returns the pods that these checks need.
pub(super) fn pods(node: &str) -> Vec<serde_json::Value> {
    let answer = "while read line; do echo got $line; done";
    vec![shell("talker", node, TALK), shell("idle", node, IDLE), with_stdin(shell("listener", node, answer))]
}

/// Runs all checks, copying this number of megabytes.
pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>, megabytes: u64) {
    checks.run("logs", logs(&cluster.kubectl)).await;
    checks.run("logs -f shows lines as they come", follow(&cluster.kubectl)).await;
    for transport in [Transport::WebSocket, Transport::Spdy] {
        let kubectl = cluster.kubectl.over(transport);
        let name = |what: &str| format!("{what} ({transport:?})");
        checks.run(&name("exec with standard input and an exit code"), exec(&kubectl)).await;
        checks.run(&name("exec -it follows the terminal's size"), resize(&kubectl)).await;
        checks.run(&name("attach"), attach(&kubectl)).await;
    }
    for transport in [Transport::WebSocket, Transport::Spdy] {
        let kubectl = cluster.kubectl.over(transport);
        let copied = copy(&kubectl, cluster.testbed.dir(), transport, megabytes);
        let name = format!("cp of {megabytes} MB both ways ({transport:?})");
        checks.run_within(Duration::from_secs(180), &name, copied).await;
    }
}

pub(super) async fn logs(kubectl: &Kubectl) -> Result<()> {
    let logs = kubectl.run(&["logs", "talker", "--tail=-1"]).await?;
    ensure!(
        logs.starts_with("line 1\nline 2\n"),
        "the logs begin with {:?}",
        logs.lines().take(3).collect::<Vec<_>>()
    );
    let last = kubectl.run(&["logs", "talker", "--tail=1"]).await?;
    ensure!(last.lines().count() == 1 && last.starts_with("line "), "--tail=1 printed {last:?}");
    let error = kubectl.fails(&["logs", "talker", "-c", "no-such-container"]).await?;
    ensure!(error.contains("not valid for pod"), "another container's logs: {error}");
    Ok(())
}

async fn follow(kubectl: &Kubectl) -> Result<()> {
    Following::start(kubectl).await?.next(15).await
}

pub(super) async fn exec(kubectl: &Kubectl) -> Result<()> {
    let input: Vec<u8> = (0..20_000_u32).flat_map(|n| format!("{n}\n").into_bytes()).collect();
    let args = ["exec", "-i", "idle", "--", "sh", "-c", "cat; echo to stderr >&2; exit 7"];
    let output = kubectl.output_with_input(&args, &input).await?;
    ensure!(output.status.code() == Some(7), "exec ended with {}: {}", output.status, said(&output));
    ensure!(output.stdout == input, "{} bytes came back of {}", output.stdout.len(), input.len());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(errors.contains("to stderr"), "standard error was {errors:?}");
    let printed = kubectl.run(&["exec", "idle", "--", "hostname"]).await?;
    ensure!(printed == "idle\n", "hostname printed {printed:?}");
    Ok(())
}

async fn resize(kubectl: &Kubectl) -> Result<()> {
    // Typed into the shell, so that it starts after the shell; as exec's command it would race with the first size.
    let command = kubectl.command_at_terminal(&["exec", "-it", "idle", "--", "sh"]);
    let mut terminal = Terminal::start(command, 24, 80)?;
    terminal.write("while true; do stty size; sleep 0.1; done\n")?;
    terminal.wait_for("24 80", PATIENCE).await?;
    for (rows, columns) in [(50, 132), (10, 40)] {
        terminal.resize(rows, columns)?;
        terminal.wait_for(&format!("{rows} {columns}"), PATIENCE).await?;
    }
    // Ctrl-C ends the loop, not kubectl: the terminal is raw and the byte goes to the node.
    let mut typed = 0;
    loop {
        terminal.write("\u{3}")?;
        terminal.write("echo still $((40+2)); exit 3\n")?;
        typed += 1;
        // The signal goes to nobody if the shell's child has ended in this moment: a user types it again.
        match terminal.wait_for("still 42", PATIENCE / 5).await {
            Err(error) if typed == 5 => return Err(error),
            Err(_) => {}
            Ok(()) => break,
        }
    }
    let status = timeout(PATIENCE, terminal.child.wait()).await.context("exec -it did not end")??;
    ensure!(status.code() == Some(3), "exec -it ended with {status}");
    Ok(())
}

async fn attach(kubectl: &Kubectl) -> Result<()> {
    let mut child = kubectl.start(&["attach", "-i", "listener"])?;
    let mut stdin = child.stdin.take().context("no input")?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    for word in ["one", "two", "three"] {
        stdin.write_all(format!("{word}\n").as_bytes()).await.context("typing")?;
        let line = timeout(PATIENCE, lines.next_line()).await.context("no line arrived")??;
        ensure!(line.as_deref() == Some(&format!("got {word}")), "{word} was answered {line:?}");
    }
    Ok(())
}

/// Number of answers whose end containerd has lost, by the edge's kubelet: it closes when it has sent everything, and if one
/// of kube-apiserver's PINGs (every 5 s, kubernetes/kubernetes#130126) arrives after that, its kernel resets the connection.
fn lost_by_containerd(dir: &Path) -> Result<usize> {
    let log =
        std::fs::read_to_string(dir.join("logs/kubelet-edge-1.log")).context("reading kubelet's log")?;
    let reset = |line: &&str| {
        line.contains("Error proxying data from client to backend: readfrom tcp 127.0.0.1:")
            && line.ends_with("write: connection reset by peer")
    };
    Ok(log.lines().filter(reset).count())
}

async fn copy(kubectl: &Kubectl, dir: &Path, transport: Transport, megabytes: u64) -> Result<()> {
    let (here, back) = (dir.join("original"), dir.join("copy"));
    let mut pattern = Pattern::new(4, megabytes << 20);
    let mut file = File::create(&here).await.context("creating the file to copy")?;
    pattern.write_to(&mut file).await?;
    file.flush().await.context("writing the file to copy")?;
    let there = format!("idle:/tmp/{transport:?}");
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let kubectl = kubectl.within(Duration::from_secs(150));

    let start = std::time::Instant::now();
    kubectl.run(&["cp", &text(&here)?, &there]).await?;
    let up = start.elapsed();
    let sum = kubectl.run(&["exec", "idle", "--", "sha256sum", &format!("/tmp/{transport:?}")]).await?;
    ensure!(sum.starts_with(&pattern.digest()), "the copy on the node has the checksum {sum}");

    let start = std::time::Instant::now();
    let lost = lost_by_containerd(dir)?;
    if let Err(error) = kubectl.run(&["cp", &there, &text(&back)?]).await {
        ensure!(lost_by_containerd(dir)? > lost, error);
        figure("containerd lost the end of a copy");
        kubectl.run(&["cp", &there, &text(&back)?]).await?;
    }
    let down = start.elapsed();
    let (_, digest) = client::digest(&mut File::open(&back).await.context("opening the copy")?).await?;
    ensure!(digest == pattern.digest(), "the copy that came back has the checksum {digest}");
    figure(&format!("cp of {megabytes} MB over {transport:?}: {up:.1?} to the node, {down:.1?} back"));
    kubectl.run(&["exec", "idle", "--", "rm", &format!("/tmp/{transport:?}")]).await?;
    for path in [here, back] {
        tokio::fs::remove_file(&path).await.with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

//! Runs a document's commands unchanged.
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::manifests::deploy;
use postern_testbed::cluster::peers;
pub(super) use postern_testbed::document::{blocks, commands};
use postern_testbed::report::progress;
use tokio::process::Command;

/// Time limit for the commands of one section.
const SECTION: Duration = Duration::from_secs(150);

/// Runs the commands of a section ([`commands`]) in the run's folder, with kubectl and helm on PATH. `replaced`: texts
/// that a test has to change.
pub(super) async fn section(
    cluster: &Cluster<'_>,
    document: &str,
    title: &str,
    replaced: &[(&str, &str)],
) -> Result<String> {
    run(cluster, title, &commands(document, title)?, replaced).await
}

/// As [`section`], for lines of the section that begin with `command`.
pub(super) async fn lines(
    cluster: &Cluster<'_>,
    document: &str,
    title: &str,
    command: &str,
    replaced: &[(&str, &str)],
) -> Result<String> {
    let commands = commands(document, title)?;
    let lines: Vec<&str> = commands.lines().filter(|line| line.starts_with(command)).collect();
    ensure!(!lines.is_empty(), "the section {title:?} has no {command:?}");
    run(cluster, title, &lines.join("\n"), replaced).await
}

/// As [`section`], with these commands.
pub(super) async fn run(
    cluster: &Cluster<'_>,
    title: &str,
    commands: &str,
    replaced: &[(&str, &str)],
) -> Result<String> {
    let mut commands = commands.to_owned();
    for (from, to) in replaced {
        ensure!(commands.contains(from), "the section {title:?} does not have {from:?}");
        commands = commands.replace(from, to);
    }

    let kubectl = cluster.kubectl.command(&[]);
    let kubectl = kubectl.as_std();
    let folder = Path::new(kubectl.get_program()).parent().context("kubectl is in no folder")?;
    let helm = peers::helm()?;
    let helm = helm.parent().context("helm is in no folder")?;
    let inherited = std::env::var("PATH").context("PATH")?;
    // kubectl's plugin is there as the guide has it.
    let plugin = deploy().join("krew");
    let path = format!("{}:{}:{}:{inherited}", folder.display(), helm.display(), plugin.display());
    let mut command = Command::new("sh");
    command.args(["-eux", "-c", &commands]).current_dir(cluster.testbed.dir()).env("PATH", path);
    for (key, value) in kubectl.get_envs().filter_map(|(key, value)| Some((key, value?))) {
        command.env(key, value);
    }
    followed(title, command).await
}

/// Runs commands on a machine of the cluster, in the run's folder.
pub(super) async fn on_host(
    cluster: &Cluster<'_>,
    node: &str,
    title: &str,
    commands: &str,
) -> Result<String> {
    let folder = fs::canonicalize(cluster.testbed.dir()).context("the run's folder")?;
    // Entering the machine's mount namespace resets the working directory.
    let script = "cd \"$1\"; eval \"$2\"";
    let mut command = cluster.host(node)?.command(Path::new("sh"));
    command.args(["-eux", "-c", script, "sh"]).arg(folder).arg(commands);
    followed(&format!("{title} on {node}"), command.into()).await
}

async fn followed(title: &str, mut command: Command) -> Result<String> {
    let output = tokio::time::timeout(SECTION, command.stdin(Stdio::null()).kill_on_drop(true).output());
    let output = output.await.with_context(|| format!("{title:?} took more than {SECTION:?}"))??;
    if !output.status.success() {
        bail!("{title:?} ended with {}: {}", output.status, said(&output));
    }
    progress(&format!("followed {title:?}"));
    Ok(said(&output))
}

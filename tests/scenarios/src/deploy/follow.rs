//! A document's commands, run as they are.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::peers;
use postern_testbed::report::progress;
use tokio::process::Command;

/// How long the commands of one section may take.
const SECTION: Duration = Duration::from_secs(150);

/// The commands of the section whose title begins with `title`.
pub(super) fn commands(document: &str, title: &str) -> Result<String> {
    let section = document.split("\n## ").find(|section| section.starts_with(title));
    let section = section.with_context(|| format!("the document has no section {title:?}"))?;
    let blocks: Vec<&str> =
        section.split("\n```sh\n").skip(1).filter_map(|rest| rest.split("\n```").next()).collect();
    ensure!(!blocks.is_empty(), "the section {title:?} has no commands");
    Ok(blocks.join("\n"))
}

/// Runs the commands of a section ([`commands`]) in the run's folder, with kubectl and helm on PATH. `replaced`: what a test
/// has to set differently.
pub(super) async fn section(
    cluster: &Cluster<'_>,
    document: &str,
    title: &str,
    replaced: &[(&str, &str)],
) -> Result<String> {
    let mut commands = commands(document, title)?;
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
    let path = format!("{}:{}:{inherited}", folder.display(), helm.display());
    let mut command = Command::new("sh");
    command.args(["-eux", "-c", &commands]).current_dir(cluster.testbed.dir()).kill_on_drop(true);
    for (key, value) in kubectl.get_envs().filter_map(|(key, value)| Some((key, value?))) {
        command.env(key, value);
    }
    let output = tokio::time::timeout(SECTION, command.env("PATH", path).output());
    let output = output.await.with_context(|| format!("{title:?} took more than {SECTION:?}"))??;
    if !output.status.success() {
        bail!("{title:?} ended with {}: {}", output.status, said(&output));
    }
    progress(&format!("followed {title:?}"));
    Ok(said(&output))
}

//! A document's commands, run as they are.
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::peers;
use postern_testbed::report::progress;
use tokio::process::Command;

/// How long the commands of one section may take.
const SECTION: Duration = Duration::from_secs(150);

/// A fenced block of a document.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block<'a> {
    /// The title of its section.
    pub(super) section: &'a str,
    /// What stands behind the fence; empty: nothing does.
    pub(super) language: &'a str,
    pub(super) text: &'a str,
}

impl Block<'_> {
    /// Whether it is to be run as it is.
    pub(super) fn is_commands(&self) -> bool {
        self.language == "sh"
    }
}

/// The blocks of a document, in its order.
pub(super) fn blocks(document: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    for section in document.split("\n## ") {
        let title = section.lines().next().unwrap_or_default();
        let mut rest = section;
        while let Some((_, fenced)) = rest.split_once("\n```") {
            let (language, fenced) = fenced.split_once('\n').unwrap_or((fenced, ""));
            let (text, after) = fenced.split_once("\n```").unwrap_or((fenced, ""));
            blocks.push(Block { section: title, language, text });
            rest = after;
        }
    }
    blocks
}

/// The commands of the section whose title begins with `title`.
pub(super) fn commands(document: &str, title: &str) -> Result<String> {
    let blocks = blocks(document);
    let section = blocks.iter().map(|block| block.section).find(|section| section.starts_with(title));
    let section = section.with_context(|| format!("the document has no section {title:?} with a block"))?;
    let commands = blocks.iter().filter(|block| block.section == section && block.is_commands());
    let commands: Vec<&str> = commands.map(|block| block.text).collect();
    ensure!(!commands.is_empty(), "the section {title:?} has no commands");
    Ok(commands.join("\n"))
}

/// Runs the commands of a section ([`commands`]) in the run's folder, with kubectl and helm on PATH. `replaced`: what a test
/// has to set differently.
pub(super) async fn section(
    cluster: &Cluster<'_>,
    document: &str,
    title: &str,
    replaced: &[(&str, &str)],
) -> Result<String> {
    run(cluster, title, &commands(document, title)?, replaced).await
}

/// The same with those lines of the section that begin with `command`.
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

async fn run(
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
    let path = format!("{}:{}:{inherited}", folder.display(), helm.display());
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
    // Entering the machine's mount namespace forgets the folder.
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

#[cfg(test)]
mod tests {
    use super::*;

    const GUIDE: &str = "\
# Title
```
first
```
## One
text
```sh
a
b
```
  ```
  in a list
  ```
## Two
```yaml
c: d
```
```sh
e
```
";

    #[test]
    fn a_documents_blocks_are_found() {
        let found = blocks(GUIDE);
        let found: Vec<_> = found.iter().map(|block| (block.section, block.language, block.text)).collect();
        let expected =
            [("# Title", "", "first"), ("One", "sh", "a\nb"), ("Two", "yaml", "c: d"), ("Two", "sh", "e")];
        assert_eq!(found, expected);
        assert_eq!(commands(GUIDE, "One").unwrap(), "a\nb");
        assert!(commands(GUIDE, "Three").is_err());
    }
}

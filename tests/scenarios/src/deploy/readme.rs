//! Runs the README's installation in Kubernetes as it is written, and what docs/get-started.md has beyond it.
use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::document::{Block, blocks, commands};

use super::{PROGRAMS, archive, explained, follow, logs, overlay};
use crate::readme::{README, are_printed, is_shown};

const GET_STARTED: &str = include_str!("../../../../docs/get-started.md");
const TITLE: &str = "Use it in Kubernetes";

pub(super) async fn the_readme_is_followed(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    explained(&cluster, followed).await
}

/// Follows the README. xtask has made the images already; `ssh` is a command that runs on the named machine.
async fn followed(cluster: &Cluster<'_>) -> Result<()> {
    // The testbed's nodes have their labels from the start.
    cluster.kubectl.run(&["label", "node", EDGE_NODE, "node-role.kubernetes.io/edge-"]).await?;
    let commands = commands(README, TITLE)?;
    let lines: Vec<&str> = commands.lines().collect();
    let started = blocks(GET_STARTED);
    let further = further(&started, &lines)?;
    let [build, master, edge, label, apply, rollout] = lines[..] else {
        bail!("{TITLE:?} has {} commands instead of six", lines.len())
    };
    ensure!(build.starts_with("cargo xtask image "), "first comes {build:?}");

    let images = fs::canonicalize(cluster.testbed.dir()).context("the run's folder")?.join("target/image");
    fs::create_dir_all(&images).with_context(|| images.display().to_string())?;
    for (program, _) in PROGRAMS {
        let link = images.join(format!("{program}.oci.tar"));
        std::os::unix::fs::symlink(archive(program)?, &link).with_context(|| link.display().to_string())?;
    }
    let mut imported = String::new();
    for (line, host, node) in [(master, "master-1", CLOUD_NODE), (edge, "edge-1", EDGE_NODE)] {
        let command = line.strip_prefix(&format!("ssh {host} "));
        let command = command.with_context(|| format!("{line:?} is not for {host}"))?;
        imported += &follow::on_host(cluster, node, TITLE, command).await?;
    }
    // A test must not redirect the whole machine: its overlay on top of the README's one limits the redirect.
    let folder = "base";
    overlay(cluster.testbed, folder)?;
    let shown = follow::run(
        cluster,
        TITLE,
        &[label, apply, rollout].join("\n"),
        &[(&format!("-k deploy/{folder}"), "-k overlay")],
    )
    .await?;
    is_shown(TITLE, &shown)?;
    logs(&cluster.kubectl).await?;
    let seen = follow::run(cluster, "docs/get-started.md", &further.join("\n"), &[]).await?;
    let outputs = started.iter().filter(|block| is_output(block)).map(|block| block.text);
    are_printed(outputs, &[imported, shown, seen].join("\n"))
}

/// Returns the commands of docs/get-started.md behind those that it shares with the README.
fn further<'a>(started: &[Block<'a>], readme: &[&str]) -> Result<Vec<&'a str>> {
    let commands = started.iter().filter(|block| block.is_commands()).flat_map(|block| block.text.lines());
    let commands: Vec<&str> = commands.collect();
    // The README explains its commands at their ends.
    let readme = readme.iter().map(|line| line.split("    #").next().unwrap_or_default().trim());
    let shared = readme.clone().zip(&commands).take_while(|(ours, theirs)| ours == *theirs).count();
    ensure!(
        shared == readme.count(),
        "command {} of docs/get-started.md is not that of the README",
        shared + 1
    );
    Ok(commands[shared..].to_vec())
}

/// Reports whether the block is what the commands before it print. Others are commands that only some need.
fn is_output(block: &Block<'_>) -> bool {
    !block.is_commands() && !block.text.starts_with("kubectl ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_started_begins_as_the_readme() {
        let (started, commands) = (blocks(GET_STARTED), commands(README, TITLE).unwrap());
        let lines: Vec<&str> = commands.lines().collect();
        assert_eq!(further(&started, &lines).unwrap().len(), 2);
        let changed = GET_STARTED.replace("kubectl label node edge-1", "kubectl label node edge-2");
        assert!(further(&blocks(&changed), &lines).is_err());
        assert_eq!(started.iter().filter(|block| is_output(block)).count(), 6);
    }
}

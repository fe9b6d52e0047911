//! Runs the README's installation in Kubernetes as it is written.
use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::document::commands;

use super::{PROGRAMS, archive, explained, follow, logs, overlay};
use crate::readme::{README, is_shown};

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
    for (line, host, node) in [(master, "master-1", CLOUD_NODE), (edge, "edge-1", EDGE_NODE)] {
        let command = line.strip_prefix(&format!("ssh {host} "));
        let command = command.with_context(|| format!("{line:?} is not for {host}"))?;
        follow::on_host(cluster, node, TITLE, command).await?;
    }
    // A test must not redirect the whole machine: its overlay on top of the README's one limits the redirect.
    let folder = "overlays/nodeport";
    overlay(cluster.testbed, folder)?;
    let shown = follow::run(
        cluster,
        TITLE,
        &[label, apply, rollout].join("\n"),
        &[(&format!("-k deploy/{folder}"), "-k overlay")],
    )
    .await?;
    is_shown(TITLE, &shown)?;
    logs(&cluster.kubectl).await
}

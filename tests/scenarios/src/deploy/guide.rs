//! The pages on Kubernetes, followed from labelling a node to `kubectl logs`, and back to nothing.
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::visit;
use postern_testbed::cluster::api::condition;
use postern_testbed::cluster::manifests::deploy;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::{Cluster, EDGE_NODE};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_for;

use super::chart::nothing_is_left;
use super::{DOCUMENT, NAMESPACE, PATIENCE, PROGRAMS, archive, explained, follow, logs, overlay, text};
use crate::common::target;

/// Sections with commands, each with the scenario that runs all of them.
const RUN: [(&str, &str); 12] = [
    ("1. Label the edge nodes", HERE),
    (IMAGES, HERE),
    ("3. Apply", HERE),
    ("4. Check", HERE),
    (CHART, "deploy::chart_is_installed_upgraded_and_removed"),
    (FINDING_SERVERS, "deploy::manifests_run_unchanged"),
    (PORTS, HERE),
    (CALLERS, "deploy::callers_are_asked_for"),
    (ROTATION, HERE),
    (REVOCATION, HERE),
    (PROMETHEUS, "deploy::prometheus_reads_servers"),
    (REMOVAL, HERE),
];
const HERE: &str = "deploy::the_guide_is_followed";
const IMAGES: &str = "2. Bring the images to the nodes";
const PORTS: &str = "Add a port";
const ROTATION: &str = "Rotate the CA";
const REVOCATION: &str = "Shut a node out";
const REMOVAL: &str = "Remove from a cluster";
pub(super) const CHART: &str = "With Helm";
pub(super) const FINDING_SERVERS: &str = "Address of the API server for agents";
pub(super) const CALLERS: &str = "Switch it on";
pub(super) const PROMETHEUS: &str = "Servers and redirectors";

pub(super) async fn the_guide_is_followed(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    explained(&cluster, followed).await
}

async fn followed(cluster: &Cluster<'_>) -> Result<()> {
    // The testbed's nodes have their labels from the start.
    cluster.kubectl.run(&["label", "node", EDGE_NODE, "node-role.kubernetes.io/edge-"]).await?;
    // Shortens the API server's own timeout of 30 s.
    let args = ["logs", "talker", "--tail=1", "--request-timeout=3s"];
    let refused = cluster.kubectl.fails(&args).await?;
    ensure!(
        !refused.lines().any(|line| line.starts_with("line ")),
        "kubectl logs works without Postern: {refused}"
    );
    folder(cluster.testbed)?;
    let mut done = BTreeSet::from([IMAGES]);
    let mut follow = async |title: &'static str, replaced: &[(&str, &str)]| {
        done.insert(title);
        follow::section(cluster, DOCUMENT, title, replaced).await
    };

    follow("1. Label the edge nodes", &[]).await?;
    images(cluster).await?;
    // The test's overlay is on top of the guide's. There is no registry here.
    let tests = [("-k my-postern", "-k overlay")];
    follow("3. Apply", &[&tests[..], &[("registry.example.org", "localhost")]].concat()).await?;
    let shown = follow("4. Check", &[]).await?;
    for expected in ["nodes: 1 of 1 connected", "talker"] {
        ensure!(shown.contains(expected), "{expected:?} is not shown:\n{shown}");
    }
    logs(&cluster.kubectl).await?;

    let exporter = target(cluster.testbed, 1, 9100, Behaviour::Echo)?;
    follow(PORTS, &[]).await?;
    let address = exporter.address;
    wait_for("the port to be redirected", PATIENCE, async || Ok(visit(address).await.ok())).await?;
    let said = follow(ROTATION, &[]).await?;
    ensure!(said.contains("its certificates may be in use until"), "`ca status` says:\n{said}");
    // At the end: the agent of a revoked node enrols again only after minutes.
    follow(REVOCATION, &[]).await?;
    // As servers with the component `node-condition` leave it.
    let left = r#"{"status":{"conditions":[{"type":"PosternTunnel","status":"True"}]}}"#;
    let patch = ["patch", "node", EDGE_NODE, "--subresource=status", "--type=strategic", "--patch", left];
    cluster.kubectl.run(&patch).await?;
    follow(REMOVAL, &tests).await?;

    let all: BTreeSet<_> = RUN.iter().filter(|(_, by)| *by == HERE).map(|(title, _)| *title).collect();
    ensure!(done == all, "{done:?} were followed, and {all:?} are listed");
    nothing_is_left(cluster).await?;
    let objects =
        "secret/tunnel-server-ca configmap/tunnel-nodes configmap/tunnel-revoked-agents lease/tunnel-server";
    for object in objects.split(' ') {
        let found = cluster.kubectl.fails(&["get", object, "--namespace", NAMESPACE]).await;
        found.with_context(|| format!("{object} is left"))?;
    }
    let node = cluster.api.get(&format!("/api/v1/nodes/{EDGE_NODE}")).await?;
    ensure!(node["metadata"]["labels"]["node-role.kubernetes.io/edge"].is_null(), "the label is left");
    ensure!(condition(&node, "PosternTunnel").is_none(), "the condition is left");
    Ok(())
}

/// Prepares the run's folder as the guide expects it: with `deploy` and the images' archives. A test must not redirect
/// the whole machine, so it has its own overlay on top of the guide's.
fn folder(testbed: &Testbed) -> Result<()> {
    let dir = link_deploy(testbed)?;
    for (program, _) in PROGRAMS {
        link(&archive(program)?, &dir.join(format!("{program}.oci.tar")))?;
    }
    let mine = dir.join("my-postern");
    fs::create_dir(&mine).with_context(|| mine.display().to_string())?;
    overlay(testbed, text(&mine)?).map(drop)
}

/// Links `deploy`, which the guide's commands name, into the run's folder, and returns that folder.
pub(super) fn link_deploy(testbed: &Testbed) -> Result<PathBuf> {
    let dir = fs::canonicalize(testbed.dir()).context("the run's folder")?;
    link(&fs::canonicalize(deploy()).context("deploy/")?, &dir.join("deploy"))?;
    Ok(dir)
}

fn link(existing: &Path, new: &Path) -> Result<()> {
    symlink(existing, new).with_context(|| format!("linking {} to {}", new.display(), existing.display()))
}

/// Runs each block of the section on the hosts of its program.
async fn images(cluster: &Cluster<'_>) -> Result<()> {
    let blocks = follow::blocks(DOCUMENT).into_iter();
    let blocks: Vec<_> = blocks.filter(|block| block.section == IMAGES && block.is_commands()).collect();
    ensure!(blocks.len() == PROGRAMS.len(), "{IMAGES:?} has {} blocks with commands", blocks.len());
    for (block, (program, node)) in blocks.iter().zip(PROGRAMS) {
        ensure!(block.text.contains(program), "for {node} there is {:?}", block.text);
        follow::on_host(cluster, node, IMAGES, block.text).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use postern_testbed::document::Block;

    use super::*;
    use crate::deploy::SCENARIOS;

    /// The other blocks by their beginning, each with the reason why no test runs it unchanged.
    const NOT_RUN: [(&str, &str); 13] = [
        (
            "cargo xtask image",
            "xtask has made the images, with the same code and a faster profile, before it starts this",
        ),
        (
            "# my-postern/kustomization.yaml\nresources: [../deploy/base]",
            "deploy::addresses_are_as_documented renders it",
        ),
        (
            "# my-postern/kustomization.yaml\nresources: [../deploy/base]\ncomponents: [../deploy/components/public-addresses]",
            "the same",
        ),
        ("# my-postern/kustomization.yaml\nresources: [../deploy/overlays/loadbalancer]", "the same"),
        (
            "kubectl --namespace kube-system patch deployment metrics-server",
            "kubernetes::top runs metrics-server as a process",
        ),
        (
            "tunnel-server token create --redirector HOST",
            "with the reader's names; the scenarios in redirector.rs give the same flags",
        ),
        (
            "kubectl apply -k my-postern\nkubectl --namespace kube-system rollout status daemonset/tunnel-server --timeout=300s",
            "deploy::two_masters_are_updated updates both programs with its own overlay",
        ),
        (
            "curl --cacert ca/ca.crt",
            "with the reader's names; the scenarios in metrics.rs send the same request",
        ),
        ("hosts /etc/edge/tunnel-nodes {", "CoreDNS is not among the programs of the testbed's cluster"),
        ("kubectl --namespace kube-system patch deployment coredns", "the same"),
        ("--plain-port=10268", "flags, not commands; the scenarios in plain.rs give them to a server"),
        (
            "kubectl postern ca retire",
            "it is refused for as long as a certificate of the old root may be in use, which is days",
        ),
        (
            "# The volumes of Prometheus' pod.",
            "parts of somebody's Deployment; deploy::prometheus_reads_servers takes both keys from their Secrets",
        ),
    ];

    #[test]
    fn every_block_of_the_guide_is_run_or_named() {
        let blocks = follow::blocks(DOCUMENT);
        let named = |block: &Block<'_>| NOT_RUN.iter().any(|(start, _)| block.text.starts_with(start));
        let run = |block: &Block<'_>| RUN.iter().any(|(title, _)| *title == block.section);
        for block in &blocks {
            let title = block.section;
            if block.is_commands() {
                assert!(run(block), "no test runs the commands of {title:?}: {}", block.text);
            } else {
                assert!(named(block), "a block of {title:?} is not run, and not in NOT_RUN: {}", block.text);
            }
        }
        for (start, _) in NOT_RUN {
            assert!(
                blocks.iter().any(|block| !block.is_commands() && block.text.starts_with(start)),
                "{start}"
            );
        }
        for (title, scenario) in RUN {
            assert!(follow::commands(DOCUMENT, title).is_ok(), "{title}");
            assert!(SCENARIOS.iter().any(|one| one.name() == scenario), "{title}: {scenario}");
        }
        // The parser would not find blocks in lists.
        assert!(
            !DOCUMENT
                .lines()
                .any(|line| line.starts_with([' ', '\t']) && line.trim_start().starts_with("```"))
        );
    }
}

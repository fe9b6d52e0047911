//! Postern as its manifests install it, with nothing else changed in the cluster.
use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::cluster::{Cluster, EDGE_NODE, pods, postern};
use postern_testbed::process::program;

use super::checks::Checks;
use super::{commands, forward, prometheus, redirect, views};
use crate::doctor;

pub(super) async fn in_cluster(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    let mut all = [commands::pods(EDGE_NODE), forward::pods(EDGE_NODE), views::pods(EDGE_NODE)].concat();
    all.extend(redirect::pods());
    pods::run(&cluster.api, &all).await?;
    let mut checks = Checks::new();
    checks.run("without Postern, logs of an edge pod fail", redirect::nothing_works_yet(&cluster)).await;
    let manifests = postern::install(&cluster, "base").await?;
    let builder = postern::server(&cluster, &manifests).await?.flag("--edge-pod-routes=10.72.0.0/16");
    let server = builder.start().await?;
    let agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    commands::run(&mut checks, &cluster, commands::MEGABYTES).await;
    forward::run(&mut checks, &cluster).await;
    views::run(&mut checks, &cluster).await;
    redirect::run(&mut checks, &cluster, &server).await;
    prometheus::run(&mut checks, &cluster).await;
    drop(agent);
    checks.finish()?;
    missing_rights(&cluster).await.context("doctor of a server that lacks rights")
}

/// Runs the doctor of a server with the agents' ServiceAccount.
async fn missing_rights(cluster: &Cluster<'_>) -> Result<()> {
    let create = ["create", "token", "tunnel-agent", "--namespace", postern::NAMESPACE];
    let token = cluster.kubectl.run(&create).await?;
    let kubeconfig = cluster.pki.kubeconfig_with_token("agents-account", &cluster.server, token.trim())?;
    let mut command = cluster.testbed.on_cloud().command(&program("tunnel-server")?);
    // No running server at this admin address: it would report its own flags.
    command.args(["doctor", "-o", "json", "--redirect=off", "--admin-address=127.0.0.1:1"]);
    command.arg(format!("--state-dir={}", cluster.testbed.dir().join("agents-account").display()));
    command.arg(format!("--kubeconfig={}", kubeconfig.display()));
    let said = doctor::run(command).await?;
    said.expect("api-right-missing", "may not update secrets tunnel-server-ca in kube-system")?;
    said.expect("api-right-missing", "may not list nodes")
}

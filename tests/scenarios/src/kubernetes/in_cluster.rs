//! Postern as its manifests install it, with nothing else in the cluster changed.
use anyhow::Result;
use postern_testbed::Testbed;
use postern_testbed::cluster::{Cluster, EDGE_NODE, pods, postern};

use super::checks::Checks;
use super::{commands, forward, prometheus, redirect, views};

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
    commands::run(&mut checks, &cluster).await;
    forward::run(&mut checks, &cluster).await;
    views::run(&mut checks, &cluster).await;
    redirect::run(&mut checks, &cluster, &server).await;
    prometheus::run(&mut checks, &cluster).await;
    drop(agent);
    checks.finish()
}

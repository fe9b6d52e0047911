//! Postern outside of the cluster: an inventory file and tokens, and the cluster is served all the same.
use anyhow::{Context as _, Result};

use super::checks::Checks;
use super::{commands, forward, views};
use crate::agent::Agent;
use crate::cluster::{Cluster, EDGE_NODE, pods};
use crate::server::Builder;
use crate::testbed::Testbed;

pub(super) async fn run(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    let all = [commands::pods(EDGE_NODE), forward::pods(EDGE_NODE), views::pods(EDGE_NODE)].concat();
    pods::run(&cluster.api, &all).await?;
    // The inventory is what its help says: the output of kubectl.
    let nodes = cluster.kubectl.run(&["get", "nodes", "-o", "yaml"]).await?;
    std::fs::write(testbed.dir().join("nodes.yaml"), nodes).context("writing the inventory")?;
    let server = Builder::new(testbed).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let mut checks = Checks::new();
    commands::run(&mut checks, &cluster).await;
    forward::run(&mut checks, &cluster).await;
    views::run(&mut checks, &cluster).await;
    checks.finish()
}

//! Postern outside of the cluster, with an inventory file and enrolment tokens.
use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::cluster::{Cluster, EDGE_NODE, pods};
use postern_testbed::server::Builder;

use super::checks::Checks;
use super::{commands, views};

pub(super) async fn standalone(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &commands::pods(EDGE_NODE)).await?;
    // The inventory is the output of kubectl, as --help says.
    let nodes = cluster.kubectl.run(&["get", "nodes", "-o", "yaml"]).await?;
    std::fs::write(testbed.dir().join("nodes.yaml"), nodes).context("writing the inventory")?;
    let server = Builder::new(testbed).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let mut checks = Checks::new();
    checks.run("logs", commands::logs(&cluster.kubectl)).await;
    checks.run("exec with standard input and an exit code", commands::exec(&cluster.kubectl)).await;
    checks.run("stats/summary of the edge node", views::summary(&cluster)).await;
    checks.finish()
}

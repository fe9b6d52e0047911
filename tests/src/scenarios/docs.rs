//! What the documents list is what the programs have.
use std::collections::BTreeSet;

use anyhow::{Result, ensure};

use super::Scenario;
use super::common::server_and_agent;
use crate::testbed::Testbed;

pub(super) const ALL: &[Scenario] =
    &[Scenario::new("docs::every_metric_is_listed_and_no_other", 1, |t| Box::pin(metrics(t)))];

const OPERATIONS: &str = include_str!("../../../docs/operations.md");

async fn metrics(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let mut exposed = families(&server.get("/metrics").await?.1);
    exposed.extend(families(&agent.get("/metrics").await?.1));
    let listed = listed(OPERATIONS);
    let unlisted: Vec<_> = exposed.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&exposed).collect();
    ensure!(unlisted.is_empty(), "not in docs/operations.md: {unlisted:?}");
    ensure!(gone.is_empty(), "in docs/operations.md, but no longer there: {gone:?}");
    Ok(())
}

/// Metrics by the name that a query uses: counters end in `_total`, an info metric in `_info`.
fn families(page: &str) -> BTreeSet<String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types
        .map(|(name, kind)| match kind {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name.to_owned(),
        })
        .collect()
}

/// What stands in backquotes below "Metrics", without its labels.
fn listed(document: &str) -> BTreeSet<String> {
    let section = document.split("\n## ").find(|section| section.starts_with("Metrics")).unwrap_or_default();
    // What only a cluster has.
    let section = section.split("\n### ").next().unwrap_or_default();
    let quoted = section.split('`').skip(1).step_by(2);
    let names = quoted.map(|text| text.split('{').next().unwrap_or(text));
    names
        .filter(|name| name.starts_with("postern_") || name.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

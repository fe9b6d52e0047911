//! The documented metrics are the exposed ones.
use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use postern_testbed::Testbed;

use crate::common::server_and_agent;

scenarios! {
    exactly_the_exposed_metrics_are_listed,
}

const OPERATIONS: &str = include_str!("../../../docs/operations.md");

async fn exactly_the_exposed_metrics_are_listed(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let mut exposed = families(&server.get("/metrics").await?.1);
    exposed.extend(families(&agent.get("/metrics").await?.1));
    let listed = listed(OPERATIONS);
    let unlisted: Vec<_> = exposed.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&exposed).collect();
    ensure!(unlisted.is_empty(), "not in docs/operations.md: {unlisted:?}");
    ensure!(gone.is_empty(), "in docs/operations.md, but not exposed: {gone:?}");
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

/// The names in backquotes below "Metrics", without labels.
fn listed(document: &str) -> BTreeSet<String> {
    let section = document.split("\n## ").find(|section| section.starts_with("Metrics")).unwrap_or_default();
    // The subsections list metrics that only a cluster has.
    let section = section.split("\n### ").next().unwrap_or_default();
    let quoted = section.split('`').skip(1).step_by(2);
    let names = quoted.map(|text| text.split('{').next().unwrap_or(text));
    names
        .filter(|name| name.starts_with("postern_") || name.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

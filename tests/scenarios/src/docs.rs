//! Compares the documented metrics with the exposed ones.
use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use postern_testbed::Testbed;

use crate::common::server_and_agent;

scenarios! {
    exactly_the_exposed_metrics_are_listed(quick),
}

pub(crate) const METRICS: &str = include_str!("../../../docs/metrics.md");

async fn exactly_the_exposed_metrics_are_listed(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let mut exposed = families(&server.get("/metrics").await?.1);
    exposed.extend(families(&agent.get("/metrics").await?.1));
    let elsewhere = ["Server in a cluster", "Redirector"];
    let outside = METRICS.split("\n## ");
    let outside = outside.filter(|section| !elsewhere.iter().any(|heading| section.starts_with(heading)));
    let listed: BTreeMap<_, _> = outside.flat_map(listed).collect();
    let unlisted: Vec<_> = exposed.iter().filter(|metric| !listed.contains_key(metric.0)).collect();
    ensure!(unlisted.is_empty(), "not in docs/metrics.md: {unlisted:?}");
    let gone: Vec<_> = listed.keys().filter(|name| !exposed.contains_key(*name)).collect();
    ensure!(gone.is_empty(), "in docs/metrics.md, but not exposed: {gone:?}");
    let other: Vec<_> = exposed.iter().filter(|(name, kind)| listed[*name] != **kind).collect();
    ensure!(other.is_empty(), "of another type in docs/metrics.md: {other:?}");
    Ok(())
}

/// Returns the metrics by the name that a query uses, and their types.
pub(crate) fn families(page: &str) -> BTreeMap<String, String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

/// Returns the names in the tables of a part of docs/metrics.md, without labels, and their types.
pub(crate) fn listed(part: &str) -> Vec<(String, String)> {
    let rows = part.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let columns = rows.map(|(name, rest)| (name, rest.split('|').nth(1).unwrap_or_default().trim()));
    columns.map(|(name, kind)| (name.split('{').next().unwrap_or(name).to_owned(), kind.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_scenario_that_documents_name_exists() {
        let names: Vec<&str> = crate::all().map(crate::scenario::Scenario::name).collect();
        for (file, text) in [
            ("parity.md", include_str!("../../../docs/parity.md")),
            ("security.md", include_str!("../../../docs/security.md")),
        ] {
            for named in text.split('`').skip(1).step_by(2) {
                let is_scenario = named.split_once("::").is_some_and(|(subject, case)| {
                    names.iter().any(|name| name.starts_with(&format!("{subject}::"))) && case != "…"
                });
                assert!(
                    !is_scenario || names.contains(&named),
                    "docs/{file} names {named}, which does not exist"
                );
            }
        }
    }
}

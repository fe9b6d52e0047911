//! Compares the listed metrics, of which the book's page is made, with the exposed ones.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use serde_json::Value;

use crate::common::server_and_agent;

scenarios! {
    exactly_the_exposed_metrics_are_listed(quick),
}

const METRICS: &str = include_str!("../../../deploy/prometheus/metrics.json");

/// A metric of deploy/prometheus/metrics.json.
pub(crate) struct Listed {
    /// Programs that expose it.
    pub(crate) of: String,
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) labels: Vec<String>,
}

async fn exactly_the_exposed_metrics_are_listed(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let pages = format!("{}{}", server.get("/metrics").await?.1, agent.get("/metrics").await?.1);
    let exposed = families(&pages);
    let mut metrics = listed()?;
    metrics.retain(|metric| !["Server in a cluster", "Redirector"].contains(&metric.of.as_str()));
    let listed: BTreeMap<_, _> = metrics.into_iter().map(|metric| (metric.name.clone(), metric)).collect();
    let unlisted: Vec<_> = exposed.iter().filter(|metric| !listed.contains_key(metric.0)).collect();
    ensure!(unlisted.is_empty(), "not in metrics.json: {unlisted:?}");
    let gone: Vec<_> = listed.keys().filter(|name| !exposed.contains_key(*name)).collect();
    ensure!(gone.is_empty(), "in metrics.json, but not exposed: {gone:?}");
    let other: Vec<_> = exposed.iter().filter(|(name, kind)| listed[*name].kind != **kind).collect();
    ensure!(other.is_empty(), "of another type in metrics.json: {other:?}");
    for (name, labels) in labels(&pages) {
        if let Some(metric) = listed.get(name) {
            let known: BTreeSet<&str> = metric.labels.iter().map(String::as_str).collect();
            ensure!(labels == known, "{name} has the labels {labels:?}, and in metrics.json {known:?}");
        }
    }
    Ok(())
}

/// Returns the names and labels of the series; those of histograms have other names than their metrics.
fn labels(page: &str) -> impl Iterator<Item = (&str, BTreeSet<&str>)> {
    let series = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('{'));
    series.map(|(name, rest)| {
        let labels = rest.rsplit_once('}').map_or("", |(labels, _)| labels);
        // Values may have commas, but no quotes.
        (
            name,
            labels
                .split('"')
                .step_by(2)
                .filter_map(|part| part.strip_suffix('='))
                .map(|part| part.trim_start_matches(','))
                .collect(),
        )
    })
}

/// Returns the metrics by the name that a query uses, and their types.
pub(crate) fn families(page: &str) -> BTreeMap<String, String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

/// Reads deploy/prometheus/metrics.json.
pub(crate) fn listed() -> Result<Vec<Listed>> {
    let groups: Vec<Value> = serde_json::from_str(METRICS).context("metrics.json")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut metrics = Vec::new();
    for group in &groups {
        for metric in group["metrics"].as_array().with_context(|| format!("no metrics: {group}"))? {
            let labels = metric["labels"].as_array().into_iter().flatten();
            metrics.push(Listed {
                of: text(&group["of"]),
                name: text(&metric["name"]),
                kind: text(&metric["type"]),
                labels: labels.map(text).collect(),
            });
        }
    }
    Ok(metrics)
}

//! The alerts and the dashboard: alerts fire when they should, and the metrics in both exist.
use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::visit;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::manifests::deploy;
use postern_testbed::metrics::Metrics;
use postern_testbed::target::Behaviour;
use serde_json::{Value, json};
use tokio::process::Command;

use super::text;
use crate::common::{server_and_agent, target};
use crate::docs::families;

/// Metrics in panels that only a server in a cluster exposes.
const IN_A_CLUSTER: [&str; 2] = ["postern_kube_errors_total", "postern_kube_watch_synced"];
/// Labels that the scrape adds.
const SCRAPED: [&str; 3] = ["job", "instance", "node"];

/// Every alert fires when it should, and not when it should not; every query of the dashboard can be parsed.
pub(super) async fn alerts_fire_and_stay_silent(testbed: &Testbed) -> Result<()> {
    promtool(&["check", "rules", "alerts.yml"]).await?;
    promtool(&["test", "rules", "alerts_test.yml", "alerts_slow_test.yml"]).await?;
    let queries = queries(&dashboard()?);
    ensure!(!queries.is_empty(), "the dashboard asks nothing");
    let rule =
        |(at, query): (usize, &String)| json!({ "record": format!("query_{at}"), "expr": filled(query) });
    let rules: Vec<Value> = queries.iter().enumerate().map(rule).collect();
    let file = testbed.dir().join("dashboard.yml");
    // JSON is YAML too.
    let groups = json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    fs::write(&file, groups.to_string()).context("writing the queries")?;
    promtool(&["check", "rules", text(&file)?]).await
}

/// Each panel queries metrics of its own program, filtered and grouped by labels that they have.
pub(super) async fn panels_ask_for_what_programs_expose(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    server.wait_access("of the visit", |line| line.text("outcome") == "ok").await?;
    let (of_server, of_agent) = (server.get("/metrics").await?.1, agent.get("/metrics").await?.1);
    let (mut asked, mut missing) = (0, BTreeSet::new());
    for query in queries(&dashboard()?) {
        let about_agents = query.contains("$node") || query.contains("\"tunnel-agent\"");
        let page = if about_agents { &of_agent } else { &of_server };
        let (types, series) = (families(page), Metrics::parse(page)?.samples);
        for (name, labels) in metrics_in(&query) {
            asked += 1;
            let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let in_histogram =
                histogram.and_then(|name| types.get(name)).is_some_and(|kind| kind == "histogram");
            if !in_histogram && !types.contains_key(&name) {
                missing.insert(name);
                continue;
            }
            // Some have no series before a failure.
            let Some(one) = series.iter().find(|one| one.name == name) else { continue };
            for label in labels.iter().map(String::as_str).chain(grouped_by(&query)) {
                let known = SCRAPED.contains(&label) || one.labels.contains_key(label);
                ensure!(known, "{one} has no label {label}: {query}");
            }
        }
    }
    ensure!(asked > 40, "only {asked} metrics were found");
    ensure!(
        missing.iter().map(String::as_str).eq(IN_A_CLUSTER),
        "panels ask for {missing:?}, which the programs do not expose; outside of a cluster {IN_A_CLUSTER:?} should be missing"
    );
    Ok(())
}

async fn promtool(args: &[&str]) -> Result<()> {
    let mut command = Command::new("promtool");
    command.args(args).current_dir(deploy().join("prometheus")).kill_on_drop(true);
    let output = command.output().await.context("running promtool, of Debian's package prometheus")?;
    ensure!(output.status.success(), "promtool {}: {}", args.join(" "), said(&output));
    Ok(())
}

fn dashboard() -> Result<Value> {
    let text = fs::read_to_string(deploy().join("prometheus/dashboard.json")).context("dashboard.json")?;
    serde_json::from_str(&text).context("dashboard.json")
}

/// Returns the queries of the panels.
fn queries(dashboard: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let targets = list(&dashboard["panels"]).into_iter().flat_map(|panel| list(&panel["targets"]));
    targets.filter_map(|target| target["expr"].as_str().map(str::to_owned)).collect()
}

/// Returns a query with values for Grafana's variables.
fn filled(query: &str) -> String {
    query.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$node", ".*")
}

/// Returns the names such as postern_tunnels in a query, each with the labels in its selector.
fn metrics_in(query: &str) -> Vec<(String, Vec<String>)> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut found = Vec::new();
    for prefix in ["postern_", "process_"] {
        for (at, _) in query.match_indices(prefix) {
            let name: String = query[at..].chars().take_while(|c| is_name(*c)).collect();
            let rest = &query[at + name.len()..];
            let matchers = rest.strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or_default();
            let labels = matchers.split(',').filter_map(|matcher| matcher.split(['=', '!']).next());
            found.push((name, labels.filter(|label| !label.is_empty()).map(str::to_owned).collect()));
        }
    }
    found
}

/// Returns the labels by which a query's result is grouped.
fn grouped_by(query: &str) -> impl Iterator<Item = &str> {
    let groups = query.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
    groups.flat_map(|labels| labels.split(',').map(str::trim))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::docs::listed;

    fn read(name: &str) -> String {
        fs::read_to_string(deploy().join(name)).unwrap()
    }

    fn yaml(name: &str) -> Value {
        serde_saphyr::from_str(&read(name)).unwrap()
    }

    /// Returns the listed metrics with their labels.
    fn documented() -> BTreeMap<String, BTreeSet<String>> {
        let metrics = listed().unwrap().into_iter();
        metrics.map(|metric| (metric.name, metric.labels.into_iter().collect())).collect()
    }

    fn alerts() -> Vec<Value> {
        let file = yaml("prometheus/alerts.yml");
        let groups = file["groups"].as_array().unwrap().clone();
        groups.into_iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
    }

    #[test]
    fn alerts_and_panels_ask_for_metrics_and_labels_that_exist() {
        let documented = documented();
        assert_eq!(documented.len(), listed().unwrap().len(), "one is listed twice");
        let expressions = alerts().into_iter().map(|alert| alert["expr"].as_str().unwrap().to_owned());
        let mut seen = 0;
        for query in expressions.chain(queries(&dashboard().unwrap())) {
            for (name, labels) in metrics_in(&query) {
                let series = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
                let known = documented.get(&name).or_else(|| series.and_then(|name| documented.get(name)));
                let known = known.unwrap_or_else(|| panic!("{name} is not in metrics.json: {query}"));
                for label in labels {
                    let scraped = SCRAPED.contains(&label.as_str()) || label == "le";
                    assert!(scraped || known.contains(&label), "{name} has no label {label}: {query}");
                }
                seen += 1;
            }
        }
        assert!(seen > 60, "only {seen} metrics were found");
    }

    #[test]
    fn every_alert_is_tested_by_firing() {
        let tests = read("prometheus/alerts_test.yml") + &read("prometheus/alerts_slow_test.yml");
        for alert in alerts() {
            let (name, severity) =
                (alert["alert"].as_str().unwrap(), alert["labels"]["severity"].as_str().unwrap());
            assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
            for text in ["summary", "description"] {
                assert!(alert["annotations"][text].is_string(), "{name} has no {text}");
            }
            let fired = format!("'{{alertname=\"{name}\", severity=\"{severity}\"}}', value: 1");
            assert!(tests.contains(&fired), "{name} does not fire in a test");
        }
    }

    #[test]
    fn copies_are_the_same() {
        for (copy, of) in [("alerts.yaml", "alerts.yml"), ("dashboard.json", "dashboard.json")] {
            let (copy, of) = (format!("helm/postern/files/{copy}"), format!("prometheus/{of}"));
            assert!(read(&copy) == read(&of), "cp deploy/{of} deploy/{copy}");
        }
        let rule = yaml("components/prometheus-operator/rules.yaml");
        assert_eq!(rule["spec"], yaml("prometheus/alerts.yml"));
    }

    #[test]
    fn panels_have_a_place_and_a_query_of_their_own() {
        let dashboard = dashboard().unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let mut taken = BTreeSet::new();
        for panel in panels {
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
            for row in at("y")..at("y") + at("h") {
                for column in at("x")..at("x") + at("w") {
                    assert!(taken.insert((row, column)), "{} lies on another", panel["title"]);
                }
            }
            assert!(panel["type"] == "row" || panel["targets"][0]["expr"].is_string(), "{}", panel["title"]);
        }
        let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
        assert_eq!(ids.len(), panels.len());
    }
}

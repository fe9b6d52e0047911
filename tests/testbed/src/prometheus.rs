//! Debian's Prometheus and node exporter, and the client of Prometheus' HTTP API.
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::client;
use crate::process::Process;
use crate::topology::Testbed;
use crate::wait::wait_until;

const API: ([u8; 4], u16) = ([127, 0, 0, 1], 9090);
/// Time limit until a query finds scraped samples.
const STORED: Duration = Duration::from_secs(20);

/// Starts Debian's Prometheus on the cloud host. It has no kubernetes_sd.
pub fn start(testbed: &Testbed, configuration: &str) -> Result<Process> {
    start_as(testbed, testbed.on_cloud().command(Path::new("prometheus")), configuration)
}

/// Starts Prometheus with this command.
pub fn start_as(testbed: &Testbed, mut command: Command, configuration: &str) -> Result<Process> {
    let config = testbed.dir().join("prometheus.yml");
    fs::write(&config, configuration).with_context(|| format!("writing {}", config.display()))?;
    command
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", testbed.dir().join("prometheus").display()))
        // Interval at which it applies discovered targets: 5 s by default, on top of up to 5 s for discovering them.
        .arg("--scrape.discovery-reload-interval=1s")
        .arg("--web.listen-address=127.0.0.1:9090");
    Process::spawn(testbed.dir(), "prometheus", command)
}

/// Starts a node exporter on edge `n`, with its own host name (UTS namespace), which identifies its samples.
pub fn start_exporter(testbed: &Testbed, n: usize) -> Result<Process> {
    let edge = testbed.edge(n);
    let mut command = testbed.on_edge(n).command(Path::new("unshare"));
    command
        .args([
            "--uts",
            "sh",
            "-c",
            r#"hostname "$0" && exec prometheus-node-exporter --log.level=warn --web.listen-address="$1""#,
        ])
        .arg(&edge.name)
        .arg(format!("{}:9100", edge.address));
    Process::spawn(testbed.dir(), &format!("node-exporter-{n}"), command)
}

/// One series of a query's answer.
#[derive(Debug)]
pub struct Series {
    labels: Value,
    value: String,
}

impl Series {
    /// Returns a label's value; empty if there is none.
    pub fn label(&self, name: &str) -> &str {
        self.labels[name].as_str().unwrap_or("")
    }

    pub fn number(&self) -> f64 {
        // f64 parses all numbers that Prometheus writes, including NaN and +Inf.
        self.value.parse().unwrap_or(f64::NAN)
    }
}

pub async fn query(expression: &str) -> Result<Vec<Series>> {
    let answer = get(&format!("/api/v1/query?query={}", encoded(expression))).await?;
    let result = answer["data"]["result"].as_array().with_context(|| format!("no result in {answer}"))?;
    let series = result.iter().map(|series| Series {
        labels: series["metric"].clone(),
        value: series["value"][1].as_str().unwrap_or_default().to_owned(),
    });
    Ok(series.collect())
}

/// Waits until a query has samples: a target counts as up a moment before a query finds its samples.
pub async fn samples(expression: &str) -> Result<Vec<Series>> {
    let query = async || query(expression).await;
    wait_until(&format!("samples of {expression}"), STORED, query, |series| !series.is_empty()).await
}

/// A target that Prometheus scrapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScrapeTarget {
    pub job: String,
    pub url: String,
    /// `up`, or the last error.
    pub health: String,
}

/// Returns the targets of all jobs.
pub async fn targets() -> Result<Vec<ScrapeTarget>> {
    let answer = get("/api/v1/targets?state=active").await?;
    let active = answer["data"]["activeTargets"].as_array();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let target = |target: &Value| ScrapeTarget {
        job: text(&target["labels"]["job"]),
        url: text(&target["scrapeUrl"]),
        health: match text(&target["lastError"]) {
            error if error.is_empty() => text(&target["health"]),
            error => error,
        },
    };
    Ok(active.with_context(|| format!("no targets in {answer}"))?.iter().map(target).collect())
}

async fn get(path: &str) -> Result<Value> {
    let (status, body) = client::http(client::connect(API).await?, "GET", path, "").await?;
    ensure!(status == 200, "Prometheus answered {status}: {body}");
    serde_json::from_str(&body).context("Prometheus' answer")
}

fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' => encoded.push(char::from(byte)),
            // Writing to a String cannot fail.
            other => write!(encoded, "%{other:02X}").unwrap_or_default(),
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use super::encoded;

    #[test]
    fn queries_are_encoded() {
        assert_eq!(encoded("up{job=\"a b\"}"), "up%7Bjob%3D%22a%20b%22%7D");
    }
}

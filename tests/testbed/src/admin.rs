//! The admin pages of a running program, and waits for what they show.
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::client;
use crate::metrics::Metrics;
use crate::netns::Namespace;
use crate::wait::wait_until;

/// The admin port of a server or agent.
#[derive(Debug, Clone)]
pub struct Admin<'a> {
    ns: &'a Namespace,
    address: SocketAddr,
}

impl<'a> Admin<'a> {
    pub(crate) const fn new(ns: &'a Namespace, address: SocketAddr) -> Self {
        Self { ns, address }
    }

    /// Gets an admin page: status and body.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let stream = client::connect_from(self.ns, self.address, client::PATIENCE).await;
        client::http(stream.context("connecting to the admin port")?, "GET", path, "").await
    }

    /// Waits until metrics, log, status and the kernel's maps show what has reached the program. A count of what goes through
    /// agent and server is complete once both have settled, the agent first.
    pub async fn settled(&self) -> Result<()> {
        let (status, body) = self.get("/debug/settled").await?;
        ensure!(status == 200, "/debug/settled answered {status}: {body}");
        Ok(())
    }

    pub async fn status(&self) -> Result<Value> {
        let (status, body) = self.get("/status").await?;
        ensure!(status == 200, "/status answered {status}: {body}");
        serde_json::from_str(&body).with_context(|| format!("/status is not JSON: {body}"))
    }

    pub async fn metrics(&self) -> Result<Metrics> {
        let (status, body) = self.get("/metrics").await?;
        ensure!(status == 200, "/metrics answered {status}: {body}");
        Metrics::parse(&body)
    }

    /// Returns a metric's present value, to compare a later one with. What a step has changed is waited for instead: a
    /// program counts after it has acted.
    ///
    /// # Errors
    /// As [`Metrics::sum`].
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        self.metrics().await?.sum(name, labels)
    }

    /// As [`Self::metric`], but 0 while no series has these labels yet.
    pub async fn metric_or_zero(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        self.metrics().await?.sum_or_zero(name, labels)
    }

    /// Waits until the metric has this value.
    pub async fn expect_metric(&self, name: &str, labels: &[(&str, &str)], expected: f64) -> Result<()> {
        // Whole numbers: exact below 2^53.
        let what = format!("{name}{labels:?} to be {expected}");
        self.wait_value(&what, client::PATIENCE, name, labels, |value| value == expected).await.map(drop)
    }

    /// Waits until the metric has a value that `accept` accepts, and returns it.
    pub async fn wait_metric(
        &self,
        name: &str,
        labels: &[(&str, &str)],
        accept: impl Fn(f64) -> bool,
    ) -> Result<f64> {
        self.wait_metric_for(client::PATIENCE, name, labels, accept).await
    }

    /// As [`Self::wait_metric`], with another limit.
    pub async fn wait_metric_for(
        &self,
        limit: Duration,
        name: &str,
        labels: &[(&str, &str)],
        accept: impl Fn(f64) -> bool,
    ) -> Result<f64> {
        self.wait_value(&format!("another value of {name}{labels:?}"), limit, name, labels, accept).await
    }

    async fn wait_value(
        &self,
        what: &str,
        limit: Duration,
        name: &str,
        labels: &[(&str, &str)],
        accept: impl Fn(f64) -> bool,
    ) -> Result<f64> {
        wait_until(what, limit, async || self.metric(name, labels).await, |value| accept(*value)).await
    }
}

//! The redirect's counters and state, read from the kernel at each scrape.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::running::Redirect;

/// Reads the counters of the kernel; the data path keeps no others.
#[derive(Debug)]
pub struct RedirectMetrics(pub Arc<Redirect>);

impl Collector for RedirectMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let health = self.0.health();
        let works = i64::from(health.problem.is_none());
        encode_gauge(
            &mut encoder,
            "redirect_verified",
            "1 if the last self-test of the redirect passed",
            works,
        )?;
        let help = "1 if the kernel holds the current routes and exclusions";
        encode_gauge(&mut encoder, "redirect_current", help, i64::from(health.stale.is_none()))?;
        let help =
            "1 if connections of pods, Services and other hosts are taken by route, 0 if pods' at connect()";
        encode_gauge(&mut encoder, "redirect_by_route", help, i64::from(self.0.by_route()))?;
        let help = "Excluded addresses for which the kernel's list has no room; they are direct all the same";
        let left_out = i64::try_from(self.0.left_out()).unwrap_or(i64::MAX);
        encode_gauge(&mut encoder, "redirect_exclusions_left_out", help, left_out)?;
        let help = "Times that something lost from the redirect was restored";
        let restored = encoder.encode_descriptor("redirect_mended", help, None, MetricType::Counter)?;
        ConstCounter::new(health.restored).encode(restored)?;
        let counters = match self.0.counters() {
            Ok(counters) => counters,
            Err(error) => {
                tracing::warn!(%error, "failed to read the counters of the redirect");
                return Ok(());
            }
        };
        let help = "What the BPF programs decided, by hook and outcome";
        let mut family = encoder.encode_descriptor("redirect_verdicts", help, None, MetricType::Counter)?;
        for (name, count) in counters {
            let (hook, outcome) = name.split_once('/').unwrap_or((name, ""));
            let labels = [("hook", hook), ("outcome", outcome)];
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn encode_gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: i64,
) -> Result<(), fmt::Error> {
    ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

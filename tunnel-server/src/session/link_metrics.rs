//! Metrics of the links with agents: percentiles, because a series for each of 100,000 nodes would be too much.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::{Link, Sessions};

/// Shares of the links that are at or below the value.
const QUANTILES: [(f64, &str); 5] =
    [(0.01, "0.01"), (0.1, "0.1"), (0.5, "0.5"), (0.9, "0.9"), (0.99, "0.99")];

/// Registers `links`, `link_rtt_seconds`, `link_delivery_rate_bytes`, `link_window_limited_ratio`,
/// `link_buffer_limited_ratio` and `link_retransmits`. `registry` has the prefix `postern`.
pub fn register_links(registry: &mut Registry, sessions: Arc<Sessions>) {
    registry.register_collector(Box::new(Collected(sessions)));
}

struct Collected(Arc<Sessions>);

impl fmt::Debug for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Collected")
    }
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let links: Vec<Arc<Link>> = self.0.linked().iter().flat_map(|session| session.links.all()).collect();
        let count = ConstGauge::new(i64::try_from(links.len()).unwrap_or(i64::MAX));
        let help = "TCP connections with agents: one of each, and more of those that are busy";
        count.encode(encoder.encode_descriptor("links", help, None, count.metric_type())?)?;

        let rtt = links.iter().filter_map(|link| Some(link.flow.rtt.last()?.as_secs_f64()));
        let help = "Round-trip time by PING that this share of the links has at most";
        quantiles(&mut encoder, "link_rtt", help, &Unit::Seconds, rtt.collect())?;

        // The rate is 0 until something was sent.
        let rates = links.iter().map(|link| link.flow.rate()).filter(|rate| *rate > 0);
        let help = "Bytes a second, measured by TCP when the server sent something last, that this share of the links has at most";
        quantiles(
            &mut encoder,
            "link_delivery_rate",
            help,
            &Unit::Bytes,
            rates.map(|rate| rate as f64).collect(),
        )?;

        let limits: Vec<_> = links.iter().filter_map(|link| link.flow.limits()).collect();
        let ratio = Unit::Other("ratio".to_owned());
        let help = "Share of the last 10 to 20 s of sending, with a full TCP receive window at the agent, that this share of the links has at most";
        let window = limits.iter().map(|limits| limits.receive_window);
        quantiles(&mut encoder, "link_window_limited", help, &ratio, window.collect())?;
        let help = "Share of the last 10 to 20 s of sending, with too small a TCP send buffer at the server, that this share of the links has at most";
        let buffer = limits.iter().map(|limits| limits.send_buffer);
        quantiles(&mut encoder, "link_buffer_limited", help, &ratio, buffer.collect())?;

        let retransmits = links.iter().map(|link| u64::from(link.flow.retransmits())).sum::<u64>();
        let retransmits = ConstGauge::new(i64::try_from(retransmits).unwrap_or(i64::MAX));
        let help = "TCP segments that the server has sent again on the links that are up";
        retransmits.encode(encoder.encode_descriptor(
            "link_retransmits",
            help,
            None,
            retransmits.metric_type(),
        )?)
    }
}

fn quantiles(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: &Unit,
    mut values: Vec<f64>,
) -> fmt::Result {
    values.sort_unstable_by(f64::total_cmp);
    let gauge = ConstGauge::new(0.0);
    let mut family = encoder.encode_descriptor(name, help, Some(unit), gauge.metric_type())?;
    for (share, label) in QUANTILES {
        let Some(value) = at(&values, share) else { continue };
        ConstGauge::new(value).encode(family.encode_family(&[("quantile", label)])?)?;
    }
    Ok(())
}

/// The smallest of the sorted values that at least this share of them does not exceed.
fn at(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_there() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(
            QUANTILES.map(|(share, _)| at(&values, share)),
            [2.0, 20.0, 100.0, 180.0, 198.0].map(Some)
        );
        assert_eq!(at(&[7.0], 0.01), Some(7.0));
        assert_eq!(at(&[], 0.5), None);
    }
}

//! Metrics of the links with agents: percentiles, because a series for each of 100,000 nodes would be too much.

use std::fmt;
use std::sync::Arc;

use prometheus_client::registry::{Registry, Unit};
use tunnel_runtime::gauges::{Gauges, register_gauges};

use super::{Link, Sessions};

/// Shares of the links that are at or below the value.
const QUANTILES: [(f64, &str); 5] =
    [(0.01, "0.01"), (0.1, "0.1"), (0.5, "0.5"), (0.9, "0.9"), (0.99, "0.99")];

/// Registers `links`, `link_rtt_seconds`, `link_delivery_rate_bytes`, `link_window_limited_ratio`,
/// `link_buffer_limited_ratio` and `link_retransmits`. `registry` has the prefix `postern`.
pub fn register_links(registry: &mut Registry, sessions: Arc<Sessions>) {
    register_gauges(registry, move |gauges| write(gauges, &sessions));
}

fn write(gauges: &mut Gauges<'_>, sessions: &Sessions) -> fmt::Result {
    let links: Vec<Arc<Link>> = sessions.linked().iter().flat_map(|session| session.links.all()).collect();
    let help = "TCP connections with agents: one of each, and more of those that are busy";
    gauges.count("links", help, None, links.len())?;

    let rtt = links.iter().filter_map(|link| Some(link.flow.rtt.last()?.as_secs_f64()));
    let help = "Round-trip time by PING that this share of the links has at most";
    quantiles(gauges, "link_rtt", help, &Unit::Seconds, rtt.collect())?;

    // The rate is 0 until something was sent.
    let rates = links.iter().map(|link| link.flow.rate()).filter(|rate| *rate > 0).map(|rate| rate as f64);
    let help = "Bytes a second, measured by TCP when the server sent something last, that this share of the links has at most";
    quantiles(gauges, "link_delivery_rate", help, &Unit::Bytes, rates.collect())?;

    let limits: Vec<_> = links.iter().filter_map(|link| link.flow.limits()).collect();
    let ratio = Unit::Other("ratio".to_owned());
    let help = "Share of the last 10 to 20 s of sending, with a full TCP receive window at the agent, that this share of the links has at most";
    let window = limits.iter().map(|limits| limits.receive_window);
    quantiles(gauges, "link_window_limited", help, &ratio, window.collect())?;
    let help = "Share of the last 10 to 20 s of sending, with too small a TCP send buffer at the server, that this share of the links has at most";
    let buffer = limits.iter().map(|limits| limits.send_buffer);
    quantiles(gauges, "link_buffer_limited", help, &ratio, buffer.collect())?;

    let retransmits = links.iter().map(|link| u64::from(link.flow.retransmits())).sum::<u64>();
    let help = "TCP segments that the server has sent again on the links that are up";
    gauges.count("link_retransmits", help, None, retransmits)
}

fn quantiles(
    gauges: &mut Gauges<'_>,
    name: &str,
    help: &str,
    unit: &Unit,
    mut values: Vec<f64>,
) -> fmt::Result {
    values.sort_unstable_by(f64::total_cmp);
    let quantiles = QUANTILES.into_iter().filter_map(|(share, label)| Some((label, at(&values, share)?)));
    gauges.by_label((name, help, Some(unit)), "quantile", quantiles)
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

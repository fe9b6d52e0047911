//! Registers metrics: those that are counted, and those that are read at each scrape.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Returns a new metric that the registry has too.
pub fn registered<M: Clone + Default + Metric>(
    registry: &mut Registry,
    name: impl Into<String>,
    help: impl Into<String>,
) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Registers the gauges and counters that `read` writes at each scrape.
pub fn register_gauges(
    registry: &mut Registry,
    read: impl Fn(&mut Gauges<'_>) -> fmt::Result + Send + Sync + 'static,
) {
    registry.register_collector(Box::new(Read(read)));
}

struct Read<F>(F);

impl<F> fmt::Debug for Read<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Read")
    }
}

impl<F: Fn(&mut Gauges<'_>) -> fmt::Result + Send + Sync + 'static> Collector for Read<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.0)(&mut Gauges(encoder))
    }
}

#[derive(Debug)]
pub struct Gauges<'a>(pub(crate) DescriptorEncoder<'a>);

impl Gauges<'_> {
    /// Writes a count. One that is too large is written as the largest.
    ///
    /// # Errors
    /// Fails if the output does.
    pub fn count(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        count: impl TryInto<i64>,
    ) -> fmt::Result {
        let gauge = ConstGauge::new(count.try_into().unwrap_or(i64::MAX));
        gauge.encode(self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?)
    }

    /// Writes a counter.
    ///
    /// # Errors
    /// Fails if the output does.
    pub fn counter(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        let descriptor = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(count).encode(descriptor)
    }

    /// Writes a counter for each set of labels.
    ///
    /// # Errors
    /// Fails if the output does.
    pub fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        counts: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, count) in counts {
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Writes a value for each value of a label.
    ///
    /// # Errors
    /// Fails if the output does.
    pub fn by_label<'v, N: EncodeGaugeValue>(
        &mut self,
        (name, help, unit): (&str, &str, Option<&Unit>),
        label: &str,
        values: impl IntoIterator<Item = (&'v str, N)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for (of, value) in values {
            ConstGauge::new(value).encode(family.encode_family(&[(label, of)])?)?;
        }
        Ok(())
    }
}

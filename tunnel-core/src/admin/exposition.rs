//! The metrics as text.

use std::fmt;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

/// <https://prometheus.io/docs/specs/om/open_metrics_spec/#protocol-negotiation>; decides which parser Prometheus uses.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics of a registry, as [`OPENMETRICS`].
///
/// # Errors
/// A collector fails.
pub fn exposition(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    encode(&mut text, registry)?;
    Ok(text)
}

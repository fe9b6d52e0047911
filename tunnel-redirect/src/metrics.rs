//! The redirect's counters and state, read from the kernel at each scrape.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tunnel_runtime::gauges::register_gauges;

use super::running::Redirect;

/// Registers the state and the counters of the kernel; the data path keeps no others. `registry` has the prefix
/// `postern`. A scrape waits for no change of the maps, which may take longer than the scraper waits.
pub fn register_redirect(registry: &mut Registry, redirect: Arc<Redirect>) {
    register_gauges(registry, move |gauges| {
        let health = redirect.health();
        let help = "1 if the last self-test of the redirect passed";
        gauges.count("redirect_verified", help, None, u8::from(health.problem.is_none()))?;
        let help = "1 if the kernel holds the current routes and exclusions";
        gauges.count("redirect_current", help, None, u8::from(health.stale.is_none()))?;
        let help =
            "1 if connections of pods, Services and other hosts are taken by route, 0 if pods' at connect()";
        gauges.count("redirect_by_route", help, None, u8::from(redirect.routed))?;
        let help = "Excluded addresses for which the kernel's list has no room; connects to them are still not redirected";
        gauges.count("redirect_exclusions_left_out", help, None, health.left_out)?;
        let help = "Times that something lost from the redirect was restored";
        gauges.counter("redirect_mended", help, health.restored)?;
        let counters = match redirect.counters() {
            Ok(counters) => counters,
            Err(error) => {
                tracing::warn!(%error, "failed to read the counters of the redirect");
                return Ok(());
            }
        };
        let labelled = counters.into_iter().map(|(name, count)| {
            let (hook, outcome) = name.split_once('/').unwrap_or((name, ""));
            ([("hook", hook), ("outcome", outcome)], count)
        });
        gauges.counters("redirect_verdicts", "What the BPF programs decided, by hook and outcome", labelled)
    });
}

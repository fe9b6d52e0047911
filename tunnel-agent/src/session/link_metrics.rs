//! Metrics of the links with each server.

use std::fmt;

use prometheus_client::registry::{Registry, Unit};
use tunnel_runtime::gauges::{Gauges, register_gauges};

use super::LinkStatus;

/// Registers `postern_agent_links` and `postern_agent_link_*`, labelled by server.
pub fn register_links(registry: &mut Registry, links: impl Fn() -> Vec<LinkStatus> + Send + Sync + 'static) {
    register_gauges(registry.sub_registry_with_prefix("postern_agent"), move |gauges| {
        write(gauges, &links())
    });
}

/// Returns a metric's value for one server, if there is one.
type Value = fn(&LinkStatus) -> Option<f64>;

fn write(gauges: &mut Gauges<'_>, servers: &[LinkStatus]) -> fmt::Result {
    if servers.is_empty() {
        return Ok(());
    }
    let metrics: [(&str, &str, Option<Unit>, Value); 6] = [
        ("links", "TCP connections with the server, up or under way", None, |link| Some(link.links as f64)),
        ("link_rtt", "Round-trip time by PING on the first link", Some(Unit::Seconds), |link| {
            link.rtt_ms.map(|rtt| rtt / 1e3)
        }),
        (
            "link_delivery_rate",
            "Bytes a second on the first link, measured by TCP when this agent sent something last",
            Some(Unit::Bytes),
            |link| Some(link.delivery_rate? as f64),
        ),
        (
            "link_window_limited",
            "Share of the last 10 to 20 s of sending on the first link with a full TCP receive window at the server",
            Some(Unit::Other("ratio".to_owned())),
            |link| link.window_limited,
        ),
        (
            "link_buffer_limited",
            "Share of the last 10 to 20 s of sending on the first link with too small a TCP send buffer at the agent",
            Some(Unit::Other("ratio".to_owned())),
            |link| link.buffer_limited,
        ),
        ("link_retransmits", "TCP segments that this agent has sent again on the first link", None, |link| {
            link.retransmits.map(f64::from)
        }),
    ];
    for (name, help, unit, value) in metrics {
        let values = servers.iter().filter_map(|server| Some((server.address.as_str(), value(server)?)));
        gauges.by_label((name, help, unit.as_ref()), "server", values)?;
    }
    Ok(())
}

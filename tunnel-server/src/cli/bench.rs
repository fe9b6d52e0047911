//! `tunnel-server bench NODE`.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use http::{Method, StatusCode};
use serde::Serialize;
use tunnel_link::link::limited_by;
use tunnel_runtime::NodeName;
use tunnel_runtime::admin::client::{ClientError, fetch, request};
use tunnel_runtime::admin::to_json;
use tunnel_runtime::output::{Output, print};
use tunnel_runtime::progress::Progress;

use super::running::AskArgs;
use crate::session::bench::BenchReport;
use crate::status::{LinkStatus, StatusReport};

/// Longer than the server takes at most.
const DEADLINE: Duration = Duration::from_secs(25);
/// Approximate payload of a TCP segment in bytes, precise enough for a share.
const SEGMENT: u64 = 1400;

#[derive(Args, Clone, Debug)]
pub struct BenchCommand {
    /// The edge node; its agent has to be attached to this server.
    #[arg(value_name = "NODE")]
    node: NodeName,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    ask: AskArgs,
}

impl BenchCommand {
    /// Measures and prints the result.
    ///
    /// # Errors
    /// If the server is not running or has no session with the node, or the agent refuses.
    pub async fn run(&self) -> anyhow::Result<()> {
        let node = &self.node;
        let address = self.ask.admin_address.ok_or(ClientError::Off)?;
        let links = async || -> anyhow::Result<Vec<LinkStatus>> {
            let status: StatusReport = fetch(address, "/status").await?;
            let node = status.nodes.into_iter().find(|status| status.name == *node);
            Ok(node.and_then(|node| node.session).map(|session| session.links).unwrap_or_default())
        };
        let progress = Progress::start("bench", format!("measuring the way to {node}"));
        let before = links().await?;
        let path = format!("/bench/{node}");
        let answer = request(DEADLINE, address, Method::POST, &path, bytes::Bytes::new()).await?;
        if answer.status != StatusCode::OK {
            anyhow::bail!("{}", answer.text().trim());
        }
        let report: BenchReport = serde_json::from_slice(&answer.body).context("the server's answer")?;
        let measured = Measured::new(report, &before, &links().await?);
        drop(progress);
        print(&self.output.output.show(&to_json(&measured), || measured.to_text())?)?;
        Ok(())
    }
}

#[derive(Serialize)]
struct Measured {
    #[serde(flatten)]
    report: BenchReport,
    links: usize,
    /// Segments that the server has retransmitted meanwhile, on the links that exist after the measurement.
    resent_segments: u32,
    /// Share of the segments to the node that were retransmitted: those lost, or taken for lost.
    loss: f64,
    window_limited: Option<f64>,
    buffer_limited: Option<f64>,
}

impl Measured {
    fn new(report: BenchReport, before: &[LinkStatus], after: &[LinkStatus]) -> Self {
        let count = |links: &[LinkStatus], number| {
            links.iter().find(|link| link.number == number).map_or(0, |link| link.retransmits)
        };
        let resent_segments: u32 =
            after.iter().map(|link| link.retransmits.saturating_sub(count(before, link.number))).sum();
        let most = |share: fn(&LinkStatus) -> Option<f64>| after.iter().filter_map(share).reduce(f64::max);
        let segments = (report.to_node_bytes / SEGMENT).max(1);
        Self {
            report,
            links: after.len(),
            resent_segments,
            loss: (f64::from(resent_segments) / segments as f64).min(1.0),
            window_limited: most(|link| link.window_limited),
            buffer_limited: most(|link| link.buffer_limited),
        }
    }

    fn to_text(&self) -> String {
        let report = &self.report;
        let mut times = report.rtt_ms.clone();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = times.len().saturating_sub(1);
            times.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
        };
        let mut text = format!("{}, {} links\n", report.node, self.links);
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "round trip  {:.1} ms ({:.1} to {:.1}, {} echoes)",
            at(0.5),
            at(0.0),
            at(1.0),
            times.len()
        );
        let _ = writeln!(text, "to node     {:.2} MB/s", report.to_node_mb_s);
        let _ = writeln!(text, "from node   {:.2} MB/s", report.from_node_mb_s);
        let (resent, loss) = (self.resent_segments, self.loss * 100.0);
        let _ = writeln!(text, "sent again  {resent} segments to the node ({loss:.2} %)");
        let limited = self.window_limited.zip(self.buffer_limited);
        let by = limited.and_then(|(window, buffer)| limited_by(window, buffer));
        let _ = writeln!(text, "limited by  {}", by.unwrap_or_else(|| "the path".to_owned()));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(number: u32, retransmits: u32, window_limited: Option<f64>) -> LinkStatus {
        LinkStatus {
            number,
            connections: 0,
            rtt_ms: None,
            delivery_rate: 0,
            retransmits,
            window_limited,
            buffer_limited: Some(0.01),
            window: 1 << 20,
        }
    }

    #[test]
    fn what_happened_meanwhile_is_told_from_what_was_before() {
        let report = BenchReport {
            node: "edge-1".to_owned(),
            rtt_ms: vec![30.0, 10.0, 20.0],
            to_node_mb_s: 7.0,
            from_node_mb_s: 5.5,
            to_node_bytes: 1_400_000,
            from_node_bytes: 1,
        };
        let measured =
            Measured::new(report, &[link(0, 100, None)], &[link(0, 105, Some(0.5)), link(1, 5, None)]);
        let text = measured.to_text();
        for line in [
            "edge-1, 2 links\n",
            "round trip  20.0 ms (10.0 to 30.0, 3 echoes)\n",
            "to node     7.00 MB/s\n",
            "sent again  10 segments to the node (1.00 %)\n",
            "limited by  window 50 %\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert_eq!(to_json(&measured)["loss"], 0.01);
    }
}

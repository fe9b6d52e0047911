//! `tunnel-server test NODE` and `test --all`.

use std::collections::BTreeSet;
use std::io::{self, Write as _};

use clap::Args;
use futures_util::{StreamExt as _, stream};
use serde_json::json;
use tunnel_doctor::{Checkup, Finding, Report, Running, Severity};
use tunnel_runtime::NodeName;
use tunnel_runtime::config::{report_error, value};
use tunnel_runtime::output::{Format, Output, print};
use tunnel_runtime::progress::Progress;
use tunnel_runtime::text::harmless;

use super::running::AskArgs;
use crate::config::Config;
use crate::doctor;
use crate::status::StatusReport;

/// Number of nodes that are tested at the same time.
const AT_ONCE: usize = 32;

#[derive(Args, Clone, Debug)]
pub struct TestCommand {
    /// The edge node.
    #[arg(value_name = "NODE", required_unless_present = "all")]
    node: Option<NodeName>,
    /// Test each edge node of the inventory: one line for each fault, and one with counts at the end.
    #[arg(long, conflicts_with = "node")]
    all: bool,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    ask: AskArgs,
    /// Ports to test, comma-separated; 10250 stands for the port that the Node names for its kubelet [default: all that the
    /// server tunnels but 10255].
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true, value_parser = value::ports)]
    port: BTreeSet<u16>,
}

impl TestCommand {
    /// Tests and prints the report. Returns the exit code: 0 fine, 1 warnings, 2 broken or no running server.
    ///
    /// # Errors
    /// If standard output fails.
    pub async fn run(&self) -> anyhow::Result<u8> {
        let ports: Vec<u16> = self.port.iter().copied().collect();
        let progress = Progress::start("test", "asking the running server");
        let asked = self.ask.configured().await;
        drop(progress);
        let reported = asked.map_err(|error| report_error("tunnel-server", error.as_ref()));
        let Ok((config, running)) = reported else { return Ok(2) };
        let Some(node) = &self.node else { return Ok(self.all(&config, &running, &ports).await?) };
        let report = doctor::test(Checkup::of("test"), &config, &running, node.as_str(), &ports).await;
        report.print(self.output.output)?;
        Ok(report.exit_code())
    }

    async fn all(&self, config: &Config, running: &Running<StatusReport>, ports: &[u16]) -> io::Result<u8> {
        let nodes =
            running.status.nodes.iter().filter(|node| node.in_inventory).map(|node| node.name.as_str());
        let nodes: Vec<&str> = nodes.collect();
        let test = async |name| (name, doctor::test(Checkup::silent(), config, running, name, ports).await);
        let mut tests = stream::iter(nodes.iter().copied()).map(test).buffer_unordered(AT_ONCE);
        let (mut counts, mut documents) = ([0_usize; 3], Vec::new());
        let is_text = self.output.output == Format::Text;
        while let Some((name, report)) = tests.next().await {
            counts[usize::from(report.exit_code())] += 1;
            if !is_text {
                documents.push(json!({ "node": name, "report": report }));
            } else if !print(&lines(name, &report))? {
                break;
            }
            let done = counts.iter().sum::<usize>();
            if done % 100 == 0 {
                // A closed stderr cannot be reported anywhere.
                let _ = writeln!(io::stderr(), "{done} of {} nodes tested", nodes.len());
            }
        }
        let [ok, warnings, broken] = counts;
        let counted = || {
            let hint = if ok < nodes.len() { "; `test NODE` says how to fix it" } else { "" };
            format!("{} nodes: {ok} ok, {warnings} with warnings, {broken} broken{hint}\n", nodes.len())
        };
        print(&self.output.output.show(&documents, counted)?)?;
        Ok(if broken > 0 { 2 } else { u8::from(warnings > 0) })
    }
}

/// Returns a line for each finding, with its severity, or one that says that there is none.
fn lines(node: &str, report: &Report) -> String {
    let node = harmless(node);
    let line = |finding: &Finding| {
        let state = match finding.severity {
            Severity::Warning => "WARNING",
            Severity::Broken => "BROKEN",
        };
        format!("{state:<8} {node}  {}: {}\n", finding.code, harmless(&finding.found))
    };
    let lines: String = report.findings().map(line).collect();
    if lines.is_empty() { format!("{:<8} {node}\n", "ok") } else { lines }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tunnel_doctor::{Outcome, codes};

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        test: TestCommand,
    }

    #[test]
    fn one_node_or_all_are_named() {
        let parsed = |args: &[&str]| Program::try_parse_from([&["test"], args].concat());
        assert!(parsed(&["edge-1"]).is_ok_and(|program| program.test.node.is_some()));
        assert!(parsed(&["--all"]).is_ok_and(|program| program.test.all));
        parsed(&[]).unwrap_err();
        parsed(&["--all", "edge-1"]).unwrap_err();
    }

    #[test]
    fn each_finding_of_a_node_has_its_line() {
        let report = |outcome: Outcome| {
            let mut checkup = Checkup::default();
            checkup.add("tunnel", outcome);
            checkup.report("tunnel-server", "1.0")
        };
        assert_eq!(lines("edge-1", &report(Outcome::fine("up"))), "ok       edge-1\n");
        let faults = vec![
            Finding::new(&codes::PORT_NOT_REACHED, "port 9100: \u{1b}", "start it"),
            Finding::new(&codes::NODE_WITHOUT_TUNNEL, "no agent", "start it"),
        ];
        let expected = "WARNING  edge-1  port-not-reached: port 9100: \u{fffd}\n\
                        BROKEN   edge-1  node-without-tunnel: no agent\n";
        assert_eq!(lines("edge-1", &report(Outcome::Faults(faults))), expected);
    }
}

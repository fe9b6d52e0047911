//! `tunnel-server status`.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde::de::DeserializeOwned;
use tunnel_runtime::NodeName;
use tunnel_runtime::admin::Show;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::output::{Format, print};

use super::running::AskArgs;
use crate::status::{ConnectionsReport, Shown, StatusReport, merged, summary};

#[derive(Args, Clone, Debug)]
pub struct StatusCommand {
    /// text, for humans; wide, with all columns of the nodes; json or yaml as the admin port has it.
    #[arg(short, long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    output: Format,
    #[command(flatten)]
    show: Show,
    /// Show every node, not only the first 50.
    #[arg(long)]
    all: bool,
    /// Show the connections that are relayed now instead, of NODE or of all nodes; 1,000 at most, first those whose receiver
    /// has taken nothing for longest.
    #[arg(long, value_name = "NODE", conflicts_with_all = ["all", "from"])]
    connections: Option<Option<NodeName>>,
    /// Show the versions of servers and agents and the nodes without a tunnel instead, a line each: for scripts.
    #[arg(long, conflicts_with_all = ["all", "connections", "output"])]
    summary: bool,
    /// Show what `status -o json` printed, instead of asking; of several servers, one after the other, as one table. `-` is
    /// standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    from: Option<PathBuf>,
    #[command(flatten)]
    ask: AskArgs,
}

impl StatusCommand {
    /// Prints the status once, or until Ctrl-C with `--watch`.
    ///
    /// # Errors
    /// As [`Show::run`], or if the file has no status.
    pub async fn run(&self) -> anyhow::Result<()> {
        if let Some(from) = &self.from {
            let text = read(from).with_context(|| format!("--from={}", from.display()))?;
            let shown = self.of_file(&text).with_context(|| format!("--from={}", from.display()))?;
            print(&shown)?;
            return Ok(());
        }
        if let Some(node) = &self.connections {
            let of_node = node.as_ref().map_or_else(String::new, |node| format!("?node={node}"));
            let path = format!("/connections{of_node}");
            let to_text = |report: ConnectionsReport| report.to_text();
            if self.output == Format::Wide {
                let reason = "connections have no further columns; text, json or yaml";
                return Err(ConfigError::new("--output", "wide", reason).into());
            }
            return Ok(self
                .show
                .run(self.output, "tunnel-server", self.ask.admin_address, &path, to_text)
                .await?);
        }
        let to_text = |report: StatusReport| {
            if self.summary { summary(&[report]) } else { report.to_text(self.shown()) }
        };
        Ok(self.show.run(self.output, "tunnel-server", self.ask.admin_address, "/status", to_text).await?)
    }

    fn of_file(&self, text: &str) -> anyhow::Result<String> {
        if matches!(self.output, Format::Json | Format::Yaml) {
            // Unchanged: a newer server may report more than this version knows.
            return Ok(self.output.show(&documents::<serde_json::Value>(text)?, String::new)?);
        }
        let reports: Vec<StatusReport> = documents(text)?;
        Ok(match reports.as_slice() {
            reports if self.summary => summary(reports),
            [report] => report.to_text(self.shown()),
            reports => merged(reports, self.shown()),
        })
    }

    fn shown(&self) -> Shown {
        Shown { all: self.all, wide: self.output == Format::Wide }
    }
}

/// Reads a file, or standard input if it is `-`.
pub(super) fn read(path: &Path) -> io::Result<String> {
    if path == Path::new("-") {
        return io::read_to_string(io::stdin());
    }
    std::fs::read_to_string(path)
}

/// Parses concatenated JSON documents.
fn documents<T: DeserializeOwned>(text: &str) -> anyhow::Result<Vec<T>> {
    let documents: Result<Vec<T>, _> = serde_json::Deserializer::from_str(text).into_iter().collect();
    let documents = documents.context("not what `status -o json` prints")?;
    anyhow::ensure!(!documents.is_empty(), "no status found");
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_follow_each_other() {
        assert_eq!(documents::<serde_json::Value>("{\"a\": 1}\n{\"a\": 2}\n\n").unwrap().len(), 2);
        let error = |text: &str| format!("{:#}", documents::<StatusReport>(text).unwrap_err());
        assert_eq!(error("\n"), "no status found");
        assert!(error("{}").contains("missing field"), "{}", error("{}"));
        assert!(error("Error from server").starts_with("not what `status -o json` prints: "));
    }
}

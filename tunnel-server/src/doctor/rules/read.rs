//! Gets the rules of this host.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::model::Ruleset;
use super::{iptables, nft};

const DEADLINE: Duration = Duration::from_secs(20);
/// Those of both back ends: a host may have rules in each.
const TOOLS: [(&str, &[&str], Parse); 5] = [
    ("iptables-save", &[], iptables::parse),
    ("ip6tables-save", &[], iptables::parse),
    ("iptables-legacy-save", &[], iptables::parse),
    ("ip6tables-legacy-save", &[], iptables::parse),
    ("nft", &["list", "ruleset"], nft::parse),
];

type Parse = fn(&str) -> Ruleset;

/// The rules, and what they were read with.
pub(crate) struct Rules {
    pub(crate) all: Vec<Ruleset>,
    pub(crate) with: Vec<String>,
}

/// Reads them with the host's tools, or from files with the tools' output.
///
/// # Errors
/// Why there are none to judge.
pub(crate) async fn read(files: &[PathBuf]) -> Result<Rules, String> {
    let mut rules = Rules { all: Vec::new(), with: Vec::new() };
    if !files.is_empty() {
        for file in files {
            let text =
                std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            rules.add(&file.display().to_string(), &text, parser_of(&text));
        }
        return Ok(rules);
    }
    let mut failed = Vec::new();
    for (tool, args, parse) in TOOLS {
        let mut command = Command::new(tool);
        command.args(args).stdin(Stdio::null()).kill_on_drop(true);
        match tokio::time::timeout(DEADLINE, command.output()).await {
            Ok(Ok(output)) if output.status.success() => {
                rules.add(tool, &String::from_utf8_lossy(&output.stdout), parse);
            }
            Ok(Ok(output)) => {
                let said = String::from_utf8_lossy(&output.stderr);
                failed.push(format!("{tool}: {}", said.lines().next().unwrap_or("failed")));
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Ok(Err(error)) => failed.push(format!("{tool}: {error}")),
            Err(_) => failed.push(format!("{tool}: no end within {} s", DEADLINE.as_secs())),
        }
    }
    if rules.with.is_empty() {
        if failed.is_empty() {
            failed.push("neither iptables-save nor nft is here".to_owned());
        }
        return Err(format!(
            "{}; on the host: `iptables-save > rules; nft list ruleset > nft-rules`, then `tunnel-server doctor --rules rules --rules nft-rules`",
            failed.join("; ")
        ));
    }
    Ok(rules)
}

fn parser_of(text: &str) -> Parse {
    let nft = text.lines().any(|line| line.starts_with("table "));
    if nft { nft::parse } else { iptables::parse }
}

impl Rules {
    fn add(&mut self, with: &str, text: &str, parse: Parse) {
        self.all.push(parse(text));
        self.with.push(with.to_owned());
    }

    /// The rules in a file's text.
    #[cfg(test)]
    pub(super) fn of(path: &std::path::Path, text: &str) -> Self {
        let mut rules = Self { all: Vec::new(), with: Vec::new() };
        rules.add(&path.display().to_string(), text, parser_of(text));
        rules
    }
}

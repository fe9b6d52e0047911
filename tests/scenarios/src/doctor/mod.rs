//! `doctor` and `test` of the real programs: each fault is put in and must be found under its code (`faults.rs`).

pub(crate) mod agent;
pub(crate) mod bench;
pub(crate) mod bundle;
pub(crate) mod faults;
pub(crate) mod firewall;
pub(crate) mod node;
pub(crate) mod server;

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Output of `doctor -o json`.
#[derive(Debug)]
pub(crate) struct Said {
    report: Value,
    exit: i32,
}

/// Runs a command that prints a report.
pub(crate) async fn run(mut command: Command) -> Result<Said> {
    // The target of a check may be in this process.
    let output =
        tokio::task::spawn_blocking(move || command.output()).await?.context("running the command")?;
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&out).with_context(|| format!("no report: {out}{error}"))?;
    let exit = output.status.code().context("killed")?;
    let expected = match report["result"].as_str() {
        Some("ok") => 0,
        Some("warning") => 1,
        _ => 2,
    };
    ensure!(exit == expected, "exit code {exit} with {report:#}");
    for finding in findings(&report) {
        for key in ["found", "meaning", "fix"] {
            ensure!(finding[key].as_str().is_some_and(|text| text.len() > 3), "no {key}: {finding}");
        }
        let (docs, code) = (finding["docs"].as_str(), finding["code"].as_str().unwrap_or_default());
        let page = docs.and_then(|docs| docs.strip_suffix(&format!("#{code}")));
        ensure!(
            page.is_some_and(
                |url| url.starts_with("https://") && url.ends_with("/operate/troubleshooting.html")
            ),
            "{finding}"
        );
    }
    Ok(Said { report, exit })
}

fn findings(report: &Value) -> impl Iterator<Item = &Value> {
    let checks = report["checks"].as_array().into_iter().flatten();
    checks.flat_map(|check| check["findings"].as_array().into_iter().flatten())
}

impl Said {
    fn codes(&self) -> Vec<&str> {
        findings(&self.report).filter_map(|finding| finding["code"].as_str()).collect()
    }

    pub(crate) fn has(&self, code: &'static str) -> bool {
        let found = self.codes().contains(&code);
        if found {
            faults::found(code);
        }
        found
    }

    /// Fails unless the report has this code and its text contains `text`.
    pub(crate) fn expect(&self, code: &'static str, text: &str) -> Result<()> {
        let found = |finding: &&Value| finding["found"].as_str().is_some_and(|found| found.contains(text));
        let mut of_code = findings(&self.report).filter(|finding| finding["code"] == code);
        ensure!(of_code.any(|finding| found(&finding)), "no {code} with {text:?}: {:#}", self.report);
        faults::found(code);
        Ok(())
    }

    fn expect_only(&self, codes: &[&'static str]) -> Result<()> {
        ensure!(self.codes() == codes, "not {codes:?}: {:#}", self.report);
        codes.iter().copied().for_each(faults::found);
        Ok(())
    }

    fn state(&self, name: &str) -> Result<&str> {
        let mut checks = self.report["checks"].as_array().into_iter().flatten();
        let check = checks.find(|check| check["name"] == name);
        check
            .and_then(|check| check["state"].as_str())
            .with_context(|| format!("no check {name}: {:#}", self.report))
    }
}

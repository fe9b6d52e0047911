//! systemd's units, and the logs of their programs.
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::wait::wait_until;
use tokio::process::Command;
use tokio::time::timeout;

/// Maximum time of systemd and the programs for a step, where the processor is emulated too.
pub(crate) const LONG: Duration = Duration::from_secs(120);
/// Maximum time of one command: systemd waits 75 s for a program that does not stop.
const COMMAND: Duration = Duration::from_secs(150);

/// Runs a command to its end; returns its output.
pub(crate) async fn output(mut command: Command) -> Result<String> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let shown = format!("{:?}", command.as_std());
    let output = timeout(COMMAND, command.output());
    let output = output.await.with_context(|| format!("{shown} took more than {COMMAND:?}"))?;
    let output = output.with_context(|| format!("running {shown}"))?;
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{shown} ended with {}: {said}{errors}", output.status);
    Ok(said.into_owned())
}

pub(crate) async fn systemctl(args: &[&str]) -> Result<String> {
    let mut command = Command::new("systemctl");
    command.args(args);
    output(command).await
}

/// A property of a unit, as systemd has it.
pub(crate) async fn property(unit: &str, name: &str) -> Result<String> {
    let value = systemctl(&["show", "--value", "--property", name, unit]).await?;
    Ok(value.trim().to_owned())
}

/// Fails unless the unit is in that state: `failed` is one of its own.
pub(crate) async fn expect_state(unit: &str, expected: &str) -> Result<()> {
    let state = property(unit, "ActiveState").await?;
    ensure!(state == expected, "{unit} is {state}, expected {expected}");
    Ok(())
}

pub(crate) async fn wait_state(unit: &str, expected: &str) -> Result<()> {
    let what = format!("{unit} to be {expected}");
    let state = async || property(unit, "ActiveState").await;
    wait_until(&what, LONG, state, |state| state == expected).await.map(drop)
}

/// Waits until the unit's part of the journal contains this.
pub(crate) async fn wait_logged(unit: &str, text: &str) -> Result<()> {
    let what = format!("the journal of {unit} to contain {text:?}");
    let journal = async || {
        let mut command = Command::new("journalctl");
        command.args(["--no-pager", "--output=cat", "--unit", unit]);
        output(command).await
    };
    wait_until(&what, LONG, journal, |journal| journal.contains(text)).await.map(drop)
}

/// The process of an active unit.
pub(crate) async fn main_pid(unit: &str) -> Result<u32> {
    let pid = property(unit, "MainPID").await?;
    pid.parse::<u32>().ok().filter(|pid| *pid > 0).with_context(|| format!("{unit} has the process {pid:?}"))
}

//! Runs programs of the host to collect facts.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

const DEADLINE: Duration = Duration::from_secs(20);

/// Runs a program and returns what it prints.
///
/// # Errors
/// Fails if the program does not exist ([`io::ErrorKind::NotFound`]), fails (with its first line of errors), or takes
/// too long.
pub async fn tool_output(program: &str, args: &[&str]) -> io::Result<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let slow = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no end within {} s", DEADLINE.as_secs()));
    let output = timeout(DEADLINE, command.output()).await.map_err(slow)??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(said.lines().next().unwrap_or("failed").to_owned()))
}

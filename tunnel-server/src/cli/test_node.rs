//! `tunnel-server test NODE`.

use std::collections::BTreeSet;

use clap::Args;
use tunnel_doctor::DoctorOutput;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::value;

use super::running::AskArgs;
use crate::doctor;

#[derive(Args, Clone, Debug)]
pub struct TestCommand {
    /// The edge node.
    #[arg(value_name = "NODE")]
    node: NodeName,
    #[command(flatten)]
    output: DoctorOutput,
    #[command(flatten)]
    ask: AskArgs,
    /// Ports to test, comma-separated [default: all that the server tunnels].
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true, value_parser = value::ports)]
    port: BTreeSet<u16>,
}

impl TestCommand {
    /// Tests and prints the report. Returns the exit code: 0 fine, 1 warnings, 2 broken.
    ///
    /// # Errors
    /// If the server is not running, or standard output fails.
    pub async fn run(&self) -> anyhow::Result<u8> {
        let ports: Vec<u16> = self.port.iter().copied().collect();
        let (config, running) = self.ask.configured().await?;
        let report = doctor::test(&config, &running, self.node.as_str(), &ports).await;
        self.output.print(&report)?;
        Ok(report.exit_code())
    }
}

//! `tunnel-server status`.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tunnel_core::admin::client::{ClientError, fetch};
use tunnel_core::config::{parse_loopback_door, report_error};

use crate::config::DEFAULT_ADMIN_ADDRESS;
use crate::status::StatusReport;

/// Between two looks with `--watch`.
const INTERVAL: Duration = Duration::from_secs(2);

/// Which server, and how to show it.
#[derive(Args, Clone, Debug)]
pub struct StatusCommand {
    /// text, or json as `/status` has it.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Output,
    /// Show it again every 2 s until Ctrl-C.
    #[arg(short, long)]
    watch: bool,
    /// Show every node, not only the first 50 after those with problems.
    #[arg(long)]
    all: bool,
    /// The running server's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = DEFAULT_ADMIN_ADDRESS)]
    admin_address: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

impl StatusCommand {
    /// Prints once, or until Ctrl-C with `--watch`.
    ///
    /// # Errors
    /// A bad `--admin-address`; without `--watch`, also no answer there.
    pub async fn run(&self) -> anyhow::Result<()> {
        let Some(address) = parse_loopback_door("--admin-address", &self.admin_address)? else {
            anyhow::bail!(
                "--admin-address={}: port 0 means that the server has no admin endpoints",
                self.admin_address
            );
        };
        if !self.watch {
            print(&self.look(address).await?)?;
            return Ok(());
        }
        // Before the first look: from here on Ctrl-C is a normal end, also while an answer is awaited.
        let mut interrupt = signal(SignalKind::interrupt()).context("installing the handler of SIGINT")?;
        let watch = async {
            loop {
                match self.look(address).await {
                    Ok(text) if print(&text)? => {}
                    Ok(_) => return Ok(()),
                    // It may come back, as during an upgrade.
                    Err(error) => {
                        report_error("tunnel-server", &error);
                    }
                }
                tokio::time::sleep(INTERVAL).await;
            }
        };
        tokio::select! {
            biased;
            _ = interrupt.recv() => Ok(()),
            done = watch => done,
        }
    }

    async fn look(&self, address: SocketAddr) -> Result<String, ClientError> {
        match self.output {
            Output::Json => {
                // Passed on as it is: a newer server may say more than this version knows.
                let status: serde_json::Value = fetch(address, "/status").await?;
                Ok(format!("{status:#}\n"))
            }
            Output::Text => {
                let mut text = fetch::<StatusReport>(address, "/status").await?.to_text(self.all);
                if self.watch {
                    text.push('\n');
                }
                Ok(text)
            }
        }
    }
}

/// False when nobody reads any more, as behind `| head`.
fn print(text: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

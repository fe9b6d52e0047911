//! The `status` command of both programs: prints the admin endpoints' answer, once or repeatedly.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use serde::de::DeserializeOwned;
use tokio::signal::unix::{SignalKind, signal};

use super::client::{ClientError, fetch};
use crate::config::report_error;
use crate::config::value::ListenAddress;
use crate::output::{Format, print};

/// Pause between two requests under `--watch`.
const INTERVAL: Duration = Duration::from_secs(2);

/// Flags for the output of `status`.
#[derive(Args, Clone, Debug)]
pub struct Show {
    /// text, or json as the admin port has it.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
    /// Show it again every 2 s until Ctrl-C.
    #[arg(short, long)]
    watch: bool,
}

/// Reason for not being able to show the status.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    /// No answer, or an unknown one.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Standard output or the SIGINT handler failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Show {
    /// True if JSON is requested.
    pub fn is_json(&self) -> bool {
        self.output == Format::Json
    }

    /// Prints the document at `path` of the `program` that has this `--admin-address`, formatted by `to_text`. With
    /// `--watch` it repeats until Ctrl-C.
    ///
    /// # Errors
    /// Fails if the program has no admin endpoints, if standard output fails or, without `--watch`, if there is no
    /// answer.
    pub async fn run<T: DeserializeOwned>(
        &self,
        program: &str,
        admin_address: ListenAddress,
        path: &str,
        to_text: impl Fn(T) -> String,
    ) -> Result<(), ShowError> {
        let address = admin_address.ok_or(ClientError::Off)?;
        if !self.watch {
            print(&self.fetch_text(address, path, &to_text).await?)?;
            return Ok(());
        }
        // Install the handler before the first request: Ctrl-C is a normal end even while waiting for an answer.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let watch = async {
            loop {
                match self.fetch_text(address, path, &to_text).await {
                    Ok(text) if print(&text)? => {}
                    Ok(_) => return Ok(()),
                    // It may come back, as during an upgrade.
                    Err(error) => {
                        report_error(program, &error);
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

    async fn fetch_text<T: DeserializeOwned>(
        &self,
        address: SocketAddr,
        path: &str,
        to_text: impl Fn(T) -> String,
    ) -> Result<String, ClientError> {
        let mut shown = match self.output {
            // Print unparsed JSON: a newer program may report more than this version knows.
            Format::Json => format!("{:#}\n", fetch::<serde_json::Value>(address, path).await?),
            Format::Text => to_text(fetch(address, path).await?),
        };
        if self.watch && self.output == Format::Text {
            shown.push('\n');
        }
        Ok(shown)
    }
}

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
use crate::progress::Progress;

/// Pause between two requests under `--watch`.
const INTERVAL: Duration = Duration::from_secs(2);

/// Flag for the output of `status`.
#[derive(Args, Clone, Debug)]
pub struct Show {
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
    /// Prints the document at `path` of the `program` that has this `--admin-address`, with `to_text` as its text.
    /// With `--watch` it repeats until Ctrl-C.
    ///
    /// # Errors
    /// Fails if the program has no admin endpoints, if standard output fails or, without `--watch`, if there is no
    /// answer.
    pub async fn run<T: DeserializeOwned>(
        &self,
        format: Format,
        program: &str,
        admin_address: ListenAddress,
        path: &str,
        to_text: impl Fn(T) -> String,
    ) -> Result<(), ShowError> {
        let address = admin_address.ok_or(ClientError::Off)?;
        if !self.watch {
            print(&self.fetch_text(format, address, path, &to_text).await?)?;
            return Ok(());
        }
        // Install the handler before the first request: Ctrl-C is a normal end even while waiting for an answer.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let watch = async {
            loop {
                match self.fetch_text(format, address, path, &to_text).await {
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
        format: Format,
        address: SocketAddr,
        path: &str,
        to_text: impl Fn(T) -> String,
    ) -> Result<String, ShowError> {
        let _progress = Progress::start("status", format!("asking {address}"));
        let mut shown = match format {
            Format::Text | Format::Wide => to_text(fetch(address, path).await?),
            // Print the document unparsed: a newer program may report more than this version knows.
            _ => format.show(&fetch::<serde_json::Value>(address, path).await?, String::new)?,
        };
        if self.watch {
            match format {
                Format::Text | Format::Wide => shown.push('\n'),
                Format::Yaml => shown.insert_str(0, "---\n"),
                Format::Json => {}
            }
        }
        Ok(shown)
    }
}

//! The `status` command of both programs: shows what the admin endpoints answer, once or repeatedly.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;
use tokio::signal::unix::{SignalKind, signal};

use super::client::{ClientError, fetch};
use crate::config::{ConfigError, parse_loopback_door, report_error};

/// Pause between two requests with `--watch`.
const INTERVAL: Duration = Duration::from_secs(2);

/// How `status` shows its answer.
#[derive(Args, Clone, Debug)]
pub struct Show {
    /// text, or json as the admin port has it.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Output,
    /// Show it again every 2 s until Ctrl-C.
    #[arg(short, long)]
    watch: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// Why the status cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    /// A bad `--admin-address`.
    #[error("{0}")]
    Config(#[source] ConfigError),
    /// An `--admin-address` with port 0.
    #[error("--admin-address={address}: port 0 means that {program} has no admin endpoints")]
    Off { program: String, address: String },
    /// No answer, or none that is understood.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Standard output, or the handler of SIGINT, failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Show {
    /// Whether JSON is wanted.
    pub fn is_json(&self) -> bool {
        self.output == Output::Json
    }

    /// Prints what is at `path` of the `program` whose `--admin-address` this is, formatted by `to_text`; until Ctrl-C with
    /// `--watch`.
    ///
    /// # Errors
    /// The address is no loopback address and port, standard output fails, or, without `--watch`, there is no answer.
    pub async fn run<T: DeserializeOwned>(
        &self,
        program: &str,
        admin_address: &str,
        path: &str,
        to_text: impl Fn(T) -> String,
    ) -> Result<(), ShowError> {
        let parsed = parse_loopback_door("--admin-address", admin_address).map_err(ShowError::Config)?;
        let Some(address) = parsed else {
            return Err(ShowError::Off { program: program.to_owned(), address: admin_address.to_owned() });
        };
        if !self.watch {
            print(&self.fetch_text(address, path, &to_text).await?)?;
            return Ok(());
        }
        // Before the first request: Ctrl-C is a normal end even while an answer is awaited.
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
            // Printed unparsed: a newer program may report more than this version knows.
            Output::Json => format!("{:#}\n", fetch::<serde_json::Value>(address, path).await?),
            Output::Text => to_text(fetch(address, path).await?),
        };
        if self.watch && self.output == Output::Text {
            shown.push('\n');
        }
        Ok(shown)
    }
}

/// False when standard output is closed, as with `| head`.
fn print(text: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

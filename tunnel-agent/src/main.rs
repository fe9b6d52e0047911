//! The program `tunnel-agent`: see `--help`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory as _;
use tunnel_agent::app;
use tunnel_agent::cli::{Cli, Command, SERVICE, SHORT_HELP};
use tunnel_runtime::config::{exit, parse_command_line, report_error, shell_line};
use tunnel_runtime::lifecycle::{Shutdown, block_on, forbid_core_dumps};
use tunnel_runtime::logging;
use tunnel_runtime::memory::reuse_freed;

/// musl's own allocator maps and unmaps every large buffer, which doubles the CPU time of bulk transfers.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    reuse_freed();
    let (cli, flags) = match parse_command_line::<Cli>(SHORT_HELP) {
        Ok(parsed) => parsed,
        Err(code) => return code,
    };
    if let Err(error) = forbid_core_dumps() {
        return ExitCode::from(report_error("tunnel-agent", &error));
    }
    // One thread is enough for an edge node's connections, and leaves the other CPUs to the workload.
    match block_on(command(cli, flags)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(report_error("tunnel-agent", error.as_ref())),
    }
}

/// Returns the exit code.
async fn command(cli: Cli, flags: Vec<String>) -> anyhow::Result<u8> {
    match cli.command {
        Some(Command::Status(command)) => command.run().await?,
        Some(Command::Bundle(command)) => command.run().await?,
        Some(Command::Doctor(command)) => return Ok(command.run().await?),
        Some(Command::Service(command)) => {
            command.run(&SERVICE, |cli: Cli| cli.run.config(Vec::new()).map(drop))?;
        }
        Some(Command::Completion(command)) => command.run(Cli::command())?,
        None => {
            let config = cli.run.config(flags)?;
            let (log, _written) = logging::init(config.given.log)?;
            tracing::info!(
                version = env!("CARGO_PKG_VERSION"),
                flags = shell_line(&config.flags),
                "tunnel-agent starts"
            );
            config.ignored.warn();
            let shutdown = Shutdown::on_signals().context("installing the signal handlers")?;
            app::run(config, log, shutdown).await?;
        }
    }
    Ok(exit::OK)
}

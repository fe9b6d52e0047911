//! `tunnel-agent`: see `--help`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use tunnel_agent::app;
use tunnel_agent::config::{Cli, Command, Config};
use tunnel_core::config::{exit, parse_command_line, report_error, shell_line};
use tunnel_core::lifecycle::Shutdown;
use tunnel_core::logging;

/// musl's own allocator maps and unmaps every large buffer: bulk transfers then take twice the CPU time.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What still runs on other threads at the end, such as a name that is being looked up, is not waited for longer.
const LEFT_OVER: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = match parse_command_line::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match run(cli) {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => ExitCode::from(report_error("tunnel-agent", error.as_ref())),
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    // One thread is enough for an edge node's connections, and leaves the rest to the workload.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("making the runtime")?;
    let result = runtime.block_on(command(cli));
    runtime.shutdown_timeout(LEFT_OVER);
    result
}

async fn command(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Some(Command::Status(command)) => command.run().await,
        None => {
            let config = Config::new(&cli.run)?;
            let log = logging::init(config.log_format, config.log_level)?;
            tracing::info!(
                version = env!("CARGO_PKG_VERSION"),
                flags = shell_line(&config.flags()),
                "tunnel-agent starts"
            );
            for (flag, why) in &config.ignored {
                tracing::warn!(flag, "this flag of YurtTunnel's is ignored: {why}");
            }
            let shutdown = Shutdown::on_signals().context("installing the signal handlers")?;
            app::run(config, log, shutdown).await
        }
    }
}

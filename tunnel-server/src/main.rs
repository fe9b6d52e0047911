//! `tunnel-server`: see `--help`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory as _;
use tunnel_runtime::config::{exit, parse_command_line, report_error, shell_line};
use tunnel_runtime::lifecycle::{Shutdown, block_on, forbid_core_dumps};
use tunnel_runtime::logging;
use tunnel_runtime::memory::reuse_freed;
use tunnel_server::app;
use tunnel_server::cli::{Cli, Command, SERVICE, SHORT_HELP, redact};
use tunnel_server::config::Config;

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
        return ExitCode::from(report_error("tunnel-server", &error));
    }
    let done = match cli.command {
        None => cli.run.check(flags).map_err(Into::into).and_then(run),
        Some(Command::Redirector(redirector)) => redirector.config(flags).map_err(Into::into).and_then(run),
        Some(Command::Status(command)) => block_on(command.run()),
        Some(Command::Doctor(command)) => return ended(block_on(async { Ok(command.run().await?) })),
        Some(Command::Test(command)) => return ended(block_on(command.run())),
        Some(Command::Bench(command)) => block_on(command.run()),
        Some(Command::Bundle(command)) => block_on(async { Ok(command.run().await?) }),
        Some(Command::Redact) => redact().map_err(Into::into),
        Some(Command::Cleanup(command)) => command.run(),
        Some(Command::Token(command)) => command.run().map_err(Into::into),
        Some(Command::Agent(command)) => block_on(command.run()),
        Some(Command::Import(command)) => command.run().map_err(Into::into),
        Some(Command::Policy(command)) => command.run().map_err(Into::into),
        Some(Command::Ca(command)) => block_on(command.run()),
        Some(Command::Service(command)) => {
            command.run(&SERVICE, |cli: Cli| cli.run.check(Vec::new()).map(drop)).map_err(Into::into)
        }
        Some(Command::Completion(command)) => command.run(Cli::command()).map_err(Into::into),
    };
    ended(done.map(|()| exit::OK))
}

fn ended(done: anyhow::Result<u8>) -> ExitCode {
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(report_error("tunnel-server", error.as_ref())),
    }
}

fn run(config: Config) -> anyhow::Result<()> {
    // Before the thread that writes the log: each thread has capabilities of its own.
    let given_up = tunnel_redirect::give_up_capabilities(config.redirect_start().as_ref());
    let (log, _written) = logging::init(config.log)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        flags = shell_line(&config.flags),
        "starting tunnel-server"
    );
    match given_up {
        Ok(capabilities) => tracing::debug!(?capabilities, "gave up capabilities that are not needed"),
        Err(error) => tracing::warn!(%error, "failed to give up capabilities"),
    }
    config.ignored.warn();
    // The data path has threads of its own; this one accepts connections and runs everything else.
    block_on(async {
        let shutdown = Shutdown::on_signals().context("installing the signal handlers")?;
        app::build(config, log).await?.run(shutdown).await
    })
}

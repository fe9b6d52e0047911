//! Flags of both programs: each part's flags are a clap `Args` struct, whose fields use the parsers of [`value`].

mod command_line;
mod error;
mod ignored;
mod target;
pub mod value;

pub(crate) use command_line::reason_of;
pub use command_line::{ConfigFile, parse};
pub use error::{BindError, ConfigError, pair};
pub use ignored::Ignored;
pub use target::{PortSet, TargetNet, TargetRule};
pub use value::HostPort;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::error::{causes, chain};

/// Maximum time for which the end of the process waits for its last line to be written.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// Exit codes of both programs.
pub mod exit {
    /// Finished, or stopped on request.
    pub const OK: u8 = 0;
    /// Failed while running.
    pub const FAILED: u8 = 1;
    /// Invalid configuration (`EX_USAGE` of BSD's sysexits).
    pub const CONFIG: u8 = 64;
}

/// Returns this host's name (uname(2)'s nodename) in lower case, as Kubernetes names nodes.
///
/// # Errors
/// Fails if `/proc` cannot be read.
pub fn host_name() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_lowercase())
}

/// Formats flags as a shell command line, for the log.
pub fn shell_line(flags: &[String]) -> String {
    let plain = |flag: &str| flag.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=.,:/[]@%+*".contains(&b));
    let quoted = flags
        .iter()
        .map(|flag| if plain(flag) { flag.clone() } else { format!("'{}'", flag.replace('\'', "'\\''")) });
    quoted.collect::<Vec<_>>().join(" ")
}

/// Formats a duration in the form that [`value::duration`] parses.
pub fn duration_text(duration: std::time::Duration) -> String {
    if duration.subsec_nanos() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}

/// Parses this process's command line with [`parse`]. On failure, and for `--help` and `--version`, prints clap's
/// message.
///
/// # Errors
/// Returns the exit code: [`exit::OK`] for `--help` and `--version`, [`exit::CONFIG`] for a failure.
pub fn parse_command_line<T: clap::Parser>(short_help: &str) -> Result<(T, Vec<String>), ExitCode> {
    parse(std::env::args_os(), short_help).map_err(|error| ExitCode::from(report_clap_error(&error)))
}

/// Prints clap's message and returns its exit code.
pub fn report_clap_error(error: &clap::Error) -> u8 {
    // If standard output or error is closed, there is no place to report that.
    drop(error.print());
    if error.use_stderr() { exit::CONFIG } else { exit::OK }
}

/// Prints an error and its causes on one line, unless standard error is a pipe that stays full. Returns the exit code:
/// [`exit::CONFIG`] if a cause is a [`ConfigError`], else [`exit::FAILED`].
pub fn report_error(program: &str, error: &(dyn std::error::Error + 'static)) -> u8 {
    let line = format!("{program}: {}\n", chain(error));
    let (written, done) = mpsc::channel();
    let writer = thread::Builder::new().spawn(move || {
        // There is no place to report a failure.
        io::stderr().write_all(line.as_bytes()).ok();
        written.send(()).ok();
    });
    if writer.is_ok() {
        done.recv_timeout(LAST_WRITE).ok();
    }
    if causes(error).any(|cause| cause.is::<ConfigError>()) { exit::CONFIG } else { exit::FAILED }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_key_value_and_reason() {
        assert_eq!(
            ConfigError::new("--agent-port", "70000", "not a port").to_string(),
            "--agent-port=70000: not a port"
        );
        assert_eq!(ConfigError::without_value("--server", "is needed").to_string(), "--server: is needed");
        let address = "127.0.0.1:10265".parse().unwrap();
        assert_eq!(
            BindError::new("--admin-address", address, io::ErrorKind::AddrInUse.into()).to_string(),
            "--admin-address: cannot listen on 127.0.0.1:10265: address in use: another process listens there; \
             stop it or choose another port"
        );
    }

    #[test]
    fn flags_are_quoted_for_a_shell() {
        let flags = ["--a=b,c".to_owned(), "--d=e || f".to_owned(), "--g=it's".to_owned()];
        assert_eq!(shell_line(&flags), r"--a=b,c '--d=e || f' '--g=it'\''s'");
    }

    #[test]
    fn the_exit_code_follows_the_root_cause() {
        #[derive(Debug, thiserror::Error)]
        #[error("starting")]
        struct Outer(#[source] ConfigError);

        assert_eq!(report_error("test", &Outer(ConfigError::new("--x", "1", "bad"))), exit::CONFIG);
        assert_eq!(report_error("test", &io::Error::other("gone")), exit::FAILED);
    }
}

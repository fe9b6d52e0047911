//! What both binaries need to turn flags into typed values: errors that name key, value and reason, and the parsers.
//!
//! Flags reach the parsers as text, so that every error has the one form of [`ConfigError`].

mod parse;
mod target;

pub use parse::{
    HostPort, parse_address, parse_cidr, parse_cidrs, parse_door, parse_duration, parse_ip, parse_ips,
    parse_loopback_door, parse_port, parse_ports, parse_with,
};
pub use target::{PortSet, TargetNet, TargetRule, parse_target_rules};

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;

/// Exit codes of both binaries.
pub mod exit {
    /// Done, or stopped as asked.
    pub const OK: u8 = 0;
    /// Failed while running.
    pub const FAILED: u8 = 1;
    /// Bad configuration (`EX_USAGE` of BSD's sysexits).
    pub const CONFIG: u8 = 64;
}

/// A flag, environment variable or key with a value that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}{}: {reason}", .value.as_deref().map(|v| format!("={v}")).unwrap_or_default())]
pub struct ConfigError {
    /// As the user writes it, such as `--agent-port` or `$NODE_IP`.
    pub key: String,
    /// None when it is the absence that is wrong.
    pub value: Option<String>,
    pub reason: String,
}

impl ConfigError {
    pub fn new(key: impl Into<String>, value: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), value: Some(value.into()), reason: reason.into() }
    }

    /// For a key that is missing, or whose value must not be printed.
    pub fn without_value(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), value: None, reason: reason.into() }
    }
}

/// An address that could not be listened on. Not a [`ConfigError`]: the same flags may work a minute later.
#[derive(Debug, thiserror::Error)]
#[error("{key}: cannot listen on {address}: {}", bind_reason(.source))]
pub struct BindError {
    /// The flag that gives the address.
    pub key: &'static str,
    pub address: SocketAddr,
    pub source: io::Error,
}

impl BindError {
    pub fn new(key: &'static str, address: SocketAddr, source: io::Error) -> Self {
        Self { key, address, source }
    }
}

/// This host's name (uname(2)'s nodename) in lower case, as Kubernetes names nodes.
///
/// # Errors
/// When `/proc` does not tell.
pub fn host_name() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_lowercase())
}

/// Flags as a command line that a shell would take, for the log.
pub fn shell_line(flags: &[String]) -> String {
    let plain = |flag: &str| flag.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=.,:/[]@%+*".contains(&b));
    let quoted = flags
        .iter()
        .map(|flag| if plain(flag) { flag.clone() } else { format!("'{}'", flag.replace('\'', "'\\''")) });
    quoted.collect::<Vec<_>>().join(" ")
}

/// A length of time as [`parse_duration`] reads it.
pub fn duration_text(duration: std::time::Duration) -> String {
    if duration.subsec_nanos() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}

fn bind_reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "address in use: another process listens there; stop it or choose another port".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => "this host does not have that address".to_owned(),
        io::ErrorKind::PermissionDenied => {
            "permission denied: a port below 1024 needs root or CAP_NET_BIND_SERVICE".to_owned()
        }
        _ => error.to_string(),
    }
}

/// Parses the command line. On failure, and for `--help` and `--version`, prints what clap has to say and returns
/// the exit code: 0 for the latter two, [`exit::CONFIG`] otherwise.
///
/// # Errors
/// The exit code to leave with.
pub fn parse_command_line<T: clap::Parser>() -> Result<T, ExitCode> {
    T::try_parse().map_err(|error| ExitCode::from(report_clap_error(&error)))
}

/// Prints clap's error and returns the exit code that goes with it.
pub fn report_clap_error(error: &clap::Error) -> u8 {
    // Nothing useful can be done when standard output or error is closed.
    drop(error.print());
    if error.use_stderr() { exit::CONFIG } else { exit::OK }
}

/// Prints an error and its causes on one line and returns the exit code that goes with it: [`exit::CONFIG`] when a
/// [`ConfigError`] is at its root, [`exit::FAILED`] otherwise.
pub fn report_error(program: &str, error: &(dyn std::error::Error + 'static)) -> u8 {
    let mut text = error.to_string();
    let mut code = exit::FAILED;
    let mut cause = Some(error);
    while let Some(current) = cause {
        if current.is::<ConfigError>() {
            code = exit::CONFIG;
        }
        let part = current.to_string();
        // Errors that already quote their source would otherwise say it twice.
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = current.source();
    }
    eprintln!("{program}: {text}");
    code
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
    fn a_shell_would_take_the_line() {
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

//! `tunnel-agent doctor` and `tunnel-agent bundle`.

use std::path::PathBuf;

use clap::Args;
use tunnel_doctor::{Asked, Examine, Report, bad_flags, parse_flags};
use tunnel_runtime::config::value::ListenAddress;

use super::Cli;
use crate::config::{Flags, proxy_of_environment};
use crate::doctor;
use crate::status::AgentStatus;

#[derive(Args, Clone, Debug)]
pub struct ExamineFlags {
    // Flags of the agent running at --admin-address take precedence.
    #[command(flatten, next_help_heading = "The agent's flags, if it does not run")]
    run: Flags,
}

impl Examine for ExamineFlags {
    type Status = AgentStatus;
    const UNITS: &'static str = "postern-agent@*";

    fn admin_address(&self) -> ListenAddress {
        self.run.admin_address
    }

    async fn examine(&self, running: &Asked<AgentStatus>) -> (Report, PathBuf) {
        let flags = running.as_ref().ok().and_then(|running| running.flags.as_deref());
        let flags = flags.and_then(|flags| flags_of(flags, proxy_of_environment()));
        let flags = flags.unwrap_or_else(|| self.run.clone());
        let state_dir = flags.state_dir.clone();
        let report = match flags.config(Vec::new()) {
            Ok(config) => doctor::examine(&config, running).await,
            Err(error) => bad_flags("tunnel-agent", env!("CARGO_PKG_VERSION"), &error),
        };
        (report, state_dir)
    }
}

/// The flags of a running agent. They lack the password of its proxy. `environment`: this process's own has that proxy, with
/// its password.
fn flags_of(flags: &[String], environment: Option<String>) -> Option<Flags> {
    let known = environment.map(|proxy| format!("--proxy={proxy}"));
    let flags = flags.iter().filter(|flag| Some(*flag) != known.as_ref());
    parse_flags::<Cli>(flags).map(|cli| cli.run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_agents_proxy_counts() {
        let kept = |proxy: &str| {
            let flags = ["--server=a:1", "--node-name=edge-1", proxy].map(str::to_owned);
            let flags = flags_of(&flags, Some("http://b:2".to_owned())).unwrap();
            flags.config(Vec::new()).unwrap().flags.iter().any(|flag| flag == proxy)
        };
        assert!(kept("--proxy=none") && kept("--proxy=http://c:3"));
        assert!(!kept("--proxy=http://b:2"), "the environment's has the password");
    }
}

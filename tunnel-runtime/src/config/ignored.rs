//! Flags of other systems that have no effect here; accepted so that existing manifests start our programs.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// Flags of YurtTunnel, SuperEdge, konnectivity and klog, whose `--v` is supported.
const NAMES: [&str; 4] = [
    "egress-selector-enable iptables-sync-period dns-sync-period server-count proxy-strategy apiserver-addr meta-host",
    "m c",
    "mode delete-existing-uds-file cluster-cert cluster-key cluster-ca-cert server-bind-address agent-bind-address \
     admin-bind-address health-bind-address admin-server-port health-server-host keepalive-time frontend-keepalive-time \
     enable-profiling enable-contention-profiling server-id kubeconfig-qps kubeconfig-burst kube-api-content-type \
     proxy-strategies cipher-suites tls-min-version xfr-channel-size enable-lease-controller lease-namespace lease-label \
     lease-label-selector count-server-leases server-count-source backend-dial-timeout probe-interval \
     warn-on-channel-limit sync-forever",
    "log-dir log-file log-file-max-size logtostderr alsologtostderr stderrthreshold log-flush-frequency one-output vmodule \
     log-backtrace-at add-dir-header skip-headers skip-log-headers",
];

fn names() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter().flat_map(str::split_whitespace)
}

/// The ignored flags given on the command line. Flatten it into a program's flags.
#[derive(Clone, Debug, Default)]
pub struct Ignored(pub Vec<String>);

impl Ignored {
    /// Logs once which flags have no effect.
    pub fn warn(&self) {
        if !self.0.is_empty() {
            tracing::warn!(flags = self.0.join(" "), "ignoring flags without effect");
        }
    }
}

impl FromArgMatches for Ignored {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
        Ok(Self(names().filter(is_given).map(|name| format!("--{name}")).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Ignored {
    fn augment_args(command: Command) -> Command {
        command.args(names().map(|name| {
            // Repeating an ignored flag is fine, and Go's boolean flags have no value.
            let flag = Arg::new(name).long(name).hide(true).action(ArgAction::Append);
            let flag = flag.num_args(0..=1).default_missing_value("true");
            match name.as_bytes() {
                [letter] => flag.short(char::from(*letter)),
                _ => flag,
            }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[arg(long)]
        own: Option<String>,
        #[command(flatten)]
        ignored: Ignored,
    }

    fn given(arguments: &[&str]) -> Vec<String> {
        let program = Program::try_parse_from(std::iter::once(&"program").chain(arguments)).unwrap();
        assert_eq!(program.own.as_deref(), Some("1"), "{arguments:?}");
        program.ignored.0
    }

    #[test]
    fn those_that_are_given_are_named() {
        assert!(given(&["--own=1"]).is_empty());
        for mode in [&["-m=edge"][..], &["--m=edge"], &["-m", "edge"], &["--m", "edge"]] {
            assert_eq!(given(&[mode, &["--own=1"]].concat()), ["--m"], "{mode:?}");
        }
        let all = ["--logtostderr=false", "--log-file", "a", "--one-output", "--log-file=b", "--own=1"];
        assert_eq!(given(&all), ["--log-file", "--logtostderr", "--one-output"]);
        assert!(Program::try_parse_from(["program", "--slow"]).is_err());
    }

    #[test]
    fn help_does_not_show_them() {
        let help = Program::command().render_help().to_string();
        assert!(help.contains("--own") && !help.contains("--log"), "{help}");
    }
}

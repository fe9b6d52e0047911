//! Flags of YurtTunnel's server and of SuperEdge's tunnel, so that their manifests start this one. What means the same here
//! takes effect; the rest is named in a warning.

use clap::Args;
use tunnel_core::config::ConfigError;

use crate::config::on_or_off;

#[derive(Args, Clone, Debug, Default)]
pub struct ForeignArgs {
    /// YurtTunnel's name of --redirect.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_iptables: Option<String>,
    /// YurtTunnel's name of --dns-records.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_dns_controller: Option<String>,
    /// YurtTunnel's; ignored.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub egress_selector_enable: Option<String>,
    /// YurtTunnel's; ignored.
    #[arg(long, hide = true)]
    pub iptables_sync_period: Option<String>,
    /// YurtTunnel's; ignored.
    #[arg(long, hide = true)]
    pub dns_sync_period: Option<String>,
    /// YurtTunnel's; ignored.
    #[arg(long, hide = true)]
    pub server_count: Option<String>,
    /// YurtTunnel's; ignored.
    #[arg(long, hide = true)]
    pub proxy_strategy: Option<String>,
    /// SuperEdge's mode; ignored.
    #[arg(short = 'm', long = "m", hide = true)]
    pub mode: Option<String>,
    /// SuperEdge's configuration; ignored.
    #[arg(short = 'c', long = "c", hide = true)]
    pub configuration: Option<String>,
    /// klog's; ignored.
    #[arg(long, hide = true)]
    pub log_dir: Option<String>,
    /// klog's; ignored.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub logtostderr: Option<String>,
    /// klog's; ignored.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub alsologtostderr: Option<String>,
}

impl ForeignArgs {
    /// `--redirect`, which YurtTunnel calls `--enable-iptables`.
    pub(super) fn redirect(&self, redirect: &str) -> Result<bool, ConfigError> {
        let on = on_or_off("--redirect", redirect)?;
        Ok(on && boolean("--enable-iptables", self.enable_iptables.as_deref())?)
    }

    /// `--dns-records`, which YurtTunnel calls `--enable-dns-controller`.
    pub(super) fn dns_records(&self, records: &str) -> Result<bool, ConfigError> {
        let on = on_or_off("--dns-records", records)?;
        Ok(on && boolean("--enable-dns-controller", self.enable_dns_controller.as_deref())?)
    }

    /// Those that are given and mean nothing here, and why.
    pub(super) fn ignored(&self) -> Vec<(&'static str, &'static str)> {
        [
            (
                &self.egress_selector_enable,
                "--egress-selector-enable",
                "it never worked there; see --help for what kube-apiserver's EgressSelector needs",
            ),
            (&self.iptables_sync_period, "--iptables-sync-period", "there are no rules to repeat"),
            (&self.dns_sync_period, "--dns-sync-period", "records are written when they change"),
            (&self.server_count, "--server-count", "the servers find each other"),
            (&self.proxy_strategy, "--proxy-strategy", "a connection goes to the node that it names"),
            (&self.mode, "-m", "this program is the cloud's; the edge's is tunnel-agent"),
            (
                &self.configuration,
                "-c",
                "flags say everything; `tunnel-server import superedge FILE` prints its maps as --maps reads them",
            ),
            (&self.log_dir, "--log-dir", "the log goes to standard error"),
            (&self.logtostderr, "--logtostderr", "the log goes there anyway"),
            (&self.alsologtostderr, "--alsologtostderr", "the log goes there anyway"),
        ]
        .into_iter()
        .filter(|(given, _, _)| given.is_some())
        .map(|(_, flag, why)| (flag, why))
        .collect()
    }
}

/// True unless it says otherwise, in the words that Go's flags take.
fn boolean(key: &str, value: Option<&str>) -> Result<bool, ConfigError> {
    match value {
        None | Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some(other) => Err(ConfigError::new(key, other, "use true or false")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::cli::Cli;
    use crate::config::Config;

    fn config(flags: &[&str]) -> Result<Config, String> {
        let args = ["tunnel-server", "--inventory=nodes.yaml"].iter().chain(flags);
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
        cli.run.config().map_err(|error| error.to_string())
    }

    #[test]
    fn what_means_the_same_takes_effect() {
        assert!(config(&["--enable-iptables", "--enable-dns-controller=true"]).unwrap().redirect.is_some());
        assert!(config(&["--enable-iptables=false"]).unwrap().redirect.is_none());
        assert!(!config(&["--enable-dns-controller=false"]).unwrap().dns_records);
        let error = config(&["--enable-iptables=off"]).unwrap_err();
        assert_eq!(error, "--enable-iptables=off: use true or false");
    }

    #[test]
    fn what_means_nothing_is_named() {
        let flags = [
            "--egress-selector-enable=false",
            "--iptables-sync-period=60",
            "--dns-sync-period=1800",
            "--server-count=1",
            "--proxy-strategy=destHost",
            "-m=cloud",
            "-c=/etc/superedge/tunnel/conf/tunnel_cloud.toml",
            "--log-dir=/var/log",
            "--logtostderr",
            "--alsologtostderr=true",
        ];
        let ignored: Vec<_> = config(&flags).unwrap().ignored.iter().map(|(flag, _)| *flag).collect();
        let named: Vec<_> = flags.iter().map(|flag| flag.split('=').next().unwrap()).collect();
        assert_eq!(ignored, named);
        assert!(config(&[]).unwrap().ignored.is_empty());
    }
}

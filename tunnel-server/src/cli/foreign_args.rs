//! Flags of YurtTunnel's server, of SuperEdge's tunnel and of konnectivity's proxy-server, so that their manifests start this
//! one. What means the same here takes effect; the rest is named in a warning.

use std::net::IpAddr;

use clap::Args;
use tunnel_core::config::{ConfigError, ForeignFlag, ForeignFlags, Ignored, Klog};

use crate::config::{DEFAULT_ADMIN_ADDRESS, on_or_off};

#[derive(Args, Clone, Debug)]
pub struct ForeignArgs {
    /// YurtTunnel's name of --redirect.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_iptables: Option<String>,
    /// YurtTunnel's name of --dns-records.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_dns_controller: Option<String>,
    /// konnectivity's; another name of --admin-address unless that is given too.
    #[arg(long, hide = true)]
    pub health_port: Option<String>,
    #[command(flatten)]
    pub yurttunnel: Ignored<YurtTunnel>,
    #[command(flatten)]
    pub superedge: Ignored<SuperEdge>,
    #[command(flatten)]
    pub konnectivity: Ignored<Konnectivity>,
    #[command(flatten)]
    pub klog: Ignored<Klog>,
}

/// YurtTunnel's server.
#[derive(Clone, Copy, Debug)]
pub struct YurtTunnel;

impl ForeignFlags for YurtTunnel {
    const FLAGS: &'static [ForeignFlag] = &[
        ForeignFlag::switch(
            "--egress-selector-enable",
            "it never worked there; see --help for what kube-apiserver's EgressSelector needs",
        ),
        ForeignFlag::value("--iptables-sync-period", "there are no rules to repeat"),
        ForeignFlag::value("--dns-sync-period", "records are written when they change"),
        ForeignFlag::value("--server-count", "the servers find each other"),
        ForeignFlag::value("--proxy-strategy", NAMED),
    ];
}

/// SuperEdge's tunnel.
#[derive(Clone, Copy, Debug)]
pub struct SuperEdge;

impl ForeignFlags for SuperEdge {
    const FLAGS: &'static [ForeignFlag] = &[
        ForeignFlag::value("-m", "this program is the cloud's; the edge's is tunnel-agent"),
        ForeignFlag::value(
            "-c",
            "flags say everything; `tunnel-server import superedge FILE` prints its maps as --maps reads them",
        ),
    ];
}

/// konnectivity's proxy-server. Its `--server-count` is YurtTunnel's too.
#[derive(Clone, Copy, Debug)]
pub struct Konnectivity;

impl ForeignFlags for Konnectivity {
    const FLAGS: &'static [ForeignFlag] = &[
        ForeignFlag::value("--mode", "both protocols are served, told apart by their first bytes"),
        ForeignFlag::switch("--delete-existing-uds-file", "a socket that is there is replaced"),
        ForeignFlag::value("--cluster-cert", CERTIFICATES),
        ForeignFlag::value("--cluster-key", CERTIFICATES),
        ForeignFlag::value("--cluster-ca-cert", CERTIFICATES),
        ForeignFlag::value("--server-bind-address", BIND),
        ForeignFlag::value("--agent-bind-address", BIND),
        ForeignFlag::value("--admin-bind-address", ADMIN),
        ForeignFlag::value("--health-bind-address", ADMIN),
        ForeignFlag::value("--keepalive-time", "agents that say nothing are asked after seconds"),
        ForeignFlag::value("--frontend-keepalive-time", "callers that say nothing are asked by themselves"),
        ForeignFlag::switch("--enable-profiling", PROFILES),
        ForeignFlag::switch("--enable-contention-profiling", PROFILES),
        ForeignFlag::value("--server-id", "it is made at each start"),
        ForeignFlag::value("--kubeconfig-qps", "questions to the API server have bounds of their own"),
        ForeignFlag::value("--kubeconfig-burst", "questions to the API server have bounds of their own"),
        ForeignFlag::value("--kube-api-content-type", "the API server is asked for JSON"),
        ForeignFlag::value("--proxy-strategies", NAMED),
        ForeignFlag::value("--cipher-suites", "the safe ones of TLS 1.2 and 1.3 are in use, and no others"),
        ForeignFlag::value("--tls-min-version", "TLS 1.2 and 1.3 are in use, and no others"),
        ForeignFlag::value("--xfr-channel-size", "what waits is bounded in bytes"),
        ForeignFlag::switch("--enable-lease-controller", LEASES),
        ForeignFlag::value("--lease-namespace", LEASES),
        ForeignFlag::value("--lease-label", LEASES),
        ForeignFlag::value("--backend-dial-timeout", "a dial has 5 s"),
    ];
}

const NAMED: &str = "a connection goes to the node that it names";
const CERTIFICATES: &str = "agents and servers get their certificates from Postern's own CA";
const BIND: &str = "--bind-address is that of all doors";
const ADMIN: &str = "the admin endpoints are on --admin-address";
const PROFILES: &str = "there are no profiles";
const LEASES: &str = "agents find the servers by the Service";

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

    /// `--admin-address`; konnectivity has its health endpoints at a port of their own.
    pub(super) fn admin_address<'a>(&'a self, address: &'a str) -> &'a str {
        match &self.health_port {
            Some(port) if address == DEFAULT_ADMIN_ADDRESS => port.as_str(),
            _ => address,
        }
    }

    /// `--insecure-bind-address`. YurtTunnel's manifests open that door to everybody who reaches the node; here it stays on the
    /// loopback. Without another flag of YurtTunnel's such an address is an error.
    pub(super) fn insecure_bind_address<'a>(&self, address: &'a str) -> &'a str {
        let elsewhere = |address: &IpAddr| !address.is_loopback();
        match address.parse::<IpAddr>().ok().filter(elsewhere) {
            Some(IpAddr::V4(_)) if self.is_of_yurttunnel() => "127.0.0.1",
            Some(IpAddr::V6(_)) if self.is_of_yurttunnel() => "::1",
            _ => address,
        }
    }

    fn is_of_yurttunnel(&self) -> bool {
        self.enable_iptables.is_some()
            || self.enable_dns_controller.is_some()
            || self.yurttunnel.given().next().is_some()
    }

    /// Those that are given and mean nothing here, and why. `admin_address`, `insecure_bind_address`: as given.
    pub(super) fn ignored(
        &self,
        admin_address: &str,
        insecure_bind_address: &str,
    ) -> Vec<(&'static str, &'static str)> {
        let closed = self.insecure_bind_address(insecure_bind_address) != insecure_bind_address;
        let closed = closed.then_some((
            "--insecure-bind-address",
            "the door has no authentication and stays on the loopback; see --plain-port",
        ));
        let health = self.health_port.is_some() && admin_address != DEFAULT_ADMIN_ADDRESS;
        let health = health.then_some(("--health-port", ADMIN));
        let foreign = self.yurttunnel.given().chain(self.superedge.given()).chain(self.konnectivity.given());
        closed.into_iter().chain(health).chain(foreign).chain(self.klog.given()).collect()
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
    use crate::config::{Config, NodeSource};

    fn config(flags: &[&str]) -> Result<Config, String> {
        let args = ["tunnel-server", "--inventory=nodes.yaml"].iter().chain(flags);
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
        cli.run.config().map_err(|error| error.to_string())
    }

    /// In a cluster, as their manifests are.
    fn published(flags: &[&str]) -> Config {
        let args = std::iter::once(&"tunnel-server").chain(flags);
        Cli::try_parse_from(args).unwrap().run.config().unwrap()
    }

    fn ignored(config: &Config) -> Vec<&'static str> {
        config.ignored.iter().map(|(flag, _)| *flag).collect()
    }

    #[test]
    fn what_means_the_same_takes_effect() {
        assert!(config(&["--enable-iptables", "--enable-dns-controller=true"]).unwrap().redirect.is_some());
        assert!(config(&["--enable-iptables=false"]).unwrap().redirect.is_none());
        assert!(!config(&["--enable-dns-controller=false"]).unwrap().dns_records);
        let error = config(&["--enable-iptables=off"]).unwrap_err();
        assert_eq!(error, "--enable-iptables=off: use true or false");
        let drain = config(&["--graceful-shutdown-timeout=1m0s"]).unwrap().drain_timeout;
        assert_eq!(drain.as_secs(), 60);
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
            "--proxy-strategies=destHost,default",
            "--enable-lease-controller",
            "--log-dir=/var/log",
            "--logtostderr",
            "--alsologtostderr=true",
        ];
        let named: Vec<_> = flags.iter().map(|flag| flag.split('=').next().unwrap()).collect();
        assert_eq!(ignored(&config(&flags).unwrap()), named);
        assert!(config(&[]).unwrap().ignored.is_empty());
    }

    /// Of its charts and of its folder config/setup, v0.4 to v1.3.
    #[test]
    fn yurttunnels_published_command_lines_are_accepted() {
        let chart = published(&[
            "--bind-address=10.0.0.1",
            "--insecure-bind-address=10.0.0.1",
            "--proxy-strategy=destHost",
            "--cert-dns-names=",
            "--cert-ips=",
            "--tunnel-agent-connect-port=10262",
            "--v=2",
        ]);
        assert_eq!(ignored(&chart), ["--insecure-bind-address", "--proxy-strategy"]);
        assert_eq!(chart.agent_port, Some(10262));
        assert_eq!(chart.insecure_address, Some("127.0.0.1:10264".parse().unwrap()), "it stays closed");
        let older =
            published(&["--bind-address=fd00::1", "--insecure-bind-address=fd00::1", "--server-count=1"]);
        assert_eq!(ignored(&older), ["--insecure-bind-address", "--server-count"]);
        assert_eq!(older.insecure_address, Some("[::1]:10264".parse().unwrap()));
        assert!(ignored(&published(&["--bind-address=10.0.0.1"])).is_empty());
        // Who does not come from there is told.
        assert!(
            config(&["--insecure-bind-address=10.0.0.1"]).unwrap_err().contains("not a loopback address")
        );
        assert!(
            config(&["--insecure-bind-address=x", "--server-count=1"]).unwrap_err().contains("not an IP")
        );
    }

    #[test]
    fn superedges_published_command_line_is_accepted() {
        let config = published(&[
            "--m=cloud",
            "--c=/etc/superedge/tunnel/conf/tunnel_cloud.toml",
            "--log-dir=/var/log/tunnel",
            "--alsologtostderr",
        ]);
        assert_eq!(ignored(&config), ["-m", "-c", "--log-dir", "--alsologtostderr"]);
    }

    /// Of its folder examples, v0.36.0, and of the documentation of Kubernetes.
    #[test]
    fn konnectivitys_published_command_lines_are_accepted() {
        let examples = published(&[
            "--log-file=/var/log/konnectivity-server.log",
            "--logtostderr=false",
            "--log-file-max-size=0",
            "--uds-name=/etc/srv/kubernetes/konnectivity-server/konnectivity-server.socket",
            "--delete-existing-uds-file",
            "--cluster-cert=/etc/srv/kubernetes/pki/apiserver.crt",
            "--cluster-key=/etc/srv/kubernetes/pki/apiserver.key",
            "--server-port=0",
            "--agent-port=8091",
            "--health-port=8092",
            "--admin-port=8093",
            "--keepalive-time=1h",
            "--mode=http-connect",
            "--agent-namespace=kube-system",
            "--agent-service-account=konnectivity-agent",
            "--kubeconfig=/etc/srv/kubernetes/konnectivity-server/kubeconfig",
            "--authentication-audience=system:konnectivity-server",
            "--enable-lease-controller",
        ]);
        assert_eq!(
            ignored(&examples),
            [
                "--agent-namespace",
                "--health-port",
                "--mode",
                "--delete-existing-uds-file",
                "--cluster-cert",
                "--cluster-key",
                "--keepalive-time",
                "--enable-lease-controller",
                "--log-file",
                "--log-file-max-size",
                "--logtostderr",
            ]
        );
        let socket = examples.egress.socket.as_deref().unwrap();
        assert!(socket.ends_with("konnectivity-server.socket") && examples.egress.port.is_none());
        assert_eq!((examples.agent_port, examples.admin_address.unwrap().port()), (Some(8091), 8093));
        let NodeSource::Kubernetes(options) = &examples.source else { panic!("not Kubernetes") };
        assert_eq!(options.names.agent_service_account, "tunnel-agent", "theirs is not for our agents");

        let tcp = published(&[
            "--logtostderr=true",
            "--server-port=8131",
            "--server-cert=/pki/server.crt",
            "--server-key=/pki/server.key",
            "--server-ca-cert=/pki/ca.crt",
            "--agent-port=8132",
            "--health-port=8134",
            "--agent-namespace=konnectivity",
            "--agent-service-account=agents",
            "--konnectivity-agent-port=8135",
        ]);
        assert_eq!(ignored(&tcp), ["--logtostderr"]);
        let (port, tls) = tcp.egress.port.as_ref().unwrap();
        assert!(*port == 8131 && tls.certificate.is_some(), "{tls:?}");
        assert_eq!(tcp.admin_address.unwrap().port(), 8134);
        assert_eq!(tcp.konnectivity.as_ref().unwrap().account, "konnectivity/agents");
        let both = ["--agent-namespace=a", "--konnectivity-service-account=b/c"];
        assert!(config(&both).unwrap_err().contains("cannot be used with"));
    }
}

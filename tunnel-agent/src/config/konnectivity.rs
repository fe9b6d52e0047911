//! Flags for konnectivity's servers.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::value::{self, List};
use tunnel_runtime::config::{ConfigError, HostPort, duration_text, pair};

/// Default port of konnectivity's own agent.
const AGENT_PORT: &str = "8091";
/// Kinds of identifiers that servers know.
const KINDS: [&str; 5] = ["ipv4", "ipv6", "host", "cidr", "default-route"];

/// Settings for konnectivity's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KonnectivityConfig {
    /// Address that leads to all servers.
    pub server: HostPort,
    pub ca: PathBuf,
    /// Certificate and key.
    pub client: Option<(PathBuf, PathBuf)>,
    pub token_file: Option<PathBuf>,
    pub agent_id: String,
    /// None: the node's name and addresses.
    pub identifiers: Option<String>,
    /// Offered before `h2`.
    pub alpn: Vec<String>,
    /// Initial interval of attempts to find one more server.
    pub sync_interval: Duration,
    /// Maximum interval of such attempts.
    pub sync_interval_cap: Duration,
    /// The clock for the dates of certificates.
    pub clock: Clock,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "konnectivity's servers")]
pub(super) struct KonnectivityFlags {
    /// Attach to konnectivity's proxy-server at this address instead of tunnel-servers, for every server that it says there are. What is
    /// dialled is decided by --allow-target; nothing is enrolled.
    #[arg(long, value_name = "HOST:PORT")]
    konnectivity_server: Option<HostPort>,
    /// The CA of the proxy-server's certificate, which names HOST.
    #[arg(long, value_name = "FILE", alias = "ca-cert")]
    konnectivity_ca: Option<PathBuf>,
    /// Client certificate to show it.
    #[arg(long, value_name = "FILE", alias = "agent-cert")]
    konnectivity_cert: Option<PathBuf>,
    /// Key of the client certificate.
    #[arg(long, value_name = "FILE", alias = "agent-key")]
    konnectivity_key: Option<PathBuf>,
    /// Token of a service account to show it, read at each attempt.
    #[arg(long, value_name = "FILE", alias = "service-account-token-path")]
    konnectivity_token_file: Option<PathBuf>,
    /// Name of this agent at the proxy-server [default: the node's name].
    #[arg(long, value_name = "ID", alias = "agent-id", env = "PROXY_AGENT_ID")]
    konnectivity_agent_id: Option<String>,
    /// Identifiers by which the proxy-server chooses this agent, such as host=edge-1&ipv4=10.8.0.7&default-route=true [default: the node's
    /// name and addresses].
    #[arg(long, value_name = "QUERY", alias = "agent-identifiers")]
    konnectivity_identifiers: Option<String>,
    /// Names to offer in TLS (ALPN) before h2, comma-separated or repeated.
    #[arg(long, value_name = "NAME[,…]", alias = "alpn-proto", value_parser = alpn)]
    konnectivity_alpn: Vec<List<String>>,
    /// How long to wait before the next attempt to find one more proxy-server.
    #[arg(long, value_name = "DURATION", alias = "sync-interval", default_value = "1s", value_parser = interval)]
    konnectivity_sync_interval: Duration,
    /// Maximum of that pause, which grows while attempts fail.
    #[arg(long, value_name = "DURATION", alias = "sync-interval-cap", default_value = "10s", value_parser = interval)]
    konnectivity_sync_interval_cap: Duration,
    #[arg(long, hide = true, conflicts_with = "konnectivity_server")]
    proxy_server_host: Option<String>,
    #[arg(long, hide = true, conflicts_with = "konnectivity_server")]
    proxy_server_port: Option<String>,
}

impl KonnectivityFlags {
    /// True if the servers are konnectivity's.
    pub(super) fn names_a_server(&self) -> bool {
        self.konnectivity_server.is_some() || self.proxy_server_host.is_some()
    }

    pub(super) fn has_identifiers(&self) -> bool {
        self.konnectivity_identifiers.is_some()
    }

    /// None if the servers are not konnectivity's. `of_tunnel_servers` is a given flag that concerns tunnel-servers.
    pub(super) fn config(
        &self,
        node: &NodeName,
        of_tunnel_servers: Option<&str>,
    ) -> Result<Option<KonnectivityConfig>, ConfigError> {
        let given = self;
        let Some(server) = server(given)? else {
            return stray(given).map_or(Ok(None), |flag| {
                Err(ConfigError::without_value(flag, "without --konnectivity-server it means nothing"))
            });
        };
        if let Some(flag) = of_tunnel_servers {
            let reason =
                "not with --konnectivity-server, which replaces tunnel-servers, enrolment and the API server";
            return Err(ConfigError::without_value(flag, reason));
        }
        let Some(ca) = given.konnectivity_ca.clone() else {
            let reason =
                "needed with --konnectivity-server: FILE with the CA of the proxy-server's certificate";
            return Err(ConfigError::without_value("--konnectivity-ca", reason));
        };
        let certificate = ("--konnectivity-cert", &given.konnectivity_cert);
        let client = pair(certificate, ("--konnectivity-key", &given.konnectivity_key))?;
        let (interval, cap) = (given.konnectivity_sync_interval, given.konnectivity_sync_interval_cap);
        if cap < interval {
            let reason = "shorter than --konnectivity-sync-interval";
            return Err(ConfigError::new("--konnectivity-sync-interval-cap", duration_text(cap), reason));
        }
        let agent_id = given.konnectivity_agent_id.clone().filter(|given| !given.is_empty());
        Ok(Some(KonnectivityConfig {
            server,
            ca,
            client,
            token_file: given.konnectivity_token_file.clone(),
            agent_id: header("--konnectivity-agent-id", agent_id.unwrap_or_else(|| node.to_string()))?,
            identifiers: given.konnectivity_identifiers.clone().map(identifiers).transpose()?,
            alpn: given.konnectivity_alpn.concat(),
            sync_interval: interval,
            sync_interval_cap: cap,
            clock: Clock::default(),
        }))
    }
}

fn server(given: &KonnectivityFlags) -> Result<Option<HostPort>, ConfigError> {
    if let Some(server) = &given.konnectivity_server {
        return Ok(Some(server.clone()));
    }
    let Some(host) = &given.proxy_server_host else {
        return match &given.proxy_server_port {
            Some(port) => {
                let reason = "needed: --konnectivity-server=HOST:PORT, or --proxy-server-host beside it";
                Err(ConfigError::new("--proxy-server-port", port, reason))
            }
            None => Ok(None),
        };
    };
    let port = given.proxy_server_port.as_deref().unwrap_or(AGENT_PORT);
    let text = if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let parsed = text.parse::<HostPort>();
    parsed.map(Some).map_err(|reason: &str| ConfigError::new("--proxy-server-host", text.clone(), reason))
}

/// A given flag that has no effect without a server. YurtTunnel's agent has identifiers too, which are ignored.
fn stray(given: &KonnectivityFlags) -> Option<&'static str> {
    let stray = [
        ("--konnectivity-ca", given.konnectivity_ca.is_some()),
        ("--konnectivity-cert", given.konnectivity_cert.is_some()),
        ("--konnectivity-key", given.konnectivity_key.is_some()),
        ("--konnectivity-token-file", given.konnectivity_token_file.is_some()),
        ("--konnectivity-alpn", !given.konnectivity_alpn.is_empty()),
    ];
    stray.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
}

fn identifiers(text: String) -> Result<String, ConfigError> {
    const KEY: &str = "--konnectivity-identifiers";
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let kind = pair.split_once('=').map_or(pair, |(kind, _)| kind);
        if !KINDS.contains(&kind) {
            let reason = format!("{kind:?} is none of {}", KINDS.join(", "));
            return Err(ConfigError::new(KEY, &text, reason));
        }
    }
    header(KEY, text)
}

/// Accepts text that can be sent in a header.
fn header(key: &str, text: String) -> Result<String, ConfigError> {
    if text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Ok(text);
    }
    Err(ConfigError::new(key, text, "has characters that are not printable ASCII"))
}

fn alpn(value: &str) -> Result<List<String>, String> {
    let names: List<String> = value::list(value)?;
    match names.iter().find(|name| name.len() > 255) {
        Some(name) => Err(format!("{name:?} is longer than 255 bytes")),
        None => Ok(names),
    }
}

fn interval(value: &str) -> Result<Duration, String> {
    match value::duration(value)? {
        Duration::ZERO => Err("too short".to_owned()),
        interval => Ok(interval),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, parsed_again};

    #[test]
    fn konnectivitys_own_flags_are_accepted() {
        let config = config(&[
            "--logtostderr=true",
            "--ca-cert=/ca",
            "--agent-cert=/crt",
            "--agent-key=/key",
            "--proxy-server-host=cloud.example.org",
            "--proxy-server-port=8132",
            "--admin-server-port=8133",
            "--health-server-port=8134",
            "--service-account-token-path=/token",
            "--agent-identifiers=ipv4=10.8.0.7&default-route=true",
            "--sync-interval=100ms",
            "--sync-interval-cap=1s",
            "--keepalive-time=1h0m0s",
            "--sync-forever",
            "--count-server-leases=true",
            "--kubeconfig=/k",
        ])
        .unwrap();
        let konnectivity = config.konnectivity.clone().unwrap();
        assert_eq!(konnectivity.server.to_string(), "cloud.example.org:8132");
        assert_eq!((konnectivity.agent_id.as_str(), konnectivity.token_file.is_some()), ("edge-1", true));
        assert_eq!(konnectivity.identifiers.as_deref(), Some("ipv4=10.8.0.7&default-route=true"));
        assert_eq!(config.given.admin_address.unwrap().port(), 8134);
        assert!(config.servers.is_empty() && config.kube.is_none() && konnectivity.client.is_some());
        assert_eq!(
            config.ignored.0,
            [
                "--admin-server-port",
                "--keepalive-time",
                "--count-server-leases",
                "--sync-forever",
                "--logtostderr",
                "--kubeconfig"
            ]
        );
        assert_eq!(format!("{:?}", parsed_again(&config)), format!("{config:?}"));
    }

    #[test]
    fn errors_name_key_and_reason() {
        const SERVER: &str = "--konnectivity-server=a:1";
        const CA: &str = "--konnectivity-ca=/ca";
        for (args, expected) in [
            (&["--konnectivity-server=a"][..], "--konnectivity-server=a: not HOST:PORT"),
            (&["--proxy-server-port=1"], "--proxy-server-port=1: needed: --konnectivity-server=HOST:PORT"),
            (&["--server=a:1", CA], "--konnectivity-ca: without --konnectivity-server it means nothing"),
            (&[SERVER], "--konnectivity-ca: needed with --konnectivity-server"),
            (&[SERVER, CA, "--server=b:1"], "--server: not with --konnectivity-server"),
            (&[SERVER, CA, "--service=s"], "--service: not with --konnectivity-server"),
            (
                &[SERVER, CA, "--connect-address=127.0.0.1:1"],
                "--connect-address: not with --konnectivity-server",
            ),
            (&[SERVER, CA, "--agent-cert=/c"], "--konnectivity-key: needed with --konnectivity-cert"),
            (&[SERVER, CA, "--agent-key=/c"], "--konnectivity-cert: needed with --konnectivity-key"),
            (&[SERVER, CA, "--agent-id=ä"], "--konnectivity-agent-id=ä: has characters"),
            (
                &[SERVER, CA, "--agent-identifiers=name=x"],
                "--konnectivity-identifiers=name=x: \"name\" is none of ipv4, ipv6, host, cidr, default-route",
            ),
            (&[SERVER, CA, "--sync-interval=0s"], "--konnectivity-sync-interval=0s: too short"),
            (&[SERVER, CA, "--sync-interval=1m"], "--konnectivity-sync-interval-cap=10s: shorter than"),
        ] {
            let error = config(args).expect_err(&format!("{args:?}"));
            let (given, reason) = expected.split_once(": ").unwrap();
            let parts = given.splitn(2, '=').chain([reason]);
            parts.for_each(|part| assert!(error.contains(part), "{args:?}: {error} lacks {part}"));
        }
    }
}

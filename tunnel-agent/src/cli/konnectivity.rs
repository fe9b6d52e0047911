//! What becomes of konnectivity's flags.

use tunnel_core::config::{ConfigError, HostPort, parse_door, parse_duration};
use tunnel_core::identity::NodeName;

use super::args::RunArgs;
use super::konnectivity_args::{KonnectivityArgs, LEASES};
use crate::konnectivity::KonnectivityConfig;

/// konnectivity's own agent takes it for the default.
const AGENT_PORT: &str = "8091";
/// What servers know identifiers by.
const KINDS: [&str; 5] = ["ipv4", "ipv6", "host", "cidr", "default-route"];

/// None: the servers are not konnectivity's.
pub(super) fn konnectivity(
    args: &RunArgs,
    node: &NodeName,
) -> Result<Option<KonnectivityConfig>, ConfigError> {
    let given = &args.konnectivity;
    let Some(server) = server(given)? else {
        return stray(given).map_or(Ok(None), |flag| {
            Err(ConfigError::without_value(flag, "without --konnectivity-server it means nothing"))
        });
    };
    if let Some(flag) = of_tunnel_servers(args) {
        let reason =
            "not with --konnectivity-server, which replaces tunnel-servers, enrolment and the API server";
        return Err(ConfigError::without_value(flag, reason));
    }
    let Some(ca) = given.konnectivity_ca.clone() else {
        let reason = "needed with --konnectivity-server: FILE with the CA of the proxy-server's certificate";
        return Err(ConfigError::without_value("--konnectivity-ca", reason));
    };
    let client = match (&given.konnectivity_cert, &given.konnectivity_key) {
        (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
        (None, None) => None,
        (Some(_), None) => {
            return Err(ConfigError::without_value("--konnectivity-key", "needed with --konnectivity-cert"));
        }
        (None, Some(_)) => {
            return Err(ConfigError::without_value("--konnectivity-cert", "needed with --konnectivity-key"));
        }
    };
    let duration = |key: &str, value: &str| match parse_duration(key, value)? {
        duration if duration.is_zero() => Err(ConfigError::new(key, value, "too short")),
        duration => Ok(duration),
    };
    let sync_interval = duration("--konnectivity-sync-interval", &given.konnectivity_sync_interval)?;
    let cap = &given.konnectivity_sync_interval_cap;
    let sync_interval_cap = duration("--konnectivity-sync-interval-cap", cap)?;
    if sync_interval_cap < sync_interval {
        let reason = "shorter than --konnectivity-sync-interval";
        return Err(ConfigError::new("--konnectivity-sync-interval-cap", cap, reason));
    }
    let agent_id = given.konnectivity_agent_id.clone().filter(|given| !given.is_empty());
    Ok(Some(KonnectivityConfig {
        server,
        ca,
        client,
        token_file: given.konnectivity_token_file.clone(),
        agent_id: header("--konnectivity-agent-id", agent_id.unwrap_or_else(|| node.to_string()))?,
        identifiers: given.konnectivity_identifiers.clone().map(identifiers).transpose()?,
        alpn: alpn(&given.konnectivity_alpn)?,
        sync_interval,
        sync_interval_cap,
    }))
}

/// The given flags that have no meaning here, each with the reason.
pub(super) fn ignored(args: &RunArgs) -> impl Iterator<Item = (&'static str, &'static str)> {
    // Theirs is for the leases.
    let kubeconfig = args.kubeconfig.is_some() && args.konnectivity.names_a_server();
    args.konnectivity.ignored.given().chain(kubeconfig.then_some(("--kubeconfig", LEASES)))
}

fn server(given: &KonnectivityArgs) -> Result<Option<HostPort>, ConfigError> {
    if let Some(server) = &given.konnectivity_server {
        let parsed = server.parse::<HostPort>();
        return parsed
            .map(Some)
            .map_err(|reason: &str| ConfigError::new("--konnectivity-server", server, reason));
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

/// A flag that means something only with a server. YurtTunnel's agent has identifiers too, which are ignored.
fn stray(given: &KonnectivityArgs) -> Option<&'static str> {
    let stray = [
        ("--konnectivity-ca", given.konnectivity_ca.is_some()),
        ("--konnectivity-cert", given.konnectivity_cert.is_some()),
        ("--konnectivity-key", given.konnectivity_key.is_some()),
        ("--konnectivity-token-file", given.konnectivity_token_file.is_some()),
        ("--konnectivity-alpn", !given.konnectivity_alpn.is_empty()),
    ];
    stray.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
}

/// A given flag that is about tunnel-servers.
fn of_tunnel_servers(args: &RunArgs) -> Option<&'static str> {
    let connects = parse_door("--connect-address", &args.connect_address).is_ok_and(|door| door.is_some());
    let given = [
        ("--server", !args.server.is_empty()),
        ("--token", args.token.is_some()),
        ("--token-file", args.token_file.is_some()),
        ("--ca-hash", args.ca_hash.is_some()),
        ("--namespace", args.namespace.is_some()),
        ("--service", args.service.is_some()),
        ("--pod-targets", args.pod_targets != "off"),
        ("--connect-address", connects),
        ("--map", !args.map.is_empty()),
    ];
    given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
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

/// What can be sent in a header.
fn header(key: &str, text: String) -> Result<String, ConfigError> {
    if text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Ok(text);
    }
    Err(ConfigError::new(key, text, "has characters that are not printable ASCII"))
}

fn alpn(values: &[String]) -> Result<Vec<String>, ConfigError> {
    let names =
        values.iter().flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| match name.len() {
            1..=255 => Ok(name.to_owned()),
            _ => Err(ConfigError::new("--konnectivity-alpn", name, "longer than 255 bytes")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::Cli;
    use crate::config::Config;
    use tunnel_core::config::ConfigError;

    fn config(args: &[&str]) -> Result<Config, ConfigError> {
        let base = ["tunnel-agent", "--node-name=edge-1"];
        Cli::try_parse_from(base.iter().chain(args)).unwrap().run.to_config()
    }

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
        assert_eq!(config.admin_address.unwrap().port(), 8134);
        assert!(config.servers.is_empty() && config.kube.is_none() && konnectivity.client.is_some());
        let ignored: Vec<_> = config.ignored.iter().map(|(flag, _)| *flag).collect();
        assert_eq!(
            ignored,
            [
                "--admin-server-port",
                "--keepalive-time",
                "--sync-forever",
                "--count-server-leases",
                "--kubeconfig",
                "--logtostderr"
            ]
        );
        let again = Cli::try_parse_from(std::iter::once("tunnel-agent".to_owned()).chain(config.flags()));
        let again = again.unwrap().run.to_config().unwrap();
        assert_eq!(again.konnectivity, config.konnectivity);
        assert_eq!(again.flags(), config.flags());
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
            let error = config(args).expect_err(&format!("{args:?}")).to_string();
            assert!(error.starts_with(expected), "{args:?}: {error}");
        }
    }
}

//! Tests of the command line and the resulting configuration.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::CommandFactory;
use tunnel_pki::enrol::EnrollConfig;
use tunnel_pki::{ExposeSecret, Holder, SecretString};
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::parse;
use tunnel_runtime::logging;

use super::Config;
use crate::cli::{Cli, SHORT_HELP};
use crate::reach::Reach;

const HASH: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Returns the configuration that the program would run with, or the error that it would print.
fn parsed_as(pod: bool, words: &[&str]) -> Result<Config, String> {
    let words = std::iter::once(&"tunnel-agent").chain(words);
    let (cli, flags) = parse::<Cli>(words, SHORT_HELP).map_err(|error| error.to_string())?;
    cli.run.config_as(pod, flags).map_err(|error| error.to_string())
}

pub(crate) fn config(args: &[&str]) -> Result<Config, String> {
    parsed_as(false, &[&["--node-name=edge-1"], args].concat())
}

/// The configuration given by the logged flags.
pub(super) fn parsed_again(config: &Config) -> Config {
    parsed_as(false, &config.flags.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

fn error(args: &[&str]) -> String {
    config(args).expect_err(&format!("{args:?}"))
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn no_debug_output_has_the_token() {
    const TOKEN: &str = "abcdef.0123456789abcdefghijklmnop";
    let (token, hash) = (format!("--token={TOKEN}"), format!("--ca-hash={HASH}"));
    let config = config(&["--server=a:1", &token, &hash]).unwrap();
    let enrol = EnrollConfig {
        servers: vec!["a:1".into()],
        holder: Holder::Agent,
        node: config.node_name.clone(),
        state_dir: config.given.state_dir.clone(),
        token: config.token.clone().zip(config.ca_hash.clone()),
        reach: Reach::default(),
        clock: Clock::default(),
    };
    assert_eq!(enrol.token.as_ref().unwrap().0.expose_secret(), TOKEN);
    for shown in [format!("{config:?} {config:#?}"), format!("{enrol:?}")] {
        assert!(shown.contains("token") && !shown.contains(&TOKEN[7..]), "{shown}");
    }
}

#[test]
fn defaults() {
    let config = config(&["--server=tunnel.example.org:10262"]).unwrap();
    assert_eq!(config.given.state_dir, Path::new("/var/lib/postern/agent"));
    assert_eq!(config.given.admin_address, Some("127.0.0.1:10266".parse().unwrap()));
    assert_eq!(config.given.drain_timeout, Duration::from_secs(30));
    assert_eq!(
        (config.given.log.log_format, config.given.log.log_level),
        (logging::Format::Text, "info".parse().unwrap())
    );
    assert_eq!(
        (config.given.node_ip, config.given.targets.allow.len(), config.given.targets.pods),
        (None, 0, false)
    );
    assert!(config.token.is_none() && config.ca_hash.is_none());
}

#[test]
fn other_systems_flag_names_are_accepted() {
    let config =
        config(&["--tunnelserver-addr=a:1,b:2", "--server=b:2", "--meta-port=0", "--cert-dir=/x", "--v=4"])
            .unwrap();
    assert_eq!(config.servers.iter().map(ToString::to_string).collect::<Vec<_>>(), ["a:1", "b:2"]);
    assert_eq!((config.given.admin_address, config.given.state_dir), (None, PathBuf::from("/x")));
    assert_eq!(config.given.log.log_level, "debug".parse().unwrap());
}

#[test]
fn a_proxy_is_the_flags_or_the_environments() {
    let flag = |url: &str| Some(SecretString::from(url));
    let shown = |flag: Option<SecretString>, variables: &[(&str, &str)]| {
        let environment = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let proxy = super::proxy(flag.as_ref(), environment);
        proxy.map(|proxy| proxy.map(|proxy| proxy.to_string())).map_err(|error| error.to_string())
    };
    let both = [("https_proxy", "http://user:secret@b:2"), ("ALL_PROXY", "http://c:3")];
    assert_eq!(shown(None, &[]), Ok(None));
    assert_eq!(shown(None, &[("HTTP_PROXY", "http://a:1"), ("HTTPS_PROXY", "")]), Ok(None));
    assert_eq!(shown(None, &both), Ok(Some("http://b:2".to_owned())));
    assert_eq!(shown(None, &both[1..]), Ok(Some("http://c:3".to_owned())));
    assert_eq!(shown(flag("http://a:1"), &both), Ok(Some("http://a:1".to_owned())));
    assert_eq!(shown(flag("none"), &both), Ok(None));
    let error = shown(flag("https://user:secret@a:1"), &[]).unwrap_err();
    assert!(error.starts_with("--proxy") && !error.contains("secret"), "{error}");
    let error = shown(None, &[("HTTPS_PROXY", "socks5://a:1")]).unwrap_err();
    assert!(error.starts_with("HTTPS_PROXY") && error.contains("socks5"), "{error}");
}

#[test]
fn the_short_help_is_short() {
    let help = |words: &[&str]| {
        parse::<Cli>(std::iter::once(&"tunnel-agent").chain(words), SHORT_HELP).unwrap_err().to_string()
    };
    for words in [&["-h"][..], &["doctor", "-h"], &["bundle", "-h"]] {
        let text = help(words);
        assert!(text.lines().count() <= 25, "{words:?}: {} lines:\n{text}", text.lines().count());
    }
    let short = help(&["-h"]);
    for shown in SHORT_HELP.split_whitespace() {
        assert!(short.contains(shown), "{shown} is not in\n{short}");
    }
    let long = help(&["--help"]);
    for heading in ["Links with the servers:", "Kubernetes:", "konnectivity's servers:"] {
        assert!(long.contains(heading), "{heading} is not in\n{long}");
    }
}

#[test]
fn a_file_has_flags_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.yaml");
    let file = format!("--config={}", path.display());
    std::fs::write(&path, "server: [a:1, b:1]\nallow-target:\n- node:22\n- 10.0.0.0/8:*\nbench: off\n")
        .unwrap();
    let of_file = config(&[&file]).unwrap();
    assert_eq!((of_file.servers.len(), of_file.given.targets.allow.len()), (2, 2));
    assert!(!of_file.given.links.bench);
    assert_eq!(format!("{:?}", parsed_again(&of_file)), format!("{of_file:?}"));
    assert_eq!(config(&[&file, "--server=c:1"]).unwrap().servers.len(), 1, "the command line wins");
}

#[test]
fn the_logged_flags_give_the_same_configuration() {
    let config = config(&[
        "--server=a:1,[fd00::1]:2",
        "--node-ip=10.8.0.7",
        "--state-dir=/s",
        "--admin-address=0",
        "--allow-target=node:22,80-90",
        "--allow-target=[fd00::/64]:*",
        "--max-servers=2",
        "--max-links=3",
        "--keepalive=30s",
        "--drain-timeout=1500ms",
        "--when-replaced=wait",
        "--log-format=json",
        "--log-level=9",
    ])
    .unwrap();
    assert_eq!(format!("{:?}", parsed_again(&config)), format!("{config:?}"));
}

#[test]
fn the_logged_proxy_has_no_password() {
    let logged = |proxy: &str| {
        let flags = config(&["--server=a:1", proxy]).unwrap().flags;
        flags.into_iter().filter(|flag| flag.starts_with("--proxy")).collect::<Vec<_>>()
    };
    assert_eq!(logged("--proxy=http://user:secret@b:2"), ["--proxy=http://b:2"]);
    assert_eq!(logged("--proxy=none"), ["--proxy=none"]);
}

#[test]
fn with_a_kubeconfig_servers_are_found_or_given() {
    let found = config(&["--kube-config=/k"]).unwrap();
    let kube = found.kube.clone().unwrap();
    assert_eq!((kube.kubeconfig.as_deref(), kube.namespace), (Some(Path::new("/k")), None));
    assert_eq!((kube.service.as_str(), found.servers.len()), ("x-tunnel-server-svc", 0));
    let given =
        config(&["--kubeconfig=/k", "--server=a:1", "--namespace=n", "--service=s", "--pod-targets=on"])
            .unwrap();
    assert!(given.servers.len() == 1 && given.given.targets.pods);
    for config in [found, given] {
        assert_eq!(format!("{:?}", parsed_again(&config)), format!("{config:?}"));
    }
    assert!(config(&["--server=a:1"]).unwrap().kube.is_none());
}

#[test]
fn a_pod_uses_the_api_server_unless_it_has_a_token() {
    let as_pod = |args: &[&str]| parsed_as(true, &[&["--node-name=edge-1"], args].concat());
    assert!(as_pod(&[]).unwrap().kube.is_some());
    // Several masters behind public addresses: the servers are given, and the certificate comes through the API server.
    let given = as_pod(&["--server=a:1,b:1", "--namespace=n"]).unwrap();
    assert_eq!(given.servers.len(), 2);
    assert_eq!(given.kube.unwrap().namespace.as_deref(), Some("n"));
    let token = [format!("--ca-hash={HASH}"), "--token=abc.def".to_owned(), "--server=a:1".to_owned()];
    let token: Vec<&str> = token.iter().map(String::as_str).collect();
    assert!(as_pod(&token).unwrap().kube.is_none());
    // Enrolled, and the token was removed from the manifest.
    assert!(as_pod(&[token[0], token[2]]).unwrap().kube.is_none());
    assert!(as_pod(&token[..2]).unwrap_err().starts_with("--token: not with --kubeconfig"));
}

#[test]
fn yurttunnels_command_line_is_accepted() {
    let config = config(&[
        "--kube-config=/etc/kubernetes/kubelet.conf",
        "--apiserver-addr=https://10.0.0.1:6443",
        "--agent-identifiers=ipv4=10.8.0.7&host=edge-1",
        "--meta-host=127.0.0.1",
        "--meta-port=10266",
        "--cert-dir=/x",
    ])
    .unwrap();
    assert_eq!(config.ignored.0, ["--apiserver-addr", "--meta-host", "--agent-identifiers"]);
}

/// Command lines of pods, with $(NODE_NAME) and the like replaced.
#[test]
fn published_command_lines_are_accepted() {
    let published = |args: &[&str]| parsed_as(true, args).unwrap();
    let ignored = |config: &Config| config.ignored.0.clone();
    // YurtTunnel's chart and its folder config/setup, v0.4 to v1.3.
    let yurttunnel =
        published(&["--node-name=edge-1", "--node-ip=10.8.0.7", "--tunnelserver-addr=", "--v=2"]);
    assert!(ignored(&yurttunnel).is_empty() && yurttunnel.servers.is_empty() && yurttunnel.kube.is_some());
    assert!(ignored(&published(&["--node-name=edge-1", "--node-ip=10.8.0.7", "--v=2"])).is_empty());
    // SuperEdge's tunnel-edge, v0.2 to v0.9, which has $NODE_NAME in its environment.
    let superedge = published(&[
        "--m=edge",
        "--c=/etc/superedge/tunnel/conf/tunnel_edge.toml",
        "--log-dir=/var/log/tunnel",
        "--alsologtostderr",
        "--node-name=edge-1",
    ]);
    assert_eq!(ignored(&superedge), ["--m", "--c", "--log-dir", "--alsologtostderr"]);
    // konnectivity's folder examples, v0.36.0, and the documentation of Kubernetes.
    let examples = published(&[
        "--logtostderr=true",
        "--ca-cert=/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
        "--proxy-server-host=konnectivity-server.kube-system.svc.cluster.local",
        "--proxy-server-port=8091",
        "--sync-interval=5s",
        "--sync-interval-cap=30s",
        "--sync-forever",
        "--probe-interval=5s",
        "--service-account-token-path=/var/run/secrets/tokens/konnectivity-agent-token",
        "--agent-identifiers=ipv4=10.8.0.7",
        "--count-server-leases",
        "--node-name=edge-1",
    ]);
    assert_eq!(
        ignored(&examples),
        ["--count-server-leases", "--probe-interval", "--sync-forever", "--logtostderr"]
    );
    let server = examples.konnectivity.unwrap().server.to_string();
    assert_eq!(server, "konnectivity-server.kube-system.svc.cluster.local:8091");
    let documented = published(&[
        "--logtostderr=true",
        "--ca-cert=/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
        "--proxy-server-host=35.225.206.7",
        "--proxy-server-port=8132",
        "--admin-server-port=8133",
        "--health-server-port=8134",
        "--service-account-token-path=/var/run/secrets/tokens/konnectivity-agent-token",
        "--node-name=edge-1",
    ]);
    assert_eq!(ignored(&documented), ["--admin-server-port", "--logtostderr"]);
    assert_eq!(documented.given.admin_address.unwrap().port(), 8134);
}

#[test]
fn the_token_is_masked_and_needs_the_ca_hash() {
    let config = config(&["--server=a:1", "--token=abc.def", &format!("--ca-hash={HASH}")]).unwrap();
    assert_eq!(config.token.as_ref().unwrap().expose_secret(), "abc.def");
    assert!(!format!("{config:?} {:?}", config.flags).contains("abc.def"));
    assert_eq!(
        error(&["--server=a:1", "--token=abc.def"]),
        "--ca-hash: needed with a token, or it could enrol with an impostor; `tunnel-server ca status` prints it"
    );
}

#[test]
fn the_token_file_may_be_gone_once_enrolled() {
    let directory = tempfile::tempdir().unwrap();
    let (file, state) = (directory.path().join("token"), directory.path().join("state"));
    let flags = [
        "--server=a:1".to_owned(),
        format!("--ca-hash={HASH}"),
        format!("--token-file={}", file.display()),
        format!("--state-dir={}", state.display()),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    assert_eq!(
        error(&flags),
        format!("--token-file={}: No such file or directory (os error 2)", file.display())
    );
    std::fs::write(&file, " \n").unwrap();
    let reason = "--token-file: not a token: it is empty, or has blanks or characters that are not ASCII";
    assert_eq!(error(&flags), reason);
    std::fs::write(&file, "abc\u{2011}def\n").unwrap();
    assert_eq!(error(&flags), reason, "a hyphen of a word processor");
    std::fs::write(&file, "\u{feff}abc.def\r\n").unwrap();
    assert_eq!(config(&flags).unwrap().token.unwrap().expose_secret(), "abc.def");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&state).unwrap();
    std::fs::write(state.join("agent.crt"), "").unwrap();
    assert!(config(&flags).unwrap().token.is_none());
}

#[test]
fn errors_name_key_value_and_reason() {
    for (args, expected) in [
        (
            &[][..],
            "--server: needed: HOST:PORT of each tunnel-server; or --kubeconfig FILE, to find them and enrol through the API server (as a pod neither is needed, but this is none: $KUBERNETES_SERVICE_HOST is not set)",
        ),
        (&["--server=,"], "--server=,: no HOST:PORT in it"),
        (
            &["--server=a:1,b"],
            "--server=b: not HOST:PORT; use one such as tunnel.example.org:10262 or [fd00::1]:10262",
        ),
        (
            &["--kubeconfig=/k", "--token=a"],
            "--token: not with --kubeconfig, nor as a pod without --server, where this agent enrols through the API server; leave it out, or enrol with --server, --token and --ca-hash alone",
        ),
        (
            &["--server=a:1", "--service=s"],
            "--service=s: not with --server alone, which uses no API server; add --kubeconfig or leave it out",
        ),
        (&["--kubeconfig=/k", "--service=a,b"], "--service=a,b: not the name of an object in Kubernetes"),
        (
            &["--server=a:1", "--node-ip=edge"],
            "--node-ip=edge: not an IP address; use one such as 10.8.0.7 or fd00::7",
        ),
        (&["--kubeconfig=/k", "--pod-targets=yes"], "--pod-targets=yes: use on or off"),
        (
            &["--server=a:1", "--pod-targets=on"],
            "--pod-targets=on: an API server is needed, which has the ranges; name them with --allow-target",
        ),
        (
            &["--kubeconfig=/k", "--pod-targets=on", "--allow-target=node:22"],
            "--pod-targets=on: not with --allow-target: name the ranges there",
        ),
        (&["--server=a:1", "--node-ip=0.0.0.0"], "--node-ip=0.0.0.0: not the address of a node"),
        (
            &["--server=a:1", "--ca-hash=sha256:12"],
            "--ca-hash=sha256:12: CA hash \"sha256:12\": want \"sha256:\" and 64 hexadecimal digits, as `tunnel-server token create` prints it",
        ),
        (
            &["--server=a:1", "--token=a", "--token-file=/t"],
            "--token-file=/t: --token is given too; use one of them",
        ),
        (
            &["--server=a:1", "--admin-address=0.0.0.0:1"],
            "--admin-address=0.0.0.0:1: not a loopback address: this endpoint has no authentication; use 127.0.0.1 or [::1]",
        ),
        (
            &["--server=a:1", "--allow-target=10.0.0.1"],
            "--allow-target=10.0.0.1: not CIDR:PORTS; use one such as 10.8.0.0/24:22,80, [fd00::/64]:443 or node:*",
        ),
        (&["--server=a:1", "--max-servers=0"], "--max-servers=0: not a number of servers from 1 on, nor all"),
        (&["--server=a:1", "--max-links=9"], "--max-links=9: not from 1 to 8, nor auto"),
        (&["--server=a:1", "--keepalive=1500ms"], "--keepalive=1500ms: not whole seconds from 1s to 5m"),
        (&["--server=a:1", "--when-replaced=stop"], "--when-replaced=stop: possible values: exit, wait"),
        (&["--server=a:1", "--keepalive=6m"], "--keepalive=6m: not whole seconds from 1s to 5m"),
        (
            &["--server=a:1", "--drain-timeout=30"],
            "--drain-timeout=30: not a length of time; use a number and a unit, such as 500ms, 30s or 1h30m",
        ),
        (&["--server=a:1", "--log-format=xml"], "--log-format=xml: possible values: text, json"),
        (
            &["--server=a:1", "--log-level=loud"],
            "--log-level=loud: not a log level; use off, error, warn, info, debug, trace, or klog's number",
        ),
    ] {
        let error = error(args);
        let (given, reason) = expected.split_once(": ").unwrap();
        let parts = given.splitn(2, '=').chain([reason]);
        parts.for_each(|part| assert!(error.contains(part), "{args:?}: {error} lacks {part}"));
    }
    let named = parsed_as(false, &["--server=a:1", "--node-name=Edge_1"]).unwrap_err();
    assert!(named.contains("'Edge_1' for '--node-name <NAME>': ") && named.contains("upper-case"), "{named}");
}

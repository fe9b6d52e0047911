//! The flags and the configuration that they yield.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, CommandFactory, Parser};
use tunnel_redirect::{Pods, RedirectConfig};
use tunnel_routing::inventory::Selector;
use tunnel_runtime::config::parse;
use tunnel_runtime::logging;

use super::Config;
use crate::cli::{Cli, Command, SHORT_HELP};
use crate::kube::KubeOptions;
use crate::runtime::role::Role;

/// Parses a command line to the configuration, or to the error that would be printed.
pub(super) fn parsed(words: &[&str]) -> Result<Config, String> {
    let words = std::iter::once(&"tunnel-server").chain(words);
    let (cli, flags) = parse::<Cli>(words, SHORT_HELP).map_err(|error| error.to_string())?;
    let config = match cli.command {
        Some(Command::Redirector(redirector)) => redirector.config(flags),
        _ => cli.run.check(flags),
    };
    config.map_err(|error| error.to_string())
}

pub(super) fn config(args: &[&str]) -> Result<Config, String> {
    parsed(&[&["--inventory=/nodes.yaml"], args].concat())
}

pub(super) fn in_cluster(args: &[&str]) -> Result<Config, String> {
    parsed(args)
}

/// Parses the flags that are logged again.
pub(super) fn parsed_again(config: &Config) -> Config {
    parsed(&config.flags.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

fn error(args: &[&str]) -> String {
    config(args).expect_err(&format!("{args:?}"))
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

/// Those without one can neither be in the file of --config nor are they shown by /config.
#[test]
fn every_flag_takes_a_value() {
    let command = Cli::command();
    let redirector = command.find_subcommand("redirector").unwrap();
    for arg in command.get_arguments().chain(redirector.get_arguments()) {
        let sets = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        assert!(sets || matches!(arg.get_long(), Some("help" | "version") | None), "{arg}");
    }
}

#[test]
fn defaults_are_as_documented() {
    let config = config(&[]).unwrap();
    assert_eq!(config.nodes.inventory, Some("/nodes.yaml".into()));
    assert!(config.redirect.edge_pod_routes.is_empty() && !config.writes.node_condition);
    assert_eq!(config.process.state_dir, PathBuf::from("/var/lib/postern/server"));
    assert_eq!(config.listeners.common.bind_address, IpAddr::from([0, 0, 0, 0]));
    assert_eq!(
        (config.listeners.agents.port, config.listeners.listeners.secure_port),
        (Some(10262), Some(10263))
    );
    assert_eq!(config.listeners.listeners.insecure_address(), Some("127.0.0.1:10264".parse().unwrap()));
    assert_eq!(config.listeners.common.admin_address, Some("127.0.0.1:10265".parse().unwrap()));
    assert_eq!(config.redirect.redirect_ports, BTreeSet::from([10250, 10255]));
    assert_eq!(config.redirect.ranges.redirect_range.to_string(), "198.18.0.0/15");
    assert_eq!(config.nodes.edge_selector, Selector::default());
    assert_eq!(config.process.drain_timeout, Duration::from_secs(30));
    assert_eq!(
        (config.log.log_format, config.log.log_level),
        (logging::Format::Text, "info".parse().unwrap())
    );
    assert!(config.redirect.exclude.is_empty() && config.redirect.redirect_clients.is_empty());
    assert!(config.redirect.edge_addresses.is_empty() && config.redirect.service_cidrs.is_empty());
    assert!(!config.nodes.allow_empty_inventory);
    assert!(config.listeners.agents.cert_dns_names.is_empty() && config.listeners.agents.cert_ips.is_empty());
    let redirect = config.redirect_start().unwrap();
    let default = RedirectConfig::default();
    assert_eq!((redirect.cgroup, redirect.pods), (None, Pods::Auto));
    assert_eq!(
        (redirect.redirect_range, redirect.redirect_range_v6),
        (default.redirect_range, default.redirect_range_v6)
    );
    assert_eq!(
        (config.redirect.ranges.redirect_range, config.redirect.ranges.redirect_range_v6),
        (default.redirect_range, default.redirect_range_v6)
    );
}

#[test]
fn every_flag_has_an_effect() {
    let config = config(&[
        "--state-dir=/s",
        "--bind-address=::",
        "--agent-port=1",
        "--secure-port=0",
        "--admin-address=[::1]:3",
        "--redirect-cgroup=/sys/fs/cgroup/x",
        "--redirect-pods=route",
        "--redirect-ports=22,80",
        "--exclude=10.0.0.0/8,fd00::1",
        "--edge-addresses=10.8.0.0/16,fd00:8::/32",
        "--service-cidrs=10.96.0.0/12",
        "--allow-empty-inventory",
        "--redirect-clients=10.244.0.0/16",
        "--redirect-range=100.64.0.0/10",
        "--redirect-range-v6=fd00:1:2:3::/80",
        "--edge-selector=edge=yes",
        "--cert-dns-names=a.example.org,*.b.example.org",
        "--cert-ips=192.0.2.1,fd00::2",
        "--drain-timeout=1m",
        "--log-format=json",
        "--log-level=debug",
        "--insecure-bind-address=127.0.0.2",
        "--insecure-port=4",
        "--edge-pod-routes=10.244.0.0/16,10.245.0.0/16",
        "--node-condition=on",
        "--dns-records=off",
        "--dns-zones=edge.example.org,b.example.org",
        "--connect-port=5",
        "--metrics-port=6",
        "--policy=/etc/policy.yaml",
        "--client-ca-file=/etc/ca.crt",
        "--terminate-tls=off",
        "--token-auth-file=/etc/tokens.csv",
        "--map=127.0.0.1:2222=edge-7/22",
        "--map=0.0.0.0:2223=edge-8/10.8.0.9:443,10.0.0.0/8",
        "--maps=/etc/maps.yaml",
    ])
    .unwrap();
    assert_eq!(config.redirect.edge_pod_routes.len(), 2);
    assert!(config.writes.node_condition && !config.writes.dns_records);
    assert_eq!(config.writes.dns_zones.len(), 2);
    assert_eq!(
        (config.listeners.connect.connect_port, config.listeners.common.metrics_port),
        (Some(5), Some(6))
    );
    let maps: Vec<_> = config.listeners.connect.maps.iter().map(ToString::to_string).collect();
    let local = "127.0.0.1:2222=edge-7/22,127.0.0.0/8,::1/128";
    assert_eq!(maps, [local, "0.0.0.0:2223=edge-8/10.8.0.9:443,10.0.0.0/8"]);
    assert_eq!(config.listeners.listeners.insecure_address(), Some("127.0.0.2:4".parse().unwrap()));
    assert_eq!(config.listeners.common.bind_address, "::".parse::<IpAddr>().unwrap());
    assert_eq!((config.listeners.agents.port, config.listeners.listeners.secure_port), (Some(1), None));
    assert_eq!(config.listeners.common.admin_address, Some("[::1]:3".parse().unwrap()));
    let redirect = config.redirect_start().unwrap();
    assert_eq!(redirect.cgroup, Some(PathBuf::from("/sys/fs/cgroup/x")));
    assert_eq!(redirect.redirect_range.to_string(), "100.64.0.0/10");
    assert_eq!(redirect.redirect_range_v6.to_string(), "fd00:1:2:3::/80");
    assert_eq!((&redirect.clients, redirect.pods), (&config.redirect.redirect_clients, Pods::Route));
    assert_eq!(config.redirect.redirect_ports, BTreeSet::from([22, 80]));
    assert_eq!(config.redirect.exclude, ["10.0.0.0/8".parse().unwrap(), "fd00::1/128".parse().unwrap()]);
    assert_eq!(
        config.redirect.edge_addresses,
        ["10.8.0.0/16".parse().unwrap(), "fd00:8::/32".parse().unwrap()]
    );
    assert_eq!(config.redirect.service_cidrs, ["10.96.0.0/12".parse().unwrap()]);
    assert!(config.nodes.allow_empty_inventory);
    assert_eq!(config.nodes.edge_selector.to_string(), "edge=yes");
    assert_eq!(config.listeners.agents.cert_dns_names, ["a.example.org", "*.b.example.org"]);
    assert_eq!(config.listeners.agents.cert_ips.len(), 2);
    assert_eq!(config.process.drain_timeout, Duration::from_secs(60));
    assert_eq!(
        (config.log.log_format, config.log.log_level),
        (logging::Format::Json, "debug".parse().unwrap())
    );
    let again = parsed_again(&config);
    assert_eq!(
        format!("{again:?}"),
        format!("{config:?}"),
        "the flags that are logged give the same configuration"
    );

    let off = self::config(&[
        "--redirect=off",
        "--insecure-port=0",
        "--redirect-ports=",
        "--admin-address=0",
        "--drain-timeout=1500ms",
    ])
    .unwrap();
    assert!(off.redirect_start().is_none());
    let again = parsed_again(&off);
    assert_eq!(format!("{again:?}"), format!("{off:?}"));
}

#[test]
fn flag_names_of_other_systems_are_accepted() {
    let config =
        config(&["--tunnel-agent-connect-port=7", "--meta-port=9", "--cert-dir=/c", "--v=5"]).unwrap();
    assert_eq!(config.listeners.agents.port, Some(7));
    assert_eq!(config.listeners.common.admin_address, Some("127.0.0.1:9".parse().unwrap()));
    assert_eq!(
        (config.process.state_dir, config.log.log_level),
        (PathBuf::from("/c"), "debug".parse().unwrap())
    );
    assert_eq!(in_cluster(&["--kube-config=/k"]).unwrap().kube.kubeconfig, Some("/k".into()));
}

#[test]
fn who_may_attach_and_enrol() {
    let standalone = config(&[]).unwrap();
    assert_eq!((standalone.listeners.agents.refuse_unknown, standalone.token_enrollment()), (true, true));
    assert!(!in_cluster(&[]).unwrap().token_enrollment(), "a cluster has CSRs");
    let other = in_cluster(&["--unknown-agents=allow", "--token-enrollment=on"]).unwrap();
    assert_eq!((other.listeners.agents.refuse_unknown, other.token_enrollment()), (false, true));
    assert!(!config(&["--token-enrollment=off"]).unwrap().token_enrollment());
    assert!(error(&["--unknown-agents=ask"]).contains("use refuse or allow"));
    assert!(error(&["--token-enrollment=yes"]).contains("use on or off"));
}

#[test]
fn kubernetes_is_the_default_source() {
    let default = in_cluster(&[]).unwrap();
    assert_eq!(default.nodes.inventory, None);
    assert_eq!(default.kube, KubeOptions { kubeconfig: None, namespace: None, names: Default::default() });
    let config = in_cluster(&[
        "--kubeconfig=/k",
        "--namespace=edge",
        "--configmap=yurt-tunnel-server-cfg",
        "--dns-configmap=yurt-tunnel-nodes",
        "--service=a",
        "--internal-service=b",
        "--ca-secret=c",
        "--lease=d",
        "--revocations-configmap=f",
        "--agent-service-account=e.f",
    ])
    .unwrap();
    let again = parsed_again(&config);
    assert_eq!(format!("{again:?}"), format!("{config:?}"));
    assert_eq!(config.kube.namespace.as_deref(), Some("edge"));
    assert_eq!(config.kube.names.configmap, "yurt-tunnel-server-cfg");
    assert_eq!(config.kube.names.agent_service_account, "e.f");
    assert!(Cli::try_parse_from(["tunnel-server", "--kubeconfig=/k", "--inventory=/n"]).is_err());
}

#[test]
fn errors_name_key_value_and_reason() {
    for (args, expected) in [
        (
            &["--agent-port=70000"][..],
            "--agent-port=70000: not a port; use 1 to 65535, or 0 to switch it off",
        ),
        (&["--secure-port=10262"], "--secure-port: --agent-port has port 10262 already; choose another"),
        (
            &["--admin-address=127.0.0.1:10263"],
            "--admin-address: --secure-port has port 10263 already; choose another",
        ),
        (
            &["--bind-address=localhost"],
            "--bind-address=localhost: not an IP address; use one such as 10.8.0.7 or fd00::7",
        ),
        (
            &["--admin-address=10.0.0.1:10265"],
            "--admin-address=10.0.0.1:10265: not a loopback address: this endpoint has no authentication; use 127.0.0.1 or [::1]",
        ),
        (
            &["--insecure-bind-address=0.0.0.0"],
            "--insecure-bind-address=0.0.0.0: not a loopback address: this listener has no authentication; use 127.0.0.1 or ::1",
        ),
        (
            &["--insecure-port=10265"],
            "--admin-address: --insecure-port has port 10265 already; choose another",
        ),
        (&["--redirect=maybe"], "--redirect=maybe: use on or off"),
        (
            &["--orphan-policy=refuse", "--bpffs=off"],
            "--orphan-policy=refuse: not possible with --bpffs=off, where the programs end with this process: give a BPF file system",
        ),
        (
            &["--token-audience=a,"],
            "--token-audience=a,: an audience is empty; name one or more, such as postern.internal,api-server",
        ),
        (&["--redirect-ports=a"], "--redirect-ports=a: \"a\" is not a port; use 1 to 65535, comma-separated"),
        (&["--redirect-ports="], "--redirect-ports=: empty; name the ports to redirect"),
        (
            &["--gateway", "--redirect-clients=10.0.0.0/8"],
            "--gateway: what the network leads here is taken by route only: give --redirect-pods=route too",
        ),
        (
            &["--gateway", "--redirect-pods=route"],
            "--gateway: it would serve this host's pods only: name the clients' addresses with --redirect-clients",
        ),
        (
            &["--exclude=10.0.0.1/8"],
            "--exclude=10.0.0.1/8: \"10.0.0.1/8\" has bits set after its prefix; did you mean 10.0.0.0/8?",
        ),
        (
            &["--redirect-range=198.18.0.0/25"],
            "--redirect-range=198.18.0.0/25: use a /8 to /24: one address for each edge address",
        ),
        (
            &["--redirect-range=198.0.0.0/7"],
            "--redirect-range=198.0.0.0/7: use a /8 to /24: one address for each edge address",
        ),
        (
            &["--redirect-range=fd00::/64"],
            "--redirect-range=fd00::/64: not IPv4; the IPv6 range is --redirect-range-v6",
        ),
        (&["--redirect-range=127.1.0.0/16"], "--redirect-range=127.1.0.0/16: it contains loopback addresses"),
        (
            &["--redirect-range=224.1.0.0/16"],
            "--redirect-range=224.1.0.0/16: it contains multicast or reserved addresses",
        ),
        (
            &["--exclude=198.18.1.0/24"],
            "--redirect-range=198.18.0.0/15: it overlaps 198.18.1.0/24 of --exclude",
        ),
        (
            &["--redirect-range-v6=fd00::/48"],
            "--redirect-range-v6=fd00::/48: use a /64 to /96: one address for each edge address",
        ),
        (
            &["--redirect-range-v6=10.0.0.0/8"],
            "--redirect-range-v6=10.0.0.0/8: not IPv6; the IPv4 range is --redirect-range",
        ),
        (
            &["--redirect-range-v6=fe80::/64"],
            "--redirect-range-v6=fe80::/64: not a unique local or global unicast range; use one such as fd00:1:2:3::/64",
        ),
        (
            &["--edge-selector="],
            "--edge-selector=: a selector is empty, which would make every node an edge node",
        ),
        (&["--cert-dns-names=a,b c"], "--cert-dns-names=a,b c: \"b c\" is not a DNS name"),
        (&["--cert-ips=a"], "--cert-ips=a: \"a\": "),
        (
            &["--peers=tunnel-2"],
            "--peers=tunnel-2: not HOST:PORT; use one such as tunnel.example.org:10262 or [fd00::1]:10262",
        ),
        (
            &["--congestion-control=BBR"],
            "--congestion-control=BBR: not auto, system, or the kernel's name of an algorithm, such as bbr or cubic",
        ),
        (
            &["--drain-timeout=30"],
            "--drain-timeout=30: not a length of time; use a number and a unit, such as 500ms, 30s or 1h30m",
        ),
        (&["--log-format=xml"], "--log-format=xml: possible values: text, json"),
        (
            &["--log-level=loud"],
            "--log-level=loud: not a log level; use off, error, warn, info, debug, trace, or klog's number",
        ),
        (
            &["--edge-pod-routes=on"],
            "--edge-pod-routes=on: name the ranges of edge nodes' pods, such as 10.244.0.0/16, or off",
        ),
        (
            &["--namespace=Kube"],
            "--namespace=Kube: not the name of an object; use lower-case letters, digits, - and ., such as tunnel-server",
        ),
        (
            &["--lease="],
            "--lease=: not the name of an object; use lower-case letters, digits, - and ., such as tunnel-server",
        ),
    ] {
        let error = error(args);
        let (given, reason) = expected.split_once(": ").unwrap();
        let parts = given.splitn(2, '=').chain([reason]);
        parts.for_each(|part| assert!(error.contains(part), "{args:?}: {error} lacks {part}"));
    }
}

#[test]
fn flags_and_subcommands_do_not_mix() {
    assert!(Cli::try_parse_from(["tunnel-server", "--agent-port=1", "status"]).is_err());
    let cli = Cli::try_parse_from(["tunnel-server", "status", "-o", "json"]).unwrap();
    assert!(matches!(cli.command, Some(Command::Status(_))));
    for args in [
        &["cleanup"][..],
        &["token", "create", "--node", "edge-1", "--state-dir=/x", "-o", "json"],
        &["ca", "status"],
        &["agent", "revoke", "edge-1", "--state-dir=/x"],
        &["agent", "list", "--in-cluster", "--namespace=x"],
    ] {
        assert!(
            Cli::try_parse_from(std::iter::once(&"tunnel-server").chain(args)).unwrap().command.is_some(),
            "{args:?}"
        );
    }
}

#[test]
fn a_redirector_has_its_own_flags() {
    let redirector =
        |args: &[&str]| parsed(&[&["redirector", "--inventory=/n", "--node-name=cloud-2"], args].concat());
    let plain =
        redirector(&["--peers=a:1,b:1", "--token=abc.def", &format!("--ca-hash=sha256:{}", "0".repeat(64))]);
    let plain = plain.unwrap();
    assert_eq!(plain.role(), Role::Redirector);
    assert_eq!(plain.listeners.addresses(), [("--admin-address", "127.0.0.1:10265".parse().unwrap())]);
    assert!(plain.redirect_start().is_some());
    assert!(!format!("{plain:?} {:?}", plain.flags).contains("abc.def"));
    assert_eq!(plain.flags[0], "redirector");
    assert!(plain.flags.contains(&"--token=***".to_owned()), "{:?}", plain.flags);
    assert_eq!(format!("{:?}", parsed_again(&plain)), format!("{plain:?}"));
    assert!(redirector(&[]).unwrap_err().starts_with("--peers: needed with --inventory"));
    for flag in ["--agent-port=1", "--redirect=off", "--policy=/p", "--ca-secret=s", "--map=127.0.0.1:1=a/1"]
    {
        let error = redirector(&["--peers=a:1", flag]).unwrap_err();
        assert!(error.contains("unexpected argument"), "{flag}: {error}");
    }
    let metrics =
        ["--metrics-port=10269", "--bind-address=::1", "--client-ca-file=/c", "--token-auth-file=/t"];
    let metrics = redirector(&[&["--peers=a:1"][..], &metrics].concat()).unwrap();
    assert_eq!(
        (metrics.listeners.common.metrics_port, metrics.listeners.listeners.terminate_tls),
        (Some(10269), false)
    );
    for flag in ["--node-name=x", "--token=x", "--token-file=x", "--ca-hash=x"] {
        assert!(error(&[flag]).contains("unexpected argument"), "{flag}");
    }
    let pod = parsed(&["redirector", "--node-name=cloud-2", "--service=s"]).unwrap();
    assert_eq!(pod.redirector.as_ref().unwrap().node.as_str(), "cloud-2");
    assert_eq!(pod.kube.names.service, "s");
    assert_eq!(format!("{:?}", parsed_again(&pod)), format!("{pod:?}"));
    let token = parsed(&["redirector", "--token=x"]).unwrap_err();
    assert!(token.starts_with("--token: not supported in a cluster"), "{token}");
    // deploy/components/everywhere copies these from the servers.
    let server = Cli::command();
    for command in [&server, server.find_subcommand("redirector").unwrap()] {
        for (flag, variable) in
            [("configmap", "POSTERN_CONFIGMAP"), ("edge_selector", "POSTERN_EDGE_SELECTOR")]
        {
            let found = command.get_arguments().find(|argument| argument.get_id() == flag).unwrap();
            assert_eq!(found.get_env().unwrap(), variable, "{}", command.get_name());
        }
    }
}

#[test]
fn listeners_that_speak_http_have_their_flags() {
    let plain = config(&[]).unwrap();
    assert!(!plain.listeners.listeners.terminate_tls && plain.listeners.listeners.plain.port.is_none());
    assert_eq!(plain.listeners.listeners.targets.plain_ports, BTreeSet::from([10255]));
    let all = config(&[
        "--client-ca-file=/ca.crt",
        "--kubelet-certificate-authority=/kubelets.crt",
        "--kubelet-client-certificate=/own.crt",
        "--kubelet-client-key=/own.key",
        "--http-ports=9100,9445",
        "--plain-port=10268",
        "--plain-clients=10.244.0.0/16",
        "--plain-ports=9100",
        "--secure-ports=10270=9443, 10271=10257",
    ])
    .unwrap();
    assert_eq!(all.listeners.listeners.secure_ports, BTreeMap::from([(10270, 9443), (10271, 10257)]));
    assert_eq!(all.listeners.listeners.internal().secure, BTreeMap::from([(9443, 10270), (10257, 10271)]));
    assert!(all.listeners.listeners.terminate_tls, "a CA of callers is given for that");
    assert_eq!(all.listeners.listeners.targets.plain_ports, BTreeSet::from([9100, 9445]));
    let listener = all.listeners.listeners.plain.clone();
    assert_eq!(
        (listener.port, listener.clients.len(), listener.ports),
        (Some(10268), 1, BTreeSet::from([9100]))
    );
    assert_eq!(format!("{:?}", parsed_again(&all)), format!("{all:?}"));
    // The Service leads to the plain listener; the ConfigMap's pairs name the http listener.
    let listeners = all.listeners.listeners.internal();
    assert_eq!((listeners.https, listeners.http, listeners.pairs), (10263, 10268, 10264));
    assert_eq!(plain.listeners.listeners.internal().http, 0);
    assert!(
        !config(&["--client-ca-file=/ca.crt", "--terminate-tls=off"])
            .unwrap()
            .listeners
            .listeners
            .terminate_tls
    );
    assert_eq!(in_cluster(&["--metrics-port=10269"]).unwrap().listeners.common.metrics_port, Some(10269));
    assert!(
        in_cluster(&["--terminate-tls=on", "--plain-port=10268"]).unwrap().listeners.listeners.terminate_tls
    );
    // Given explicitly, or not needed.
    let both = ["--connect-port=10280", "--client-ca-file=/ca.crt"];
    assert!(
        config(&[&both[..], &["--terminate-tls=on"]].concat()).unwrap().listeners.listeners.terminate_tls
    );
    assert!(!config(&[&both[..], &["--secure-port=0"]].concat()).unwrap().listeners.listeners.terminate_tls);
    for (args, part) in [
        (&["--terminate-tls=on"][..], "give --client-ca-file"),
        (&["--terminate-tls=maybe"], "use on or off"),
        (&["--terminate-tls=on", "--client-ca-file=/ca.crt", "--secure-port=0"], "the https listener is off"),
        (&["--kubelet-client-certificate=/own.crt"], "needed with --kubelet-client-certificate"),
        (&["--kubelet-client-key=/own.key"], "needed with --kubelet-client-key"),
        (&["--plain-port=10268"], "nobody else may use the listener"),
        (&["--plain-port=10263", "--plain-clients=::/0"], "--secure-port has port"),
        (&["--plain-clients=x"], "--plain-clients <CIDRS>"),
        (&["--plain-clients=10.0.0.0/8"], "--plain-clients: not supported without --plain-port"),
        (&["--plain-ports=9100"], "--plain-ports: not supported without --plain-port"),
        (&["--connect-port=10280", "--client-ca-file=/ca.crt"], "say on or off"),
        (&["--metrics-port=10269", "--client-ca-file=/ca.crt"], "say on or off"),
        (&["--metrics-port=10269"], "--metrics-port=10269: with --inventory callers show"),
        (&["--metrics-port=10263", "--token-auth-file=/t"], "--secure-port has port"),
        (&["--metrics-port=10265", "--token-auth-file=/t"], "--metrics-port has port"),
        (&["--metrics-port=x"], "--metrics-port <PORT>"),
        (&["--secure-ports=9443"], "\"9443\" is not PORT=NODE-PORT"),
        (&["--secure-ports=10270=9443,"], "\"\" is not PORT=NODE-PORT"),
        (&["--secure-ports=0=9443"], "\"0=9443\" is not PORT=NODE-PORT"),
        (&["--secure-ports=10270=1,10270=2"], "port 10270 is there twice"),
        (&["--secure-ports=10270=1,10271=1"], "port 1 of nodes is there twice"),
        (&["--secure-ports=10262=9443"], "--secure-ports: --agent-port has port 10262"),
        (&["--secure-ports=10270=9443", "--secure-port=0"], "the https listener is off"),
    ] {
        let error = error(args);
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

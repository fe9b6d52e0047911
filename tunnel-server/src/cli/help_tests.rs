//! What `--help` shows.

use clap::CommandFactory;

use super::Cli;

/// Every flag in the order of `--help`, and the default that it shows there, if any.
const FLAGS: &[(&str, Option<&str>)] = &[
    ("inventory", None),
    ("allow-empty-inventory", Some("off")),
    ("state-dir", Some("/var/lib/postern/server")),
    ("bind-address", Some("0.0.0.0")),
    ("agent-port", Some("10262")),
    ("secure-port", Some("10263")),
    ("insecure-bind-address", Some("127.0.0.1")),
    ("insecure-port", Some("10264")),
    ("admin-address", Some("127.0.0.1:10265")),
    ("metrics-port", Some("0")),
    ("redirect", Some("on")),
    ("redirect-cgroup", None),
    ("bpffs", Some("/sys/fs/bpf")),
    ("orphan-timeout", Some("30s")),
    ("redirect-ports", Some("10250,10255")),
    ("exclude", None),
    ("edge-addresses", None),
    ("service-cidrs", None),
    ("redirect-clients", None),
    ("token-range", Some("198.18.0.0/15")),
    ("token-range-v6", Some("fd9e:706f:7374:6572::/64")),
    (
        "edge-selector",
        Some(
            "openyurt.io/is-edge-worker=true || superedge.io/edge-node=enable || node-role.kubernetes.io/edge",
        ),
    ),
    ("unknown-agents", Some("refuse")),
    ("token-enrollment", None),
    ("cert-dns-names", None),
    ("cert-ips", None),
    ("peers", None),
    ("congestion-control", Some("auto")),
    ("drain-timeout", Some("30s")),
    ("log-format", Some("text")),
    ("log-level", Some("info")),
    ("connect-port", Some("0")),
    ("policy", None),
    ("token-auth-file", None),
    ("map", None),
    ("maps", None),
    ("secure-ports", None),
    ("terminate-tls", None),
    ("client-ca-file", None),
    ("kubelet-certificate-authority", None),
    ("kubelet-client-certificate", None),
    ("kubelet-client-key", None),
    ("http-ports", Some("10255")),
    ("plain-port", Some("0")),
    ("plain-clients", None),
    ("plain-ports", None),
    ("kubeconfig", None),
    ("namespace", None),
    ("configmap", Some("tunnel-server-cfg")),
    ("dns-configmap", Some("tunnel-nodes")),
    ("service", Some("x-tunnel-server-svc")),
    ("internal-service", Some("x-tunnel-server-internal-svc")),
    ("ca-secret", Some("tunnel-server-ca")),
    ("lease", Some("tunnel-server")),
    ("revocations-configmap", Some("tunnel-revoked-agents")),
    ("agent-service-account", Some("tunnel-agent")),
    ("dns-records", Some("on")),
    ("node-condition", Some("off")),
    ("redirector-service-account", Some("tunnel-redirector")),
    ("edge-pod-routes", Some("off")),
    ("egress-socket", None),
    ("egress-socket-mode", Some("0600")),
    ("egress-port", Some("0")),
    ("egress-client-ca", None),
    ("egress-clients", None),
    ("egress-cert", None),
    ("egress-key", None),
    ("egress-direct", None),
    ("egress-services", Some("off")),
    ("konnectivity-agent-port", Some("0")),
    ("konnectivity-service-account", Some("kube-system/konnectivity-agent")),
    ("konnectivity-audience", Some("system:konnectivity-server")),
    ("role", Some("server")),
    ("node-name", None),
    ("token", None),
    ("token-file", None),
    ("ca-hash", None),
];

#[test]
fn help_lists_these_flags_and_defaults() {
    let command = Cli::command();
    let shown: Vec<(String, Option<String>)> = command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set())
        .filter_map(|argument| Some((argument.get_long()?.to_owned(), argument)))
        .filter(|(long, _)| !["help", "version"].contains(&long.as_str()))
        .map(|(long, argument)| {
            let default =
                argument.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
            (long, default.filter(|_| !argument.is_hide_default_value_set()))
        })
        .collect();
    let expected: Vec<_> =
        FLAGS.iter().map(|(long, default)| ((*long).to_owned(), default.map(str::to_owned))).collect();
    assert_eq!(shown, expected);
    // Each has a help text, which names the units of a duration.
    for argument in command.get_arguments() {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.len() > 10, "{}: {help:?}", argument.get_id());
        if argument
            .get_value_names()
            .is_some_and(|names| names.iter().any(|name| name.as_str() == "DURATION"))
        {
            assert!(help.contains("unit"), "{help}");
        }
    }
    let subcommands: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
    assert_eq!(
        subcommands,
        [
            "status", "doctor", "test", "bundle", "redact", "bench", "cleanup", "token", "agent", "ca",
            "policy", "import"
        ]
    );
}

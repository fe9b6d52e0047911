//! Command lines of YurtTunnel, SuperEdge and konnectivity.

use super::Config;
use super::tests::{config, in_cluster, parsed_again};

/// Parses flags as in a cluster, like the manifests of the other systems.
fn published(flags: &[&str]) -> Config {
    in_cluster(flags).unwrap()
}

fn ignored(config: &Config) -> Vec<&str> {
    config.ignored.0.iter().map(String::as_str).collect()
}

#[test]
fn what_means_the_same_takes_effect() {
    assert!(config(&["--enable-iptables", "--enable-dns-controller=true"]).unwrap().redirects);
    assert!(!config(&["--enable-iptables=false"]).unwrap().redirects);
    assert!(!config(&["--enable-dns-controller=false"]).unwrap().writes.dns_records);
    let drain = config(&["--graceful-shutdown-timeout=1m0s"]).unwrap().process.drain_timeout;
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
    let config = config(&flags).unwrap();
    let mut named: Vec<_> = flags.iter().map(|flag| flag.split('=').next().unwrap()).collect();
    named[5..7].copy_from_slice(&["--m", "--c"]);
    let (mut given, mut named) = (ignored(&config), named);
    given.sort_unstable();
    named.sort_unstable();
    assert_eq!(given, named);
    assert!(ignored(&super::tests::config(&[]).unwrap()).is_empty());
}

/// From its charts and its folder config/setup, v0.4 to v1.3.
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
    assert_eq!(ignored(&chart), ["--proxy-strategy", "--insecure-bind-address"]);
    assert_eq!(chart.listeners.agents.port, Some(10262));
    assert_eq!(
        chart.listeners.listeners.insecure_address(),
        Some("127.0.0.1:10264".parse().unwrap()),
        "it stays closed"
    );
    let older = published(&["--bind-address=fd00::1", "--insecure-bind-address=fd00::1", "--server-count=1"]);
    assert_eq!(ignored(&older), ["--server-count", "--insecure-bind-address"]);
    assert_eq!(older.listeners.listeners.insecure_address(), Some("[::1]:10264".parse().unwrap()));
    assert!(ignored(&published(&["--bind-address=10.0.0.1"])).is_empty());
    // Without flags of YurtTunnel it is an error.
    assert!(config(&["--insecure-bind-address=10.0.0.1"]).unwrap_err().contains("not a loopback address"));
    assert!(config(&["--insecure-bind-address=x", "--server-count=1"]).unwrap_err().contains("not an IP"));
}

#[test]
fn superedges_published_command_line_is_accepted() {
    let config = published(&[
        "--m=cloud",
        "--c=/etc/superedge/tunnel/conf/tunnel_cloud.toml",
        "--log-dir=/var/log/tunnel",
        "--alsologtostderr",
    ]);
    assert_eq!(ignored(&config), ["--m", "--c", "--log-dir", "--alsologtostderr"]);
}

/// From its folder examples, v0.36.0, and from the documentation of Kubernetes.
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
    for flag in ["--mode", "--delete-existing-uds-file", "--cluster-cert", "--keepalive-time", "--log-file"] {
        assert!(ignored(&examples).contains(&flag), "{flag}");
    }
    assert_eq!(ignored(&examples).len(), 10);
    assert_eq!(ignored(&examples).last(), Some(&"--agent-namespace"), "there is no port for its agents");
    assert_eq!(format!("{:?}", parsed_again(&examples)), format!("{examples:?}"));
    let socket = examples.listeners.egress.socket.as_deref().unwrap();
    assert!(socket.ends_with("konnectivity-server.socket") && examples.listeners.egress.port.is_none());
    assert_eq!(
        (examples.listeners.agents.port, examples.listeners.common.admin_address.unwrap().port()),
        (Some(8091), 8093)
    );
    let account = &examples.kube.names.agent_service_account;
    assert_eq!(account, "tunnel-agent", "theirs is not for our agents");

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
    let tls = tcp.listeners.egress.tls.as_ref().unwrap();
    assert!(tcp.listeners.egress.port == Some(8131) && tls.certificate.is_some(), "{tls:?}");
    assert_eq!(tcp.listeners.common.admin_address.unwrap().port(), 8134);
    assert_eq!(tcp.listeners.konnectivity.account, "konnectivity/agents");
    assert_eq!(format!("{:?}", parsed_again(&tcp)), format!("{tcp:?}"));
}

//! konnectivity: proxy-server on the cloud host with its frontend on a Unix socket, proxy-agent on the edge, mutual
//! TLS between them.
use std::path::Path;

use anyhow::Result;
use postern_testbed::process::Process;
use postern_testbed::{CLOUD, Testbed};

use super::running::{BEHIND_NAT, Running};
use super::tls::Certificates;
use crate::dial::Dialer;
use crate::usage::Side;

/// Protocol between kube-apiserver and the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frontend {
    /// `ProxyService` over gRPC.
    Grpc,
    HttpConnect,
}

pub(super) fn start<'a>(
    testbed: &'a Testbed,
    folder: &Path,
    certificates: &Certificates,
    frontend: Frontend,
) -> Result<Running<'a>> {
    let mode = match frontend {
        Frontend::Grpc => "grpc",
        Frontend::HttpConnect => "http-connect",
    };
    let socket = testbed.dir().join("konnectivity.sock");
    let target = testbed.edge(BEHIND_NAT).ip();
    let server = testbed.on_cloud();
    let mut server = server.command(&folder.join("proxy-server"));
    // Ports below the ephemeral range: they would collide with the load's otherwise.
    server
        .args(["--logtostderr=true", "--v=0", "--server-port=0", "--agent-port=8091", "--health-port=8092"])
        .args(["--admin-port=8095", "--server-count=1", "--delete-existing-uds-file=true"])
        .arg(format!("--mode={mode}"))
        .arg(file("uds-name", &socket))
        .arg(file("cluster-cert", &certificates.server))
        .arg(file("cluster-key", &certificates.server_key))
        .arg(file("cluster-ca-cert", &certificates.ca));
    let agent = testbed.on_edge(BEHIND_NAT);
    let mut agent = agent.command(&folder.join("proxy-agent"));
    agent
        .args(["--logtostderr=true", "--v=0", "--proxy-server-port=8091", "--health-server-port=8093"])
        .args(["--admin-server-port=8094", "--sync-interval=500ms"])
        .arg(format!("--proxy-server-host={CLOUD}"))
        .arg(file("ca-cert", &certificates.ca))
        .arg(file("agent-cert", &certificates.client))
        .arg(file("agent-key", &certificates.client_key));
    let processes = vec![
        (Side::Cloud, Process::spawn(testbed.dir(), "konnectivity-server", server)?),
        (Side::Edge, Process::spawn(testbed.dir(), "konnectivity-agent", agent)?),
    ];
    let dialer = match frontend {
        Frontend::Grpc => Dialer::Grpc { socket, target },
        Frontend::HttpConnect => Dialer::HttpConnect { socket, target },
    };
    Ok(Running::of_processes(dialer, BEHIND_NAT, processes))
}

fn file(flag: &str, path: &Path) -> String {
    format!("--{flag}={}", path.display())
}

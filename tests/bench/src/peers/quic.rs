//! Connections relayed by QUIC (`by_quic`): both ends are this program.
use std::net::SocketAddr;

use anyhow::Result;
use postern_testbed::process::{self, Process};
use postern_testbed::{CLOUD, Testbed};

use super::running::{BEHIND_NAT, LOOPBACK, Running};
use super::tls::Certificates;
use crate::dial::Dialer;
use crate::usage::Side;

const PORT: u16 = 10_262;

pub(super) fn start<'a>(
    testbed: &'a Testbed,
    certificates: &Certificates,
    congestion: &str,
) -> Result<Running<'a>> {
    let program = process::program("bench")?;
    let listen = SocketAddr::new(CLOUD.into(), PORT).to_string();
    let mut near = testbed.on_cloud().command(&program);
    near.arg("--quic-cloud").arg(&listen).args([&certificates.server, &certificates.server_key]);
    near.arg(congestion);
    let mut remote = testbed.on_edge(BEHIND_NAT).command(&program);
    remote.arg("--quic-edge").arg(&listen).arg(&certificates.ca);
    remote.arg(testbed.edge(BEHIND_NAT).address.to_string()).arg(congestion);
    let processes = vec![
        (Side::Cloud, Process::spawn(testbed.dir(), "quic-cloud", near)?),
        (Side::Edge, Process::spawn(testbed.dir(), "quic-edge", remote)?),
    ];
    Ok(Running::of_processes(Dialer::Tcp(LOOPBACK.into()), BEHIND_NAT, processes))
}

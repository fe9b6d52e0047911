//! Postern's data path on tonic (`by_tonic`): both ends are this program. The cloud dials, so the pair uses the edge that
//! it can dial.
use std::net::SocketAddr;

use anyhow::Result;
use postern_testbed::Testbed;
use postern_testbed::process::{self, Process};

use super::running::{LOOPBACK, OPEN, Running};
use super::tls::Certificates;
use crate::dial::Dialer;
use crate::usage::Side;

const PORT: u16 = 10_262;

pub(super) fn start<'a>(testbed: &'a Testbed, certificates: &Certificates) -> Result<Running<'a>> {
    let (program, edge) = (process::program("bench")?, testbed.edge(OPEN));
    let listen = SocketAddr::new(edge.ip(), PORT).to_string();
    let mut remote = testbed.on_edge(OPEN).command(&program);
    remote.arg("--tonic-edge").arg(&listen).args([&certificates.server, &certificates.server_key]);
    let mut near = testbed.on_cloud().command(&program);
    near.arg("--tonic-cloud").arg(&listen).arg(&certificates.ca);
    let processes = vec![
        (Side::Edge, Process::spawn(testbed.dir(), "tonic-edge", remote)?),
        (Side::Cloud, Process::spawn(testbed.dir(), "tonic-cloud", near)?),
    ];
    Ok(Running::of_processes(Dialer::Tcp(LOOPBACK.into()), OPEN, processes))
}

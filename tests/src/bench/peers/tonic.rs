//! Our carrying on tonic instead of h2 itself (`bench/by_tonic`): its ends are this program. The cloud dials, so the pair
//! stands where the router lets it in.
use std::net::SocketAddr;

use anyhow::Result;

use super::{Certificates, LOOPBACK, OPEN, Running};
use crate::bench::dial::Dialer;
use crate::bench::usage::Side;
use crate::testbed::Testbed;
use crate::testbed::process::{self, Process};

const PORT: u16 = 10_262;

pub(super) fn start<'a>(testbed: &'a Testbed, certificates: &Certificates) -> Result<Running<'a>> {
    let (program, edge) = (process::program("bench")?, testbed.edge(OPEN));
    let listen = SocketAddr::new(edge.ip(), PORT).to_string();
    let mut remote = testbed.on_edge(OPEN).command(&program);
    remote.arg("--tonic-edge").arg(&listen).args([&certificates.server, &certificates.server_key]);
    let mut near = testbed.on_cloud().command(&program);
    near.arg("--tonic-cloud").arg(&listen).arg(&certificates.ca);
    let processes = vec![
        (Side::Edge, Process::spawn(testbed, "tonic-edge", remote)?),
        (Side::Cloud, Process::spawn(testbed, "tonic-cloud", near)?),
    ];
    Ok(Running::of_processes(Dialer::Tcp(LOOPBACK.into()), OPEN, processes))
}

//! Starting the peers on the testbed: edge 1 is behind NAT, and the router lets the cloud into the site of edge 2.
mod haproxy;
mod konnectivity;
pub(crate) mod postern;
mod programs;
mod rathole;
mod running;
mod tls;
mod tonic;

use anyhow::Result;
use postern_testbed::Testbed;
use postern_testbed::netns::Namespace;

use crate::dial::Dialer;
use crate::line::Peer;
use konnectivity::Frontend;

pub(crate) use programs::{Programs, needs};
pub(crate) use running::{BEHIND_NAT, OPEN, Running};
pub(crate) use tls::Certificates;

/// Starts a peer and waits until a connection through it works.
pub(crate) async fn start<'a>(
    testbed: &'a Testbed,
    neighbour: &'a Namespace,
    peer: Peer,
    programs: &Programs,
    certificates: &Certificates,
) -> Result<Running<'a>> {
    let program = || programs.path(needs(peer).unwrap_or_default()).map_err(anyhow::Error::msg);
    let mut running = match peer {
        Peer::Direct | Peer::Iptables => {
            Running::of_processes(Dialer::Tcp(testbed.edge(OPEN).ip()), OPEN, Vec::new())
        }
        Peer::Haproxy => haproxy::start(testbed, &program()?, certificates, "")?,
        Peer::HaproxyTuned => haproxy::start(testbed, &program()?, certificates, haproxy::TUNED)?,
        Peer::Rathole => rathole::start(testbed, &program()?)?,
        Peer::KonnectivityGrpc => konnectivity::start(testbed, &program()?, certificates, Frontend::Grpc)?,
        Peer::KonnectivityHttp => {
            konnectivity::start(testbed, &program()?, certificates, Frontend::HttpConnect)?
        }
        Peer::Tonic => tonic::start(testbed, certificates)?,
        Peer::Postern => postern::start(testbed).await?,
        Peer::PosternForwarded => postern::start_forwarded(testbed, neighbour).await?,
    };
    running.wait_ready(peer).await?;
    Ok(running)
}

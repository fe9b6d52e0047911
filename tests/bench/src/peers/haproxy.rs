//! Two HAProxy with TLS 1.3 between them. HAProxy cannot be dialled from inside a site, so this pair uses the
//! edge that the cloud can dial.
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::load_target::RELAYED;
use postern_testbed::process::Process;

use super::running::{LOOPBACK, OPEN, Running};
use super::tls::Certificates;
use crate::dial::Dialer;
use crate::usage::Side;

/// The far end's port for a relayed port.
const fn far(port: u16) -> u16 {
    port + 1_000
}

/// The cipher suite that Postern's two ends agree on.
const SUITE: &str = "TLS_AES_256_GCM_SHA384";

pub(super) fn start<'a>(
    testbed: &'a Testbed,
    program: &Path,
    certificates: &Certificates,
    tuning: &str,
) -> Result<Running<'a>> {
    let edge = testbed.edge(OPEN).address;
    let (mut near, mut remote) = (common(tuning), common(tuning));
    for port in RELAYED {
        let far = far(port);
        // Writing to a String cannot fail.
        write!(
            near,
            "listen p{port}\n  bind {LOOPBACK}:{port}\n  server far {edge}:{far} ssl verify required ca-file {}\n",
            certificates.ca.display()
        )?;
        write!(
            remote,
            "listen p{port}\n  bind {edge}:{far} ssl crt {}\n  server target {edge}:{port}\n",
            certificates.server_both.display()
        )?;
    }
    let spawn = |name: &str, text: &str, on_edge: bool| {
        let path = testbed.dir().join(format!("{name}.cfg"));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        let placement = if on_edge { testbed.on_edge(OPEN) } else { testbed.on_cloud() };
        let mut command = placement.command(program);
        // In the foreground, without a master process.
        command.args(["-db", "-f"]).arg(&path);
        Process::spawn(testbed.dir(), name, command)
    };
    let processes = vec![
        (Side::Edge, spawn("haproxy-edge", &remote, true)?),
        (Side::Cloud, spawn("haproxy-cloud", &near, false)?),
    ];
    Ok(Running::of_processes(Dialer::Tcp(LOOPBACK.into()), OPEN, processes))
}

/// Lines of `global` that give a connection buffers as large as Postern's, instead of 16 KiB.
pub(super) const TUNED: &str = "  tune.bufsize 262144\n";

/// Defaults, except TLS 1.3 with one suite and time-outs that are never reached.
fn common(tuning: &str) -> String {
    format!(
        "global\n{tuning}  maxconn 8000\n  ssl-default-bind-options ssl-min-ver TLSv1.3\n  ssl-default-server-options ssl-min-ver TLSv1.3\n  ssl-default-bind-ciphersuites {SUITE}\n  ssl-default-server-ciphersuites {SUITE}\ndefaults\n  mode tcp\n  timeout connect 10s\n  timeout client 1h\n  timeout server 1h\n"
    )
}

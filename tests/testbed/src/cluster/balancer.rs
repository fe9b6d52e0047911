//! One address for two masters: a real HAProxy on the router, in the role of a cloud's load balancer.
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::process::{Placement, Process};
use crate::topology::{CLOUD, NEIGHBOUR, ROUTER, Testbed};

/// Starts HAProxy for the API servers (6443) and the tunnel servers' agent ports (10262).
pub(super) fn start(testbed: &Testbed) -> Result<Process> {
    let mut text = String::from(
        "global
    maxconn 2000
defaults
    mode tcp
    timeout connect 2s
    timeout client 1h
    timeout server 1h
    default-server check inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
",
    );
    for (name, port, check) in [("api", 6443, " check-ssl verify none"), ("agents", 10262, "")] {
        let probe = if check.is_empty() { "" } else { "    option httpchk GET /readyz\n" };
        text += &format!("listen {name}\n    bind {ROUTER}:{port}\n    balance roundrobin\n{probe}");
        for (master, address) in [("first", CLOUD), ("second", NEIGHBOUR)] {
            text += &format!("    server {master} {address}:{port}{check}\n");
        }
    }
    let file = testbed.dir().join("haproxy.cfg");
    fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    let place = Placement { ns: &testbed.router, cgroup: &testbed.edge_cgroup };
    let mut command = place.command(Path::new("haproxy"));
    command.arg("-db").arg("-f").arg(file);
    Process::spawn(testbed.dir(), "haproxy", command)
}

//! rathole with its noise transport (Noise_NK_25519_ChaChaPoly_BLAKE2s): one service for each relayed port.
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::load_target::RELAYED;
use postern_testbed::process::Process;
use postern_testbed::{CLOUD, Testbed};

use super::running::{BEHIND_NAT, LOOPBACK, Running};
use crate::dial::Dialer;
use crate::usage::Side;

const PORT: u16 = 2333;

pub(super) fn start<'a>(testbed: &'a Testbed, program: &Path) -> Result<Running<'a>> {
    let (private, public) = keys(program)?;
    let edge = testbed.edge(BEHIND_NAT).address;
    let mut server = format!(
        "[server]\nbind_addr = \"{CLOUD}:{PORT}\"\ndefault_token = \"bench\"\n[server.transport]\ntype = \"noise\"\n[server.transport.noise]\nlocal_private_key = \"{private}\"\n"
    );
    let mut client = format!(
        "[client]\nremote_addr = \"{CLOUD}:{PORT}\"\ndefault_token = \"bench\"\n[client.transport]\ntype = \"noise\"\n[client.transport.noise]\nremote_public_key = \"{public}\"\n"
    );
    for port in RELAYED {
        write!(server, "[server.services.p{port}]\nbind_addr = \"{LOOPBACK}:{port}\"\n")?;
        write!(client, "[client.services.p{port}]\nlocal_addr = \"{edge}:{port}\"\n")?;
    }
    let spawn = |name: &str, text: &str, on_edge: bool| {
        let path = testbed.dir().join(format!("{name}.toml"));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        let placement = if on_edge { testbed.on_edge(BEHIND_NAT) } else { testbed.on_cloud() };
        let mut command = placement.command(Path::new("sh"));
        // It does not raise its limit of open files itself, as the other peers do.
        command.args(["-c", r#"ulimit -S -n "$(ulimit -H -n)"; exec "$0" "$@""#]);
        command.arg(program).arg(if on_edge { "--client" } else { "--server" }).arg(&path);
        Process::spawn(testbed.dir(), name, command)
    };
    let processes = vec![
        (Side::Cloud, spawn("rathole-server", &server, false)?),
        (Side::Edge, spawn("rathole-client", &client, true)?),
    ];
    Ok(Running::of_processes(Dialer::Tcp(LOOPBACK.into()), BEHIND_NAT, processes))
}

/// A pair of keys: private, public.
fn keys(program: &Path) -> Result<(String, String)> {
    let output = Command::new(program).arg("--genkey").output().context("rathole --genkey")?;
    ensure!(output.status.success(), "rathole --genkey ended with {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let after = |heading: &str| {
        let mut lines = text.lines().skip_while(|line| !line.contains(heading)).skip(1);
        lines.next().map(str::to_owned).with_context(|| format!("no {heading} in {text:?}"))
    };
    Ok((after("Private Key")?, after("Public Key")?))
}

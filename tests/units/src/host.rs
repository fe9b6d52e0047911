//! The machine as a cloud host, and an edge in a network namespace that accepts no connection from outside.
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, PATIENCE};
use postern_testbed::id::{Id, Kind};
use postern_testbed::inventory::node;
use postern_testbed::netns::{Namespace, run};
use postern_testbed::wait::wait_for;
use serde_json::json;

use crate::unit::LONG;

/// The server's address.
pub(crate) const CLOUD: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 1);
/// The edge's on the network between them, which stands for the internet.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 2);
/// The edge's address in the inventory.
pub(crate) const EDGE: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 2);
/// Its name there.
pub(crate) const NODE: &str = "edge-1";
const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10265);

/// Makes the edge. A connect to its address that bypasses the tunnel has no answer.
pub(crate) fn wire() -> Result<Namespace> {
    let edge = Namespace::create(&Id::new(Kind::Test), "edge")?;
    for args in [
        format!("link add eth0 type veth peer name eth0 netns {}", edge.name()),
        format!("addr add {CLOUD}/24 dev eth0"),
        "link set eth0 up".to_owned(),
        format!("route add default via {OUTSIDE}"),
    ] {
        run(Command::new("ip").args(args.split_whitespace()))?;
    }
    edge.ip(&format!("addr add {OUTSIDE}/24 dev eth0"))?;
    edge.ip(&format!("addr add {EDGE}/32 dev eth0"))?;
    edge.ip("link set eth0 up")?;
    edge.iptables("-A INPUT -i eth0 -p tcp --syn -j DROP")?;
    Ok(edge)
}

/// Writes the inventory that server.env names.
pub(crate) fn write_inventory() -> Result<()> {
    let nodes = [node("cloud-1", false, &[CLOUD.into()], &[]), node(NODE, true, &[EDGE.into()], &[])];
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": nodes });
    fs::write("/etc/postern/nodes.yaml", list.to_string()).context("writing the inventory")
}

/// Waits until the server's /readyz answers 200.
pub(crate) async fn wait_ready() -> Result<()> {
    let ready = async || {
        let Ok(stream) = client::attempt(ADMIN, PATIENCE).await else { return Ok(None) };
        let answer = client::http(stream, "GET", "/readyz", "").await;
        Ok(answer.is_ok_and(|(status, _)| status == 200).then_some(()))
    };
    wait_for("/readyz of the server to answer 200", LONG, ready).await
}

/// Folders of pins.
pub(crate) fn pins() -> Vec<PathBuf> {
    let entries = fs::read_dir("/sys/fs/bpf/postern").into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Fails if pins or routes are left.
pub(crate) fn nothing_is_left() -> Result<()> {
    let left = pins();
    ensure!(left.is_empty(), "pins are left: {left:?}");
    let mut routes = Command::new("ip");
    routes.args(["-4", "route", "show", "table", "local", "198.18.0.0/15"]);
    let routes = routes.output().context("listing routes")?.stdout;
    ensure!(routes.is_empty(), "routes are left: {}", String::from_utf8_lossy(&routes));
    Ok(())
}

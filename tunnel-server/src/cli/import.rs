//! `tunnel-server import`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Deserialize;
use tunnel_routing::inventory::DEFAULT_KUBELET_PORT;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::ConfigError;

use super::status::read;

#[derive(Args, Clone, Debug)]
pub struct ImportCommand {
    #[command(subcommand)]
    action: ImportAction,
}

#[derive(Clone, Debug, Subcommand)]
enum ImportAction {
    /// The tcp and https maps of SuperEdge's tunnel_cloud.toml.
    Superedge {
        /// The file; - is standard input.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The node that the maps lead to [default: to be filled in].
        #[arg(long, value_name = "NAME")]
        node: Option<NodeName>,
    },
}

/// The parts of SuperEdge's file that are read.
#[derive(Deserialize)]
struct Superedge {
    mode: Mode,
}

#[derive(Deserialize)]
struct Mode {
    cloud: Cloud,
}

#[derive(Deserialize)]
struct Cloud {
    #[serde(default)]
    tcp: BTreeMap<SocketAddr, SocketAddr>,
    https: Option<Https>,
}

#[derive(Deserialize)]
struct Https {
    #[serde(default)]
    addr: BTreeMap<String, SocketAddr>,
}

impl ImportCommand {
    /// Prints the maps to standard output.
    ///
    /// # Errors
    /// If the file cannot be used: with the place and the reason.
    pub fn run(&self) -> Result<(), ConfigError> {
        let ImportAction::Superedge { file, node } = &self.action;
        // Standard input, because the image has no tool to copy a file into a pod.
        let text = read(file).map_err(|error| error.to_string());
        let printed = text.and_then(|text| superedge(&text, node.as_ref()));
        let wrong = |reason| ConfigError::new("import superedge", file.display().to_string(), reason);
        print!("{}", printed.map_err(wrong)?);
        Ok(())
    }
}

/// Converts the maps to a file for `--maps`, with comments about everything that cannot be a map.
fn superedge(text: &str, node: Option<&NodeName>) -> Result<String, String> {
    let Superedge { mode: Mode { cloud } } = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut out = String::new();
    // Writing to a String cannot fail.
    let mut line = |text: &str| writeln!(out, "{text}").unwrap_or_default();
    line("# The maps of a SuperEdge tunnel, for --maps.");
    if node.is_none() && !cloud.tcp.is_empty() {
        line(
            "# SuperEdge leads to whichever node is connected first. Name the one that is meant in each, or import with --node.",
        );
    }
    if !cloud.tcp.is_empty() {
        line("# SuperEdge lets everybody in: name the clients instead of all addresses.");
    }
    line(if cloud.tcp.is_empty() { "maps: []" } else { "maps:" });
    let node = node.map_or("NODE", NodeName::as_str);
    for (listen, target) in &cloud.tcp {
        line(&format!("- listen: '{listen}'"));
        line(&format!("  node: {node}"));
        line(&format!("  target: '{target}'"));
        line("  clients: ['0.0.0.0/0', '::/0']");
    }
    https_ports(&mut line, &cloud.https.map(|https| https.addr).unwrap_or_default())?;
    Ok(out)
}

/// Writes the flag that corresponds to the HTTPS ports, as a comment: they are not maps.
fn https_ports(line: &mut impl FnMut(&str), ports: &BTreeMap<String, SocketAddr>) -> Result<(), String> {
    if ports.is_empty() {
        return Ok(());
    }
    line("#");
    line(
        "# HTTPS ports: TLS passes through untouched to the node that its server name names, so clients see",
    );
    line("# the node's certificate, and show their own (docs/migrating-from-superedge.md, step 3).");
    let mut further = BTreeMap::new();
    for (port, at) in ports {
        let own = port.parse::<u16>().ok().filter(|port| *port != 0);
        let own =
            own.ok_or_else(|| format!("mode.cloud.https.addr: {port:?} = {at} is not PORT = ADDRESS:PORT"))?;
        if at.port() == DEFAULT_KUBELET_PORT {
            line(&format!("#   {own} -> {at}: the listener itself (--secure-port)"));
        } else {
            // Each port of nodes has one port of the listener.
            let own_of = *further.entry(at.port()).or_insert(own);
            line(&format!("#   {own} -> {at}: port {own_of} of the listener (--secure-ports)"));
        }
    }
    if !further.is_empty() {
        let list =
            further.iter().map(|(of_node, own)| format!("{own}={of_node}")).collect::<Vec<_>>().join(",");
        line(&format!("# --secure-ports={list}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::parse_secure_ports;
    use crate::maps::parse_file;

    const FILE: &str = r#"
[mode]
  [mode.cloud]
    [mode.cloud.stream]
      [mode.cloud.stream.server]
        grpcport = 9000
        logport = 51010
        key = "/etc/superedge/tunnel/certs/cloud.key"
        tokenfile = "/etc/superedge/tunnel/token/token"
      [mode.cloud.stream.dns]
        configmap = "tunnel-nodes"
        debug = true
    [mode.cloud.https]
      cert = "/etc/superedge/tunnel/certs/apiserver-kubelet-client.crt"
      key = "/etc/superedge/tunnel/certs/apiserver-kubelet-client.key"
      [mode.cloud.https.addr]
        "10250" = "127.0.0.1:10250"
    [mode.cloud.tcp]
      "0.0.0.0:6443" = "127.0.0.1:6443"
      "0.0.0.0:2222" = "10.8.0.7:22"
"#;

    #[test]
    fn the_maps_are_those_of_a_file_for_maps() {
        let printed = superedge(FILE, Some(&"edge-7".parse().unwrap())).unwrap();
        let maps: Vec<_> = parse_file(&printed).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(
            maps,
            [
                "0.0.0.0:2222=edge-7/10.8.0.7:22,0.0.0.0/0,::/0",
                "0.0.0.0:6443=edge-7/127.0.0.1:6443,0.0.0.0/0,::/0"
            ]
        );
        assert!(
            printed.contains("#   10250 -> 127.0.0.1:10250: the listener itself (--secure-port)\n"),
            "{printed}"
        );
        assert!(!printed.contains("--secure-ports"), "{printed}");
        let open = superedge(FILE, None).unwrap();
        assert!(parse_file(&open).unwrap_err().contains("maps[0].node"), "the node is to be filled in");
        assert!(parse_file(&superedge("[mode.cloud]\n", None).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn https_ports_are_those_of_a_flag() {
        let text = r#"
            [mode.cloud.https.addr]
            "10250" = "127.0.0.1:10250"
            "8443" = "127.0.0.1:9443"
            "8444" = "127.0.0.1:9443"
            "9100" = "127.0.0.1:9100"
        "#;
        let printed = superedge(text, None).unwrap();
        assert!(parse_file(&printed).unwrap().is_empty(), "{printed}");
        let flag = |name: &str| printed.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let secure = parse_secure_ports(flag("# --secure-ports=")).unwrap();
        assert_eq!(secure, BTreeMap::from([(8443, 9443), (9100, 9100)]));
        assert!(printed.contains("#   8444 -> 127.0.0.1:9443: port 8443 of the listener"), "{printed}");
    }

    #[test]
    fn errors_name_the_entry() {
        for (text, reason) in [
            ("[mode.edge]\n", "missing field `cloud`"),
            ("[mode.cloud.tcp]\n\"6443\" = \"127.0.0.1:6443\"\n", "invalid socket address"),
            ("[mode.cloud.tcp]\n\"0.0.0.0:1\" = \"edge:1\"\n", "2 | \"0.0.0.0:1\" = \"edge:1\""),
            ("[mode.cloud.https.addr]\n\"x\" = \"127.0.0.1:1\"\n", "mode.cloud.https.addr: \"x\""),
            ("[mode.cloud.https.addr]\n\"0\" = \"127.0.0.1:1\"\n", "mode.cloud.https.addr: \"0\""),
            ("[mode", "TOML parse error"),
        ] {
            let error = superedge(text, None).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}

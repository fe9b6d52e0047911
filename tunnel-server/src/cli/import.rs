//! `tunnel-server import`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Deserialize;
use tunnel_core::config::ConfigError;
use tunnel_core::identity::NodeName;

use crate::reloaded::read;

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

/// What is read of SuperEdge's file; it has more.
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
    tcp: BTreeMap<String, String>,
    https: Option<Https>,
}

#[derive(Deserialize)]
struct Https {
    #[serde(default)]
    addr: BTreeMap<String, String>,
}

impl ImportCommand {
    /// Prints to standard output.
    ///
    /// # Errors
    /// The file cannot be used: where and why.
    pub fn run(&self) -> Result<(), ConfigError> {
        let ImportAction::Superedge { file, node } = &self.action;
        // The image has nothing that could put a file into a pod.
        let text = if file.as_os_str() == "-" {
            io::read_to_string(io::stdin()).map_err(|error| error.to_string())
        } else {
            read(file)
        };
        let printed = text.and_then(|text| superedge(&text, node.as_ref()));
        let wrong = |reason| ConfigError::new("import superedge", file.display().to_string(), reason);
        print!("{}", printed.map_err(wrong)?);
        Ok(())
    }
}

/// The maps as a file for `--maps`, and in comments what there is no map for.
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
        let at = |text: &str, what: &str| {
            let parsed = text.parse::<SocketAddr>().ok().filter(|address| address.port() != 0);
            parsed
                .ok_or_else(|| format!("mode.cloud.tcp: {listen:?} = {target:?}: {what} is not ADDRESS:PORT"))
        };
        let (listen, target) = (at(listen, "the listener")?, at(target, "the target")?);
        line(&format!("- listen: '{listen}'"));
        line(&format!("  node: {node}"));
        line(&format!("  target: '{target}'"));
        line("  clients: ['0.0.0.0/0', '::/0']");
    }
    let https = cloud.https.map(|https| https.addr).unwrap_or_default();
    if !https.is_empty() {
        line("#");
        line(
            "# HTTPS ports, where SuperEdge finds the node by Host or server name and adds a certificate of its own. Here TLS",
        );
        line(
            "# passes through untouched: clients reach the node's own certificate through the redirect, at NODE:PORT through",
        );
        line(
            "# the connect door, or by server name at the https door (--secure-port) for the kubelet's port.",
        );
    }
    let mut ports = Vec::new();
    for (port, target) in &https {
        let wrong = || format!("mode.cloud.https.addr: {port:?} = {target:?} is not PORT = ADDRESS:PORT");
        port.parse::<u16>().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        let target: SocketAddr = target.parse().map_err(|_| wrong())?;
        line(&format!("#   {port} -> {target}"));
        ports.push(target.port().to_string());
    }
    if !ports.is_empty() {
        line(&format!("# --redirect-ports=10250,10255,{}", ports.join(",")));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert!(printed.contains("#   10250 -> 127.0.0.1:10250\n"), "{printed}");
        let open = superedge(FILE, None).unwrap();
        assert!(parse_file(&open).unwrap_err().contains("maps[0].node"), "the node is to be filled in");
        assert!(parse_file(&superedge("[mode.cloud]\n", None).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn errors_name_the_entry() {
        for (text, reason) in [
            ("[mode.edge]\n", "missing field `cloud`"),
            ("[mode.cloud.tcp]\n\"6443\" = \"127.0.0.1:6443\"\n", "mode.cloud.tcp: \"6443\""),
            ("[mode.cloud.tcp]\n\"0.0.0.0:1\" = \"edge:1\"\n", "the target is not ADDRESS:PORT"),
            ("[mode.cloud.https.addr]\n\"x\" = \"127.0.0.1:1\"\n", "mode.cloud.https.addr: \"x\""),
            ("[mode", "TOML parse error"),
        ] {
            let error = superedge(text, None).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}

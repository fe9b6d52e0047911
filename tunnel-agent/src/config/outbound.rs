//! Flags of the listeners that lead to the cloud.

use std::net::{IpAddr, SocketAddr};

use clap::Args;
use ipnet::IpNet;
use tunnel_runtime::config::value::{self, List, ListenAddress};
use tunnel_runtime::config::{ConfigError, HostPort};

/// Maximum number of listeners: a successor gets them all in one message.
const MOST_LISTENERS: usize = 128;

/// A listener of this node, and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    pub address: SocketAddr,
    /// None: each client names its target to the server.
    pub target: Option<HostPort>,
    /// Clients that may use it.
    pub clients: Vec<IpNet>,
}

impl Listen {
    /// The flag that defines it.
    pub(crate) fn flag(&self) -> &'static str {
        if self.target.is_some() { "--forward" } else { "--connect-address" }
    }

    pub(crate) fn permits(&self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        self.clients.iter().any(|range| range.contains(&client))
    }
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "From this node to the cloud")]
pub(super) struct OutboundFlags {
    /// Where workloads on this node find an HTTP proxy (CONNECT and http:// URLs) to what the server's --policy lets this node reach
    /// in the cloud and on other edge nodes; port 0: off.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0", value_parser = value::listen)]
    pub(super) connect_address: ListenAddress,
    /// Source addresses that may use --connect-address, comma-separated [default: this host]. Whoever may acts as this node.
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = value::cidrs)]
    connect_clients: List<IpNet>,
    /// LISTEN=HOST:PORT[,CIDR…]: a listener that leads to HOST:PORT in the cloud or on another edge node, as far as the server's
    /// --policy permits, for clients in these ranges (needed unless LISTEN is a loopback address). May be given several times.
    #[arg(long, value_name = "FORWARD", value_parser = parse_forward)]
    pub(super) forward: Vec<Listen>,
}

impl OutboundFlags {
    pub(super) fn listeners(&self) -> Result<Vec<Listen>, ConfigError> {
        let mut listeners = Vec::new();
        let clients = self.connect_clients.clone();
        if let Some(address) = self.connect_address {
            let given = Some(clients).filter(|clients| !clients.is_empty());
            let clients = value::clients_of(address, given).map_err(|_| {
                let reason = "it is reached from elsewhere: name who may use it with --connect-clients";
                ConfigError::new("--connect-address", address.to_string(), reason)
            })?;
            listeners.push(Listen { address, target: None, clients });
        } else if !clients.is_empty() {
            let reason = "without --connect-address it means nothing";
            return Err(ConfigError::without_value("--connect-clients", reason));
        }
        listeners.extend(self.forward.iter().cloned());
        if listeners.len() > MOST_LISTENERS {
            let reason = format!("{} listeners; at most {MOST_LISTENERS} are possible", listeners.len());
            return Err(ConfigError::without_value("--forward", reason));
        }
        for (index, listen) in listeners.iter().enumerate() {
            if let Some(other) = listeners[..index].iter().find(|other| other.address == listen.address) {
                let reason = format!("{}={} has that address already", other.flag(), other.address);
                return Err(ConfigError::new(listen.flag(), listen.address.to_string(), reason));
            }
        }
        Ok(listeners)
    }
}

fn parse_forward(text: &str) -> Result<Listen, String> {
    const FORM: &str = "not LISTEN=HOST:PORT, such as 127.0.0.1:9090=prometheus.monitoring:9090";
    let (address, rest) = text.split_once('=').ok_or(FORM)?;
    let (target, clients) = match rest.split_once(',') {
        Some((target, clients)) => (target, Some(clients)),
        None => (rest, None),
    };
    let address: SocketAddr = address.trim().parse().map_err(|_| FORM)?;
    if address.port() == 0 {
        return Err("port 0 cannot be listened on".to_owned());
    }
    let target: HostPort = target.parse().map_err(|error| format!("{target:?}: {error}"))?;
    let clients = value::clients_of(address, clients.map(value::cidrs).transpose()?)?;
    Ok(Listen { address, target: Some(target), clients })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        flags: OutboundFlags,
    }

    fn listeners(args: &[&str]) -> Result<Vec<Listen>, String> {
        let program = Program::try_parse_from(std::iter::once(&"program").chain(args));
        program.map_err(|error| error.to_string())?.flags.listeners().map_err(|error| error.to_string())
    }

    #[test]
    fn listeners_of_flags() {
        assert!(listeners(&[]).unwrap().is_empty());
        let listeners = listeners(&[
            "--connect-address=10.8.0.7:10281",
            "--connect-clients=10.244.0.0/16",
            "--forward=127.0.0.1:9090=prometheus.monitoring:9090",
            "--forward=10.8.0.7:22=edge-8:22,10.8.0.0/24",
        ])
        .unwrap();
        let shown: Vec<_> = listeners
            .iter()
            .map(|listen| {
                let clients = listen.clients.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
                let target = listen.target.as_ref().map(ToString::to_string).unwrap_or_default();
                format!("{}={} {target} {clients}", listen.flag(), listen.address)
            })
            .collect();
        assert_eq!(
            shown,
            [
                "--connect-address=10.8.0.7:10281  10.244.0.0/16",
                "--forward=127.0.0.1:9090 prometheus.monitoring:9090 127.0.0.0/8,::1/128",
                "--forward=10.8.0.7:22 edge-8:22 10.8.0.0/24",
            ]
        );
    }

    #[test]
    fn errors_name_the_flag_and_the_reason() {
        for (args, reason) in [
            (
                &["--connect-address=10.8.0.7:10281"][..],
                "--connect-address=10.8.0.7:10281: it is reached from elsewhere",
            ),
            (&["--connect-clients=10.0.0.0/8"], "--connect-clients: without --connect-address"),
            (&["--forward=9090"], "invalid value '9090' for '--forward <FORWARD>': not LISTEN=HOST:PORT"),
            (&["--forward=127.0.0.1:1=x"], "\"x\""),
            (&["--forward=127.0.0.1:0=x:1"], "port 0 cannot be listened on"),
            (&["--forward=0.0.0.0:1=x:1"], "0.0.0.0:1 is reached from elsewhere"),
            (
                &["--connect-address=127.0.0.1:1", "--forward=127.0.0.1:1=x:1"],
                "--connect-address=127.0.0.1:1 has that address already",
            ),
        ] {
            let error = listeners(args).unwrap_err();
            assert!(error.contains(reason), "{error:?} lacks {reason:?}");
        }
        let forwards = |most: usize| -> Vec<String> {
            (1..=most).map(|port| format!("--forward=127.0.0.1:{port}=x:1")).collect()
        };
        let of = |flags: Vec<String>| listeners(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(of(forwards(MOST_LISTENERS)).unwrap().len(), MOST_LISTENERS);
        let error = of(forwards(MOST_LISTENERS + 1)).unwrap_err();
        assert!(error.contains("129 listeners; at most 128 are possible"), "{error}");
    }
}

//! Flags of the listeners that lead to the cloud.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::Args;
use ipnet::IpNet;
use tunnel_core::config::value::{self, List, ListenAddress};
use tunnel_core::config::{ConfigError, HostPort};

use crate::outbound::{Listen, MOST_LISTENERS};

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

/// Default clients of a listener on a loopback address.
fn this_host() -> Vec<IpNet> {
    let v4 = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
    vec![v4, IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST))]
}

impl OutboundFlags {
    pub(super) fn listeners(&self) -> Result<Vec<Listen>, ConfigError> {
        let mut listeners = Vec::new();
        let clients = self.connect_clients.clone();
        if let Some(address) = self.connect_address {
            let clients = match clients.is_empty() {
                false => clients,
                true if address.ip().is_loopback() => this_host(),
                true => {
                    let reason = "it is reached from elsewhere: name who may use it with --connect-clients";
                    return Err(ConfigError::new("--connect-address", address.to_string(), reason));
                }
            };
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
                let reason = format!("{} has that address already", other.flag());
                return Err(ConfigError::new(listen.name(), listen.address.to_string(), reason));
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
    let clients = match clients {
        Some(clients) => value::cidrs(clients)?,
        None if address.ip().is_loopback() => this_host(),
        None => {
            return Err(format!(
                "{address} is reached from elsewhere: say by which clients, such as 10.0.0.0/8"
            ));
        }
    };
    Ok(Listen { address, target: Some(target), clients })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::MOST_LISTENERS;
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
                format!("{} {target} {clients}", listen.flag())
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

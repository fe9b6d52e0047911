//! The listeners that lead to the cloud.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use tunnel_core::config::{ConfigError, HostPort, parse_cidrs, parse_door};

use crate::outbound::{Listen, MOST_LISTENERS};

/// Who may use a listener on a loopback address that names nobody.
fn this_host() -> Vec<IpNet> {
    let v4 = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
    vec![v4, IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST))]
}

/// From `--connect-address`, `--connect-clients` and each `--map`.
pub(super) fn outbound(connect: &str, clients: &str, maps: &[String]) -> Result<Vec<Listen>, ConfigError> {
    let mut listeners = Vec::new();
    let named = parse_cidrs("--connect-clients", clients)?;
    if let Some(address) = parse_door("--connect-address", connect)? {
        let clients = match named.is_empty() {
            false => named,
            true if address.ip().is_loopback() => this_host(),
            true => {
                let reason = "it is reached from elsewhere: name who may use it with --connect-clients";
                return Err(ConfigError::new("--connect-address", connect, reason));
            }
        };
        listeners.push(Listen { address, target: None, clients });
    } else if !named.is_empty() {
        return Err(ConfigError::new(
            "--connect-clients",
            clients,
            "without --connect-address it means nothing",
        ));
    }
    for map in maps {
        listeners.push(parse_map(map).map_err(|reason| ConfigError::new("--map", map, reason))?);
    }
    if listeners.len() > MOST_LISTENERS {
        let reason = format!("{} listeners; at most {MOST_LISTENERS} are possible", listeners.len());
        return Err(ConfigError::without_value("--map", reason));
    }
    for (index, listen) in listeners.iter().enumerate() {
        if let Some(other) = listeners[..index].iter().find(|other| other.address == listen.address) {
            let reason = format!("{} has that address already", other.flag());
            return Err(ConfigError::new(listen.name(), listen.address.to_string(), reason));
        }
    }
    Ok(listeners)
}

fn parse_map(text: &str) -> Result<Listen, String> {
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
        Some(clients) => parse_cidrs("clients", clients).map_err(|error| error.to_string())?,
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

    #[test]
    fn listeners_of_flags() {
        assert!(outbound("127.0.0.1:0", "", &[]).unwrap().is_empty());
        let maps = [
            "127.0.0.1:9090=prometheus.monitoring:9090".to_owned(),
            "10.8.0.7:22=edge-8:22,10.8.0.0/24".to_owned(),
        ];
        let listeners = outbound("10.8.0.7:10281", "10.244.0.0/16", &maps).unwrap();
        let shown: Vec<_> =
            listeners.iter().flat_map(Listen::flags).map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(
            shown,
            [
                "connect-address=10.8.0.7:10281",
                "connect-clients=10.244.0.0/16",
                "map=127.0.0.1:9090=prometheus.monitoring:9090,127.0.0.0/8,::1/128",
                "map=10.8.0.7:22=edge-8:22,10.8.0.0/24",
            ]
        );
    }

    #[test]
    fn errors_name_the_flag_and_the_reason() {
        for (connect, clients, map, reason) in [
            ("10.8.0.7:10281", "", None, "--connect-address=10.8.0.7:10281: it is reached from elsewhere"),
            ("127.0.0.1:0", "10.0.0.0/8", None, "--connect-clients=10.0.0.0/8: without --connect-address"),
            ("127.0.0.1:0", "", Some("9090"), "--map=9090: not LISTEN=HOST:PORT"),
            ("127.0.0.1:0", "", Some("127.0.0.1:1=x"), "\"x\""),
            ("127.0.0.1:0", "", Some("127.0.0.1:0=x:1"), "port 0 cannot be listened on"),
            ("127.0.0.1:0", "", Some("0.0.0.0:1=x:1"), "0.0.0.0:1 is reached from elsewhere"),
            (
                "127.0.0.1:1",
                "",
                Some("127.0.0.1:1=x:1"),
                "--connect-address=127.0.0.1:1 has that address already",
            ),
        ] {
            let maps: Vec<_> = map.into_iter().map(str::to_owned).collect();
            let error = outbound(connect, clients, &maps).unwrap_err().to_string();
            assert!(error.contains(reason), "{error:?} lacks {reason:?}");
        }
        let maps = |most: u16| (1..=most).map(|port| format!("127.0.0.1:{port}=x:1")).collect::<Vec<_>>();
        assert_eq!(outbound("127.0.0.1:0", "", &maps(128)).unwrap().len(), 128);
        let error = outbound("127.0.0.1:0", "", &maps(129)).unwrap_err().to_string();
        assert!(error.contains("129 listeners; at most 128 are possible"), "{error}");
    }
}

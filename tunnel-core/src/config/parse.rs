//! Parsers of flag values. Each takes the key, so that its error names it.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;

/// Parses a value with its own `FromStr`.
///
/// # Errors
/// Names the key, the value, and the parser's error as the reason.
pub fn parse_with<T>(key: &str, value: &str) -> Result<T, ConfigError>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    value.parse().map_err(|reason: T::Err| ConfigError::new(key, value, reason.to_string()))
}

/// A port of a door: 0 means that the door is off.
///
/// # Errors
/// Not a number from 0 to 65535.
pub fn parse_port(key: &str, value: &str) -> Result<Option<u16>, ConfigError> {
    match value.trim().parse::<u16>() {
        Ok(0) => Ok(None),
        Ok(port) => Ok(Some(port)),
        Err(_) => {
            Err(ConfigError::new(key, value, "not a port; use 1 to 65535, or 0 to switch the door off"))
        }
    }
}

/// Comma-separated ports. An empty value is an empty list.
///
/// # Errors
/// Names the entry that is not a port.
pub fn parse_ports(key: &str, value: &str) -> Result<BTreeSet<u16>, ConfigError> {
    each(key, value, |entry| match entry.parse::<u16>() {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(format!("{entry:?} is not a port; use 1 to 65535, comma-separated")),
    })
}

/// One address range; a bare address is a range of one. v4-mapped IPv6 becomes IPv4.
///
/// # Errors
/// Not a range, or one with host bits set: either half of such a value may be the mistake.
pub fn parse_cidr(key: &str, value: &str) -> Result<IpNet, ConfigError> {
    cidr(value).map_err(|reason| ConfigError::new(key, value, reason))
}

/// Comma-separated address ranges. An empty value is an empty list.
///
/// # Errors
/// Names the bad entry.
pub fn parse_cidrs(key: &str, value: &str) -> Result<Vec<IpNet>, ConfigError> {
    each(key, value, cidr)
}

pub(super) fn cidr(entry: &str) -> Result<IpNet, String> {
    if let Ok(address) = entry.parse::<IpAddr>() {
        return Ok(IpNet::from(address.to_canonical()));
    }
    let net: IpNet = entry
        .parse()
        .map_err(|_| format!("{entry:?} is not an address range; use ADDRESS/BITS such as 10.8.0.0/16"))?;
    let net = match net {
        // ::ffff:a.b.c.d/96+n is the same as a.b.c.d/n (RFC 4291 section 2.5.5.2).
        IpNet::V6(v6) if v6.prefix_len() >= 96 => match v6.addr().to_ipv4_mapped() {
            Some(v4) => ipnet::Ipv4Net::new(v4, v6.prefix_len() - 96).map_err(|e| e.to_string())?.into(),
            None => net,
        },
        _ => net,
    };
    if net.addr() != net.network() {
        return Err(format!("{entry:?} has bits set after its prefix; did you mean {}?", net.trunc()));
    }
    Ok(net)
}

/// An IP address; v4-mapped IPv6 becomes IPv4.
///
/// # Errors
/// Not an IP address.
pub fn parse_ip(key: &str, value: &str) -> Result<IpAddr, ConfigError> {
    let bare = value.trim();
    bare.parse::<IpAddr>()
        .map(|ip| ip.to_canonical())
        .map_err(|_| ConfigError::new(key, value, "not an IP address; use one such as 10.8.0.7 or fd00::7"))
}

/// Comma-separated IP addresses. An empty value is an empty list.
///
/// # Errors
/// Names the bad entry.
pub fn parse_ips(key: &str, value: &str) -> Result<Vec<IpAddr>, ConfigError> {
    each(key, value, |entry| {
        let address = entry.parse::<IpAddr>().map_err(|_| format!("{entry:?} is not an IP address"))?;
        Ok(address.to_canonical())
    })
}

/// `ADDRESS:PORT`, IPv6 in brackets.
///
/// # Errors
/// Not of that form. A name is refused too: an address to listen on must not depend on DNS.
pub fn parse_address(key: &str, value: &str) -> Result<SocketAddr, ConfigError> {
    value.trim().parse().map_err(|_| {
        ConfigError::new(key, value, "not ADDRESS:PORT; use one such as 127.0.0.1:10265 or [::1]:10265")
    })
}

/// `ADDRESS:PORT` of a door; port 0 means that the door is off.
///
/// # Errors
/// As [`parse_address`].
pub fn parse_door(key: &str, value: &str) -> Result<Option<SocketAddr>, ConfigError> {
    Ok(Some(parse_address(key, value)?).filter(|address| address.port() != 0))
}

/// [`parse_door`] for an endpoint without authentication: it must be a loopback address. A bare port means 127.0.0.1, as
/// in the flags of other systems.
///
/// # Errors
/// As [`parse_door`], and for any other address.
pub fn parse_loopback_door(key: &str, value: &str) -> Result<Option<SocketAddr>, ConfigError> {
    if let Ok(port) = value.trim().parse::<u16>() {
        return Ok(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).filter(|address| address.port() != 0));
    }
    let door = parse_door(key, value)?;
    if door.is_some_and(|address| !address.ip().to_canonical().is_loopback()) {
        return Err(ConfigError::new(
            key,
            value,
            "not a loopback address: this endpoint has no authentication; use 127.0.0.1 or [::1]",
        ));
    }
    Ok(door)
}

/// A duration with its unit: `500ms`, `30s`, `5m`, `1h30m`, `7d`.
///
/// # Errors
/// Not a duration, negative, or in months or years, whose length varies.
pub fn parse_duration(key: &str, value: &str) -> Result<Duration, ConfigError> {
    let bad = || {
        ConfigError::new(
            key,
            value,
            "not a length of time; use a number and a unit, such as 500ms, 30s or 1h30m",
        )
    };
    let span: jiff::Span = value.trim().parse().map_err(|_| bad())?;
    span.to_duration(jiff::SpanRelativeTo::days_are_24_hours())
        .ok()
        .and_then(|duration| Duration::try_from(duration).ok())
        .ok_or_else(bad)
}

/// `HOST:PORT`, where HOST is a name or an address (IPv6 in brackets).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPort {
    /// Without brackets.
    pub host: String,
    pub port: u16,
}

impl FromStr for HostPort {
    type Err = &'static str;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        const USE: &str = "not HOST:PORT; use one such as tunnel.example.org:10262 or [fd00::1]:10262";
        let (host, port) = s.trim().rsplit_once(':').ok_or(USE)?;
        let port = port
            .parse::<u16>()
            .ok()
            .filter(|port| *port != 0)
            .ok_or("the port is not a number from 1 to 65535")?;
        let host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(v6) => v6.parse::<Ipv6Addr>().map_err(|_| USE)?.to_string(),
            None if is_host(host) => host.to_ascii_lowercase(),
            None => return Err(USE),
        };
        Ok(Self { host, port })
    }
}

/// A DNS name (RFC 1123: letters, digits, hyphens and dots; underscores occur in practice) or an IPv4 address.
fn is_host(host: &str) -> bool {
    let name = host.strip_suffix('.').unwrap_or(host);
    !name.is_empty()
        && name.len() <= 253
        && name.split('.').all(|label| {
            !label.is_empty()
                && label.len() <= 63
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

impl TryFrom<String> for HostPort {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<HostPort> for String {
    fn from(address: HostPort) -> Self {
        address.to_string()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// The entries of a comma-separated value, trimmed, without empty ones.
pub(super) fn list(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|entry| !entry.is_empty())
}

/// Parses each entry of a comma-separated value; `parse` returns the reason of an error.
fn each<T, C: FromIterator<T>>(
    key: &str,
    value: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<C, ConfigError> {
    list(value).map(parse).collect::<Result<_, _>>().map_err(|reason| ConfigError::new(key, value, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text<T: fmt::Debug>(result: Result<T, ConfigError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn ports() {
        assert_eq!(parse_port("--p", "10262").unwrap(), Some(10262));
        assert_eq!(parse_port("--p", "0").unwrap(), None);
        assert_eq!(
            text(parse_port("--agent-port", "70000")),
            "--agent-port=70000: not a port; use 1 to 65535, or 0 to switch the door off"
        );
        assert_eq!(parse_ports("--r", " 10250 ,10255,10250").unwrap(), BTreeSet::from([10250, 10255]));
        assert_eq!(parse_ports("--r", "").unwrap(), BTreeSet::new());
        assert_eq!(
            text(parse_ports("--redirect-ports", "10250,0")),
            "--redirect-ports=10250,0: \"0\" is not a port; use 1 to 65535, comma-separated"
        );
    }

    #[test]
    fn cidrs() {
        let nets =
            parse_cidrs("--exclude", "10.0.0.0/8, fd00::/64,192.0.2.7,::ffff:10.1.0.0/112,::ffff:10.2.0.1")
                .unwrap();
        let expected = ["10.0.0.0/8", "fd00::/64", "192.0.2.7/32", "10.1.0.0/16", "10.2.0.1/32"];
        assert_eq!(nets.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
        assert_eq!(
            text(parse_cidrs("--exclude", "10.8.0.7/24")),
            "--exclude=10.8.0.7/24: \"10.8.0.7/24\" has bits set after its prefix; did you mean 10.8.0.0/24?"
        );
        assert_eq!(
            text(parse_cidrs("--exclude", "10.0.0.0/8,edge")),
            "--exclude=10.0.0.0/8,edge: \"edge\" is not an address range; use ADDRESS/BITS such as 10.8.0.0/16"
        );
    }

    #[test]
    fn addresses() {
        assert_eq!(parse_door("--a", "127.0.0.1:0").unwrap(), None);
        assert_eq!(parse_loopback_door("--a", "9").unwrap(), Some("127.0.0.1:9".parse().unwrap()));
        assert_eq!(parse_loopback_door("--a", "0").unwrap(), None);
        assert_eq!(parse_loopback_door("--a", "[::1]:9").unwrap(), Some("[::1]:9".parse().unwrap()));
        assert_eq!(
            text(parse_address("--admin-address", "localhost:1")),
            "--admin-address=localhost:1: not ADDRESS:PORT; use one such as 127.0.0.1:10265 or [::1]:10265"
        );
        assert_eq!(
            text(parse_loopback_door("--admin-address", "0.0.0.0:10265")),
            "--admin-address=0.0.0.0:10265: not a loopback address: this endpoint has no authentication; \
             use 127.0.0.1 or [::1]"
        );
        assert_eq!(parse_ip("--node-ip", "::ffff:10.0.0.1").unwrap(), IpAddr::from([10, 0, 0, 1]));
        assert_eq!(
            text(parse_ips("--cert-ips", "10.0.0.1,x")),
            "--cert-ips=10.0.0.1,x: \"x\" is not an IP address"
        );
    }

    #[test]
    fn durations() {
        for (value, expected) in [
            ("30s", Duration::from_secs(30)),
            ("500ms", Duration::from_millis(500)),
            ("1h30m", Duration::from_secs(5400)),
            ("7d", Duration::from_secs(7 * 86400)),
            ("0s", Duration::ZERO),
        ] {
            assert_eq!(parse_duration("--t", value).unwrap(), expected, "{value}");
        }
        for value in ["", "30", "-5s", "5 parsecs", "1y", "2mo", "99999999999999999999s"] {
            assert_eq!(
                text(parse_duration("--drain-timeout", value)),
                format!(
                    "--drain-timeout={value}: not a length of time; use a number and a unit, such as 500ms, 30s or 1h30m"
                )
            );
        }
    }

    #[test]
    fn hosts() {
        for (value, expected) in [
            ("tunnel.Example.org:10262", "tunnel.example.org:10262"),
            ("10.0.0.1:1", "10.0.0.1:1"),
            ("[fd00::1]:10262", "[fd00::1]:10262"),
        ] {
            assert_eq!(parse_with::<HostPort>("--server", value).unwrap().to_string(), expected);
        }
        for value in [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:65536",
            "fd00::1:2",
            "[fd00::1]",
            "a b:1",
            "-a:1",
            "a..b:1",
        ] {
            assert!(parse_with::<HostPort>("--server", value).is_err(), "{value}");
        }
        assert_eq!(
            text(parse_with::<HostPort>("--server", "tunnel")),
            "--server=tunnel: not HOST:PORT; use one such as tunnel.example.org:10262 or [fd00::1]:10262"
        );
    }

    proptest! {
        #[test]
        fn parsers_never_panic(value in "\\PC{0,40}") {
            let _ = parse_ports("k", &value);
            let _ = parse_cidrs("k", &value);
            let _ = parse_duration("k", &value);
            let _ = parse_door("k", &value);
            let _ = value.parse::<HostPort>();
        }

        #[test]
        fn host_ports_round_trip(host in "[a-z][a-z0-9]{0,8}(\\.[a-z][a-z0-9]{0,8}){0,3}", port in 1..=u16::MAX) {
            let parsed: HostPort = format!("{host}:{port}").parse().unwrap();
            prop_assert_eq!(&parsed.to_string().parse::<HostPort>().unwrap(), &parsed);
            prop_assert_eq!((parsed.host, parsed.port), (host, port));
        }
    }
}

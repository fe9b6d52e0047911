//! Parsers of flag values, for clap's `value_parser`. An error is only the reason; clap adds the flag and the value.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

// Aliases, because clap's derive gives `bool`, `Option` and `Vec` a special meaning by name.

/// A flag of `on` or `off`.
pub type OnOff = bool;
/// Port of a listener; `None` if the listener is off.
pub type Port = Option<u16>;
/// Address to listen on; `None` to not listen.
pub type ListenAddress = Option<SocketAddr>;
/// A comma-separated value.
pub type List<T> = Vec<T>;

/// Parses `on` or `off`, or the forms that Go's flags accept.
///
/// # Errors
/// Fails for any other value.
pub fn on_off(value: &str) -> Result<bool, String> {
    match value {
        "on" | "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "off" | "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("use on or off".to_owned()),
    }
}

/// Parses a listener's port; 0 switches the listener off.
///
/// # Errors
/// Fails unless it is a number from 0 to 65535.
pub fn port(value: &str) -> Result<Port, String> {
    match value.trim().parse::<u16>() {
        Ok(0) => Ok(None),
        Ok(port) => Ok(Some(port)),
        Err(_) => Err("not a port; use 1 to 65535, or 0 to switch it off".to_owned()),
    }
}

/// Parses comma-separated ports. An empty value is an empty list.
///
/// # Errors
/// Names the entry that is not a port.
pub fn ports(value: &str) -> Result<BTreeSet<u16>, String> {
    let port = |entry: &str| match entry.parse::<u16>() {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(format!("{entry:?} is not a port; use 1 to 65535, comma-separated")),
    };
    entries(value).map(port).collect()
}

/// Parses an address range; a bare address is a range of one. v4-mapped IPv6 becomes IPv4.
///
/// # Errors
/// Fails for anything but a range, and for a range with host bits set: the address or the length may be the mistake.
pub fn cidr(value: &str) -> Result<IpNet, String> {
    if let Ok(address) = value.parse::<IpAddr>() {
        return Ok(IpNet::from(address.to_canonical()));
    }
    let net: IpNet = value
        .parse()
        .map_err(|_| format!("{value:?} is not an address range; use ADDRESS/BITS such as 10.8.0.0/16"))?;
    let net = match net {
        // ::ffff:a.b.c.d/96+n equals a.b.c.d/n (RFC 4291 section 2.5.5.2).
        IpNet::V6(v6) if v6.prefix_len() >= 96 => match v6.addr().to_ipv4_mapped() {
            Some(v4) => ipnet::Ipv4Net::new(v4, v6.prefix_len() - 96).map_err(|e| e.to_string())?.into(),
            None => net,
        },
        _ => net,
    };
    if net.addr() != net.network() {
        return Err(format!("{value:?} has bits set after its prefix; did you mean {}?", net.trunc()));
    }
    Ok(net)
}

/// Parses comma-separated address ranges. An empty value is an empty list.
///
/// # Errors
/// Names the invalid entry.
pub fn cidrs(value: &str) -> Result<List<IpNet>, String> {
    entries(value).map(cidr).collect()
}

/// Parses an IP address; v4-mapped IPv6 becomes IPv4.
///
/// # Errors
/// Fails unless it is an IP address.
pub fn ip(value: &str) -> Result<IpAddr, String> {
    let address = value.trim().parse::<IpAddr>();
    address
        .map(|address| address.to_canonical())
        .map_err(|_| "not an IP address; use one such as 10.8.0.7 or fd00::7".to_owned())
}

/// Parses comma-separated values with `FromStr`. An empty value is an empty list.
///
/// # Errors
/// Names the invalid entry.
pub fn list<T: FromStr<Err: fmt::Display>, L: FromIterator<T>>(value: &str) -> Result<L, String> {
    entries(value).map(|entry| entry.parse().map_err(|reason| format!("{entry:?}: {reason}"))).collect()
}

/// Parses `ADDRESS:PORT`, IPv6 in brackets; port 0 switches the listener off.
///
/// # Errors
/// Fails for any other form. Names are refused too: an address to listen on must not depend on DNS.
pub fn listen(value: &str) -> Result<ListenAddress, String> {
    let address = value.trim().parse::<SocketAddr>();
    let address =
        address.map_err(|_| "not ADDRESS:PORT; use one such as 127.0.0.1:10265 or [::1]:10265".to_owned())?;
    Ok(Some(address).filter(|address| address.port() != 0))
}

/// Returns the ranges of clients that a listener is for: the given ones, or this host for a loopback address.
///
/// # Errors
/// Fails if no range is given and other hosts reach the address.
pub fn clients_of(listen: SocketAddr, given: Option<List<IpNet>>) -> Result<List<IpNet>, String> {
    match given {
        Some(clients) => Ok(clients),
        None if listen.ip().is_loopback() => {
            let v4 = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
            Ok(vec![v4, IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST))])
        }
        None => Err(format!("{listen} is reached from elsewhere: say by which clients, such as 10.0.0.0/8")),
    }
}

/// [`listen`] for an endpoint without authentication: only a loopback address is accepted. A bare port means
/// 127.0.0.1, as in the flags of other systems.
///
/// # Errors
/// Fails as [`listen`] does, and for any other address.
pub fn listen_on_loopback(value: &str) -> Result<ListenAddress, String> {
    if let Ok(port) = value.trim().parse::<u16>() {
        return Ok(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).filter(|address| address.port() != 0));
    }
    match listen(value)? {
        Some(address) if !address.ip().to_canonical().is_loopback() => {
            let reason =
                "not a loopback address: this endpoint has no authentication; use 127.0.0.1 or [::1]";
            Err(reason.to_owned())
        }
        address => Ok(address),
    }
}

/// Parses a duration with its unit: `500ms`, `30s`, `5m`, `1h30m`, `7d`.
///
/// # Errors
/// Fails unless it is a non-negative duration. Months and years are refused, because their length varies.
pub fn duration(value: &str) -> Result<Duration, String> {
    const USE: &str = "not a length of time; use a number and a unit, such as 500ms, 30s or 1h30m";
    let span: jiff::Span = value.trim().parse().map_err(|_| USE)?;
    span.to_duration(jiff::SpanRelativeTo::days_are_24_hours())
        .ok()
        .and_then(|duration| Duration::try_from(duration).ok())
        .ok_or_else(|| USE.to_owned())
}

/// `HOST:PORT`, where HOST is a name or an address (IPv6 in brackets).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPort {
    /// Name or address, without brackets.
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

/// Accepts a DNS name (RFC 1123: letters, digits, hyphens and dots; underscores occur in practice) or an IPv4 address.
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

/// Returns the entries of a comma-separated value, trimmed, without empty ones.
pub(super) fn entries(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|entry| !entry.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reason<T: fmt::Debug>(result: Result<T, String>) -> String {
        result.unwrap_err()
    }

    #[test]
    fn on_and_off() {
        for (value, expected) in [
            ("on", Ok(true)),
            ("true", Ok(true)),
            ("off", Ok(false)),
            ("false", Ok(false)),
            ("maybe", Err(())),
        ] {
            assert_eq!(on_off(value).map_err(drop), expected, "{value}");
        }
    }

    #[test]
    fn numbers_of_ports() {
        assert_eq!(port("10262"), Ok(Some(10262)));
        assert_eq!(port("0"), Ok(None));
        assert_eq!(reason(port("70000")), "not a port; use 1 to 65535, or 0 to switch it off");
        assert_eq!(ports(" 10250 ,10255,10250"), Ok(BTreeSet::from([10250, 10255])));
        assert_eq!(ports(""), Ok(BTreeSet::new()));
        assert_eq!(reason(ports("10250,0")), "\"0\" is not a port; use 1 to 65535, comma-separated");
    }

    #[test]
    fn ranges() {
        let nets = cidrs("10.0.0.0/8, fd00::/64,192.0.2.7,::ffff:10.1.0.0/112,::ffff:10.2.0.1").unwrap();
        let expected = ["10.0.0.0/8", "fd00::/64", "192.0.2.7/32", "10.1.0.0/16", "10.2.0.1/32"];
        assert_eq!(nets.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
        assert_eq!(
            reason(cidrs("10.8.0.7/24")),
            "\"10.8.0.7/24\" has bits set after its prefix; did you mean 10.8.0.0/24?"
        );
        assert_eq!(
            reason(cidrs("10.0.0.0/8,edge")),
            "\"edge\" is not an address range; use ADDRESS/BITS such as 10.8.0.0/16"
        );
    }

    #[test]
    fn addresses() {
        assert_eq!(listen("127.0.0.1:0"), Ok(None));
        assert_eq!(listen_on_loopback("9"), Ok(Some("127.0.0.1:9".parse().unwrap())));
        assert_eq!(listen_on_loopback("0"), Ok(None));
        assert_eq!(listen_on_loopback("[::1]:9"), Ok(Some("[::1]:9".parse().unwrap())));
        assert_eq!(
            reason(listen("localhost:1")),
            "not ADDRESS:PORT; use one such as 127.0.0.1:10265 or [::1]:10265"
        );
        assert_eq!(
            reason(listen_on_loopback("0.0.0.0:10265")),
            "not a loopback address: this endpoint has no authentication; use 127.0.0.1 or [::1]"
        );
        assert_eq!(ip("::ffff:10.0.0.1"), Ok(IpAddr::from([10, 0, 0, 1])));
        assert!(reason(list::<IpAddr, Vec<_>>("10.0.0.1,x")).starts_with("\"x\": "));
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
            assert_eq!(duration(value).unwrap(), expected, "{value}");
        }
        for value in ["", "30", "-5s", "5 parsecs", "1y", "2mo", "99999999999999999999s"] {
            assert!(reason(duration(value)).starts_with("not a length of time; "), "{value}");
        }
    }

    #[test]
    fn hosts() {
        for (value, expected) in [
            ("tunnel.Example.org:10262", "tunnel.example.org:10262"),
            ("10.0.0.1:1", "10.0.0.1:1"),
            ("[fd00::1]:10262", "[fd00::1]:10262"),
        ] {
            assert_eq!(value.parse::<HostPort>().unwrap().to_string(), expected);
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
            assert!(value.parse::<HostPort>().is_err(), "{value}");
        }
        assert_eq!(
            "tunnel".parse::<HostPort>().unwrap_err(),
            "not HOST:PORT; use one such as tunnel.example.org:10262 or [fd00::1]:10262"
        );
    }

    proptest! {
        #[test]
        fn parsers_never_panic(value in "\\PC{0,40}") {
            let _ = ports(&value);
            let _ = cidrs(&value);
            let _ = duration(&value);
            let _ = listen_on_loopback(&value);
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

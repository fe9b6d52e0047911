//! Parsers of the values that only the server's flags have.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_core::config::{
    ConfigError, HostPort, duration_text, parse_cidr, parse_cidrs, parse_duration, parse_ip, parse_port,
    parse_with,
};

use crate::redirect::LEAST_ORPHAN_TIMEOUT;

/// Where the http door listens. None: nowhere.
pub(crate) fn insecure_address(address: &str, port: &str) -> Result<Option<SocketAddr>, ConfigError> {
    const KEY: &str = "--insecure-bind-address";
    let ip = parse_ip(KEY, address)?;
    if !ip.is_loopback() {
        let reason = "not a loopback address: this door has no authentication; use 127.0.0.1 or ::1";
        return Err(ConfigError::new(KEY, address, reason));
    }
    Ok(parse_port("--insecure-port", port)?.map(|port| SocketAddr::new(ip, port)))
}

/// A directory, or None for `off`.
pub(crate) fn bpffs(value: &str) -> Option<PathBuf> {
    (value != "off").then(|| value.into())
}

pub(crate) fn orphan_timeout(value: &str) -> Result<Duration, ConfigError> {
    const KEY: &str = "--orphan-timeout";
    let timeout = parse_duration(KEY, value)?;
    if timeout < LEAST_ORPHAN_TIMEOUT {
        let least = duration_text(LEAST_ORPHAN_TIMEOUT);
        let reason = format!("shorter than {least}: a server that is merely busy would be taken for dead");
        return Err(ConfigError::new(KEY, value, reason));
    }
    Ok(timeout)
}

/// The agent ports of other servers.
pub(crate) fn peers(value: &str) -> Result<BTreeSet<HostPort>, ConfigError> {
    let entries = value.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries.map(|entry| parse_with("--peers", entry)).collect()
}

pub(crate) fn on_or_off(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ConfigError::new(key, value, "use on or off")),
    }
}

pub(crate) fn refuse_or_allow(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "refuse" => Ok(true),
        "allow" => Ok(false),
        _ => Err(ConfigError::new(key, value, "use refuse or allow")),
    }
}

pub(crate) fn token_range(value: &str, exclude: &[IpNet]) -> Result<Ipv4Net, ConfigError> {
    const KEY: &str = "--token-range";
    let IpNet::V4(range) = parse_cidr(KEY, value)? else {
        return Err(ConfigError::new(KEY, value, "not IPv4; the IPv6 range is --token-range-v6"));
    };
    if !(8..=24).contains(&range.prefix_len()) {
        return Err(ConfigError::new(KEY, value, "use a /8 to /24: one address for each edge address"));
    }
    let useless = [
        (Ipv4Net::new_assert(Ipv4Addr::new(0, 0, 0, 0), 8), "0.0.0.0/8 is not a usable network"),
        (Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8), "it contains loopback addresses"),
        (Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16), "it contains link-local addresses"),
        (Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 3), "it contains multicast or reserved addresses"),
    ];
    if let Some((_, reason)) = useless.iter().find(|(net, _)| overlap(&IpNet::V4(range), &IpNet::V4(*net))) {
        return Err(ConfigError::new(KEY, value, *reason));
    }
    check_excluded(KEY, value, &IpNet::V4(range), exclude)?;
    Ok(range)
}

pub(crate) fn token_range_v6(value: &str, exclude: &[IpNet]) -> Result<Ipv6Net, ConfigError> {
    const KEY: &str = "--token-range-v6";
    let IpNet::V6(range) = parse_cidr(KEY, value)? else {
        return Err(ConfigError::new(KEY, value, "not IPv6; the IPv4 range is --token-range"));
    };
    if !(64..=96).contains(&range.prefix_len()) {
        return Err(ConfigError::new(KEY, value, "use a /64 to /96: one address for each edge address"));
    }
    let first = range.network();
    // fc00::/7 (RFC 4193) and 2000::/3 (RFC 4291 §2.4); other ranges have special meanings.
    if !(first.is_unique_local() || first.segments()[0] >> 13 == 1) {
        return Err(ConfigError::new(
            KEY,
            value,
            "not a unique local or global unicast range; use one such as fd00:1:2:3::/64",
        ));
    }
    check_excluded(KEY, value, &IpNet::V6(range), exclude)?;
    Ok(range)
}

fn check_excluded(key: &str, value: &str, range: &IpNet, exclude: &[IpNet]) -> Result<(), ConfigError> {
    match exclude.iter().find(|excluded| overlap(range, excluded)) {
        Some(excluded) => Err(ConfigError::new(key, value, format!("it overlaps {excluded} of --exclude"))),
        None => Ok(()),
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

pub(crate) fn dns_names(value: &str) -> Result<Vec<String>, ConfigError> {
    let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| {
            // What a certificate may carry (RFC 5280 §4.2.1.6), or a wildcard in the first label.
            let plain = name.strip_prefix("*.").unwrap_or(name);
            match rustls_pki_types::DnsName::try_from(plain) {
                Ok(_) => Ok(name.to_ascii_lowercase()),
                Err(_) => {
                    Err(ConfigError::new("--cert-dns-names", value, format!("{name:?} is not a DNS name")))
                }
            }
        })
        .collect()
}

/// Ranges whose pod connections are redirected; `off` is none.
pub(crate) fn edge_pod_routes(value: &str) -> Result<Vec<IpNet>, ConfigError> {
    const KEY: &str = "--edge-pod-routes";
    match value {
        "off" => Ok(Vec::new()),
        "" | "on" => {
            let reason = "name the ranges of edge nodes' pods, such as 10.244.0.0/16, or off";
            Err(ConfigError::new(KEY, value, reason))
        }
        ranges => parse_cidrs(KEY, ranges),
    }
}

/// Checks a name as the API server does: an RFC 1123 subdomain.
pub(crate) fn object_name(key: &str, value: &str) -> Result<(), ConfigError> {
    let label = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        !label.is_empty()
            && label.bytes().all(|byte| inner(byte) || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if value.len() <= 253 && value.split('.').all(label) {
        return Ok(());
    }
    let reason = "not the name of an object; use lower-case letters, digits, - and ., such as tunnel-server";
    Err(ConfigError::new(key, value, reason))
}

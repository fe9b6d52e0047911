//! Checks that a name has an address.

use std::time::Duration;

use tunnel_runtime::config::HostPort;
use tunnel_runtime::net::lookup;

use super::checkup::Finding;
use super::codes;

const DEADLINE: Duration = Duration::from_secs(10);

/// Returns a finding if the host of this `HOST:PORT` has no address. `flag` is named in it.
pub async fn resolves(flag: &str, address: &str) -> Option<Finding> {
    let HostPort { host, port } = address.parse().ok()?;
    let reason = match tokio::time::timeout(DEADLINE, lookup(&host, port)).await {
        Ok(Ok(_)) => return None,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
    };
    let fix = format!(
        "compare `getent ahostsv4 {host}`, `getent ahostsv6 {host}` and /etc/resolv.conf with what the name should lead to: one \
         of them is enough; or give an address instead"
    );
    Some(Finding::new(&codes::NAME_DOES_NOT_RESOLVE, format!("{flag}={address}: {reason}"), fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_without_an_address_is_found() {
        // RFC 6761 section 6.4: never resolves.
        let finding = resolves("--server", "tunnel.invalid:10262").await.unwrap();
        assert_eq!(finding.code, "name-does-not-resolve");
        assert!(finding.found.starts_with("--server=tunnel.invalid:10262: "), "{finding:?}");
        assert!(finding.fix.contains("`getent ahostsv4 tunnel.invalid`"), "{finding:?}");
        for good in ["127.0.0.1:1", "[::1]:1", "localhost:1"] {
            assert_eq!(resolves("--server", good).await, None);
        }
    }
}

//! Whether a name leads anywhere.

use std::time::Duration;

use tokio::net::lookup_host;

use super::checkup::Finding;
use super::codes;

const DEADLINE: Duration = Duration::from_secs(10);

/// The finding if the host of this `HOST:PORT` has no address. `flag` names it.
pub async fn resolves(flag: &str, address: &str) -> Option<Finding> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let reason = match tokio::time::timeout(DEADLINE, lookup_host(address)).await {
        Ok(Ok(mut addresses)) => {
            if addresses.next().is_some() {
                return None;
            }
            "it has no address".to_owned()
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
    };
    let fix = format!(
        "compare `getent ahosts {host}` and /etc/resolv.conf with what the name should lead to, or give an address instead"
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
        assert!(finding.fix.contains("`getent ahosts tunnel.invalid`"), "{finding:?}");
        for good in ["127.0.0.1:1", "[::1]:1", "localhost:1"] {
            assert_eq!(resolves("--server", good).await, None);
        }
    }
}

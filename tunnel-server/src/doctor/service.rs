//! Checks the listeners and the nodes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use tokio::net::TcpStream;
use tunnel_doctor::{Finding, Outcome, Page, Running, codes};
use tunnel_routing::inventory;

use crate::config::Config;
use crate::listener::REDIRECT;
use crate::status::{InventoryStatus, StatusReport};

const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of conflicts shown.
const SHOWN: usize = 5;

pub(super) async fn listeners(config: &Config, running: Option<&Running<StatusReport>>) -> Outcome {
    match running {
        Some(running) => silent(running).await,
        None => taken(config),
    }
}

/// Reports the listeners of the running server that do not accept connections.
async fn silent(running: &Running<StatusReport>) -> Outcome {
    // The redirect's are reached through sk_lookup only.
    let listeners: Vec<_> =
        running.status.listeners.iter().filter(|listener| listener.name != REDIRECT).collect();
    let mut faults = Vec::new();
    for listener in &listeners {
        let address = reachable(listener.address);
        let reason = match tokio::time::timeout(DEADLINE, TcpStream::connect(address)).await {
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
        };
        let found = format!("{} at {address}: {reason}", listener.name);
        let fix = format!(
            "look for a rule that rejects it: `iptables -S INPUT`, `nft list ruleset`, and see `ss -ltn sport = :{}`",
            address.port()
        );
        faults.push(Finding::new(&codes::LISTENER_SILENT, found, fix));
    }
    let shown = |listener: &&crate::status::ListenerStatus| format!("{} {}", listener.name, listener.address);
    Outcome::of(faults, listeners.iter().map(shown).collect::<Vec<_>>().join(", "))
}

/// Returns an address at which this host reaches a listener.
pub(super) fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// Reports the ports that the server could not bind if it were started.
fn taken(config: &Config) -> Outcome {
    let mut faults = Vec::new();
    for (flag, address) in config.listeners.addresses() {
        let Err(error) = TcpListener::bind(address) else { continue };
        let port = address.port();
        let fix = match error.kind() {
            io::ErrorKind::AddrInUse => {
                format!(
                    "see who has it with `ss -ltnp sport = :{port}`, and stop that or choose another port with {flag}"
                )
            }
            _ => format!("choose an address of this host: `ip address`, {flag}"),
        };
        faults.push(Finding::new(&codes::PORT_TAKEN, format!("{flag}: {address}: {error}"), fix));
    }
    Outcome::of(faults, "every port is free")
}

pub(super) fn inventory(config: &Config, running: Option<&Running<StatusReport>>) -> Outcome {
    if let Some(running) = running {
        return judge(&running.status.inventory);
    }
    let Some(path) = &config.nodes.inventory else {
        return Outcome::Skipped("only the running server knows the cluster's nodes".to_owned());
    };
    let shown = path.display();
    let fault = |reason: String| {
        let fix = format!("kubectl get nodes -o yaml > {shown}, or correct the line that is named");
        Finding::new(&codes::INVENTORY_UNUSABLE, format!("--inventory={shown}: {reason}"), fix).into()
    };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => return fault(error.to_string()),
    };
    match inventory::parse(&text, &config.nodes.edge_selector) {
        Ok(inventory) => {
            let (edge, cloud) = inventory.counts();
            of_nodes(edge, cloud)
        }
        Err(error) => fault(error.to_string()),
    }
}

fn of_nodes(edge: usize, cloud: usize) -> Outcome {
    if edge > 0 {
        return Outcome::fine(format!("{edge} edge nodes, {cloud} others"));
    }
    let fix =
        "label them: `kubectl label node NAME node-role.kubernetes.io/edge=`, or correct --edge-selector";
    Finding::new(&codes::NO_EDGE_NODES, format!("none of {cloud} nodes is an edge node"), fix).into()
}

fn judge(inventory: &InventoryStatus) -> Outcome {
    if let Some(error) = &inventory.source.last_error {
        let found = format!("{}: {error}", inventory.source.source);
        let fix = "correct what the error names; the last good state is in effect until then";
        return Finding::new(&codes::INVENTORY_UNUSABLE, found, fix).into();
    }
    if let Some(first) = inventory.conflicts.first() {
        let shown: Vec<&str> =
            inventory.conflicts.iter().take(SHOWN).map(|conflict| conflict.message.as_str()).collect();
        let left = inventory.conflicts.len() - shown.len();
        let more =
            if left > 0 { format!("; {left} more in `tunnel-server status -o json`") } else { String::new() };
        let fix = format!(
            "correct the nodes that are named; {} says what each kind of conflict means: {}",
            Page::Nodes.url(),
            first.message
        );
        return Finding::new(&codes::INVENTORY_CONFLICT, format!("{}{more}", shown.join("; ")), fix).into();
    }
    of_nodes(inventory.source.edge, inventory.source.cloud)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn code(inventory: Value) -> (&'static str, String) {
        match judge(&serde_json::from_value(inventory).unwrap()) {
            Outcome::Faults(findings) => (findings[0].code, findings[0].found.clone()),
            _ => ("", String::new()),
        }
    }

    #[test]
    fn the_inventorys_own_complaints_are_told() {
        let inventory = |edge: usize, error: Value, conflicts: Value| json!({"source": "nodes.yaml", "edge": edge, "cloud": 2, "last_error": error, "conflicts": conflicts});
        assert_eq!(code(inventory(3, Value::Null, json!([]))).0, "");
        assert_eq!(code(inventory(0, Value::Null, json!([]))).0, "no-edge-nodes");
        assert_eq!(code(inventory(3, json!("line 7"), json!([]))).0, "inventory-unusable");
        let conflict = json!({"kind": "no_room", "address": "10.8.0.7", "nodes": ["edge-1"], "holder": null,
                              "message": "address 10.8.0.7 of edge-1: full"});
        let conflicts = vec![conflict; 7];
        let (found, text) = code(inventory(3, Value::Null, json!(conflicts)));
        assert_eq!(found, "inventory-conflict");
        assert!(
            text.contains("10.8.0.7") && text.ends_with("2 more in `tunnel-server status -o json`"),
            "{text}"
        );
    }
}

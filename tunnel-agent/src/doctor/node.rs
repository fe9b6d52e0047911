//! Checks the kubelet, the target of most connections.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;
use tunnel_doctor::{Checkup, Finding, Outcome, codes};
use tunnel_runtime::config::{TargetNet, TargetRule};
use tunnel_runtime::net::interface_addresses;

use crate::config::Config;

/// The default port. Most agents have no right to read their Node, which may name another one.
const KUBELET: u16 = 10250;
const DEADLINE: Duration = Duration::from_secs(5);

/// `own` is this node's address on the connection to a server.
pub(super) async fn check(checkup: &mut Checkup, config: &Config, own: Option<IpAddr>) {
    // Like the agent, which connects to this host's own address if the given one is on no interface.
    let here = |given: &IpAddr| {
        interface_addresses().is_ok_and(|listed| listed.iter().any(|entry| entry.address == *given))
    };
    let address = config.given.node_ip.filter(here).or(own);
    let Some(address) = address else {
        checkup
            .add("kubelet", Outcome::Skipped("this node's address is not known; give --node-ip".to_owned()));
        return;
    };
    let target = SocketAddr::new(address, KUBELET);
    checkup.add("policy", policy(&config.given.targets.allow, target));
    checkup.run("kubelet", &[], async || kubelet(target).await).await;
}

fn policy(rules: &[TargetRule], target: SocketAddr) -> Outcome {
    let allows = |rule: &TargetRule| {
        rule.names(target.ip(), target.port())
            || rule.net == TargetNet::Node && rule.ports.contains(target.port())
    };
    if rules.is_empty() || rules.iter().any(allows) {
        return Outcome::fine(format!("{target} may be reached"));
    }
    let shown = rules.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let fix = format!(
        "--allow-target=node:{KUBELET}, or the port that its Node names, beside the others, if kubectl logs and exec are wanted"
    );
    Finding::new(&codes::KUBELET_NOT_ALLOWED, format!("{target} is in none of {shown}"), fix).into()
}

async fn kubelet(target: SocketAddr) -> Outcome {
    let reason = match tokio::time::timeout(DEADLINE, TcpStream::connect(target)).await {
        Ok(Ok(_)) => return Outcome::fine(format!("{target} accepts")),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
    };
    let fix = format!(
        "systemctl status kubelet; ss -ltn sport = :{KUBELET}; iptables -S INPUT. If its Node names another port for the kubelet, \
         `tunnel-server test` examines that one"
    );
    Finding::new(&codes::KUBELET_SILENT, format!("{target}: {reason}"), fix).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(outcome: Outcome) -> &'static str {
        match outcome {
            Outcome::Faults(findings) => findings[0].code,
            _ => "",
        }
    }

    #[tokio::test]
    async fn a_kubelet_that_does_not_listen_is_found() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        assert_eq!(code(kubelet(target).await), "");
        drop(listener);
        assert_eq!(code(kubelet(target).await), "kubelet-silent");
    }

    #[test]
    fn a_policy_without_the_kubelet_is_found() {
        let target = "192.168.50.2:10250".parse().unwrap();
        for (rules, expected) in [
            (&[][..], ""),
            (&["node:*"], ""),
            (&["node:22", "192.168.50.0/24:10250"], ""),
            (&["node:22", "10.0.0.0/8:*"], "kubelet-not-allowed"),
        ] {
            let rules: Vec<TargetRule> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
            assert_eq!(code(policy(&rules, target)), expected, "{rules:?}");
        }
    }
}

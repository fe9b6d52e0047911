//! Checks the connections to konnectivity's servers, and that they have this agent.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tunnel_doctor::{Checkup, Finding, Outcome, Running, codes, resolves};

use crate::config::{Config, KonnectivityConfig};
use crate::konnectivity::{KonnectivityStatus, client_config, connect};
use crate::status::AgentStatus;

const CONNECT: Duration = Duration::from_secs(8);

/// Returns this node's address on the connection if the server was reached directly.
pub(super) async fn check(
    checkup: &mut Checkup,
    config: &Config,
    servers: &KonnectivityConfig,
    running: Option<&Running<AgentStatus>>,
) -> Option<IpAddr> {
    let address = servers.server.to_string();
    let made = client_config(servers);
    checkup.add("certificates", files(&made));
    if !config.reach.goes_through_proxy(&address) {
        checkup
            .run("names", &[], async || {
                let faults = resolves("--konnectivity-server", &address).await.into_iter().collect();
                Outcome::of(faults, address.clone())
            })
            .await;
    }
    let mut own = None;
    match made {
        Ok(tls) => {
            // Ends with the handshake. In TLS 1.3 a server refuses a client's certificate only after that.
            let reached = tokio::time::timeout(CONNECT, connect(&config.reach, &servers.server, tls)).await;
            let reached = reached
                .unwrap_or_else(|_| Err(format!("{address}: no answer within {} s", CONNECT.as_secs())));
            if let Ok((stream, None)) = &reached {
                own = stream.get_ref().0.local_addr().ok().map(|address| address.ip());
            }
            checkup.add("servers", server(&address, reached.map(drop)));
        }
        Err(_) => checkup.add("servers", Outcome::Skipped("`certificates` is broken".to_owned())),
    }
    let attached = match running.map(|running| running.status.konnectivity.as_ref()) {
        Some(Some(status)) => judge(status),
        Some(None) => Outcome::Skipped("the running agent's servers are not konnectivity's".to_owned()),
        None => Outcome::Skipped("the agent does not run".to_owned()),
    };
    checkup.add("attached", attached);
    own
}

fn files(made: &Result<Arc<ClientConfig>, String>) -> Outcome {
    match made {
        Ok(_) => Outcome::fine("the files can be used"),
        Err(reason) => {
            let fix = "correct --konnectivity-ca, --konnectivity-cert and --konnectivity-key, or the files";
            Finding::new(&codes::IDENTITY_UNUSABLE, reason, fix).into()
        }
    }
}

fn server(address: &str, reached: Result<(), String>) -> Outcome {
    match reached {
        Ok(()) => Outcome::fine(format!("{address} answers, and is trusted")),
        Err(reason) => {
            let fix = format!(
                "on the server: is proxy-server's --agent-port open, and does its certificate name {address}?"
            );
            Finding::new(&codes::SERVER_UNREACHABLE, reason, fix).into()
        }
    }
}

fn judge(status: &KonnectivityStatus) -> Outcome {
    let attached: Vec<_> = status.attached.iter().filter(|server| !server.draining).collect();
    let shown = attached.iter().map(|server| server.server_id.as_str()).collect::<Vec<_>>().join(", ");
    if attached.is_empty() {
        let found = status.last_error.clone().unwrap_or_else(|| "no answer yet".to_owned());
        let fix = "correct what the checks above have found; the agent tries again by itself";
        return Finding::new(&codes::NOT_ATTACHED, found, fix).into();
    }
    match status.server_count {
        Some(count) if attached.len() < count => {
            Outcome::fine(format!("to {shown}: {} of the {count} that they say there are", attached.len()))
        }
        _ => Outcome::fine(format!("to {shown}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::konnectivity::KonnectivityServer;

    fn code(outcome: Outcome) -> &'static str {
        match outcome {
            Outcome::Faults(findings) => findings[0].code,
            _ => "",
        }
    }

    #[test]
    fn faults_have_their_codes() {
        let mut status = KonnectivityStatus {
            server: "a:8091".to_owned(),
            agent_id: "edge-1".to_owned(),
            identifiers: String::new(),
            server_count: None,
            attached: Vec::new(),
            last_error: Some("connection refused".to_owned()),
            last_error_s: Some(1),
        };
        assert_eq!(code(judge(&status)), "not-attached");
        let server_id = "one".to_owned();
        status.attached.push(KonnectivityServer {
            server_id,
            attached_for_s: 1,
            connections: 0,
            draining: false,
        });
        assert_eq!(code(judge(&status)), "");
        assert_eq!(code(server("a:8091", Err("connection refused".to_owned()))), "server-unreachable");
        assert_eq!(code(files(&Err("/ca: No such file".to_owned()))), "identity-unusable");
    }
}

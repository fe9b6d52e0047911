//! Checks how kube-apiserver reaches kubelets: by default it resolves a node's Hostname before it tries the node's
//! addresses, and the redirect does not see name lookups.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeAddress};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time::timeout;
use tunnel_doctor::{Finding, Outcome, codes};
use tunnel_runtime::net::lookup;

use tunnel_routing::inventory::Selector;

const DEADLINE: Duration = Duration::from_secs(10);
/// Nodes listed, and edge nodes examined of them: those of a cluster are alike.
const LISTED: u32 = 500;
const EXAMINED: usize = 5;
const FLAG: &str = "--kubelet-preferred-address-types";
/// kube-apiserver's default without the flag.
const DEFAULT: &str = "Hostname,InternalDNS,InternalIP,ExternalDNS,ExternalIP";

pub(super) async fn check(client: &Client, edge: &Selector) -> Outcome {
    let nodes = Api::<Node>::all(client.clone());
    let nodes = match timeout(DEADLINE, nodes.list(&ListParams::default().limit(LISTED))).await {
        Ok(Ok(nodes)) => nodes.items,
        Ok(Err(error)) => return Outcome::Skipped(format!("failed to list nodes: {error}")),
        Err(_) => return Outcome::Skipped("failed to list nodes: no answer".to_owned()),
    };
    let read = in_processes(Path::new("/proc"));
    let order = read.as_deref().unwrap_or(DEFAULT);
    let is_edge = |node: &&Node| node.metadata.labels.as_ref().is_some_and(|labels| edge.matches(labels));
    let edges = nodes.iter().filter(is_edge);
    for node in edges.take(EXAMINED) {
        let Some(fault) = unresolved(node, order).await else { continue };
        let fix = format!(
            "start kube-apiserver with {FLAG}=InternalIP,ExternalIP,Hostname, or have this host's resolver (/etc/hosts) lead the name \
             to the node's address"
        );
        return match read {
            Some(order) => {
                Finding::new(&codes::KUBELET_BY_NAME, format!("{fault}; {FLAG}={order}"), fix).into()
            }
            None => Outcome::Skipped(format!(
                "{fault}. kube-apiserver's flags cannot be read here: kubeadm and k3s set InternalIP first; otherwise {fix}"
            )),
        };
    }
    Outcome::fine("kubelets are dialled by address, or by a name that leads to it")
}

/// Returns the problem with the address at which kube-apiserver dials this node's kubelet, if there is one.
async fn unresolved(node: &Node, order: &str) -> Option<String> {
    let all = node.status.as_ref()?.addresses.as_deref()?;
    let of = |wanted: &str| all.iter().find(move |NodeAddress { type_, .. }| type_ == wanted);
    let dialled = order.split(',').find_map(|wanted| of(wanted.trim()))?;
    if dialled.type_.ends_with("IP") {
        return None;
    }
    let name = &dialled.address;
    let addresses: Vec<IpAddr> = all
        .iter()
        .filter(|address| address.type_.ends_with("IP"))
        .filter_map(|one| one.address.parse().ok())
        .collect();
    let reason = match timeout(DEADLINE, lookup(name, 0)).await {
        Ok(Ok(found)) => {
            let found: Vec<IpAddr> = found.iter().map(|address| address.ip()).collect();
            if found.iter().any(|address| addresses.contains(address)) {
                return None;
            }
            format!("leads to {found:?}")
        }
        Ok(Err(error)) => format!("does not resolve ({error})"),
        Err(_) => "does not resolve (no answer)".to_owned(),
    };
    Some(format!(
        "{} {name} of node {} {reason}",
        dialled.type_,
        node.metadata.name.as_deref().unwrap_or("?")
    ))
}

/// Returns the address order of a kube-apiserver running in this network namespace.
fn in_processes(proc: &Path) -> Option<String> {
    let own = fs::read_link(proc.join("self/ns/net")).ok()?;
    fs::read_dir(proc).ok()?.flatten().find_map(|process| {
        let line = fs::read(process.path().join("cmdline")).ok()?;
        let args: Vec<String> =
            line.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        let is_one = Path::new(args.first()?).file_name()? == "kube-apiserver";
        let here = is_one && fs::read_link(process.path().join("ns/net")).is_ok_and(|net| net == own);
        here.then(|| order_of(&args))
    })
}

fn order_of(args: &[String]) -> String {
    let given = args.iter().enumerate().find_map(|(at, arg)| match arg.strip_prefix(FLAG)? {
        "" => args.get(at + 1).cloned(),
        rest => rest.strip_prefix('=').map(str::to_owned),
    });
    given.unwrap_or_else(|| DEFAULT.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use postern_fake_kube::ApiServer;
    use serde_json::json;
    use tunnel_kube::{ClientSettings, connect};
    use tunnel_routing::inventory::DEFAULT_EDGE_SELECTOR;

    use super::*;

    #[tokio::test]
    async fn a_name_that_is_looked_up_in_vain_is_found() {
        let server = ApiServer::start();
        let put = |hostname: &str, address: &str| {
            let addresses = json!([{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": hostname}]);
            let labels = json!({"node-role.kubernetes.io/edge": ""});
            let metadata = json!({"name": "edge-1", "labels": labels});
            server.put("/api/v1/nodes", json!({"metadata": metadata, "status": {"addresses": addresses}}));
        };
        let (client, _) = connect(Some(&server.kubeconfig()), None, &ClientSettings::SERVER).await.unwrap();
        let edge = DEFAULT_EDGE_SELECTOR.parse().unwrap();
        let checked = async || match check(&client, &edge).await {
            Outcome::Fine(_) => String::new(),
            Outcome::Skipped(reason) => format!("skipped: {reason}"),
            Outcome::Faults(faults) => format!("{}: {} {}", faults[0].code, faults[0].found, faults[0].fix),
        };
        // Never resolves (RFC 6761 section 6.4).
        put("edge-1.invalid", "192.168.50.2");
        let unknown = checked().await;
        assert!(
            unknown.starts_with("skipped: Hostname edge-1.invalid of node edge-1 does not resolve"),
            "{unknown}"
        );
        assert!(unknown.contains("--kubelet-preferred-address-types=InternalIP"), "{unknown}");
        let apiserver = |order: &[&str]| {
            let mut command = Command::new("sh");
            command.arg0("kube-apiserver").args(["-c", "read x; :", "--secure-port=1"]).args(order);
            let process = command.stdin(Stdio::piped()).spawn().unwrap();
            // The pipe that spawn() waits for is closed by the kernel before the new program's arguments are set.
            let (arguments, deadline) =
                (format!("/proc/{}/cmdline", process.id()), Instant::now() + Duration::from_secs(10));
            while fs::read(&arguments).unwrap().is_empty() {
                assert!(Instant::now() < deadline, "no arguments");
                std::thread::yield_now();
            }
            process
        };
        let of = async |order: &[&str]| {
            let mut process = apiserver(order);
            let found = checked().await;
            process.kill().unwrap();
            process.wait().unwrap();
            found
        };
        for order in
            [&[][..], &[FLAG, "Hostname,InternalIP"], &["--kubelet-preferred-address-types=Hostname"]]
        {
            let found = of(order).await;
            assert!(
                found.starts_with("kubelet-by-name: Hostname edge-1.invalid of node edge-1 does not resolve"),
                "{found}"
            );
        }
        assert_eq!(of(&[FLAG, "InternalIP,Hostname"]).await, "");
        put("localhost", "127.0.0.1");
        assert_eq!(of(&[]).await, "");
        put("localhost", "192.168.50.2");
        assert!(of(&[]).await.contains("leads to"), "another host's");
    }
}

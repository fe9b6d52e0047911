//! The other servers: the endpoints of the Service that agents dial.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tunnel_kube::Followed;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::state_file::StateFile;

use super::SERVICE_NAME;
use crate::kube::context::KubeContext;

/// Keeps `peers` current until the context's `stop`: those that it has at first plus the endpoints, ready or not, since
/// a server that briefly fails a check still has its nodes. The endpoints are saved in the state directory for a restart
/// while the API server is unavailable.
pub async fn run(context: KubeContext, state_dir: PathBuf, peers: watch::Sender<Arc<BTreeSet<HostPort>>>) {
    let file = StateFile::<BTreeSet<HostPort>>::new(state_dir.join("peers.json"));
    let given = peers.borrow().clone();
    peers.send_replace(Arc::new(given.iter().cloned().chain(file.load().unwrap_or_default()).collect()));
    let slices = Api::<EndpointSlice>::namespaced(context.client.clone(), &context.namespace);
    let of_service = Config::default().labels(&format!("{SERVICE_NAME}={}", context.names.service));
    let mut changes = pin!(context.health.follow(slices, of_service, "endpointslices/peers"));
    let mut followed = Followed::default();
    while let Some(Some(())) = context.stop.run_until_cancelled(followed.change(&mut changes)).await {
        let found: BTreeSet<HostPort> = followed.objects.values().flat_map(endpoints).collect();
        let all = Arc::new(given.union(&found).cloned().collect::<BTreeSet<_>>());
        if peers.send_if_modified(|known| std::mem::replace(known, all.clone()) != all) {
            file.save(found).await;
        }
    }
}

/// Returns the endpoints with the slice's first port: the Service has only one.
fn endpoints(slice: &EndpointSlice) -> Vec<HostPort> {
    let mut ports = slice.ports.iter().flatten().filter_map(|port| u16::try_from(port.port?).ok());
    let Some(port) = ports.find(|port| *port > 0) else { return Vec::new() };
    let addresses = slice.endpoints.iter().flat_map(|endpoint| &endpoint.addresses);
    addresses.map(|host| HostPort { host: host.clone(), port }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_endpoint_is_a_server_ready_or_not() {
        let slice = serde_json::from_value(json!({
            "addressType": "IPv4",
            "ports": [{"name": "tcp", "port": 10262, "protocol": "TCP"}],
            "endpoints": [
                {"addresses": ["192.0.2.1"], "conditions": {"ready": true}},
                {"addresses": ["192.0.2.2"], "conditions": {"ready": false, "terminating": true}},
            ],
        }));
        let servers: Vec<_> = endpoints(&slice.unwrap()).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["192.0.2.1:10262", "192.0.2.2:10262"]);
    }

    #[test]
    fn a_slice_without_a_port_has_none() {
        let slice = json!({"addressType": "IPv6", "endpoints": [{"addresses": ["2001:db8::1"]}]});
        assert_eq!(endpoints(&serde_json::from_value(slice).unwrap()), []);
    }
}

//! EndpointSlices of Services without a selector, whose programs are not pods.
use std::net::IpAddr;

use serde_json::{Value, json};

/// Returns the EndpointSlice of this Service, for its port of this name.
pub fn slice(service: &str, port_name: &str, address: IpAddr, port: u16) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": service, "labels": { "kubernetes.io/service-name": service } },
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
        "ports": [{ "name": port_name, "port": port, "protocol": "TCP" }],
    })
}

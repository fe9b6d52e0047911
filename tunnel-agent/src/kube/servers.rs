//! Derives the servers' addresses from their Service. No I/O.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tunnel_runtime::config::HostPort;

/// Name of the agents' port in the Service.
const PORT: &str = "tcp";
/// YurtTunnel's annotation: external addresses of a Service of type ClusterIP, each `HOST:PORT` or `HOST`, separated by
/// commas.
const EXTERNAL_ADDRESS: &str = "x-tunnel-server-external-addr";

/// Servers of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// These servers.
    Servers(Vec<HostPort>),
    /// The addresses of its EndpointSlices, at this port.
    Nodes(u16),
}

/// Finds the servers of a Service.
///
/// # Errors
/// Names the missing part.
pub fn of_service(service: &Service) -> Result<Found, String> {
    let spec = service.spec.clone().unwrap_or_default();
    let ports = spec.ports.unwrap_or_default();
    let no_port = || format!("it has no port named {PORT:?}");
    let port = agents_port(&ports).ok_or_else(no_port)?;
    let number = u16::try_from(port.port).map_err(|_| no_port())?;
    match spec.type_.as_deref().unwrap_or("ClusterIP") {
        "LoadBalancer" => {
            let ingress =
                service.status.as_ref().and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
            let hosts = ingress
                .into_iter()
                .flatten()
                .flat_map(|entry| [entry.ip.as_deref(), entry.hostname.as_deref()]);
            let servers: BTreeSet<_> = hosts.flatten().filter_map(|host| host_port(host, number)).collect();
            match servers.is_empty() {
                true => Err("its load balancer has no address yet".to_owned()),
                false => Ok(Found::Servers(servers.into_iter().collect())),
            }
        }
        "NodePort" => {
            let port = port.node_port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
            port.map(Found::Nodes).ok_or_else(|| format!("its port {PORT:?} has no nodePort yet"))
        }
        "ClusterIP" => {
            let annotations = service.metadata.annotations.as_ref();
            let given = annotations.and_then(|known| known.get(EXTERNAL_ADDRESS)).map(|given| given.trim());
            if let Some(given) = given.filter(|given| !given.is_empty()) {
                let malformed = |text: &str| {
                    let shown: String = text.chars().take(100).collect();
                    format!("its annotation {EXTERNAL_ADDRESS}: {shown:?} is not HOST:PORT[,HOST:PORT…]")
                };
                let mut servers = Vec::new();
                for entry in given.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
                    let server = entry.parse().ok().or_else(|| host_port(entry, number));
                    let server = server.ok_or_else(|| malformed(entry))?;
                    if !servers.contains(&server) {
                        servers.push(server);
                    }
                }
                return match servers.is_empty() {
                    true => Err(malformed(given)),
                    false => Ok(Found::Servers(servers)),
                };
            }
            let server = spec.cluster_ip.as_deref().and_then(|ip| host_port(ip, number));
            server.map(|server| Found::Servers(vec![server])).ok_or_else(|| {
                format!("it has no cluster IP, and no annotation {EXTERNAL_ADDRESS}: HOST:PORT")
            })
        }
        other => Err(format!("its type is {other}; use LoadBalancer, NodePort or ClusterIP")),
    }
}

/// The addresses of a Service's EndpointSlices, at a node port, ready or not: a server that fails a probe for a moment
/// should not be left. Terminating ones are skipped; such a server drains and says so itself.
pub fn of_slices<'a>(slices: impl IntoIterator<Item = &'a EndpointSlice>, node_port: u16) -> Vec<HostPort> {
    // Sorted: the API server may list the same addresses in another order.
    let mut found = BTreeSet::new();
    for slice in slices.into_iter().filter(|slice| slice.address_type != "FQDN") {
        for endpoint in &slice.endpoints {
            let conditions = endpoint.conditions.as_ref();
            let terminates = conditions.and_then(|conditions| conditions.terminating).unwrap_or(false);
            let addresses = endpoint.addresses.iter().filter(|_| !terminates);
            found.extend(addresses.filter_map(|address| host_port(address, node_port)));
        }
    }
    found.into_iter().collect()
}

/// Finds the agents' port. A Service with one port need not name it.
fn agents_port(ports: &[ServicePort]) -> Option<&ServicePort> {
    let named = ports.iter().find(|port| port.name.as_deref() == Some(PORT));
    named.or_else(|| match ports {
        [only] if only.name.as_deref().unwrap_or_default().is_empty() => Some(only),
        _ => None,
    })
}

/// None if the host is neither an address nor a DNS name. `None` is the cluster IP of a headless Service.
fn host_port(host: &str, port: u16) -> Option<HostPort> {
    if port == 0 {
        return None;
    }
    match host.parse::<IpAddr>() {
        Ok(address) => Some(HostPort { host: address.to_string(), port }),
        Err(_) if host == "None" => None,
        Err(_) => format!("{host}:{port}").parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(json: serde_json::Value) -> Service {
        serde_json::from_value(json).unwrap()
    }

    fn found(json: serde_json::Value) -> Result<String, String> {
        match of_service(&service(json)) {
            Ok(Found::Servers(servers)) => {
                Ok(servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
            }
            Ok(Found::Nodes(port)) => Ok(format!("nodes:{port}")),
            Err(error) => Err(error),
        }
    }

    fn ports() -> serde_json::Value {
        serde_json::json!([{"name": "metrics", "port": 1}, {"name": "tcp", "port": 10262, "nodePort": 31008}])
    }

    #[test]
    fn each_type_leads_somewhere() {
        use serde_json::json;
        let balancer = |ingress: serde_json::Value| {
            found(
                json!({"spec": {"type": "LoadBalancer", "ports": ports()}, "status": {"loadBalancer": {"ingress": ingress}}}),
            )
        };
        assert_eq!(
            balancer(
                json!([{"ip": "203.0.113.9"}, {"hostname": "lb.example.org"}, {"ip": "2001:db8::1"}, {"ip": "203.0.113.9"}])
            ),
            Ok("[2001:db8::1]:10262,203.0.113.9:10262,lb.example.org:10262".into())
        );
        assert!(balancer(json!([])).unwrap_err().contains("no address yet"));
        assert_eq!(found(json!({"spec": {"type": "NodePort", "ports": ports()}})), Ok("nodes:31008".into()));
        let cluster = |annotation: Option<&str>, ip: serde_json::Value| {
            let annotations = annotation.map(|value| json!({EXTERNAL_ADDRESS: value}));
            found(
                json!({"metadata": {"annotations": annotations}, "spec": {"ports": ports(), "clusterIP": ip}}),
            )
        };
        assert_eq!(cluster(None, json!("10.96.0.7")), Ok("10.96.0.7:10262".into()));
        assert_eq!(
            cluster(Some("tunnel.example.org:443"), json!("10.96.0.7")),
            Ok("tunnel.example.org:443".into())
        );
        assert_eq!(cluster(Some(" 203.0.113.9 "), json!("10.96.0.7")), Ok("203.0.113.9:10262".into()));
        assert_eq!(cluster(Some("fd00::1"), json!(null)), Ok("[fd00::1]:10262".into()));
        assert_eq!(
            cluster(Some("192.0.2.1, b.example.org:443,192.0.2.1"), json!("10.96.0.7")),
            Ok("192.0.2.1:10262,b.example.org:443".into())
        );
        assert!(
            cluster(Some("a:1,b c"), json!("10.96.0.7")).unwrap_err().contains("\"b c\" is not HOST:PORT")
        );
        assert!(cluster(Some(","), json!("10.96.0.7")).unwrap_err().contains("\",\" is not HOST:PORT"));
        assert!(
            cluster(Some("a b:1"), json!("10.96.0.7")).unwrap_err().contains("\"a b:1\" is not HOST:PORT")
        );
        for ip in [json!("None"), json!(""), json!(null)] {
            assert!(cluster(None, ip).unwrap_err().contains("no cluster IP"));
        }
    }

    #[test]
    fn missing_fields_are_reported() {
        use serde_json::json;
        for (json, part) in [
            (json!({}), "no port named \"tcp\""),
            (
                json!({"spec": {"ports": [{"name": "a", "port": 1}], "clusterIP": "10.0.0.1"}}),
                "no port named",
            ),
            (json!({"spec": {"type": "NodePort", "ports": [{"name": "tcp", "port": 1}]}}), "no nodePort"),
            (
                json!({"spec": {"type": "ExternalName", "externalName": "x", "ports": ports()}}),
                "type is ExternalName",
            ),
        ] {
            assert!(found(json.clone()).unwrap_err().contains(part), "{json}");
        }
        let unnamed = json!({"spec": {"ports": [{"port": 7}], "clusterIP": "10.0.0.1"}});
        assert_eq!(found(unnamed), Ok("10.0.0.1:7".into()));
    }

    #[test]
    fn addresses_count_until_they_terminate() {
        let slice = |json: serde_json::Value| serde_json::from_value::<EndpointSlice>(json).unwrap();
        let slices = [
            slice(serde_json::json!({"addressType": "IPv4", "metadata": {}, "endpoints": [
                {"addresses": ["10.70.0.2"], "conditions": {"ready": true}},
                {"addresses": ["10.70.0.3"], "conditions": {"ready": false}},
                {"addresses": ["10.70.0.4"], "conditions": {"ready": false, "terminating": true}},
                {"addresses": ["10.70.0.1"]},
            ]})),
            slice(serde_json::json!({"addressType": "IPv6", "metadata": {}, "endpoints": [
                {"addresses": ["fd00::1"], "conditions": {}},
            ]})),
            slice(
                serde_json::json!({"addressType": "FQDN", "metadata": {}, "endpoints": [{"addresses": ["a.example"]}]}),
            ),
        ];
        let text: Vec<_> = of_slices(&slices, 31008).iter().map(ToString::to_string).collect();
        assert_eq!(text, ["10.70.0.1:31008", "10.70.0.2:31008", "10.70.0.3:31008", "[fd00::1]:31008"]);
        assert!(of_slices(&[], 1).is_empty());
    }
}

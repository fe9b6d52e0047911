//! Looks up the endpoints of a Service while a caller waits.

use std::net::SocketAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;
use tunnel_kube::request;

use super::read::SERVICE_NAME;

/// Time limit for the API server while a caller waits.
pub const DEADLINE: Duration = Duration::from_secs(4);

/// Address of one endpoint of a Service's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    /// Node of the endpoint, if it has one.
    pub node: Option<Box<str>>,
}

/// Asks the API server for the endpoints of Services.
#[derive(Clone)]
pub struct ServiceEndpoints {
    pub client: kube::Client,
}

impl ServiceEndpoints {
    pub fn new(client: kube::Client) -> Self {
        Self { client }
    }

    /// Returns the ready endpoints of a Service's port.
    ///
    /// # Errors
    /// If there is no such Service or port, it has no ready endpoint, or the API server does not answer.
    pub async fn of(&self, name: &str, namespace: &str, port: u16) -> Result<Vec<Endpoint>, String> {
        let services = Api::<Service>::namespaced(self.client.clone(), namespace);
        let full_name = format!("{name}.{namespace}");
        let service = request(DEADLINE, "reading Service", &full_name, services.get_opt(name)).await;
        let service = service.map_err(|error| error.to_string())?;
        let spec = service.and_then(|service| service.spec).unwrap_or_default();
        let ports = spec.ports.unwrap_or_default();
        let mut tcp = ports.iter().filter(|known| is_tcp(known.protocol.as_deref()));
        let of_service = tcp.find(|known| known.port == i32::from(port));
        let Some(of_service) = of_service else {
            return Err(format!("there is no Service {full_name} with a TCP port {port}"));
        };
        let wanted = of_service.name.as_deref().unwrap_or_default();
        let found = self.ready(name, namespace, wanted).await?;
        if found.is_empty() {
            return Err(format!("the Service {full_name} has no ready endpoint"));
        }
        Ok(found)
    }

    /// Returns the ready endpoints of the TCP port named `port`; empty if there are none.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub async fn ready(&self, name: &str, namespace: &str, port: &str) -> Result<Vec<Endpoint>, String> {
        let slices = Api::<EndpointSlice>::namespaced(self.client.clone(), namespace);
        let of_this = ListParams::default().labels(&format!("{SERVICE_NAME}={name}"));
        let full_name = format!("{name}.{namespace}");
        let slices = request(DEADLINE, "listing EndpointSlices of", &full_name, slices.list(&of_this)).await;
        let slices = slices.map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        for slice in slices {
            let of_slice = slice.ports.unwrap_or_default().into_iter().find(|known| {
                known.name.as_deref().unwrap_or_default() == port && is_tcp(known.protocol.as_deref())
            });
            let Some(port) = of_slice.and_then(|known| u16::try_from(known.port?).ok()) else { continue };
            for endpoint in slice.endpoints {
                // An unknown readiness counts as ready (EndpointConditions).
                if endpoint.conditions.and_then(|conditions| conditions.ready) == Some(false) {
                    continue;
                }
                let node: Option<Box<str>> = endpoint.node_name.map(Into::into);
                let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
                found.extend(
                    addresses.map(|address| Endpoint {
                        address: SocketAddr::new(address, port),
                        node: node.clone(),
                    }),
                );
            }
        }
        Ok(found)
    }
}

fn is_tcp(protocol: Option<&str>) -> bool {
    protocol.is_none_or(|protocol| protocol == "TCP")
}

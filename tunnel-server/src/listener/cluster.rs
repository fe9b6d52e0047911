//! The listeners' questions to the cluster, while a client waits. `crate::kube` answers them; no listener imports it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Errors say that the cluster does not answer, and why.
#[tonic::async_trait]
pub trait Cluster: Send + Sync {
    /// Returns the node of a pod: an empty name if it is not scheduled yet, `None` if there is no such pod.
    async fn node_of_pod(&self, namespace: &str, name: &str) -> Result<Option<String>, String>;

    /// Returns the ready endpoints of a Service's TCP port. It is an error if there are none.
    async fn endpoints(&self, name: &str, namespace: &str, port: u16) -> Result<Vec<Endpoint>, String>;

    /// Returns the ready endpoints of a Service's TCP port of this name, none if there are none.
    async fn endpoints_by_name(
        &self,
        name: &str,
        namespace: &str,
        port: &str,
    ) -> Result<Vec<Endpoint>, String>;

    /// Returns the Service that has this address.
    async fn service_at(&self, address: IpAddr) -> Result<Option<Arc<ClusterService>>, String>;
}

/// Address of one endpoint of a Service's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    /// Node of the endpoint, if it has one.
    pub node: Option<Box<str>>,
}

/// A Service with a cluster IP.
#[derive(Debug, PartialEq, Eq)]
pub struct ClusterService {
    pub namespace: Box<str>,
    pub name: Box<str>,
    pub addresses: Box<[IpAddr]>,
    /// TCP ports by number, each with its name in EndpointSlices.
    pub ports: Box<[(u16, Box<str>)]>,
}

impl ClusterService {
    /// Returns the name of a TCP port.
    pub fn port_name(&self, port: u16) -> Option<&str> {
        self.ports.iter().find(|(number, _)| *number == port).map(|(_, name)| &**name)
    }
}

/// The Services of a cluster. Only the fields that identify a connection's destination are kept, so that those of the
/// largest cluster fit in a few megabytes.
#[derive(Debug, Default)]
pub struct ClusterIps {
    /// True once a complete list was read.
    pub known: bool,
    by_address: HashMap<IpAddr, Arc<ClusterService>>,
    by_name: HashMap<(Box<str>, Box<str>), Arc<ClusterService>>,
}

impl ClusterIps {
    /// Those of a complete list, which are added one by one.
    pub fn of_list() -> Self {
        Self { known: true, ..Self::default() }
    }

    pub fn get(&self, address: IpAddr) -> Option<Arc<ClusterService>> {
        self.by_address.get(&address.to_canonical()).cloned()
    }

    /// Adds a Service. Its previous state has been removed.
    pub fn put(&mut self, service: ClusterService) {
        let service = Arc::new(service);
        for address in &service.addresses {
            self.by_address.insert(*address, service.clone());
        }
        self.by_name.insert((service.namespace.clone(), service.name.clone()), service);
    }

    pub fn remove(&mut self, namespace: &str, name: &str) {
        let Some(gone) = self.by_name.remove(&(Box::from(namespace), Box::from(name))) else { return };
        for address in &gone.addresses {
            // Another Service may have the address by now.
            if self.by_address.get(address).is_some_and(|now| Arc::ptr_eq(now, &gone)) {
                self.by_address.remove(address);
            }
        }
    }
}

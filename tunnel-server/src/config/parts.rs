//! What single parts of the server need of the configuration.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Config, NodeSource};
use crate::pki::ServerNames;
use crate::route::{RouterConfig, host_addresses};
use crate::settings::Doors;

impl Config {
    /// `api_server` are its addresses, where they are known.
    pub(crate) fn router(&self, api_server: impl IntoIterator<Item = IpAddr>) -> RouterConfig {
        // In a cluster the manifests name the node. A standalone server's environment says nothing about its file.
        let host = match &self.source {
            NodeSource::File(_) => None,
            NodeSource::Kubernetes(_) => std::env::var("NODE_NAME").ok().and_then(|name| name.parse().ok()),
        };
        RouterConfig {
            token_range: self.token_range,
            token_range_v6: self.token_range_v6,
            ports: self.redirect_ports.clone(),
            pods: self.edge_pod_routes.clone(),
            host,
            edge_addresses: self.edge_addresses.clone(),
            foreign: self
                .service_cidrs
                .iter()
                .copied()
                .chain(api_server.into_iter().map(IpNet::from))
                .collect(),
            exclude: self.exclude.clone(),
            clients: self.redirect_clients.clone(),
            host_addresses,
        }
    }

    /// What the server's certificate names before a cluster adds to it.
    pub(crate) fn server_names(&self) -> ServerNames {
        ServerNames {
            dns: self.cert_dns_names.clone(),
            addresses: self.cert_ips.clone(),
            local_addresses: self.bind_address.is_unspecified(),
        }
    }

    /// The ports that the internal Service leads to.
    pub(crate) fn internal_doors(&self) -> Doors {
        Doors {
            https: self.secure_port.unwrap_or_default(),
            secure: self.doors.secure_ports.iter().map(|(port, of_node)| (*of_node, *port)).collect(),
            // The http door is on loopback, where no Service leads.
            http: self.doors.plain.as_ref().map_or(0, |plain| plain.port),
            pairs: self.insecure_address.map_or(0, |address| address.port()),
        }
    }
}

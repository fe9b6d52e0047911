//! Configuration of single parts of the server, derived from the flags.

use std::net::IpAddr;

use ipnet::IpNet;

use super::Config;
use crate::pki::ServerNames;
use crate::route::{RouterConfig, host_addresses};
use crate::settings::Doors;

impl Config {
    /// Configuration of the router. `api_server` are the API server's addresses, if known.
    pub(crate) fn router(&self, api_server: impl IntoIterator<Item = IpAddr>) -> RouterConfig {
        // In a cluster the manifests set the node's name. A standalone server's environment does not refer to its file.
        let host = match self.nodes.inventory {
            Some(_) => None,
            None => std::env::var("NODE_NAME").ok().and_then(|name| name.parse().ok()),
        };
        let redirect = &self.redirect;
        RouterConfig {
            token_range: redirect.ranges.redirect_range,
            token_range_v6: redirect.ranges.redirect_range_v6,
            ports: redirect.redirect_ports.clone(),
            pods: redirect.edge_pod_routes.clone(),
            host,
            edge_addresses: redirect.edge_addresses.clone(),
            foreign: {
                let services = redirect.service_cidrs.iter().copied();
                services.chain(api_server.into_iter().map(IpNet::from)).collect()
            },
            exclude: redirect.exclude.clone(),
            clients: redirect.redirect_clients.clone(),
            host_addresses,
        }
    }

    /// Names in the server's certificate before a cluster adds its own.
    pub(crate) fn server_names(&self) -> ServerNames {
        ServerNames {
            dns: self.agents.cert_dns_names.clone(),
            addresses: self.agents.cert_ips.clone(),
            local_addresses: self.process.bind_address.is_unspecified(),
        }
    }

    /// The target ports for the internal Service.
    pub(crate) fn internal_doors(&self) -> Doors {
        Doors {
            https: self.doors.secure_port.unwrap_or_default(),
            secure: self.doors.secure_ports.iter().map(|(port, of_node)| (*of_node, *port)).collect(),
            // The http door is on the loopback address, which no Service reaches.
            http: self.doors.plain.port.unwrap_or_default(),
            pairs: self.doors.insecure_address().map_or(0, |address| address.port()),
        }
    }
}

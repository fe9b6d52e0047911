//! Resolves the host and port that a caller asks for, if the policy permits it to reach them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use rand::seq::SliceRandom as _;
use tunnel_routing::{NodeAddress, Resolved, Router};
use tunnel_runtime::text::printable;

use crate::caller::Authenticator;
use crate::kube::{Endpoint, ServiceEndpoints};
use crate::listener::context::{OpenRequest, Reached};
use crate::listener::direct;
use crate::policy::{Destination, Identity, Origin, Policy};

/// Source of the endpoints of Services.
pub(crate) enum Services {
    Cluster(ServiceEndpoints),
    /// The resolver of this host; without Kubernetes.
    Resolver,
}

/// Decides which destinations callers may reach.
pub(crate) struct Gatekeeper {
    pub(crate) authenticator: Arc<Authenticator>,
    pub(crate) services: Services,
    pub(crate) policy: ArcSwap<Policy>,
    pub(crate) router: Arc<Router>,
}

/// Reason for which a caller reaches nothing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    Policy,
    /// The host is ambiguous, or unknown.
    Unclear(String),
    /// A Service whose endpoints are not known.
    Unavailable(String),
}

impl Gatekeeper {
    /// Returns the destination that this host and port stand for, and the name of the rule that permits it.
    ///
    /// # Errors
    /// The caller may not reach it, or there is no such destination. A caller that no rule matches learns nothing about
    /// names and addresses.
    pub(crate) async fn reach(
        &self,
        identity: &Identity,
        client: IpAddr,
        host: &str,
        port: u16,
    ) -> Result<(Reached, String), Denied> {
        let snapshot = self.router.snapshot();
        let policy = self.policy.load_full();
        let node = match identity {
            Identity::Node(name) => snapshot.inventory().get(name.as_str()).map(|node| &**node),
            _ => None,
        };
        let origin = Origin { identity, client, node };
        if !policy.knows(origin) {
            return Err(Denied::Policy);
        }
        let permitted = |to| policy.permits(origin, to, port).map(str::to_owned).ok_or(Denied::Policy);
        match self.meant(&policy, origin, host, port) {
            Resolved::Edge(found) | Resolved::Pod(found) => {
                let Some(node) = snapshot.inventory().get(found.node.as_str()) else {
                    return Err(Denied::Unclear(format!("node {} has just left", found.node)));
                };
                let rule = permitted(Destination::Edge { node, address: found.address })?;
                Ok((self.on_edge(found, port), rule))
            }
            Resolved::VirtualAddress(_) => Err(Denied::Policy),
            Resolved::Here(address) | Resolved::Elsewhere(address) => {
                let rule = permitted(Destination::Cloud { address })?;
                Ok((Reached::Cloud(SocketAddr::new(address, port)), rule))
            }
            Resolved::Service { name, namespace } => {
                let rule = permitted(Destination::Service(&format!("{name}.{namespace}")))?;
                Ok((self.endpoint(&name, &namespace, port).await?, rule))
            }
            Resolved::Unknown(name) => Err(Denied::Unclear(format!(
                "{:?} is not an edge node's name, an address, or SERVICE.NAMESPACE",
                printable(&name, 100)
            ))),
            unclear @ (Resolved::Ambiguous { .. } | Resolved::WithoutAddress(_)) => {
                Err(Denied::Unclear(unclear.to_string()))
            }
        }
    }

    /// What the host is: a Service that a rule opens to the caller comes before a node of that name, since whoever
    /// registers a Node may name it like a Service.
    pub(crate) fn meant(&self, policy: &Policy, origin: Origin<'_>, host: &str, port: u16) -> Resolved {
        if let Some(service) = self.router.resolve_service(host)
            && let Resolved::Service { name, namespace } = &service
            && policy.permits(origin, Destination::Service(&format!("{name}.{namespace}")), port).is_some()
        {
            return service;
        }
        self.router.resolve(host)
    }

    fn on_edge(&self, found: NodeAddress, port: u16) -> Reached {
        let target = self.router.dialled(&found, port);
        Reached::Edge(OpenRequest::to_found(found, target, Bytes::new()))
    }

    /// Picks one endpoint of a Service. Skips this server's loopback, where listeners trust every client: only a rule's
    /// address range may open it, since a rule does not control the addresses behind a name.
    async fn endpoint(&self, name: &str, namespace: &str, port: u16) -> Result<Reached, Denied> {
        let endpoints = self.endpoints(name, namespace, port).await.map_err(Denied::Unavailable)?;
        let resolve = |endpoint: &Endpoint| {
            let resolved = self.router.resolve_endpoint(endpoint.address, endpoint.node.as_deref());
            (!matches!(resolved, Resolved::Here(_))).then_some((endpoint.address, resolved))
        };
        let mut elsewhere: Vec<_> = endpoints.iter().filter_map(resolve).collect();
        elsewhere.shuffle(&mut rand::rng());
        match elsewhere.pop() {
            Some((address, Resolved::Edge(found) | Resolved::Pod(found))) => {
                Ok(self.on_edge(found, address.port()))
            }
            Some((_, Resolved::VirtualAddress(_))) => Err(Denied::Policy),
            Some((_, unclear @ Resolved::Ambiguous { .. })) => Err(Denied::Unavailable(unclear.to_string())),
            Some((address, _)) => Ok(Reached::Cloud(address)),
            None => {
                let reason = format!("{name}.{namespace} has no address but loopback");
                Err(Denied::Unavailable(reason))
            }
        }
    }

    async fn endpoints(&self, name: &str, namespace: &str, port: u16) -> Result<Vec<Endpoint>, String> {
        match &self.services {
            Services::Cluster(endpoints) => endpoints.of(name, namespace, port).await,
            Services::Resolver => {
                let host = format!("{name}.{namespace}");
                let found = direct::resolve(&host, port).await.map_err(|error| format!("{host}: {error}"))?;
                Ok(found.into_iter().map(|address| Endpoint { address, node: None }).collect())
            }
        }
    }
}

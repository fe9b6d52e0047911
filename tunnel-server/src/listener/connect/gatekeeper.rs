//! Resolves the host and port that a caller asks for, if the policy permits it to reach them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rand::seq::SliceRandom as _;
use tunnel_routing::{NodeAddress, Resolved, Router, Snapshot};
use tunnel_runtime::net::Reach;
use tunnel_runtime::text::printable;

use crate::caller::{Authenticator, Refusal, Shown, ShownToken};
use crate::listener::cluster::{Cluster, Endpoint, EndpointCache};
use crate::listener::context::{OpenRequest, Reached};
use crate::listener::direct;
use crate::metrics::{Judgement, Permit};
use crate::policy::{Destination, Identity, Origin, Policy};

/// Source of the endpoints of Services.
pub(crate) enum Services {
    Cluster(Arc<dyn Cluster>, EndpointCache),
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

/// A destination by which the policy decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meant {
    Edge(NodeAddress),
    Cloud(IpAddr),
    /// `NAME.NAMESPACE`.
    Service(String),
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
    /// Returns who has shown this. `exposed`: others can read it; what the client should do instead.
    ///
    /// # Errors
    /// It is not accepted, or the API server does not answer.
    pub(crate) async fn identify(
        &self,
        shown: &Shown,
        client: IpAddr,
        exposed: Option<&'static str>,
    ) -> Result<Identity, Refusal> {
        Ok(match shown {
            Shown::Nothing => Identity::None,
            Shown::Certificate(caller, certified) => {
                certified.check().map_err(Refusal::Unauthenticated)?;
                Identity::Certificate(caller.clone())
            }
            Shown::Token(token) => {
                let shown = ShownToken { token: token.secret(), client, exposed };
                Identity::Token(self.authenticator.caller_of_token(shown).await?)
            }
            Shown::Node(name) => Identity::Node(name.clone()),
        })
    }

    /// Returns the name of the rule that permits the connection.
    ///
    /// # Errors
    /// No rule does, or the node has left the inventory.
    fn permitted(
        &self,
        identity: &Identity,
        client: IpAddr,
        meant: &Meant,
        port: u16,
    ) -> Result<String, Denied> {
        let snapshot = self.router.snapshot();
        let to = match meant {
            Meant::Edge(found) => match snapshot.inventory().get(found.node.as_str()) {
                Some(node) => Destination::Edge { node, address: found.address },
                None => return Err(Denied::Unclear(format!("node {} has just left", found.node))),
            },
            Meant::Cloud(address) => Destination::Cloud {
                address: *address,
                own: self.router.is_own_port(SocketAddr::new(*address, port)),
            },
            Meant::Service(name) => Destination::Service(name),
        };
        let policy = self.policy.load();
        let permitted = policy.permits(origin(&snapshot, identity, client), to, port);
        permitted.map(str::to_owned).ok_or(Denied::Policy)
    }

    /// Returns the destination that this host and port stand for, as it is dialled and as the policy sees it, and the
    /// name of the rule that permits it.
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
    ) -> Result<(Reached, Meant, String), Denied> {
        if !self.policy.load().knows(origin(&self.router.snapshot(), identity, client)) {
            return Err(Denied::Policy);
        }
        let permitted = |meant: &Meant| self.permitted(identity, client, meant, port);
        match self.meant(identity, client, host, port) {
            Resolved::Edge(found) | Resolved::Pod(found) => {
                let meant = Meant::Edge(found.clone());
                let rule = permitted(&meant)?;
                Ok((self.on_edge(found, port), meant, rule))
            }
            Resolved::VirtualAddress(_) => Err(Denied::Policy),
            Resolved::Here(address) | Resolved::Elsewhere(address) => {
                let meant = Meant::Cloud(address);
                let rule = permitted(&meant)?;
                Ok((Reached::Cloud(SocketAddr::new(address, port)), meant, rule))
            }
            Resolved::Service { name, namespace } => {
                let meant = Meant::Service(format!("{name}.{namespace}"));
                let rule = permitted(&meant)?;
                Ok((self.endpoint(&name, &namespace, port).await?, meant, rule))
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

    /// Resolves the host: a Service that a rule opens to the caller comes before a node of that name, since whoever
    /// registers a Node may name it like a Service.
    pub(crate) fn meant(&self, identity: &Identity, client: IpAddr, host: &str, port: u16) -> Resolved {
        if let Some(service) = self.router.resolve_service(host)
            && let Resolved::Service { name, namespace } = &service
            && self.permitted(identity, client, &Meant::Service(format!("{name}.{namespace}")), port).is_ok()
        {
            return service;
        }
        self.router.resolve(host)
    }

    fn on_edge(&self, found: NodeAddress, port: u16) -> Reached {
        Reached::Edge(OpenRequest::to_port(found, port, &self.router))
    }

    /// Picks one endpoint of a Service. Skips this server's loopback, where listeners trust every client, metadata services, and
    /// the ports of Postern's own listeners: only a rule's address range may open them, since a rule does not control the
    /// addresses behind a name.
    async fn endpoint(&self, name: &str, namespace: &str, port: u16) -> Result<Reached, Denied> {
        let endpoints = self.endpoints(name, namespace, port).await.map_err(Denied::Unavailable)?;
        let endpoints = endpoints.iter().filter_map(|endpoint| self.reach_endpoint(endpoint)).collect();
        self.pick(endpoints).unwrap_or_else(|| {
            let reason = format!(
                "{name}.{namespace} has endpoints on this host's loopback or Postern's own ports only"
            );
            Err(Denied::Unavailable(reason))
        })
    }

    /// Picks an endpoint at random, of those that can be reached if there are any. A Service may keep those of a node that is
    /// away.
    fn pick(&self, mut endpoints: Vec<Result<Reached, Denied>>) -> Option<Result<Reached, Denied>> {
        endpoints.shuffle(&mut rand::rng());
        endpoints.into_iter().min_by_key(|endpoint| match endpoint {
            Ok(Reached::Edge(request)) if !self.router.is_reachable(&request.node) => 1,
            Ok(_) => 0,
            Err(_) => 2,
        })
    }

    /// `None`: loopback, or a port of Postern's own listeners.
    fn reach_endpoint(&self, endpoint: &Endpoint) -> Option<Result<Reached, Denied>> {
        let address = endpoint.address;
        if self.router.is_own_port(address) {
            return None;
        }
        Some(match self.router.resolve_endpoint(address, endpoint.node.as_deref()) {
            Resolved::Here(_) => return None,
            Resolved::Edge(found) | Resolved::Pod(found) => Ok(self.on_edge(found, address.port())),
            unclear @ Resolved::Ambiguous { .. } => Err(Denied::Unavailable(unclear.to_string())),
            Resolved::VirtualAddress(_) => Err(Denied::Policy),
            _ if Reach::of(address.ip()) != Reach::Host => Err(Denied::Policy),
            _ => Ok(Reached::Cloud(address)),
        })
    }

    async fn endpoints(&self, name: &str, namespace: &str, port: u16) -> Result<Arc<[Endpoint]>, String> {
        match &self.services {
            Services::Cluster(cluster, cache) => {
                let key = format!("{name}.{namespace}:{port}");
                let list = cluster.endpoints(name, namespace, port);
                let reached = |endpoint: &Endpoint| match self.reach_endpoint(endpoint) {
                    Some(Ok(Reached::Edge(request))) => self.router.is_reachable(&request.node),
                    endpoint => matches!(endpoint, Some(Ok(_))),
                };
                cache.get_or_list(key, list, reached).await
            }
            Services::Resolver => {
                let host = format!("{name}.{namespace}");
                let found = direct::resolve(&host, port).await.map_err(|error| format!("{host}: {error}"))?;
                Ok(found.into_iter().map(|address| Endpoint { address, node: None }).collect())
            }
        }
    }
}

fn origin<'a>(snapshot: &'a Snapshot, identity: &'a Identity, client: IpAddr) -> Origin<'a> {
    let node = match identity {
        Identity::Node(name) => snapshot.inventory().get(name.as_str()).map(|node| &**node),
        _ => None,
    };
    Origin { identity, client, node }
}

/// A destination that a caller was permitted to reach.
pub(super) struct Permitted {
    pub(super) gatekeeper: Arc<Gatekeeper>,
    pub(super) shown: Shown,
    pub(super) client: IpAddr,
    pub(super) meant: Meant,
    pub(super) port: u16,
}

impl Permitted {
    /// True if a node of the rule, or its address, is missing: an inventory may be replaced in two steps.
    fn may_come_back(&self, identity: &Identity) -> bool {
        let snapshot = self.gatekeeper.router.snapshot();
        let caller_left = match identity {
            Identity::Node(name) => snapshot.inventory().get(name.as_str()).is_none(),
            _ => false,
        };
        let target_left = match &self.meant {
            Meant::Edge(found) => !found.pod && !snapshot.names(&found.node, found.address),
            Meant::Cloud(_) | Meant::Service(_) => false,
        };
        caller_left || target_left
    }
}

#[tonic::async_trait]
impl Permit for Permitted {
    fn asker(&self) -> Option<[u8; 32]> {
        let Shown::Token(token) = &self.shown else { return None };
        self.gatekeeper.authenticator.asks_about(token.secret()).then(|| self.shown.digest())
    }

    async fn judge(&self) -> Judgement {
        let identity = match self.gatekeeper.identify(&self.shown, self.client, None).await {
            Ok(identity) => identity,
            Err(refusal) => return refusal.judgement(self.asker().is_some()),
        };
        match self.gatekeeper.permitted(&identity, self.client, &self.meant, self.port) {
            Ok(_) => Judgement::Holds,
            Err(Denied::Policy) => {
                let reason = format!("the policy no longer permits {identity} to reach this");
                if self.may_come_back(&identity) {
                    Judgement::Refused(reason)
                } else {
                    Judgement::Withdrawn(reason)
                }
            }
            Err(Denied::Unclear(reason) | Denied::Unavailable(reason)) => Judgement::Refused(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use postern_fake_kube::{ApiServer, Fault};
    use prometheus_client::registry::Registry;
    use serde_json::json;
    use tunnel_routing::inventory::{Inventory, InventoryNode};
    use tunnel_routing::{ByAddress, TunnelHolder};

    use super::*;
    use crate::caller::Tokens;
    use crate::kube::{KubeOptions, Lookups, ObjectNames};

    const POLICY: &str = "rules:\n- {name: a, from: [{nodes: node-restriction.kubernetes.io/site}], to: [{node: edge-2, ports: [22]}]}\n";

    fn node(name: &str, address: &str, label: &str) -> InventoryNode {
        InventoryNode {
            edge: true,
            addresses: vec![address.parse().unwrap()],
            labels: [(format!("node-restriction.kubernetes.io/{label}"), String::new())].into(),
            ..InventoryNode::new(name.parse().unwrap())
        }
    }

    #[test]
    fn an_endpoint_that_cannot_be_used_is_picked_only_if_there_is_no_other() {
        let router = crate::runtime::without_nodes(&mut Registry::default());
        let addresses =
            [("edge-1", "10.8.0.1"), ("edge-2", "10.8.0.1"), ("edge-3", "10.8.0.3"), ("edge-4", "10.8.0.4")];
        let nodes = addresses.map(|(name, address)| node(name, address, "site"));
        router.set_inventory(Inventory::from(nodes.to_vec()));
        let gatekeeper = Gatekeeper {
            authenticator: Arc::new(Authenticator::new(Tokens::default(), None)),
            services: Services::Resolver,
            policy: ArcSwap::from_pointee(Policy::parse(POLICY).unwrap()),
            router,
        };
        let reached = |address: &str| {
            let endpoint = Endpoint { address: address.parse().unwrap(), node: None };
            gatekeeper.reach_endpoint(&endpoint).unwrap()
        };
        let [metadata, good, twice] = ["169.254.169.254:80", "10.1.0.5:80", "10.8.0.1:80"];
        let [away, gone] = ["10.8.0.3:80", "10.8.0.4:80"];
        for _ in 0..50 {
            let picked = gatekeeper.pick([metadata, twice, away, good].map(reached).into());
            assert_eq!(picked, Some(Ok(Reached::Cloud(good.parse().unwrap()))));
        }
        for address in [metadata, "100.100.100.200:80", "[fd00:ec2::254]:80"] {
            assert_eq!(gatekeeper.pick(vec![reached(address)]), Some(Err(Denied::Policy)), "{address}");
        }
        assert!(matches!(reached(twice), Err(Denied::Unavailable(_))));
        let on_edge = |address| reached(address).unwrap();
        for _ in 0..50 {
            assert_eq!(gatekeeper.pick([twice, away].map(reached).into()), Some(Ok(on_edge(away))));
        }
        gatekeeper.router.set_live(&"edge-3".parse().unwrap(), TunnelHolder::This, true);
        for _ in 0..50 {
            assert_eq!(gatekeeper.pick([gone, away].map(reached).into()), Some(Ok(on_edge(away))));
        }
        assert!(gatekeeper.pick(Vec::new()).is_none());
    }

    #[tokio::test]
    async fn the_endpoints_of_a_service_are_remembered() {
        const SERVICES: &str = "/api/v1/namespaces/shop/services";
        const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices";
        let policy = "rules:\n- {name: a, from: [{clients: [10.0.0.0/8]}], to: [{service: hook.shop, ports: [443]}]}\n";
        let api = ApiServer::start();
        let ports = json!([{"name": "https", "port": 443, "protocol": "TCP"}]);
        api.put(SERVICES, json!({"metadata": {"name": "hook"}, "spec": {"ports": ports}}));
        let metadata = json!({"name": "hook-1", "labels": {"kubernetes.io/service-name": "hook"}});
        let ports = json!([{"name": "https", "port": 9443, "protocol": "TCP"}]);
        let endpoints = json!([{"addresses": ["10.1.0.5"], "conditions": {"ready": true}}]);
        let slice =
            json!({"metadata": metadata, "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
        api.put(SLICES, slice);
        let names = ObjectNames::default();
        let options = KubeOptions { kubeconfig: Some(api.kubeconfig()), namespace: None, names };
        let (client, _) = options.connect().await.unwrap();
        let gatekeeper = Gatekeeper {
            authenticator: Arc::new(Authenticator::new(Tokens::default(), None)),
            services: Services::Cluster(Arc::new(Lookups::new(client)), EndpointCache::default()),
            policy: ArcSwap::from_pointee(Policy::parse(policy).unwrap()),
            router: crate::runtime::without_nodes(&mut Registry::default()),
        };
        let reach = async || {
            let reached = gatekeeper.reach(&Identity::None, [10, 0, 0, 1].into(), "hook.shop", 443).await;
            reached.map(|(reached, ..)| reached)
        };
        let asked = || (api.requests("get", &format!("{SERVICES}/hook")), api.requests("list", SLICES));
        let good: Result<_, Denied> = Ok(Reached::Cloud("10.1.0.5:9443".parse().unwrap()));
        assert_eq!(reach().await, good);
        // Only while nothing is asked: the clock jumps when the test waits for an answer.
        let later = async || {
            tokio::time::pause();
            for _ in 0..8 {
                assert_eq!(reach().await, good);
            }
            tokio::time::advance(Duration::from_secs(5)).await;
            tokio::time::resume();
        };
        later().await;
        assert_eq!(asked(), (1, 1));

        // An API server that does not answer leaves the endpoints as they were.
        api.inject("get", "services", Fault::Status(500), usize::MAX);
        assert_eq!(reach().await, good);
        later().await;
        assert_eq!(asked(), (2, 1));
        api.heal();
        api.remove(SERVICES, "hook");
        let reason = "there is no Service hook.shop with a TCP port 443".to_owned();
        let none: Result<Reached, _> = Err(Denied::Unavailable(reason));
        assert_eq!(reach().await, none);
        tokio::time::pause();
        assert_eq!(reach().await, none);
        assert_eq!(asked(), (3, 1), "that there is none is remembered for a moment too");
    }

    #[tokio::test]
    async fn a_missing_node_is_refused_and_a_missing_right_is_withdrawn() {
        let router = crate::runtime::without_nodes(&mut Registry::default());
        let (one, two) = (node("edge-1", "10.8.0.1", "site"), node("edge-2", "10.8.0.2", "site"));
        router.set_inventory(Inventory::from(vec![one.clone(), two.clone()]));
        let ByAddress::Unique(found) = router.snapshot().by_address("10.8.0.2".parse().unwrap()) else {
            panic!("it is edge-2's")
        };
        let gatekeeper = Arc::new(Gatekeeper {
            authenticator: Arc::new(Authenticator::new(Tokens::default(), None)),
            services: Services::Resolver,
            policy: ArcSwap::from_pointee(Policy::parse(POLICY).unwrap()),
            router: router.clone(),
        });
        let permit = Permitted {
            gatekeeper,
            shown: Shown::Node(one.name.clone()),
            client: [10, 0, 0, 1].into(),
            meant: Meant::Edge(found),
            port: 22,
        };
        assert_eq!(permit.judge().await, Judgement::Holds);
        for (nodes, withdrawn) in [
            (vec![two.clone()], false),
            (vec![one.clone()], false),
            (vec![one.clone(), node("edge-2", "10.8.0.3", "site")], false),
            (vec![node("edge-1", "10.8.0.1", "other"), two.clone()], true),
        ] {
            router.set_inventory(Inventory::from(nodes.clone()));
            let judgement = permit.judge().await;
            let expected = if withdrawn {
                matches!(judgement, Judgement::Withdrawn(_))
            } else {
                matches!(judgement, Judgement::Refused(_))
            };
            assert!(expected, "{nodes:?}: {judgement:?}");
        }
    }
}

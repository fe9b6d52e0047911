//! Checks who sends a request, where it leads, and whether that is permitted.

use std::net::SocketAddr;
use std::sync::Arc;

use http::header::{HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Method, StatusCode};
use hyper::body::Incoming;
use tunnel_routing::NodeAddress;
use tunnel_routing::inventory::DEFAULT_KUBELET_PORT;

use super::destination::{RequestTarget, parse_destination};
use super::headers;
use super::kinds::{Admission, MAX_HEAD};
use super::metrics::PATH;
use super::permit::RequestPermit;
use super::pods::Pods;
use super::served::Served;
use crate::caller::{
    Access, Asker, Authenticator, BearerToken, Caller, Refusal, Reviewer, Shown, ShownToken, bearer_token,
    kubelet_accesses, other_accesses,
};
use crate::listener::answer::Failure;
use crate::listener::context::{OpenRequest, Reached};
use crate::metrics::Permit;

const TOO_LARGE: &str = "the request's head is larger than 64 KiB";

/// A request that its caller may send.
pub(super) struct Admitted {
    pub(super) reached: Reached,
    /// The caller, for the log; `None` if the listener does not authenticate.
    pub(super) caller: Option<Box<str>>,
    /// `None` if nobody's right was judged.
    pub(super) permit: Option<Arc<dyn Permit>>,
    /// True if the request's Authorization was for this server.
    pub(super) by_token: bool,
    /// `None` for a proxy's request, whose URL says all.
    pub(super) on_edge: Option<NodeTarget>,
    /// The protocols that may follow.
    pub(super) upgrade: Option<HeaderValue>,
}

/// Destination of a request: a node or a pod there.
pub(super) struct NodeTarget {
    pub(super) node: NodeAddress,
    pub(super) target: SocketAddr,
    /// False if the client named node and target itself.
    found: bool,
    /// Host for the target, instead of the one in the request.
    pub(super) host: Option<String>,
    /// True if the target's certificate is the node's.
    pub(super) on_node: bool,
    /// Accesses to the node of which the caller must have one; empty if nobody is asked.
    accesses: Vec<Access>,
}

impl NodeTarget {
    fn request(&self) -> OpenRequest {
        let Self { node, target, .. } = self;
        match self.found {
            true => OpenRequest::to_found(node.clone(), *target),
            false => OpenRequest::new(node.node.clone(), *target),
        }
    }
}

impl Served {
    /// Checks that the request may be sent, and where it leads.
    pub(super) async fn admitted(&self, head: &Parts, body: &Incoming) -> Result<Admitted, Failure> {
        if headers::size(head) > MAX_HEAD {
            // hyper limits the bytes that it has to buffer: a head that arrives in one piece may be longer.
            return Err(Failure::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_LARGE));
        }
        if let Admission::Policy(reception, node) = &self.front.admission {
            return self.permitted(reception, node.as_ref(), head, body).await;
        }
        let wanted = parse_destination(head).map_err(Failure::bad_request)?;
        if head.method == Method::CONNECT {
            return Err(Failure::new(StatusCode::METHOD_NOT_ALLOWED, "this listener does not take CONNECT"));
        }
        let (caller, shown) = self.caller(&head.headers).await?.unzip();
        let destination = self.destination(caller.as_ref(), &head.method, &wanted).await?;
        let by_token = matches!(shown, Some(Shown::Token(_)));
        let permit = shown.map(|shown| {
            let (node, accesses) = (destination.node.node.clone(), destination.accesses.clone());
            let (reviewer, client) = (self.front.reviewer().cloned(), self.peer.client.ip());
            Arc::new(RequestPermit { reviewer, shown, client, node, accesses }) as Arc<dyn Permit>
        });
        Ok(Admitted {
            reached: Reached::Edge(destination.request()),
            caller: caller.as_ref().map(|caller| caller.to_string().into()),
            permit,
            by_token,
            on_edge: Some(destination),
            upgrade: wanted.upgrade,
        })
    }

    /// Returns the sender of the request, if this listener authenticates.
    pub(super) async fn caller(&self, headers: &HeaderMap) -> Result<Option<(Caller, Shown)>, Failure> {
        match &self.front.admission {
            Admission::Everyone | Admission::Policy(..) => Ok(None),
            Admission::Callers(authenticator) => {
                let caller = self.identify(headers, authenticator, None).await?;
                let needed = "a client certificate or a bearer token is needed";
                Ok(Some(caller.ok_or_else(|| Refusal::Unauthenticated(needed.to_owned()))?))
            }
            Admission::Listed { clients, authenticator, exposed_tokens, .. } => {
                let client = self.peer.client.ip().to_canonical();
                if clients.iter().any(|net| net.contains(&client)) {
                    return Ok(None);
                }
                let exposed = (!exposed_tokens && self.front.is_exposed(client)).then_some(
                    "use the https listener, or let the plain one take tokens with --plain-tokens=on",
                );
                let caller = self.identify(headers, authenticator, exposed).await?;
                let needed =
                    || format!("{client} is not in --plain-clients, and the request has no bearer token");
                Ok(Some(caller.ok_or_else(|| Refusal::Unauthenticated(needed()))?))
            }
        }
    }

    /// Checks that the sender of the request may read this server's metrics.
    pub(super) async fn may_read_metrics(&self, headers: &HeaderMap) -> Result<(), Failure> {
        let Some((caller, _)) = self.caller(headers).await? else {
            return Err(Refusal::no_identity().into());
        };
        // Without a cluster every authenticated caller may.
        if let Some(reviewer) = self.front.reviewer() {
            reviewer.allow_path(&caller, PATH).await?;
        }
        Ok(())
    }

    async fn identify(
        &self,
        headers: &HeaderMap,
        authenticator: &Authenticator,
        exposed: Option<&'static str>,
    ) -> Result<Option<(Caller, Shown)>, Failure> {
        if let Some((caller, certified)) = self.peer.certificate()? {
            return Ok(Some((caller.clone(), Shown::Certificate(caller.clone(), certified.clone()))));
        }
        let Some(token) = bearer_token(headers).map_err(Refusal::Unauthenticated)? else { return Ok(None) };
        let client = self.peer.client.ip();
        // One connection may have many requests that wait for the answer, each with its head.
        let _place = self.shares.unauthenticated(client).map_err(|full| self.over_limit(&full))?;
        let shown = ShownToken { token, client, exposed };
        // The tokens of a file read metrics; about nodes the cluster's rules decide.
        let caller = match self.front.metrics {
            Some(_) => authenticator.caller_of_token(shown).await?,
            None => authenticator.caller_in_cluster(shown).await?,
        };
        Ok(Some((caller, Shown::Token(BearerToken::new(token)))))
    }

    /// Resolves the node and the agent's target, if the caller may send this request there.
    async fn destination(
        &self,
        caller: Option<&Caller>,
        method: &Method,
        wanted: &RequestTarget,
    ) -> Result<NodeTarget, Failure> {
        let named = wanted.named.as_deref();
        let host = self.context.router.resolve(named.unwrap_or(&wanted.host));
        match (host.on_edge(), &wanted.pod, &self.front.pods) {
            (Ok(node), ..) => {
                let destination = self.at(node, wanted, named)?;
                let accesses = self.admit(caller, method, wanted, &destination).await?;
                Ok(NodeTarget { accesses, ..destination })
            }
            (Err(_), Some(pod), Some(pods)) if named.is_none() => {
                self.at_pod(pods, pod, caller, method, wanted).await
            }
            (Err(reason), ..) => Err(Failure::bad_request(reason)),
        }
    }

    /// Resolves to the kubelet of the pod's node. The pod and its node are looked up before the caller's rights are
    /// checked, but only callers with these rights are told about them.
    async fn at_pod(
        &self,
        pods: &Pods,
        (namespace, pod): &(String, String),
        caller: Option<&Caller>,
        method: &Method,
        wanted: &RequestTarget,
    ) -> Result<NodeTarget, Failure> {
        let asker = Asker::new(caller, self.peer.client.ip());
        let found = pods.node_of(asker, namespace, pod).await?.and_then(|name| {
            self.context.router.snapshot().by_name(&name).ok_or_else(|| {
                let reason = format!("pod {namespace}/{pod} runs on {name}, which is not an edge node");
                Failure::bad_request(reason)
            })
        });
        let known = found.as_ref().ok();
        let port = known.map_or(DEFAULT_KUBELET_PORT, |node| node.kubelet_port);
        let mut accesses = Vec::new();
        if let Some((caller, reviewer)) = self.judge(caller, port)? {
            let path = wanted.path.as_ref().map_err(Failure::bad_request)?;
            accesses = kubelet_accesses(method, path);
            reviewer.allow_at_pod(caller, &accesses, known.map(|node| &node.node)).await?;
        }
        let node = found?;
        let target = SocketAddr::new(node.address, node.kubelet_port);
        Ok(NodeTarget { node, target, found: true, host: Some(target.to_string()), on_node: true, accesses })
    }

    fn at(
        &self,
        node: NodeAddress,
        wanted: &RequestTarget,
        named: Option<&str>,
    ) -> Result<NodeTarget, Failure> {
        let router = &self.context.router;
        let (target, host) = match (wanted.dest, wanted.port) {
            (Some(dest), _) => (dest, Some(dest.to_string())),
            (None, Some(port)) => (router.dialled(&node, port), named.map(|named| host_of(named, port))),
            (None, None) => {
                let reason = format!("Host {:?} has no port: add the port of the node", wanted.host);
                return Err(Failure::bad_request(reason));
            }
        };
        let port = wanted.dest.map_or(target.port(), |dest| dest.port());
        // Only the ports that the operator named, as at the redirect.
        if !router.tunnels(port) {
            return Err(Failure::bad_request(format!(
                "port {port} is not tunnelled: name it in --redirect-ports or the ConfigMap"
            )));
        }
        let on_node = match wanted.dest {
            Some(dest) => dest.ip().is_loopback() || router.snapshot().names(&node.node, dest.ip()),
            None => !node.pod,
        };
        Ok(NodeTarget { node, target, found: wanted.dest.is_none(), host, on_node, accesses: Vec::new() })
    }

    /// Checks that the caller may send this request. Returns the accesses of which it must have one.
    async fn admit(
        &self,
        caller: Option<&Caller>,
        method: &Method,
        wanted: &RequestTarget,
        destination: &NodeTarget,
    ) -> Result<Vec<Access>, Failure> {
        let port = destination.target.port();
        let Some((caller, reviewer)) = self.judge(caller, port)? else { return Ok(Vec::new()) };
        let path = wanted.path.as_ref().map_err(Failure::bad_request)?;
        let of_kubelet = destination.on_node && port == destination.node.kubelet_port;
        let accesses = match of_kubelet {
            true => kubelet_accesses(method, path),
            false => other_accesses(method, path, wanted.upgrade.is_some()),
        };
        reviewer.allow(caller, &accesses, &destination.node.node).await?;
        Ok(accesses)
    }

    /// Returns the caller whose rights have to be checked, and the reviewer to ask. Returns `None` if everybody who may use
    /// the listener may use this port.
    fn judge<'a>(
        &'a self,
        caller: Option<&'a Caller>,
        port: u16,
    ) -> Result<Option<(&'a Caller, &'a Reviewer)>, Failure> {
        match (&self.front.admission, caller) {
            (Admission::Everyone, _) => Ok(None),
            (Admission::Listed { ports, .. }, None) if ports.is_empty() || ports.contains(&port) => Ok(None),
            (Admission::Listed { .. }, None) => {
                Err(Refusal::Forbidden(format!("port {port} is not in --plain-ports")).into())
            }
            // Without a cluster, the certificate is all that is known of the caller.
            (_, Some(caller)) => Ok(self.front.reviewer().map(|reviewer| (caller, &**reviewer))),
            (_, None) => Err(Refusal::no_identity().into()),
        }
    }
}

/// Formats a host and a port as in a Host header.
fn host_of(name: &str, port: u16) -> String {
    if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") }
}

#[cfg(test)]
pub(super) mod tests {
    use http::{Request, header};

    use super::*;
    use crate::admission::Shares;
    use crate::listener::context::ListenerContext;
    use crate::listener::front::kinds::{Front, Peer};

    /// Returns the node and the target of a request with this Host at a listener for everyone.
    pub(in crate::listener) async fn reached_over_http(
        host: &str,
        router: Arc<tunnel_routing::Router>,
    ) -> Result<(tunnel_runtime::NodeName, SocketAddr), String> {
        let front = Front {
            listener: "http",
            admission: Admission::Everyone,
            tls: None,
            targets: None,
            pods: None,
            metrics: None,
        };
        let client = SocketAddr::from(([127, 0, 0, 1], 1));
        let context = ListenerContext { router, ..ListenerContext::without_nodes() };
        let peer = Peer::new(client, None, None);
        let served = Served::new(Arc::new(front), peer, None, context, Shares::new(1));
        let (head, ()) = Request::get("/").header(header::HOST, host).body(()).unwrap().into_parts();
        let wanted = parse_destination(&head)?;
        let found =
            served.destination(None, &head.method, &wanted).await.map_err(|failure| failure.reason)?;
        Ok((found.node.node, found.target))
    }
}

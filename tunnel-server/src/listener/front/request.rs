//! Handles one request, from its head to the head of its answer.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use rustls_pki_types::ServerName;
use tunnel_link::outcome::Outcome;
use tunnel_routing::NodeAddress;
use tunnel_routing::inventory::DEFAULT_KUBELET_PORT;
use tunnel_runtime::error::chain;

use super::answer::{self, Reader, reader};
use super::backend::{self, Tls};
use super::body::{AnswerBody, Body, Exchange, empty};
use super::destination::{Wanted, parse_destination};
use super::kinds::{Admission, Front, MAX_HEAD, Peer};
use super::pods::Pods;
use super::right::Right;
use super::socket::Faults;
use super::tunnel::{Tunnel, established};
use super::{expect, headers, upgrade};
use crate::admission::{Full, Shares};
use crate::caller::{
    Access, Asker, Authenticator, Caller, Refusal, Reviewer, Shown, ShownToken, Token, bearer_token,
    kubelet_accesses, other_accesses,
};
use crate::listener::access_log::{AccessLogGuard, over_limit};
use crate::listener::answer::Failure;
use crate::listener::context::{ListenerContext, OpenRequest, Reached};
use crate::listener::upstream::Upstream;
use crate::metrics::Permit;

const TOO_LARGE: &str = "the request's head is larger than 64 KiB";

/// State that the requests of a connection share.
pub(super) struct Served {
    pub(super) front: Arc<Front>,
    pub(super) peer: Peer,
    pub(super) faults: Faults,
    pub(super) context: ListenerContext,
    pub(super) shares: Shares,
    /// The connection's, after a CONNECT.
    pub(super) tunnel: parking_lot::Mutex<Option<Tunnel>>,
    /// Yields the connection after a request whose upgrade was refused: hyper leaves its end to its owner.
    pub(super) refused: parking_lot::Mutex<Option<OnUpgrade>>,
}

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
    pub(super) on_edge: Option<Destination>,
}

/// Destination of a request.
pub(super) struct Destination {
    node: NodeAddress,
    target: SocketAddr,
    /// False if the client named node and target itself.
    found: bool,
    /// Host for the target, instead of the one in the request.
    host: Option<String>,
    /// True if the target's certificate is the node's.
    on_node: bool,
    /// Accesses to the node of which the caller must have one; empty if nobody is asked.
    accesses: Vec<Access>,
}

impl Destination {
    fn request(&self) -> OpenRequest {
        let Self { node, target, .. } = self;
        match self.found {
            true => OpenRequest::to_found(node.clone(), *target, Bytes::new()),
            false => OpenRequest::new(node.node.clone(), *target, Bytes::new()),
        }
    }
}

/// Answers a request with the target's answer, or with the reason why there is none.
pub(super) async fn answer(served: &Arc<Served>, request: Request<Incoming>) -> Response<Body> {
    let kubelet_path = ["/exec/", "/attach/", "/portForward/", "/containerLogs/"]
        .iter()
        .any(|root| request.uri().path().starts_with(root));
    let proxy = served.front.is_proxy();
    let reader = if proxy { Reader::Person } else { reader(request.headers(), kubelet_path) };
    let http1 = request.version() != Version::HTTP_2;
    let connect = request.method() == Method::CONNECT;
    let upgrade = request.extensions().get::<OnUpgrade>().cloned();
    let answered = match &served.front.metrics {
        Some(page) => {
            let (peer, head) = (&served.peer, request.into_parts().0);
            let shown = peer.certificate().map(|shown| shown.map(|(caller, _)| caller));
            let answered = page.answer(&head, shown, peer.client.ip()).await;
            answered.inspect_err(|failure| served.turned_away(failure))
        }
        None => forward(served, request).await,
    };
    let response = match answered {
        Ok(response) => response,
        Err(failure) => {
            let mut response = answer::response(&failure, reader);
            // After a malformed request the connection's framing cannot be trusted. A caller that may not read the
            // metrics, or use the proxy, must not keep its place.
            let wrong = [StatusCode::BAD_REQUEST, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE];
            if http1 && (wrong.contains(&failure.status) || served.front.ends_with_refusal()) {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if failure.status == StatusCode::METHOD_NOT_ALLOWED && served.front.metrics.is_some() {
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            }
            response
        }
    };
    let status = response.status();
    if status != StatusCode::SWITCHING_PROTOCOLS && !(connect && status.is_success()) {
        *served.refused.lock() = upgrade;
    }
    response
}

async fn forward(served: &Arc<Served>, mut request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let wants =
        (request.version() == Version::HTTP_11).then(|| headers::wanted_upgrade(request.headers())).flatten();
    let switches = wants.is_some() || request.method() == Method::CONNECT;
    let client = switches.then(|| hyper::upgrade::on(&mut request));
    let (mut head, body) = request.into_parts();
    let admitted = served.admitted(&head, &body).await;
    let admitted = admitted.inspect_err(|failure| served.turned_away(failure))?;
    served.peer.admitted();
    let (client_address, context) = (served.peer.client, &served.context);
    let mut record =
        AccessLogGuard::reaching(served.front.listener, client_address, &admitted.reached, context);
    // hyper drops this future when the client leaves.
    record.presume(Outcome::ClientReset);
    if let Some(caller) = &admitted.caller {
        record.called_by(caller);
    }
    if let Some(permit) = &admitted.permit {
        record.admitted_by(permit.clone());
    }
    let own = served.front.is_proxy().then(|| served.peer.take_place()).flatten();
    let place = own.map_or_else(|| served.shares.admit(client_address.ip()), Ok);
    let opened = Upstream::open(context, &admitted.reached, client_address, place, &mut record).await;
    let upstream = match opened {
        Ok(upstream) => upstream,
        Err(reason) => return Err(failed(record, reason.into())),
    };
    let client = match client {
        Some(client) if head.method == Method::CONNECT => {
            record.presume(Outcome::Shutdown);
            *served.tunnel.lock() = Some(Tunnel { client, upstream, record });
            return Ok(established());
        }
        client => client,
    };
    let stream = upstream.into_pipe(&record);
    let pipe = stream.status();
    let to = admitted.reached.to_string();
    let connected = async {
        let tls = served.tls(admitted.on_edge.as_ref(), head.version == Version::HTTP_2)?;
        backend::connect(stream, tls, &to).await
    };
    let backend = match connected.await {
        Ok(backend) => backend,
        Err(failure) => return Err(failed(record, failure)),
    };
    let h2 = backend.is_http2();
    if let Err(reason) = served.rewrite(&mut head, &admitted, wants.as_ref(), h2) {
        return Err(failed(record, Failure::bad_request(reason)));
    }
    // hyper sends no body of unknown length with a GET or HEAD, unless the head says that there is one.
    if !h2 && !body.is_end_stream() && !head.headers.contains_key(header::CONTENT_LENGTH) {
        head.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    let request = expect::request(head, body);
    let (answer, connection) = backend.send(request).await;
    let exchange = Exchange { record, pipe, connection, faults: served.faults.clone() };
    let mut response = match answer {
        Ok(response) => response,
        Err(error) => {
            let (outcome, reason) = match exchange.pipe.failure() {
                Some((outcome, reason)) if outcome != Outcome::ClientReset => (outcome, reason),
                _ => (Outcome::TargetReset, chain(&error)),
            };
            let failure = Failure::of_outcome(outcome, format!("{to} did not answer: {reason}"));
            return Err(failed(exchange.record, failure));
        }
    };
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let target = switched.then(|| hyper::upgrade::on(&mut response));
    let (mut head, body) = response.into_parts();
    let protocol = head.headers.get(header::UPGRADE).cloned();
    headers::hop_by_hop(&mut head.headers);
    head.version = Version::default();
    head.extensions.clear();
    match (target, client) {
        (Some(target), Some(client)) => {
            head.headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            if let Some(protocol) = protocol {
                head.headers.insert(header::UPGRADE, protocol);
            }
            tokio::spawn(upgrade::relay(client, target, exchange));
            Ok(Response::from_parts(head, empty()))
        }
        (Some(_), None) => {
            let reason = format!("{to} changed the protocol without being asked to");
            Err(failed(exchange.record, Failure::of_outcome(Outcome::Protocol, reason)))
        }
        (None, client) => {
            // Data that the client sent ahead in the other protocol must not be read as its next request.
            if client.is_some() || served.front.is_proxy() {
                head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(Response::from_parts(head, AnswerBody::new(body, exchange).boxed_unsync()))
        }
    }
}

fn failed(record: AccessLogGuard, failure: Failure) -> Failure {
    record.end(failure.outcome, &failure.reason);
    failure
}

impl Served {
    /// Checks that the request may be sent, and where it leads.
    async fn admitted(&self, head: &Parts, body: &Incoming) -> Result<Admitted, Failure> {
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
            Arc::new(Right { reviewer, shown, client, node, accesses }) as Arc<dyn Permit>
        });
        Ok(Admitted {
            reached: Reached::Edge(destination.request()),
            caller: caller.as_ref().map(|caller| caller.to_string().into()),
            permit,
            by_token,
            on_edge: Some(destination),
        })
    }

    fn turned_away(&self, failure: &Failure) {
        let (listener, client) = (self.front.listener, self.peer.client);
        self.context.metrics.turned_away(listener);
        tracing::warn!(listener, %client, status = failure.status.as_u16(), reason = failure.reason, "connection rejected");
    }

    fn over_limit(&self, full: &Full) -> Failure {
        over_limit(&self.context.metrics, self.front.listener, self.peer.client, full);
        Failure::of_outcome(Outcome::Busy, full.to_string())
    }

    /// Returns the sender of the request, if this listener authenticates.
    pub(super) async fn caller(&self, headers: &HeaderMap) -> Result<Option<(Caller, Shown)>, Failure> {
        match &self.front.admission {
            Admission::Everyone | Admission::Policy(..) => Ok(None),
            Admission::Callers(authenticator) => match self.identify(headers, authenticator, None).await? {
                Some(caller) => Ok(Some(caller)),
                None => Err(Refusal::Unauthenticated(
                    "a client certificate or a bearer token is needed".to_owned(),
                )
                .into()),
            },
            Admission::Listed { clients, authenticator, exposed_tokens, .. } => {
                let client = self.peer.client.ip().to_canonical();
                if clients.iter().any(|net| net.contains(&client)) {
                    return Ok(None);
                }
                let exposed = (!exposed_tokens && self.front.is_exposed(client)).then_some(
                    "use the https listener, or let the plain one take tokens with --plain-tokens=on",
                );
                match self.identify(headers, authenticator, exposed).await? {
                    Some(caller) => Ok(Some(caller)),
                    None => Err(Refusal::Unauthenticated(format!(
                        "{client} is not in --plain-clients, and the request has no bearer token"
                    ))
                    .into()),
                }
            }
        }
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
        let caller = authenticator.caller_in_cluster(ShownToken { token, client, exposed }).await?;
        Ok(Some((caller, Shown::Token(Token::new(token)))))
    }

    /// Resolves the node and the agent's target, if the caller may send this request there.
    async fn destination(
        &self,
        caller: Option<&Caller>,
        method: &Method,
        wanted: &Wanted,
    ) -> Result<Destination, Failure> {
        let named = wanted.named.as_deref();
        let host = self.context.router.resolve(named.unwrap_or(&wanted.host));
        match (host.on_edge(), &wanted.pod, &self.front.pods) {
            (Ok(node), ..) => {
                let destination = self.at(node, wanted, named)?;
                let accesses = self.admit(caller, method, wanted, &destination).await?;
                Ok(Destination { accesses, ..destination })
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
        wanted: &Wanted,
    ) -> Result<Destination, Failure> {
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
        if let Some((caller, Some(reviewer))) = self.judge(caller, port)? {
            let path = wanted.path.as_ref().map_err(Failure::bad_request)?;
            accesses = kubelet_accesses(method, path);
            reviewer.allow_at_pod(caller, &accesses, known.map(|node| &node.node)).await?;
        }
        let node = found?;
        let target = SocketAddr::new(node.address, node.kubelet_port);
        Ok(Destination { node, target, found: true, host: Some(target.to_string()), on_node: true, accesses })
    }

    fn at(&self, node: NodeAddress, wanted: &Wanted, named: Option<&str>) -> Result<Destination, Failure> {
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
        Ok(Destination { node, target, found: wanted.dest.is_none(), host, on_node, accesses: Vec::new() })
    }

    /// Checks that the caller may send this request. Returns the accesses of which it must have one.
    async fn admit(
        &self,
        caller: Option<&Caller>,
        method: &Method,
        wanted: &Wanted,
        destination: &Destination,
    ) -> Result<Vec<Access>, Failure> {
        let port = destination.target.port();
        let Some((caller, reviewer)) = self.judge(caller, port)? else { return Ok(Vec::new()) };
        let path = wanted.path.as_ref().map_err(Failure::bad_request)?;
        // Without a cluster, the certificate is all that is known of the caller.
        let Some(reviewer) = reviewer else { return Ok(Vec::new()) };
        let of_kubelet = destination.on_node && port == destination.node.kubelet_port;
        let accesses = if of_kubelet { kubelet_accesses(method, path) } else { other_accesses(method, path) };
        reviewer.allow(caller, &accesses, &destination.node.node).await?;
        Ok(accesses)
    }

    /// Returns the caller whose rights have to be checked, and the reviewer to ask. Returns `None` if every client that
    /// may use the listener may use this port.
    fn judge<'a>(
        &'a self,
        caller: Option<&'a Caller>,
        port: u16,
    ) -> Result<Option<(&'a Caller, Option<&'a Reviewer>)>, Failure> {
        let authenticator = match (&self.front.admission, caller) {
            (Admission::Everyone, _) => return Ok(None),
            (Admission::Listed { ports, .. }, None) => {
                if ports.is_empty() || ports.contains(&port) {
                    return Ok(None);
                }
                return Err(Refusal::Forbidden(format!("port {port} is not in --plain-ports")).into());
            }
            (Admission::Callers(authenticator) | Admission::Listed { authenticator, .. }, _) => {
                Some(authenticator)
            }
            (Admission::Policy(..), _) => None,
        };
        match caller {
            Some(caller) => {
                Ok(Some((caller, authenticator.and_then(|known| known.reviewer().map(Arc::as_ref)))))
            }
            None => Err(Refusal::Unauthenticated("nobody knows the caller".to_owned()).into()),
        }
    }

    /// Returns the TLS settings for the target; `None` for plain HTTP.
    fn tls(&self, destination: Option<&Destination>, h2: bool) -> Result<Option<Tls>, Failure> {
        let (Some(targets), Some(destination)) = (&self.front.targets, destination) else { return Ok(None) };
        if targets.is_plain(destination.target.port()) {
            return Ok(None);
        }
        let node = &destination.node;
        let target = ServerName::from(destination.target.ip());
        let (name, names) = if destination.on_node {
            let snapshot = self.context.router.snapshot();
            let own = snapshot.inventory().get(node.node.as_str());
            let addresses = own.map(|own| own.addresses.clone()).unwrap_or_default();
            let by_name = ServerName::try_from(node.node.to_string()).ok();
            let names = by_name.iter().cloned().chain(addresses.into_iter().map(ServerName::from));
            (by_name.clone().unwrap_or_else(|| target.clone()), names.collect())
        } else {
            (target.clone(), vec![target])
        };
        let config =
            targets.config(names, h2).map_err(|reason| Failure::of_outcome(Outcome::Protocol, reason))?;
        Ok(Some(Tls { config, name }))
    }

    /// Rewrites the head for the target.
    fn rewrite(
        &self,
        head: &mut Parts,
        admitted: &Admitted,
        upgrade: Option<&HeaderValue>,
        h2: bool,
    ) -> Result<(), String> {
        let authority = head.uri.authority().map(ToString::to_string);
        let asked = head.headers.get(header::HOST).and_then(|host| host.to_str().ok().map(ToOwned::to_owned));
        let host = admitted.on_edge.as_ref().and_then(|destination| destination.host.clone());
        let host = host.or(authority).or(asked).unwrap_or_default();
        // The token authenticates the caller to this server; the node must not see it.
        if admitted.by_token {
            head.headers.remove(header::AUTHORIZATION);
        }
        if h2 { headers::target_head_2(head, &host) } else { headers::target_head(head, &host, upgrade) }
    }
}

/// Formats a host and a port as in a Host header.
fn host_of(name: &str, port: u16) -> String {
    if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

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
        let served = Served {
            front: Arc::new(front),
            peer: Peer::new(client, None, None),
            faults: Faults::default(),
            context: ListenerContext { router, ..ListenerContext::without_nodes() },
            shares: Shares::new(1),
            tunnel: parking_lot::Mutex::default(),
            refused: parking_lot::Mutex::default(),
        };
        let (head, ()) = Request::get("/").header(header::HOST, host).body(()).unwrap().into_parts();
        let wanted = parse_destination(&head)?;
        let found =
            served.destination(None, &head.method, &wanted).await.map_err(|failure| failure.reason)?;
        Ok((found.node.node, found.target))
    }
}

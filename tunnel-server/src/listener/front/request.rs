//! Handles one request, from its head to the head of its answer.

use std::sync::Arc;

use http::header;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use rustls_pki_types::ServerName;
use tunnel_link::outcome::Outcome;
use tunnel_runtime::error::chain;

use super::admitted::{Admitted, NodeTarget};
use super::answer::{self, Reader, reader};
use super::backend::{self, Tls};
use super::body::{AnswerBody, Body, Exchange};
use super::served::Served;
use super::tunnel::{Tunnel, established};
use super::upgrade::Upgraded;
use super::{expect, headers};
use crate::listener::access_log::AccessLogGuard;
use crate::listener::answer::Failure;
use crate::listener::upstream::Upstream;

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
            let head = request.into_parts().0;
            let answered = page.answer(&head, served.may_read_metrics(&head.headers)).await;
            answered.inspect_err(|failure| served.turned_away(failure))
        }
        None => forward(served, request).await,
    };
    let response = match answered {
        Ok(response) => response,
        Err(failure) => {
            let mut response = answer::response(&failure, reader);
            // After a malformed request the connection's framing cannot be trusted, and data that the client sent ahead in
            // another protocol must not be read as its next request. A caller that may not read the metrics, or use the
            // proxy, must not keep its place for longer than it takes to read that.
            let wrong = [StatusCode::BAD_REQUEST, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE];
            let closes = upgrade.is_some() || served.front.ends_with_refusal();
            if http1 && (wrong.contains(&failure.status) || closes) {
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

async fn forward(served: &Arc<Served>, request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let (mut head, body) = request.into_parts();
    let admitted = served.admitted(&head, &body).await;
    let admitted = admitted.inspect_err(|failure| served.turned_away(failure))?;
    served.peer.admitted();
    let (client_address, context) = (served.peer.client, &served.context);
    let mut record = served.record_of(&admitted, head.version);
    let own = served.front.is_proxy().then(|| served.peer.take_place()).flatten();
    let place = own.map_or_else(|| served.shares.admit(client_address.ip()), Ok);
    let opened = Upstream::open(context, &admitted.reached, client_address, place, &mut record).await;
    let upstream = match opened {
        Ok(upstream) => upstream,
        Err(reason) => return Err(failed(record, reason.into())),
    };
    let switches = admitted.upgrade.is_some() || head.method == Method::CONNECT;
    let client = switches.then(|| head.extensions.remove::<OnUpgrade>()).flatten();
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
    if let Err(reason) = served.rewrite(&mut head, &admitted, h2) {
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
            *served.upgraded.lock() = Some(Upgraded { client, target, exchange });
            Ok(Response::from_parts(head, Body::default()))
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
    /// The access log's record of a request in this version of HTTP.
    fn record_of(&self, admitted: &Admitted, version: Version) -> AccessLogGuard {
        let Admitted { reached, caller, permit, .. } = admitted;
        let mut record =
            AccessLogGuard::reaching(self.front.listener, self.peer.client, reached, &self.context);
        // hyper drops the request's future when the client leaves.
        record.presume(Outcome::ClientReset);
        if let Some(caller) = caller {
            record.called_by(caller);
        }
        if let Some(permit) = permit {
            record.admitted_by(permit.clone());
            // Over HTTP/2 that would end other requests, and what is left of this one is a window of bytes.
            if version != Version::HTTP_2 {
                record.cuts(&self.cut);
            }
        }
        record
    }

    /// Returns the TLS settings for the target; `None` for plain HTTP.
    fn tls(&self, destination: Option<&NodeTarget>, h2: bool) -> Result<Option<Tls>, Failure> {
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
    fn rewrite(&self, head: &mut Parts, admitted: &Admitted, h2: bool) -> Result<(), String> {
        let authority = head.uri.authority().map(ToString::to_string);
        let asked = head.headers.get(header::HOST).and_then(|host| host.to_str().ok().map(ToOwned::to_owned));
        let host = admitted.on_edge.as_ref().and_then(|destination| destination.host.clone());
        let host = host.or(authority).or(asked).unwrap_or_default();
        // The token authenticates the caller to this server; the node must not see it.
        if admitted.by_token {
            head.headers.remove(header::AUTHORIZATION);
        }
        match h2 {
            true => headers::target_head_2(head, &host),
            false => headers::target_head(head, &host, admitted.upgrade.as_ref()),
        }
    }
}

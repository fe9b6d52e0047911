//! Reads callers' requests, checks whether they are permitted, and starts their connections.

use std::io::Cursor;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel_core::carry::end_on_drop;
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use super::gatekeeper::{Denied, Gatekeeper, Reached};
use super::head::{Asked, Kind, parse};
use crate::caller::Refusal;
use crate::door::access_log::AccessLogGuard;
use crate::door::answer::{refuse, status_of};
use crate::door::context::{DoorContext, Failed, OpenError, OpenRequest};
use crate::door::direct;
use crate::door::open::Opened;
use crate::door::preface::{PrefaceError, read_preface, timed_out};
use crate::policy::Identity;

/// Answer to CONNECT once the target is connected.
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";
/// Challenges for a client without credentials (RFC 9110 section 15.5.8).
const CHALLENGE: &str = "Proxy-Authenticate: Basic realm=\"postern\", charset=\"UTF-8\"\r\n\
    Proxy-Authenticate: Bearer realm=\"postern\"\r\n";

/// Authenticates callers, and relays what the policy permits.
#[derive(Clone)]
pub(crate) struct Reception {
    pub(crate) gatekeeper: Arc<Gatekeeper>,
    pub(crate) context: DoorContext,
}

/// Reason for refusing a client, and the status that it gets.
pub(super) struct Refused {
    status: StatusCode,
    pub(super) reason: String,
}

impl Refused {
    fn new(status: StatusCode, reason: impl Into<String>) -> Self {
        Self { status, reason: reason.into() }
    }
}

impl Reception {
    /// Reads a client's request, and starts the connection or answers with the reason for refusing it. `secure`: nobody
    /// else can read what it sends.
    pub(super) async fn receive(
        &self,
        door: &'static str,
        socket: &mut TcpStream,
        client: SocketAddr,
        shown: Identity,
        secure: bool,
    ) -> Result<Opened, OpenError> {
        const HEAD: &str = "request";
        let mut read = BytesMut::new();
        let refused = match read_preface(socket, &mut read, HEAD, parse).await {
            Ok(asked) => match self.decide(&asked, shown, client, secure).await {
                Ok((reached, caller)) => {
                    return self.begin((door, client, caller), socket, &asked, &read, reached).await;
                }
                Err(refused) => refused,
            },
            Err(PrefaceError::Lost(error)) => return Err(error),
            Err(PrefaceError::Invalid(reason)) => Refused::new(StatusCode::BAD_REQUEST, reason),
            Err(PrefaceError::TimedOut) => Refused::new(StatusCode::REQUEST_TIMEOUT, timed_out(HEAD)),
        };
        let challenge =
            if refused.status == StatusCode::PROXY_AUTHENTICATION_REQUIRED { CHALLENGE } else { "" };
        refuse(socket, refused.status, challenge, &refused.reason).await;
        Err(OpenError::Client(refused.reason))
    }

    /// Returns the permitted destination, and the caller's description for the log.
    pub(super) async fn decide(
        &self,
        asked: &Asked,
        shown: Identity,
        client: SocketAddr,
        secure: bool,
    ) -> Result<(Reached, Box<str>), Refused> {
        let identity = match &asked.token {
            // A workload is identified by its node, whatever token it shows.
            Some(_) if matches!(shown, Identity::Node(_)) => shown,
            Some(_) if !secure => {
                let reason = "a token or password is taken over TLS only: use this proxy as https://, and renew \
                              the token, which others may have seen";
                return Err(Refused::new(StatusCode::FORBIDDEN, reason));
            }
            Some(token) => {
                let known = self.gatekeeper.authenticator.caller_of_token(token, client.ip()).await;
                known.map(Identity::Token).map_err(|refusal| {
                    let status = match refusal {
                        Refusal::Unauthenticated(_) => StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                        Refusal::Forbidden(_) => StatusCode::FORBIDDEN,
                        Refusal::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
                    };
                    Refused::new(status, refusal.to_string())
                })?
            }
            None => shown,
        };
        match self.gatekeeper.reach(&identity, client.ip(), &asked.host, asked.port).await {
            Ok((reached, rule)) => Ok((reached, format!("{identity} by {}", printable(&rule, 80)).into())),
            Err(Denied::Policy) => {
                let (host, port) = (printable(&asked.host, 100), asked.port);
                let from = client.ip();
                let reason =
                    format!("the policy does not permit {identity} from {from} to reach {host}:{port}");
                let status = match identity {
                    Identity::None => StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                    _ => StatusCode::FORBIDDEN,
                };
                Err(Refused::new(status, reason))
            }
            Err(Denied::Unclear(reason)) => Err(Refused::new(StatusCode::BAD_REQUEST, reason)),
            Err(Denied::Unavailable(reason)) => Err(Refused::new(StatusCode::BAD_GATEWAY, reason)),
        }
    }

    /// Returns a connection to an edge node for relaying; relays one that stays in the cloud itself.
    pub(super) async fn begin(
        &self,
        (door, client, caller): (&'static str, SocketAddr, Box<str>),
        socket: &mut TcpStream,
        asked: &Asked,
        read: &[u8],
        reached: Reached,
    ) -> Result<Opened, OpenError> {
        let (greeting, prefix): (&'static [u8], Bytes) = match &asked.kind {
            Kind::Map => (b"", Bytes::new()),
            Kind::Tunnel => (ESTABLISHED, Bytes::copy_from_slice(&read[asked.length..])),
            Kind::Request(head) => (b"", [head, &read[asked.length..]].concat().into()),
        };
        let target = match reached {
            Reached::Edge { node, target } => {
                return Ok(Opened::Carried(OpenRequest {
                    greeting: Bytes::from_static(greeting),
                    caller: Some(caller),
                    ..OpenRequest::to_found(node, target, prefix)
                }));
            }
            Reached::Cloud(target) => target,
        };
        let record = AccessLogGuard::direct(door, client, target, &self.context);
        record.called_by(&caller);
        match direct::connect(target).await {
            Ok(to) => {
                let ended = self.carry(socket, to, greeting, prefix, &record).await;
                record.finish(&ended);
            }
            Err(failed) => {
                if asked.kind != Kind::Map {
                    refuse(socket, status_of(failed.outcome), "", &failed.reason).await;
                }
                record.finish(&Err(failed));
            }
        }
        Ok(Opened::Ended)
    }

    async fn carry(
        &self,
        client: &mut TcpStream,
        target: TcpStream,
        greeting: &[u8],
        prefix: Bytes,
        record: &AccessLogGuard,
    ) -> Result<(), Failed> {
        let lost =
            |error: std::io::Error| Failed { outcome: Outcome::ClientReset, reason: error.to_string() };
        client.write_all(greeting).await.map_err(lost)?;
        let (read, mut write) = client.split();
        let mut read = Cursor::new(prefix).chain(read);
        direct::carry(target, record, &mut read, &mut write, std::future::pending()).await?;
        end_on_drop(client);
        Ok(())
    }
}

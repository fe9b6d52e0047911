//! Connections that a client opened with CONNECT.

use bytes::Bytes;
use http::Response;
use hyper::ext::ReasonPhrase;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::reset_on_drop;

use super::body::Body;
use crate::listener::access_log::AccessLogGuard;
use crate::listener::socket::{PrefixedSocket, Watched};
use crate::listener::upstream::Upstream;

/// A connection to a target, for a client that is being told that it is up.
pub(super) struct Tunnel {
    pub(super) client: OnUpgrade,
    pub(super) upstream: Upstream,
    pub(super) record: AccessLogGuard,
}

/// Returns the answer to CONNECT once the target is connected.
pub(super) fn established() -> Response<Body> {
    let mut response = Response::new(Body::default());
    response.extensions_mut().insert(ReasonPhrase::from_static(b"Connection established"));
    response
}

impl Tunnel {
    /// Relays until both directions have ended, once hyper has left the client's connection.
    pub(super) async fn run(self, watched: Watched) {
        let Self { client, upstream, record } = self;
        let Ok(client) = client.await else {
            return record.end(Outcome::ClientReset, &"the client left before it was connected");
        };
        let client = match client.downcast::<TokioIo<PrefixedSocket>>() {
            Err(client) => client,
            Ok(plain) => {
                // A copy: hyper's buffer is larger, and even an empty part keeps it.
                let prefix = Bytes::copy_from_slice(&plain.read_buf);
                drop(plain);
                return match watched.into_socket() {
                    Some(socket) => {
                        reset_on_drop(&socket);
                        upstream.relay(socket, prefix, record).await;
                    }
                    // Nobody else has it.
                    None => record.end(Outcome::Protocol, &"the client's socket is still in use"),
                };
            }
        };
        // Until both directions have ended well, whatever ends this resets the connection.
        watched.reset_on_drop();
        let (mut read, mut write) = tokio::io::split(TokioIo::new(client));
        let gone = async { drop(watched.lost().await) };
        let ended = upstream.pump(&record, &mut read, &mut write, gone).await;
        match &ended {
            Ok(()) => watched.end_on_drop(),
            Err(failed) => {
                // A reset discards unsent data.
                if failed.outcome == Outcome::TargetReset {
                    record.unless_ended(watched.flushed()).await;
                }
                // One direction may have ended well.
                watched.reset_on_drop();
            }
        }
        record.finish(&ended);
    }
}

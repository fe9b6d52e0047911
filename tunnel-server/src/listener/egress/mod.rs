//! The egress listener, for kube-apiserver's EgressSelector. It speaks konnectivity's ProxyService (gRPC) and HTTP
//! CONNECT, which it tells apart by the first bytes, on a Unix socket and, with mutual TLS, on a port.
//!
//! A connection is served on one of the data path's threads. Its target is dialled through the tunnel of the node that
//! has the address, or by this server itself where that is allowed.

mod authority;
mod config;
mod connect;
mod destination;
mod dial;
mod halves;
mod proxy;
mod services;
mod stream;
#[cfg(test)]
mod tests;
mod tls;
mod unix;

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::BytesMut;
use ipnet::IpNet;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::{TcpStream, UnixStream};
use tunnel_link::relay::{end_on_drop, flushed};
use tunnel_runtime::accept::{Gate, Gated, accept};
use tunnel_runtime::log_once::LogRarely;

use super::access_log::{over_limit, turned_away};
use super::context::ListenerContext;
use super::preface::{PrefaceError, read_preface};
use crate::admission::{Share, Shares};
use crate::caller::{CallerTls, caller_of_certificate};
use authority::{Masked, PREFACE};
use destination::Direct;
use dial::{Dialler, EgressClient};
use halves::{Over, Writer};

pub use config::EgressConfig;
#[cfg(test)]
pub(super) use destination::tests::leads_at_egress;
pub(crate) use dial::NAME;
pub(crate) use services::ClusterServices;
pub(crate) use tls::EgressTls;
pub(crate) use unix::Socket;

/// The egress service, for both of its listeners.
#[derive(Clone)]
pub(crate) struct Egress {
    dialler: Arc<Dialler>,
    /// Places of the callers' connections, taken before a client is authenticated or asks for anything.
    callers: Shares,
}

impl Egress {
    /// `places`: maximum number of dialled connections, and of the callers' connections.
    pub(crate) fn new(
        context: ListenerContext,
        places: u32,
        direct: Vec<IpNet>,
        services: Option<ClusterServices>,
    ) -> Self {
        context.metrics.listener(NAME);
        let (shares, services) = (Shares::new(places), services.map(Arc::new));
        let dialler = Arc::new(Dialler { context, shares, direct: Direct(direct), services });
        Self { dialler, callers: Shares::new(places) }
    }

    /// Serves the Unix socket until the drain starts. Once `gate` is open, the path leads to this socket. While the
    /// gate is closed, a successor has the same socket, and the file stays for it.
    pub(crate) async fn serve_unix(self, mut socket: Socket, gate: Gate) {
        let draining = self.dialler.context.drain.shutdown().draining_token();
        let failing = LogRarely::default();
        while draining.run_until_cancelled(gate.opened()).await.is_some() {
            if let Err(error) = socket.place() {
                tracing::error!(listener = NAME, error = format!("{error:#}"), "failed to create the socket");
            }
            tokio::select! {
                biased;
                () = draining.cancelled() => break,
                () = gate.closed() => {}
                (stream, _) = accept(|| socket.listener.accept(), NAME, &failing) => self.receive_unix(stream),
            }
        }
        if gate.is_open() {
            socket.remove();
        }
    }

    /// Serves the port until the drain starts.
    pub(crate) async fn serve_tls(self, mut listener: Gated, tls: Arc<CallerTls>) {
        loop {
            let (socket, client) = tokio::select! {
                biased;
                () = self.dialler.context.drain.shutdown().draining() => return,
                accepted = listener.accept(NAME) => accepted,
            };
            let Some(place) = self.admit(client) else {
                // Dropping it resets it: the client could take an end of file for an answer.
                continue;
            };
            let (dialler, tls) = (self.dialler.clone(), tls.clone());
            self.dialler.context.serve_apart(socket, async move |socket| {
                let _place = place;
                if let Err(reason) = receive_tls(dialler.clone(), socket, client, &tls).await {
                    turned_away(&dialler.context.metrics, NAME, client, None, &reason);
                }
            });
        }
    }

    /// Returns `None` if there is no place for the caller.
    fn admit(&self, client: SocketAddr) -> Option<Share> {
        let metrics = &self.dialler.context.metrics;
        let refused = |full| {
            over_limit(metrics, NAME, client, &full);
            metrics.turned_away(NAME);
        };
        self.callers.admit(client.ip()).map_err(refused).ok()
    }

    fn receive_unix(&self, stream: UnixStream) {
        let caller = EgressClient {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            name: stream.peer_cred().map_or_else(
                |_| "a process".into(),
                |of| format!("uid={} pid={}", of.uid(), of.pid().unwrap_or_default()).into(),
            ),
            certified: None,
        };
        let Some(place) = self.admit(caller.address) else { return };
        let dialler = self.dialler.clone();
        let guard = dialler.context.drain.guard();
        let stream = stream.into_std();
        dialler.context.workers.clone().next().spawn(async move {
            let _held = (guard, place);
            match stream.and_then(UnixStream::from_std).and_then(halves::of_unix) {
                // Closing a Unix socket discards nothing.
                Ok((read, write, watched)) => {
                    serve(dialler, caller, read, write, watched).await;
                }
                Err(error) => tracing::warn!(listener = NAME, %error, "failed to set up a client's socket"),
            }
        });
    }
}

async fn receive_tls(
    dialler: Arc<Dialler>,
    socket: TcpStream,
    client: SocketAddr,
    tls: &CallerTls,
) -> Result<(), String> {
    let (stream, certified) = tls.accept(socket, false).await?;
    let shown = certified.as_ref().and_then(|shown| caller_of_certificate(&shown.leaf).ok());
    let name = shown.map(|caller| caller.name).unwrap_or_default();
    let caller = EgressClient { address: client, name: name.into(), certified: certified.map(Arc::new) };
    let (read, write, watched) = halves::of_tls(stream).map_err(|error| error.to_string())?;
    let shutdown = dialler.context.drain.shutdown().clone();
    let over = serve(dialler, caller, read, write, watched.clone()).await;
    // Otherwise the socket is reset: Go programs take an end of file between two records for the end of the data,
    // although TLS has not signalled it.
    if over == Over::Ended {
        end_on_drop(&watched);
    }
    if over != Over::Lost {
        // A reset discards unsent data, and so does a close if the caller has sent something that was not read.
        tokio::select! {
            () = flushed(&watched) => {}
            () = shutdown.forced() => {}
        }
    }
    Ok(())
}

/// Serves one connection of either protocol.
async fn serve(
    dialler: Arc<Dialler>,
    caller: EgressClient,
    mut read: impl AsyncRead + Unpin + Send + 'static,
    write: impl Writer,
    watched: Arc<OwnedFd>,
) -> Over {
    let mut early = BytesMut::new();
    match read_preface(&mut read, &mut early, "request", |read| Ok::<_, ()>(is_http2(read))).await {
        Ok(true) => {
            let read = Masked::new(std::io::Cursor::new(early.freeze()).chain(read));
            proxy::serve(dialler, caller, tokio::io::join(read, write)).await
        }
        Ok(false) => connect::serve(&dialler, &caller, read, write, watched, early).await,
        Err(PrefaceError::Invalid(()) | PrefaceError::TimedOut | PrefaceError::Lost(_)) => {
            tracing::debug!(listener = NAME, client = %caller.address, "client sent no request");
            Over::Lost
        }
    }
}

/// Returns `None` if more bytes are needed.
fn is_http2(read: &[u8]) -> Option<bool> {
    let same = read.iter().zip(PREFACE).take_while(|(one, other)| one == other).count();
    if same < read.len() && same < PREFACE.len() {
        return Some(false);
    }
    (same == PREFACE.len()).then_some(true)
}

#[cfg(test)]
mod first_bytes {
    use super::*;

    #[test]
    fn tell_the_protocols_apart() {
        for (read, expected) in [
            (&b""[..], None),
            (b"P", None),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", None),
            (PREFACE, Some(true)),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nmore", Some(true)),
            (b"POST / HTTP/1.1", Some(false)),
            (b"CONNECT", Some(false)),
            (b"\x16", Some(false)),
        ] {
            assert_eq!(is_http2(read), expected, "{read:?}");
        }
    }
}

//! Relays bytes between one HTTP/2 stream of a link and a client that is not a plain TCP socket: TLS, a Unix socket,
//! the packets of another protocol, or a [`super::pipe()`] of this process. For sockets use [`Relay::run`], which
//! copies less.
//!
//! As there, flow control is returned to the sender only for bytes that the client has taken, so a client that does
//! not read stops only its own stream.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::FutureExt as _;
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::poll_read_buf;

use super::TARGET_RESET;
use super::error::{RelayError, Side};
use super::frame::{FrameError, HEADER_LEN, header};
use super::inward::{discard, ended_well};
use super::outward::{Room, SMALL_READ, SMALL_SEGMENT, paced, send_error, status, stream_reset};
use super::parameters::Relay;
use crate::link::Bulk;
use crate::outcome::Outcome;

impl Relay<'_> {
    /// Relays both ways until both directions have ended. The client's end of file becomes the stream's end, and the
    /// stream's end a shutdown of the client's writing half.
    ///
    /// # Errors
    /// Returns the reason for an early end. The stream is then reset; the client is not informed.
    pub async fn pump(
        &self,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
        send: &mut SendStream<Bytes>,
        mut stream: RecvStream,
    ) -> Result<(), RelayError> {
        let ended = tokio::select! {
            biased;
            (outcome, reason) = self.abort.triggered() => Err(RelayError::Aborted(outcome, reason)),
            both = async {
                tokio::try_join!(
                    self.outward(read, send)
                        .map(|sent| sent.or_else(|error| error.unless_unwanted().map(drop))),
                    self.inward(&mut stream, write),
                )
            } => both.map(drop),
        };
        match &ended {
            Ok(()) => {}
            // A status has been sent; RST_STREAM would discard the data queued before it.
            Err(RelayError::Socket(_) | RelayError::Aborted(Outcome::Ok, _)) if self.side == Side::Agent => {}
            Err(error) => send.send_reset(error.outcome(self.side).reset_reason()),
        }
        ended
    }

    /// Relays from the client to the stream, up to the client's end of file.
    async fn outward(
        &self,
        client: &mut (impl AsyncRead + Unpin),
        send: &mut SendStream<Bytes>,
    ) -> Result<(), RelayError> {
        let mut size = SMALL_READ;
        let mut bulk = Bulk::new(self.flow);
        loop {
            let room = self.room(send, size).await?;
            // Do not keep capacity reserved while idle: it is part of the link's window, which has room for 8,191 such
            // streams.
            send.reserve_capacity(0);
            let mut segment = BytesMut::with_capacity(HEADER_LEN + room);
            segment.put_bytes(0, HEADER_LEN);
            let read = tokio::select! {
                biased;
                reset = poll_fn(|cx| send.poll_reset(cx)) => {
                    return Err(reset.map_or_else(RelayError::from, RelayError::Reset));
                }
                read = poll_fn(|cx| poll_read_buf(Pin::new(&mut *client), cx, &mut segment)) => read,
            };
            let read = match read {
                Ok(read) => read,
                Err(error) => {
                    if self.side == Side::Agent {
                        // Fails only if the stream has been reset, which tells more.
                        let _ = send.send_trailers(status(TARGET_RESET));
                    }
                    return Err(RelayError::Socket(error));
                }
            };
            if read == 0 {
                let ended = match self.side {
                    Side::Server => send.send_data(Bytes::new(), true),
                    Side::Agent => send.send_trailers(status("0")),
                };
                return match ended {
                    Ok(()) => Ok(()),
                    Err(error) => Err(send_error(send, error).await),
                };
            }
            if room == size {
                size = paced(&mut bulk, self.flow, size, read);
            }
            let head = header(read).ok_or(RelayError::Frame(FrameError::Length))?;
            segment[..HEADER_LEN].copy_from_slice(&head);
            if let Err(error) = send.send_data(segment.freeze(), false) {
                return Err(send_error(send, error).await);
            }
            self.traffic.count_from_socket(read);
        }
    }

    /// Waits until at least a small read can be sent whole, and returns how much of a read of `size` can.
    async fn room(&self, send: &mut SendStream<Bytes>, size: usize) -> Result<usize, RelayError> {
        let room = Room::new(self.flow);
        send.reserve_capacity(room.wanted(HEADER_LEN + size));
        while send.capacity() < room.wanted(SMALL_SEGMENT) {
            let _wait = self.traffic.for_tunnel.begin(0);
            match poll_fn(|cx| send.poll_capacity(cx)).await {
                Some(capacity) => capacity.map(drop)?,
                None => return Err(stream_reset(send).await),
            }
        }
        Ok(room.of(send.capacity(), HEADER_LEN + size) - HEADER_LEN)
    }

    /// Relays from the stream to the client, including the stream's end.
    async fn inward(
        &self,
        stream: &mut RecvStream,
        client: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), RelayError> {
        match (self.side, self.deliver(client, stream, |_| None).await) {
            // The other direction tells how the client has gone. The rest of the request is discarded.
            (Side::Agent, Err(RelayError::Socket(_))) => {
                discard(stream).await;
                return Ok(());
            }
            (_, ended) => ended?,
        }
        if self.side == Side::Server {
            ended_well(stream).await?;
        }
        match poll_fn(|cx| Pin::new(&mut *client).poll_shutdown(cx)).await {
            // The client may already be gone.
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(RelayError::Socket(error)),
            _ => Ok(()),
        }
    }
}

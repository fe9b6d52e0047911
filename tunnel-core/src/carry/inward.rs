//! The direction from the stream to the socket.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use socket2::SockRef;
use tokio::io::AsyncWrite;
use tokio::net::tcp::WriteHalf;

use super::GRPC_STATUS;
use super::error::{RelayError, Side};
use super::frame::Deframer;
use super::stall::{Abort, StallBound};
use super::traffic::Traffic;
use crate::text::printable;

/// Chunks shorter than this (bytes) are gathered while the socket is blocked: each costs h2 some 250 bytes of bookkeeping.
const SMALL_CHUNK: usize = 4 << 10;

/// Bytes that came from the stream and are not written yet.
#[derive(Default)]
struct Inbox {
    deframer: Deframer,
    /// The data of the chunk that is being written.
    pieces: Vec<Bytes>,
    /// The data of small chunks that came while the socket was blocked.
    backlog: BytesMut,
    /// Flow control to return to the sender for the backlog, in bytes.
    owed: usize,
    /// A large chunk that came after them.
    next: Option<Bytes>,
    ended: bool,
}

impl Inbox {
    /// Takes small chunks out of h2 while the socket is blocked, and notices a reset. Their flow control is kept, so that
    /// a window of one-byte writes takes one window of memory instead of twenty.
    fn gather(&mut self, stream: &mut RecvStream, cx: &mut Context<'_>) -> Result<(), RelayError> {
        while self.next.is_none() && !self.ended {
            match stream.poll_data(cx) {
                Poll::Ready(Some(chunk)) => {
                    let mut chunk = chunk?;
                    if chunk.len() >= SMALL_CHUNK {
                        self.next = Some(chunk);
                        continue;
                    }
                    self.owed += chunk.len();
                    while let Some(data) = self.deframer.next(&mut chunk)? {
                        self.backlog.extend_from_slice(&data);
                    }
                }
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    /// The gathered bytes, and the flow control to return once they are written.
    fn gathered(&mut self) -> (Bytes, usize) {
        (std::mem::take(&mut self.backlog).freeze(), std::mem::take(&mut self.owed))
    }
}

/// Relays from the stream to the socket.
pub(super) struct Inward<'a> {
    pub(super) side: Side,
    pub(super) stalls: &'a StallBound,
    pub(super) abort: &'a Arc<Abort>,
    pub(super) traffic: &'a Traffic,
}

impl Inward<'_> {
    /// Runs until the stream's end has been passed on as a half-close.
    pub(super) async fn run(
        self,
        mut socket: WriteHalf<'_>,
        mut stream: RecvStream,
    ) -> Result<(), RelayError> {
        let mut inbox = Inbox::default();
        loop {
            let (gathered, owed) = inbox.gathered();
            if owed > 0 {
                self.write_all(&mut socket, &gathered, &mut inbox, &mut stream).await?;
                stream.flow_control().release_capacity(owed)?;
                continue;
            }
            let chunk = match inbox.next.take() {
                Some(chunk) => Some(chunk),
                None if inbox.ended => None,
                None => stream.data().await.transpose()?,
            };
            let Some(mut chunk) = chunk else { break };
            let held = chunk.len();
            // Deframed before anything is written: chunks gathered meanwhile come after it.
            let mut pieces = std::mem::take(&mut inbox.pieces);
            while let Some(data) = inbox.deframer.next(&mut chunk)? {
                pieces.push(data);
            }
            for data in pieces.drain(..) {
                self.write_all(&mut socket, &data, &mut inbox, &mut stream).await?;
            }
            inbox.pieces = pieces;
            stream.flow_control().release_capacity(held)?;
        }
        inbox.deframer.finish()?;
        if self.side == Side::Server {
            let trailers = stream.trailers().await?.unwrap_or_default();
            match trailers.get(GRPC_STATUS) {
                Some(status) if status == "0" => {}
                Some(status) => {
                    return Err(RelayError::Status(printable(&format!("grpc-status {status:?}"), 32)));
                }
                None => return Err(RelayError::Status("no grpc-status".to_owned())),
            }
        }
        match SockRef::from(socket.as_ref()).shutdown(Shutdown::Write) {
            // The other direction reports the socket's error.
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(RelayError::Socket(error)),
            _ => Ok(()),
        }
    }

    async fn write_all(
        &self,
        socket: &mut WriteHalf<'_>,
        mut data: &[u8],
        inbox: &mut Inbox,
        stream: &mut RecvStream,
    ) -> Result<(), RelayError> {
        let mut ticket = None;
        while !data.is_empty() {
            let written = poll_fn(|cx| match Pin::new(&mut *socket).poll_write(cx, data) {
                Poll::Ready(written) => {
                    ticket = None;
                    Poll::Ready(written.map_err(RelayError::Socket))
                }
                Poll::Pending => {
                    ticket.get_or_insert_with(|| self.stalls.enter(self.abort));
                    match inbox.gather(stream, cx) {
                        Ok(()) => Poll::Pending,
                        Err(error) => Poll::Ready(Err(error)),
                    }
                }
            })
            .await?;
            if written == 0 {
                return Err(RelayError::Socket(io::ErrorKind::WriteZero.into()));
            }
            data = &data[written..];
            self.traffic.count_to_socket(written);
        }
        Ok(())
    }
}

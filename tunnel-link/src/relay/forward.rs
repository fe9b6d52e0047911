//! Forwards a tunnelled connection from one HTTP/2 stream to another, on a server that has the node, for the peer that
//! has the client. Segments, trailers and resets pass unchanged, and flow control is returned only for bytes that the
//! other stream has taken.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderValue, Response};

use super::GRPC_STATUS;
use super::error::{RelayError, Side};
use super::inward::well;
use super::outward::{send_error, stream_reset};
use super::stall::{Abort, StallBound};
use super::traffic::{Traffic, Waiting};
use crate::link::{Flow, Taken};
use crate::outcome::Outcome;

/// Pieces shorter than this (bytes) are copied together while the other stream is blocked: in h2 each takes about 250
/// bytes of bookkeeping.
const SMALL_PIECE: usize = 16 << 10;
/// Bytes up to which small pieces are copied together.
const RUN: usize = 64 << 10;

/// Parameters for forwarding a connection, besides its two streams.
#[derive(Debug)]
pub struct Forward<'a> {
    /// Path estimates of the link with the server that has the client.
    pub client: &'a Flow,
    /// Path estimates of the link with the agent.
    pub agent: &'a Flow,
    /// Limit on the bytes held for receivers that do not read.
    pub stalls: &'a StallBound,
    /// Ends this connection from outside.
    pub abort: &'a Arc<Abort>,
    /// Counts the bytes, including segment headers.
    pub traffic: &'a Traffic,
}

/// Reason for the early end of a forwarded connection.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The stream of the server that has the client failed.
    #[error("the other server's stream: {0}")]
    Client(#[source] RelayError),
    /// The agent's stream failed.
    #[error("{0}")]
    Agent(#[source] RelayError),
    /// The agent has not connected, and nothing was answered yet.
    #[error("{0}")]
    Dial(#[source] RelayError),
    /// Ended by [`Abort`].
    #[error("{1}")]
    Aborted(Outcome, &'static str),
}

impl Ended {
    /// Returns the outcome as reported here, in the middle.
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::Agent(error) | Self::Dial(error) => error.outcome(Side::Server),
            Self::Client(RelayError::Reset(Reason::ENHANCE_YOUR_CALM)) => Outcome::Stalled,
            Self::Client(_) => Outcome::ClientReset,
            Self::Aborted(outcome, _) => *outcome,
        }
    }

    /// Returns the reason for resetting the streams that are still open. A reset means the same on both.
    const fn reset_reason(&self) -> Reason {
        match self {
            Self::Agent(RelayError::Reset(reason)) | Self::Client(RelayError::Reset(reason)) => *reason,
            Self::Aborted(outcome, _) => outcome.reset_reason(),
            _ => Reason::CANCEL,
        }
    }
}

/// End of one direction without a failure.
enum Forwarded {
    /// Everything up to the stream's end was forwarded; this gRPC status came with it.
    All(Option<HeaderValue>),
    /// The receiver has answered in full and refuses further data (RFC 9113 section 8.1).
    Unwanted,
}

/// The stream at which a direction ended early, and the reason.
enum Cut {
    From(RelayError),
    To(RelayError),
}

impl Forward<'_> {
    /// Forwards a connection until both directions have ended: `body` to `send`, and the response that `answer` yields
    /// to `respond`. Returns the outcome at the target.
    ///
    /// # Errors
    /// Returns the reason for an early end. Streams that are still open are then reset, unless nothing was answered
    /// yet: then `respond` can still report it.
    pub async fn run(
        self,
        (mut body, respond): (RecvStream, &mut SendResponse<Bytes>),
        send: &mut SendStream<Bytes>,
        answer: impl Future<Output = Result<Response<RecvStream>, RelayError>>,
    ) -> Result<Outcome, Ended> {
        let mut answering = None;
        let ended = {
            tokio::select! {
                biased;
                (outcome, reason) = self.abort.triggered() => Err(Ended::Aborted(outcome, reason)),
                // Build the futures where they are polled: moving a future doubles its memory.
                both = async {
                    tokio::try_join!(
                        self.up(&mut body, send),
                        self.down(answer, respond, &mut answering),
                    )
                } => both,
            }
        };
        match ended {
            Ok((_, Forwarded::All(_))) => Ok(Outcome::Ok),
            Ok((_, Forwarded::Unwanted)) => Ok(Outcome::ClientReset),
            Err(ended) => {
                let reason = ended.reset_reason();
                send.send_reset(reason);
                match (&mut answering, &ended) {
                    // Its trailers say this, and come after everything that the target had sent; see `TARGET_RESET`.
                    (Some(_), Ended::Agent(RelayError::TargetReset | RelayError::Status(_)))
                    | (None, Ended::Dial(_)) => {}
                    (Some(answering), _) => answering.send_reset(reason),
                    (None, _) => respond.send_reset(reason),
                }
                Err(ended)
            }
        }
    }

    /// Forwards from the other server to the agent.
    async fn up(&self, body: &mut RecvStream, send: &mut SendStream<Bytes>) -> Result<Forwarded, Ended> {
        let passed = |bytes| self.traffic.count_from_socket(bytes);
        let to = (send, &self.traffic.for_tunnel);
        self.direction((body, self.client), to, passed).await.map_err(|cut| match cut {
            Cut::From(error) => Ended::Client(error),
            Cut::To(error) => Ended::Agent(error),
        })
    }

    /// Forwards from the agent, once it has answered, to the other server. Leaves that stream in `answering`.
    async fn down(
        &self,
        answer: impl Future<Output = Result<Response<RecvStream>, RelayError>>,
        respond: &mut SendResponse<Bytes>,
        answering: &mut Option<SendStream<Bytes>>,
    ) -> Result<Forwarded, Ended> {
        let answer = tokio::select! {
            answer = answer => answer.map_err(Ended::Dial)?,
            reset = poll_fn(|cx| respond.poll_reset(cx)) => {
                return Err(Ended::Client(reset.map_or_else(RelayError::from, RelayError::Reset)));
            }
        };
        let (head, mut from) = answer.into_parts();
        let to = respond.send_response(Response::from_parts(head, ()), false);
        let to = answering.insert(to.map_err(|error| Ended::Client(error.into()))?);
        let passed = |bytes| self.traffic.count_to_socket(bytes);
        let to = (to, &self.traffic.for_socket);
        let ended = self.direction((&mut from, self.agent), to, passed).await.map_err(|cut| match cut {
            Cut::From(error) => Ended::Agent(error),
            Cut::To(error) => Ended::Client(error),
        })?;
        if let Forwarded::All(status) = &ended {
            // At once: the other server resets its stream when it reads this status, possibly before the agent does.
            well(status.as_ref()).map_err(Ended::Agent)?;
        }
        Ok(ended)
    }

    /// Forwards everything, including the end, from `from` (a stream of the link of `flow`) to `to`. `waiting` shows
    /// when `to` is blocked; `passed` is called with the bytes that it has taken.
    async fn direction(
        &self,
        (from, flow): (&mut RecvStream, &Flow),
        (to, waiting): (&mut SendStream<Bytes>, &Waiting),
        passed: impl Fn(usize),
    ) -> Result<Forwarded, Cut> {
        let (mut backlog, mut taken) = (Backlog::default(), Taken::default());
        loop {
            let chunk = match backlog.next() {
                Some(chunk) => chunk,
                None if backlog.ended => break,
                None => tokio::select! {
                    biased;
                    reset = poll_fn(|cx| to.poll_reset(cx)) => {
                        return match reset {
                            Ok(Reason::NO_ERROR) => Ok(Forwarded::Unwanted),
                            Ok(reason) => Err(Cut::To(RelayError::Reset(reason))),
                            Err(error) => Err(Cut::To(error.into())),
                        };
                    }
                    chunk = from.data() => match chunk {
                        Some(chunk) => chunk.map_err(|error| Cut::From(error.into()))?,
                        None => break,
                    },
                },
            };
            let length = chunk.len();
            match self.send(from, (&mut *to, waiting), chunk, &mut backlog).await {
                Err(Cut::To(RelayError::Reset(Reason::NO_ERROR))) => return Ok(Forwarded::Unwanted),
                sent => sent?,
            }
            taken.add(length, flow);
            from.flow_control().release_capacity(length).map_err(|error| Cut::From(error.into()))?;
            passed(length);
        }
        let trailers = from.trailers().await.map_err(|error| Cut::From(error.into()))?;
        let status = trailers.as_ref().and_then(|trailers| trailers.get(GRPC_STATUS)).cloned();
        let ended = match trailers {
            Some(trailers) => to.send_trailers(trailers),
            None => to.send_data(Bytes::new(), true),
        };
        match ended {
            Ok(()) => Ok(Forwarded::All(status)),
            Err(error) => match send_error(to, error).await {
                RelayError::Reset(Reason::NO_ERROR) => Ok(Forwarded::Unwanted),
                error => Err(Cut::To(error)),
            },
        }
    }

    /// Sends a chunk to `to`. While `to` is blocked, watches `from` for a reset and holds the data that arrives.
    async fn send(
        &self,
        from: &mut RecvStream,
        (to, waiting): (&mut SendStream<Bytes>, &Waiting),
        mut chunk: Bytes,
        backlog: &mut Backlog,
    ) -> Result<(), Cut> {
        let since = Instant::now();
        let mut ticket = None;
        to.reserve_capacity(chunk.len());
        while !chunk.is_empty() {
            let capacity = to.capacity();
            if capacity > 0 {
                if let Err(error) = to.send_data(chunk.split_to(capacity.min(chunk.len())), false) {
                    return Err(Cut::To(send_error(to, error).await));
                }
                ticket = None;
                continue;
            }
            let changed = poll_fn(|cx| {
                if let Poll::Ready(changed) = to.poll_capacity(cx) {
                    return Poll::Ready(Ok(changed));
                }
                if let Err(error) = backlog.gather(from, cx) {
                    return Poll::Ready(Err(Cut::From(error.into())));
                }
                let bytes = from.flow_control().used_capacity();
                match &mut ticket {
                    None => ticket = Some(self.stalls.enter(self.abort, waiting, cx.waker(), bytes)),
                    Some(ticket) => ticket.update(cx.waker(), bytes, || Some(since.elapsed())),
                }
                Poll::Pending
            });
            match changed.await? {
                Some(capacity) => capacity.map(drop).map_err(|error| Cut::To(error.into()))?,
                None => return Err(Cut::To(stream_reset(to).await)),
            }
        }
        Ok(())
    }
}

/// Data received while the other stream was blocked.
#[derive(Default)]
struct Backlog {
    pieces: VecDeque<Bytes>,
    run: BytesMut,
    ended: bool,
}

impl Backlog {
    fn gather(&mut self, from: &mut RecvStream, cx: &mut Context<'_>) -> Result<(), h2::Error> {
        while !self.ended {
            match from.poll_data(cx) {
                Poll::Ready(Some(chunk)) => self.push(chunk?),
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    fn push(&mut self, chunk: Bytes) {
        let small = chunk.len() < SMALL_PIECE;
        if small {
            self.run.extend_from_slice(&chunk);
        }
        if !self.run.is_empty() && (!small || self.run.len() >= RUN) {
            self.pieces.push_back(self.run.split().freeze());
        }
        if !small {
            self.pieces.push_back(chunk);
        }
    }

    fn next(&mut self) -> Option<Bytes> {
        self.pieces.pop_front().or_else(|| (!self.run.is_empty()).then(|| self.run.split().freeze()))
    }
}

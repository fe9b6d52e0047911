//! Passes a carried connection on from one HTTP/2 stream to another: at a server that has the node, for one that has the
//! client. Segments, trailers and resets pass as they are, and flow control is returned only for bytes that the other
//! stream has taken.

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
use super::outward::{send_error, stream_reset};
use super::stall::{Abort, StallBound};
use super::traffic::{Traffic, Waiting};
use crate::link::{Flow, Taken};
use crate::outcome::Outcome;

/// Pieces shorter than this (bytes) are copied together while the other stream takes nothing: in h2 each takes some 250
/// bytes of bookkeeping.
const SMALL_PIECE: usize = 16 << 10;
/// Bytes up to which small pieces are copied together.
const RUN: usize = 64 << 10;

/// What passing a connection on needs besides its two streams.
#[derive(Debug)]
pub struct Forward<'a> {
    /// What is known about the path of the link with the server that has the client.
    pub client: &'a Flow,
    /// The same of the link with the agent.
    pub agent: &'a Flow,
    /// The bound on what is held for receivers that do not read.
    pub stalls: &'a StallBound,
    /// Ends this connection from outside.
    pub abort: &'a Arc<Abort>,
    /// Counts the bytes, with the segments' headers.
    pub traffic: &'a Traffic,
}

/// Why a connection that was passed on ended early.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// At the stream of the server that has the client.
    #[error("the other server's stream: {0}")]
    Client(#[source] RelayError),
    /// At the agent's stream.
    #[error("{0}")]
    Agent(#[source] RelayError),
    /// The agent has not connected, and nothing was answered yet.
    #[error("{0}")]
    Dial(#[source] RelayError),
    /// By [`Abort`].
    #[error("{1}")]
    Aborted(Outcome, &'static str),
}

impl Ended {
    /// What it is called here, in the middle.
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::Agent(error) | Self::Dial(error) => error.outcome(Side::Server),
            Self::Client(RelayError::Reset(Reason::ENHANCE_YOUR_CALM)) => Outcome::Stalled,
            Self::Client(_) => Outcome::ClientReset,
            Self::Aborted(outcome, _) => *outcome,
        }
    }

    /// What the streams that are still open are reset with: a reset means the same on both.
    const fn reset_reason(&self) -> Reason {
        match self {
            Self::Agent(RelayError::Reset(reason)) | Self::Client(RelayError::Reset(reason)) => *reason,
            Self::Aborted(outcome, _) => outcome.reset_reason(),
            _ => Reason::CANCEL,
        }
    }
}

/// How one direction ended without a failure.
enum Forwarded {
    /// With everything up to the stream's end, and the gRPC status that came with it.
    All(Option<HeaderValue>),
    /// The receiver has answered in full and takes no more (RFC 9113 section 8.1).
    Unwanted,
}

/// Why a direction ended early, and at which stream.
enum Cut {
    From(RelayError),
    To(RelayError),
}

impl Forward<'_> {
    /// Passes a connection on until both directions have ended: `body` to `send`, and what `answer` gives to `respond`.
    /// Returns how the target ended it.
    ///
    /// # Errors
    /// Whatever ended it early. Both streams are then reset, unless nothing was answered yet: `respond` can still say why.
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
                // Built where they are polled: moving a future doubles its memory.
                both = async {
                    tokio::try_join!(
                        self.up(&mut body, send),
                        self.down(answer, respond, &mut answering),
                    )
                } => both,
            }
        };
        match ended {
            Ok((_, Forwarded::All(Some(status)))) if status == "0" => Ok(Outcome::Ok),
            // After everything that it had sent; see `TARGET_RESET`.
            Ok((_, Forwarded::All(_))) => Ok(Outcome::TargetReset),
            Ok((_, Forwarded::Unwanted)) => Ok(Outcome::ClientReset),
            Err(ended) => {
                let reason = ended.reset_reason();
                send.send_reset(reason);
                match (&mut answering, &ended) {
                    (Some(answering), _) => answering.send_reset(reason),
                    (None, Ended::Dial(_)) => {}
                    (None, _) => respond.send_reset(reason),
                }
                Err(ended)
            }
        }
    }

    /// From the other server to the agent.
    async fn up(&self, body: &mut RecvStream, send: &mut SendStream<Bytes>) -> Result<Forwarded, Ended> {
        let passed = |bytes| self.traffic.count_from_socket(bytes);
        let to = (send, &self.traffic.for_tunnel);
        self.direction((body, self.client), to, passed).await.map_err(|cut| match cut {
            Cut::From(error) => Ended::Client(error),
            Cut::To(error) => Ended::Agent(error),
        })
    }

    /// From the agent, once it has answered, to the other server, which is left in `answering`.
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
        self.direction((&mut from, self.agent), to, passed).await.map_err(|cut| match cut {
            Cut::From(error) => Ended::Agent(error),
            Cut::To(error) => Ended::Client(error),
        })
    }

    /// Passes everything from `from`, a stream of the link of `flow`, on to `to`, with its end; `waiting` shows when `to` takes
    /// nothing, and `passed` is told of bytes that it has taken.
    async fn direction(
        &self,
        (from, flow): (&mut RecvStream, &Flow),
        (to, waiting): (&mut SendStream<Bytes>, &Waiting),
        passed: impl Fn(usize),
    ) -> Result<Forwarded, Cut> {
        let (mut held, mut taken) = (Held::default(), Taken::default());
        loop {
            let chunk = match held.next() {
                Some(chunk) => chunk,
                None if held.ended => break,
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
            match self.send(from, (&mut *to, waiting), chunk, &mut held).await {
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

    /// Hands a chunk to `to`. While that takes nothing, `from` is watched for a reset, and what it has is held here.
    async fn send(
        &self,
        from: &mut RecvStream,
        (to, waiting): (&mut SendStream<Bytes>, &Waiting),
        mut chunk: Bytes,
        held: &mut Held,
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
                if let Err(error) = held.gather(from, cx) {
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
                None => return Err(Cut::To(RelayError::Reset(stream_reset(to).await))),
            }
        }
        Ok(())
    }
}

/// What came while the other stream took nothing.
#[derive(Default)]
struct Held {
    pieces: VecDeque<Bytes>,
    run: BytesMut,
    ended: bool,
}

impl Held {
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

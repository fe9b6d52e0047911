//! Forwards a tunnelled connection from one HTTP/2 stream to another, on a server that has the node, for the peer that
//! has the client. Segments, trailers and resets pass unchanged, and flow control is returned only for bytes that the
//! other stream has taken. Of the other link it takes the same turns and the same share as data from a socket.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderValue, Response};

use super::GRPC_STATUS;
use super::error::{RelayError, Sent, Side};
use super::inward::{PendingWrite, hold, well};
use super::outward::{Room, SMALL_SEGMENT, largest_segment, send_error, stream_reset};
use super::stall::{Abort, StallBound};
use super::traffic::{Traffic, Waiting};
use crate::link::{Bulk, Flow, Taken};
use crate::outcome::Outcome;

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
            Ok((_, Sent::All)) => Ok(Outcome::Ok),
            Ok((_, Sent::Unwanted)) => Ok(Outcome::ClientReset),
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
    async fn up(&self, body: &mut RecvStream, send: &mut SendStream<Bytes>) -> Result<Sent, Ended> {
        let passed = |bytes| self.traffic.count_from_socket(bytes);
        let to = (send, self.agent, &self.traffic.for_tunnel);
        match self.direction((body, self.client), to, passed).await {
            Ok(_) => Ok(Sent::All),
            Err(Cut::From(error)) => Err(Ended::Client(error)),
            Err(Cut::To(error)) => error.unless_unwanted().map_err(Ended::Agent),
        }
    }

    /// Forwards from the agent, once it has answered, to the other server. Leaves that stream in `answering`.
    async fn down(
        &self,
        answer: impl Future<Output = Result<Response<RecvStream>, RelayError>>,
        respond: &mut SendResponse<Bytes>,
        answering: &mut Option<SendStream<Bytes>>,
    ) -> Result<Sent, Ended> {
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
        let to = (to, self.client, &self.traffic.for_socket);
        match self.direction((&mut from, self.agent), to, passed).await {
            // At once: the other server resets its stream when it reads this status, possibly before the agent does.
            Ok(status) => well(status.as_ref()).map(|()| Sent::All).map_err(Ended::Agent),
            Err(Cut::From(error)) => Err(Ended::Agent(error)),
            Err(Cut::To(error)) => error.unless_unwanted().map_err(Ended::Client),
        }
    }

    /// Forwards everything, including the end, from `from` to `to`, each with the path estimates of its link. `waiting`
    /// shows when `to` is blocked; `passed` is called with the bytes that it has taken. Returns the gRPC status that came
    /// last.
    async fn direction(
        &self,
        (from, from_flow): (&mut RecvStream, &Flow),
        (to, to_flow, waiting): (&mut SendStream<Bytes>, &Flow, &Waiting),
        passed: impl Fn(usize),
    ) -> Result<Option<HeaderValue>, Cut> {
        let (mut backlog, mut taken) = (Backlog::default(), Taken::default());
        let mut bulk = Bulk::new(to_flow);
        loop {
            let chunk = match backlog.held.pop_front() {
                Some(next) => Bytes::from(next.data),
                None if backlog.ended => break,
                None => tokio::select! {
                    biased;
                    reset = poll_fn(|cx| to.poll_reset(cx)) => {
                        return Err(Cut::To(reset.map_or_else(RelayError::from, RelayError::Reset)));
                    }
                    chunk = from.data() => match chunk {
                        Some(chunk) => chunk.map_err(|error| Cut::From(error.into()))?,
                        None => break,
                    },
                },
            };
            let length = chunk.len();
            // As a stream counts whose socket fills a small read.
            bulk.set(length >= SMALL_SEGMENT);
            self.send(from, (&mut *to, to_flow, waiting), chunk, &mut backlog).await?;
            taken.add(length, from_flow);
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
            Ok(()) => Ok(status),
            Err(error) => Err(Cut::To(send_error(to, error).await)),
        }
    }

    /// Sends a chunk to `to`, in turns of its link, that of `flow`. While `to` is blocked, watches `from` for a reset and
    /// holds the data that arrives.
    async fn send(
        &self,
        from: &mut RecvStream,
        (to, flow, waiting): (&mut SendStream<Bytes>, &Flow, &Waiting),
        mut chunk: Bytes,
        backlog: &mut Backlog,
    ) -> Result<(), Cut> {
        let since = Instant::now();
        let mut ticket = None;
        while !chunk.is_empty() {
            let (room, turn) = (Room::new(flow), chunk.len().min(largest_segment(flow.turn())));
            to.reserve_capacity(room.wanted(turn));
            let capacity = to.capacity();
            if capacity >= room.wanted(turn.min(SMALL_SEGMENT)) {
                if let Err(error) = to.send_data(chunk.split_to(room.of(capacity, turn)), false) {
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
        // It would be part of the link's window while nothing is sent.
        to.reserve_capacity(0);
        Ok(())
    }
}

/// Data received while the other stream was blocked.
#[derive(Default)]
struct Backlog {
    held: VecDeque<PendingWrite>,
    ended: bool,
}

impl Backlog {
    fn gather(&mut self, from: &mut RecvStream, cx: &mut Context<'_>) -> Result<(), h2::Error> {
        while !self.ended {
            match from.poll_data(cx) {
                Poll::Ready(Some(chunk)) => hold(&mut self.held, chunk?, true),
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use h2::client::ResponseFuture;
    use http::Request;
    use tokio::sync::mpsc;
    use tokio::time::{sleep, timeout};
    use tokio_util::sync::CancellationToken;
    use tunnel_runtime::memory::link_queue;

    use super::*;
    use crate::link::{SERVER_STALL_BYTES, SMALLEST_PIECE, STREAM_WINDOW, client_builder, server_builder};

    const PATIENCE: Duration = Duration::from_secs(30);
    /// The largest frame of a near server.
    const FRAME: usize = 256 << 10;
    const FRAMES: usize = 3;
    /// Time after which a blocked stream has sent all that it may.
    const BLOCKED: Duration = Duration::from_millis(200);
    /// Bytes between the two ends of a link.
    const BUFFER: usize = 64 << 10;

    /// A stream of a link in memory, at both ends. The accepting end stops reading when `stopped` is cancelled.
    async fn opened(
        stopped: CancellationToken,
    ) -> (SendStream<Bytes>, ResponseFuture, RecvStream, SendResponse<Bytes>) {
        let (near, far) = tokio::io::duplex(BUFFER);
        let (streams, mut accepted) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut connection = server_builder().handshake::<_, Bytes>(far).await.unwrap();
            tokio::select! {
                biased;
                () = stopped.cancelled() => pending().await,
                () = async {
                    while let Some(Ok(stream)) = connection.accept().await {
                        let _ = streams.send(stream);
                    }
                } => {}
            }
        });
        let (send, connection) = client_builder().handshake::<_, Bytes>(near).await.unwrap();
        tokio::spawn(connection);
        let mut send = send.ready().await.unwrap();
        let (response, stream) = send.send_request(Request::new(()), false).unwrap();
        let (request, respond) = accepted.recv().await.unwrap();
        (stream, response, request.into_body(), respond)
    }

    /// Forwards an upload of large frames along the link of `flow` until `done` has ended, which gets the agent's end.
    async fn upload<T>(
        flow: &Flow,
        traffic: &Traffic,
        is_stopped: bool,
        done: impl AsyncFnOnce(RecvStream) -> T,
    ) -> T {
        let stopped = CancellationToken::new();
        let (mut client, _response, body, mut respond) = opened(CancellationToken::new()).await;
        let (mut send, response, agent, _respond) = opened(stopped.clone()).await;
        if is_stopped {
            stopped.cancel();
        }
        for _ in 0..FRAMES {
            client.send_data(Bytes::from_static(&[7; FRAME]), false).unwrap();
        }
        let (of_client, abort) = (Flow::default(), Arc::default());
        let stalls = StallBound::new(SERVER_STALL_BYTES, STREAM_WINDOW as usize);
        let forward = Forward { client: &of_client, agent: flow, stalls: &stalls, abort: &abort, traffic };
        let answer = async { Ok(response.await?) };
        tokio::select! {
            ended = forward.run((body, &mut respond), &mut send, answer) => panic!("{ended:?}"),
            done = timeout(PATIENCE, done(agent)) => done.expect("in time"),
        }
    }

    #[tokio::test]
    async fn a_large_frame_takes_turns_with_other_streams() {
        let (flow, traffic) = (Flow::default(), Traffic::default());
        let frames = upload(&flow, &traffic, false, async |mut agent: RecvStream| {
            let mut frames = Vec::<usize>::new();
            while frames.iter().sum::<usize>() < FRAMES * FRAME {
                let frame = agent.data().await.unwrap().unwrap().len();
                agent.flow_control().release_capacity(frame).unwrap();
                frames.push(frame);
            }
            frames
        })
        .await;
        assert!(frames.iter().all(|frame| *frame <= flow.turn()), "{frames:?}");
    }

    #[tokio::test]
    async fn a_link_that_takes_nothing_gets_no_more_than_a_share() {
        let (flow, traffic) = (Flow::default(), Traffic::default());
        // So many that the share is the smallest.
        let mut others: Vec<_> = (0..link_queue() / SMALLEST_PIECE).map(|_| Bulk::new(&flow)).collect();
        for other in &mut others {
            other.set(true);
        }
        upload(&flow, &traffic, true, async |_agent: RecvStream| {
            while traffic.for_tunnel.now().is_none_or(|(time, _)| time <= BLOCKED) {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        let passed = traffic.from_socket();
        assert!(passed < 2 * BUFFER as u64, "{passed} bytes count as sent though nothing took them");
    }
}

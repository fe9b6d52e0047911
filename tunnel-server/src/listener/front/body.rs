//! Bodies on their way from the target to the client.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use tokio_util::task::AbortOnDropHandle;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::PipeStatus;

use crate::listener::access_log::AccessLogGuard;
use crate::listener::socket::{Faults, Watched};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of an answer to the client.
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// State of a request until it is over: its access log line, and its connection to the target. Dropping it earlier
/// resets that connection.
pub(super) struct Exchange {
    pub(super) record: AccessLogGuard,
    pub(super) pipe: PipeStatus,
    pub(super) connection: AbortOnDropHandle<()>,
    pub(super) faults: Option<Faults>,
}

impl Exchange {
    /// Called when the whole answer has been forwarded: the connection to the target ends by itself.
    pub(super) fn complete(self) {
        let Self { record, connection, .. } = self;
        connection.detach();
        record.end(Outcome::Ok, &"");
    }

    /// Called when the target, or the way to it, broke off.
    pub(super) fn broken(self, error: &dyn std::fmt::Display) {
        let Self { record, pipe, faults, .. } = self;
        if let Some(faults) = faults {
            faults.report();
        }
        let failure = pipe.failure();
        pipe.abort(Outcome::TargetReset);
        match failure {
            Some((outcome, reason)) if outcome != Outcome::ClientReset => record.end(outcome, &reason),
            _ => record.end(Outcome::TargetReset, error),
        }
    }

    /// Returns a wait until the client has what came before the failure.
    fn last_bytes(&self) -> LastBytes {
        let faults = self.faults.clone();
        let flushed = async move {
            if let Some(faults) = faults {
                faults.flushed().await;
            }
        };
        Box::pin(self.record.unless_ended(flushed))
    }

    /// Called when an upgraded connection broke at either end.
    pub(super) async fn severed(self, error: &io::Error, client: &Watched) {
        match self.pipe.failure() {
            Some((outcome, _)) if outcome != Outcome::ClientReset => {
                // A reset discards unsent data.
                self.record.unless_ended(client.flushed()).await;
                self.broken(error);
            }
            _ => {
                if let Some(faults) = &self.faults {
                    faults.report();
                }
                self.abandoned();
            }
        }
    }

    /// Called when the client has gone.
    pub(super) fn abandoned(self) {
        let Self { record, pipe, .. } = self;
        match pipe.failure() {
            Some((outcome, reason)) => record.end(outcome, &reason),
            None => record.end(Outcome::ClientReset, &"the client left before the end of the answer"),
        }
        pipe.abort(Outcome::ClientReset);
    }
}

type LastBytes = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The body of a target's answer. hyper drops it early when the client has left.
pub(super) struct AnswerBody {
    body: Incoming,
    exchange: Option<Exchange>,
    /// Set once the target, or the way to it, has broken off: hyper drops what it holds at the error.
    broken: Option<(hyper::Error, LastBytes)>,
}

impl AnswerBody {
    pub(super) fn new(body: Incoming, exchange: Exchange) -> Self {
        let mut answer = Self { body, exchange: Some(exchange), broken: None };
        answer.note_end();
        answer
    }

    fn note_end(&mut self) {
        if self.body.is_end_stream()
            && let Some(exchange) = self.exchange.take()
        {
            exchange.complete();
        }
    }

    /// Ends the exchange if it is broken, and returns the failure.
    fn fail(&mut self) -> Option<BoxError> {
        let (error, _) = self.broken.take()?;
        if let Some(exchange) = self.exchange.take() {
            exchange.broken(&tunnel_runtime::error::chain(&error));
        }
        Some(error.into())
    }
}

impl hyper::body::Body for AnswerBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some((_, last_bytes)) = &mut self.broken {
            ready!(last_bytes.as_mut().poll(cx));
            return Poll::Ready(self.fail().map(Err));
        }
        match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => {
                self.note_end();
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                let Some(exchange) = &self.exchange else { return Poll::Ready(Some(Err(error.into()))) };
                self.broken = Some((error, exchange.last_bytes()));
                self.as_mut().poll_frame(cx)
            }
            None => {
                if let Some(exchange) = self.exchange.take() {
                    exchange.complete();
                }
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        if self.fail().is_none()
            && let Some(exchange) = self.exchange.take()
        {
            exchange.abandoned();
        }
    }
}

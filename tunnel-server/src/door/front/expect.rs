//! `Expect: 100-continue` (RFC 9110 section 10.1.1): the client's body is asked for once the target asks for it, so that a
//! target which refuses the request gets, and the client sends, nothing of it.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::oneshot;

use super::body::BoxError;

/// How long a target may take that does not know the expectation.
const PATIENCE: Duration = Duration::from_secs(1);

/// A request's body. hyper answers the client's expectation when it is read first.
pub(super) struct RequestBody {
    body: Incoming,
    gate: Option<Gate>,
}

struct Gate {
    opened: Option<oneshot::Receiver<()>>,
    patience: Pin<Box<tokio::time::Sleep>>,
}

impl RequestBody {
    /// That is sent at once.
    pub(super) fn at_once(body: Incoming) -> Self {
        Self { body, gate: None }
    }

    /// That waits until the sender is used, or a moment.
    pub(super) fn expected(body: Incoming) -> (Self, oneshot::Sender<()>) {
        let (open, opened) = oneshot::channel();
        let gate = Gate { opened: Some(opened), patience: Box::pin(tokio::time::sleep(PATIENCE)) };
        (Self { body, gate: Some(gate) }, open)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(gate) = &mut self.gate {
            let asked = match gate.opened.as_mut().map(|opened| Pin::new(opened).poll(cx)) {
                Some(Poll::Ready(Ok(()))) => true,
                // Without a sender there will be no sign: only the time counts then.
                Some(Poll::Ready(Err(_))) => {
                    gate.opened = None;
                    false
                }
                _ => false,
            };
            if !asked && gate.patience.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.gate = None;
        }
        Pin::new(&mut self.body).poll_frame(cx).map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

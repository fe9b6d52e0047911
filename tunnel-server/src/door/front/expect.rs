//! `Expect: 100-continue` (RFC 9110 section 10.1.1): this server asks for the client's body once the target asks for
//! it. If the target refuses the request, the client sends nothing of the body, and the target gets nothing.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::oneshot;

use super::body::BoxError;

/// Maximum wait for a target that does not know the expectation.
const PATIENCE: Duration = Duration::from_secs(1);

/// The body of a request. hyper answers the client's expectation when the body is first read.
pub(super) struct RequestBody {
    body: Incoming,
    gate: Option<Gate>,
}

struct Gate {
    opened: Option<oneshot::Receiver<()>>,
    patience: Pin<Box<tokio::time::Sleep>>,
}

impl RequestBody {
    /// Creates a body that is sent at once.
    pub(super) fn at_once(body: Incoming) -> Self {
        Self { body, gate: None }
    }

    /// Creates a body that waits until the sender is used, or for a short time.
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
                // Without a sender there will be no signal, and only the time counts.
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

//! `Expect: 100-continue` (RFC 9110 section 10.1.1): this server asks for the client's body once the target asks for
//! it. If the target refuses the request, the client sends nothing of the body, and the target gets nothing.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, StatusCode, header};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::oneshot;

use super::body::BoxError;

/// Maximum wait for a target that does not know the expectation.
const PATIENCE: Duration = Duration::from_secs(1);

/// The body of a request. hyper answers the client's expectation when the body is first read.
pub(super) struct RequestBody {
    body: Incoming,
    /// `None`: it is sent at once.
    wait: Option<ContinueWait>,
}

/// The wait for the target's 100, before the body is read: until the sender is used, or for a short time.
struct ContinueWait {
    opened: Option<oneshot::Receiver<()>>,
    patience: Pin<Box<tokio::time::Sleep>>,
}

/// Returns the request to the target. With an expectation, its body waits for the target's 100.
pub(super) fn request(head: Parts, body: Incoming) -> Request<RequestBody> {
    let expects = head.headers.get(header::EXPECT);
    let expects = expects.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    if !expects || body.is_end_stream() {
        return Request::from_parts(head, RequestBody { body, wait: None });
    }
    let (open, opened) = oneshot::channel();
    let wait = ContinueWait { opened: Some(opened), patience: Box::pin(tokio::time::sleep(PATIENCE)) };
    let mut request = Request::from_parts(head, RequestBody { body, wait: Some(wait) });
    let open = parking_lot::Mutex::new(Some(open));
    hyper::ext::on_informational(&mut request, move |response| {
        let open = open.lock().take();
        if let Some(open) = open.filter(|_| response.status() == StatusCode::CONTINUE) {
            // The request may be over already.
            let _ = open.send(());
        }
    });
    request
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(wait) = &mut self.wait {
            let asked = match wait.opened.as_mut().map(|opened| Pin::new(opened).poll(cx)) {
                Some(Poll::Ready(Ok(()))) => true,
                // Without a sender there will be no signal, and only the time counts.
                Some(Poll::Ready(Err(_))) => {
                    wait.opened = None;
                    false
                }
                _ => false,
            };
            if !asked && wait.patience.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.wait = None;
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

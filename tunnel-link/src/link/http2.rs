//! HTTP/2 connection of a link, which announces larger windows as it learns about its path.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use tokio::io::{AsyncRead, AsyncWrite};

use super::Flow;

/// A stream that the client of the link has opened.
pub type Accepted = (Request<RecvStream>, SendResponse<Bytes>);

/// Drives the client end until the link ends. In its own task, relayed bytes wake nothing else.
pub fn drive<T: AsyncRead + AsyncWrite + Unpin>(
    mut connection: h2::client::Connection<T, Bytes>,
    flow: Arc<Flow>,
) -> impl Future<Output = Result<(), h2::Error>> {
    poll_fn(move |cx| {
        flow.poll_window(cx.waker(), |window| connection.set_initial_window_size(window));
        Pin::new(&mut connection).poll(cx)
    })
}

/// Waits for the next stream at the server end, and drives the connection meanwhile.
pub async fn accept<T: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut h2::server::Connection<T, Bytes>,
    flow: &Flow,
) -> Option<Result<Accepted, h2::Error>> {
    poll_fn(|cx| {
        flow.poll_window(cx.waker(), |window| connection.set_initial_window_size(window));
        connection.poll_accept(cx)
    })
    .await
}

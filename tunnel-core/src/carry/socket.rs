//! A carried connection's socket: its options, and how it closes.
//!
//! A failure must never look like an end of file, which could be taken for a complete answer. So the socket is set to
//! close with a TCP reset before anything can fail, and a connection that both directions have ended well takes that
//! back. A cancelled task and a killed process reset their connections too.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::link;
use crate::net::refine;
use crate::tcp_info::unacknowledged;

/// Unsent bytes in the kernel above which the socket is not written to: bounds the kernel memory held for a receiver
/// that does not read.
const NOTSENT_LOWAT: u32 = 256 << 10;
/// How long a carried connection may be idle before the first keepalive probe.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
/// How long a client may read none of the last bytes before its connection is reset without them.
const FLUSH_PATIENCE: Duration = Duration::from_secs(10);

/// Sets the options of a carried connection's socket, on either end, and [`reset_on_drop`]. What is set on a listener
/// passes to the sockets that it accepts.
pub fn prepare_socket(socket: &impl AsFd) {
    reset_on_drop(socket);
    let socket = SockRef::from(socket);
    refine("TCP_NODELAY", socket.set_tcp_nodelay(true));
    refine("SO_KEEPALIVE", socket.set_tcp_keepalive(&link::keepalive().with_time(KEEPALIVE_TIME)));
    refine("TCP_NOTSENT_LOWAT", socket.set_tcp_notsent_lowat(NOTSENT_LOWAT));
}

/// Makes the socket's close a TCP RST.
pub fn reset_on_drop(socket: &impl AsFd) {
    linger(socket, Some(Duration::ZERO));
}

/// Takes [`reset_on_drop`] back: the socket's close is an end of file.
pub fn end_on_drop(socket: &impl AsFd) {
    linger(socket, None);
}

/// Waits until the peer's kernel has everything that was written, because a reset discards what was not sent. Gives up
/// when nothing moves for [`FLUSH_PATIENCE`].
pub async fn flushed(socket: &impl AsFd) {
    let mut last = (0, 0);
    let mut moved = Instant::now();
    let mut pause = Duration::from_millis(1);
    // The kernel has no event for it.
    loop {
        let now = match unacknowledged(socket) {
            Ok(now) => now,
            Err(error) => return tracing::debug!(%error, "cannot tell what a socket has sent"),
        };
        if now == (0, 0) || moved.elapsed() > FLUSH_PATIENCE {
            return;
        }
        if now != last {
            (last, moved) = (now, Instant::now());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Ends when the socket has failed. An end of file is no failure: the peer may only be done with sending.
pub async fn lost(socket: &TcpStream) -> io::Error {
    if socket.ready(Interest::ERROR).await.is_ok()
        && let Ok(Some(error)) | Err(error) = socket.take_error()
    {
        return error;
    }
    // Somebody else was told of it.
    std::future::pending().await
}

/// The one option of these that a promise rests on: without it a failure looks like an end of file. Every kernel has it; in a
/// sandbox that refuses it, the log says so.
fn linger(socket: &impl AsFd, time: Option<Duration>) {
    refine("SO_LINGER", SockRef::from(socket).set_linger(time));
}

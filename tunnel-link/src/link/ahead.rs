//! Reads ahead of h2 while a link cannot be written to.
//!
//! h2 reads no frame while it has to send a PING, or the answer to one, and a frame before that is partly written. Two ends in
//! that state wait for each other until the socket buffers take the rest of one frame, which they may never do.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};

use super::settings::{LARGEST_PIECE, MAX_FRAME};

/// The rest of a frame, one more that h2 may put before the answer, and the bytes in the kernel below which a socket that was
/// full is writable again.
const ENOUGH: usize = 2 * MAX_FRAME as usize + LARGEST_PIECE;
/// Bytes of one read.
const CHUNK: usize = 4096;

/// Bytes that were read ahead, and the end of the stream or its error, which comes after them.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    bytes: BytesMut,
    end: Option<io::Result<()>>,
}

impl Ahead {
    /// Reads what has arrived, up to a limit, and returns the number of bytes. Wakes the task if there is anything new: it has seen
    /// that nothing had arrived.
    pub(super) fn fill<S: AsyncRead>(&mut self, mut stream: Pin<&mut S>, cx: &mut Context<'_>) -> usize {
        let (before, ended) = (self.bytes.len(), self.end.is_some());
        while self.end.is_none() && self.bytes.len() < ENOUGH {
            let mut chunk = [const { MaybeUninit::uninit() }; CHUNK];
            let mut chunk = ReadBuf::uninit(&mut chunk);
            match stream.as_mut().poll_read(cx, &mut chunk) {
                Poll::Ready(Ok(())) if !chunk.filled().is_empty() => {
                    self.bytes.extend_from_slice(chunk.filled());
                }
                Poll::Ready(end) => self.end = Some(end),
                Poll::Pending => break,
            }
        }
        let read = self.bytes.len() - before;
        if read > 0 || ended != self.end.is_some() {
            cx.waker().wake_by_ref();
        }
        read
    }

    /// Moves bytes that were read ahead to `buffer`. None if there are none: then the stream is to be read.
    pub(super) fn take(&mut self, buffer: &mut ReadBuf<'_>) -> Option<io::Result<()>> {
        if self.bytes.is_empty() {
            return self.end.take();
        }
        let taken = buffer.remaining().min(self.bytes.len());
        buffer.put_slice(&self.bytes[..taken]);
        self.bytes.advance(taken);
        if self.bytes.is_empty() {
            // A link rarely needs it again.
            self.bytes = BytesMut::new();
        }
        Some(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn bytes_come_in_order_and_before_the_end() {
        let (mut far, mut near) = duplex(2 * ENOUGH);
        let mut ahead = Ahead::default();
        let sent: Vec<u8> = (0..ENOUGH + 2 * CHUNK).map(|at| at as u8).collect();
        far.write_all(&sent).await.unwrap();
        drop(far);
        let fill = async |ahead: &mut Ahead, near: &mut _| {
            tokio::task::unconstrained(poll_fn(|cx| Poll::Ready(ahead.fill(Pin::new(&mut *near), cx)))).await
        };
        assert_eq!(fill(&mut ahead, &mut near).await, ENOUGH);
        assert_eq!(fill(&mut ahead, &mut near).await, 0, "no more than that");
        let mut received = Vec::new();
        for fills in [true, false] {
            let mut piece = [0; 1000];
            let mut piece = ReadBuf::new(&mut piece);
            ahead.take(&mut piece).unwrap().unwrap();
            received.extend_from_slice(piece.filled());
            if fills {
                assert_eq!(fill(&mut ahead, &mut near).await, CHUNK);
            }
        }
        loop {
            let mut piece = [0; 1000];
            let mut piece = ReadBuf::new(&mut piece);
            let Some(taken) = ahead.take(&mut piece) else { break };
            taken.unwrap();
            received.extend_from_slice(piece.filled());
        }
        near.read_to_end(&mut received).await.unwrap();
        assert!(received == sent, "{} bytes of {}", received.len(), sent.len());
        assert_eq!(fill(&mut ahead, &mut near).await, 0);
        assert!(ahead.take(&mut ReadBuf::new(&mut [0; 1])).unwrap().is_ok(), "the end");
        assert!(ahead.take(&mut ReadBuf::new(&mut [0; 1])).is_none());
    }
}

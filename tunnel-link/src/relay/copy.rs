//! Copies both ways between a client and its target when there is no link between them whose streams would limit the
//! reading.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::error::Side;
use super::socket::end_on_drop;
use super::traffic::Traffic;
use crate::outcome::Outcome;

/// Bytes copied at a time between a target's socket and a client.
const PIECE: usize = 32 << 10;

/// Copies both ways between a target's socket and a client, as [`Copying::run`].
///
/// # Errors
/// Fails if an end failed. Neither end is informed: dropping the target resets it, unless both directions have ended.
pub async fn copy(
    target: &mut TcpStream,
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    traffic: &Traffic,
    side: Side,
) -> Result<(), (Outcome, String)> {
    let (mut from, mut to) = target.split();
    copy_halves((&mut from, &mut to), read, write, traffic, side).await?;
    end_on_drop(target);
    Ok(())
}

/// The same with the reading and the writing half of a target, whose end remains as it is.
///
/// # Errors
/// Fails if an end failed.
pub async fn copy_halves(
    target: (&mut (impl AsyncRead + Unpin), &mut (impl AsyncWrite + Unpin)),
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    traffic: &Traffic,
    side: Side,
) -> Result<(), (Outcome, String)> {
    // A failed write has consumed the error; the read then looks like an end of file.
    let copying = Copying { traffic, side, piece: PIECE, trusts_end: false };
    copying.run((read, write), target).await.map_err(|(outcome, error)| {
        let end = if outcome == Outcome::ClientReset { "client" } else { "target" };
        (outcome, format!("the {end}: {error}"))
    })
}

/// Parameters for copying, besides the client and the target.
#[derive(Clone, Copy, Debug)]
pub struct Copying<'a> {
    /// Counts the bytes as they pass.
    pub traffic: &'a Traffic,
    /// The end of the tunnel whose socket `traffic` counts: the client's on a server, the target's on an agent.
    pub side: Side,
    /// Bytes copied at a time in each direction.
    pub piece: usize,
    /// True if the target's end of file is relayed even after a failed write to the target. Else it counts as that failure.
    pub trusts_end: bool,
}

impl Copying<'_> {
    /// Copies both ways until both directions have ended. An end is given as its reading and its writing half. The client
    /// gets everything that the target sent before a failure; [`tokio::io::copy_bidirectional`] drops what it has read
    /// ahead then.
    ///
    /// # Errors
    /// Fails if an end failed; the outcome tells which.
    pub async fn run(
        self,
        (from_client, to_client): (&mut (impl AsyncRead + Unpin), &mut (impl AsyncWrite + Unpin)),
        (from_target, to_target): (&mut (impl AsyncRead + Unpin), &mut (impl AsyncWrite + Unpin)),
    ) -> Result<(), (Outcome, io::Error)> {
        let at_client = |error: io::Error| (Outcome::ClientReset, error);
        let at_target = |error: io::Error| (Outcome::TargetReset, error);
        // The failure of a write to the target. What it sent before must still arrive.
        let written: Mutex<Result<(), (Outcome, io::Error)>> = Mutex::new(Ok(()));
        let answered = AtomicBool::new(false);
        let up = async {
            let (mut piece, mut broken) = (vec![0; self.piece], false);
            loop {
                let length = from_client.read(&mut piece).await.map_err(at_client)?;
                if !broken {
                    let passed = self.pass(&piece[..length], to_target, self.side == Side::Server).await;
                    broken = passed.is_err();
                    *written.lock() = passed.map_err(at_target);
                }
                // After a failed write the rest is discarded: a client may write everything before it reads the answer.
                if length == 0 || (broken && answered.load(Ordering::Relaxed)) {
                    return Ok::<_, (Outcome, io::Error)>(());
                }
            }
        };
        let down = async {
            let mut piece = vec![0; self.piece];
            loop {
                let length = from_target.read(&mut piece).await.map_err(at_target)?;
                if length > 0 || self.trusts_end || written.lock().is_ok() {
                    let passed = self.pass(&piece[..length], to_client, self.side == Side::Agent).await;
                    passed.map_err(at_client)?;
                }
                if length == 0 {
                    answered.store(true, Ordering::Relaxed);
                    // An error also ends `up`, which may be discarding.
                    return std::mem::replace(&mut *written.lock(), Ok(()));
                }
            }
        };
        tokio::try_join!(up, down)?;
        written.into_inner()
    }

    /// Writes a piece and counts it, or writes the end of file if it is empty.
    async fn pass(
        &self,
        piece: &[u8],
        to: &mut (impl AsyncWrite + Unpin),
        from_socket: bool,
    ) -> io::Result<()> {
        if piece.is_empty() {
            return to.shutdown().await;
        }
        let traffic = self.traffic;
        let waiting = if from_socket { &traffic.for_tunnel } else { &traffic.for_socket };
        let wait = waiting.begin(piece.len());
        to.write_all(piece).await?;
        to.flush().await?;
        drop(wait);
        if from_socket {
            traffic.count_from_socket(piece.len());
        } else {
            traffic.count_to_socket(piece.len());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{duplex, split};
    use tokio::net::TcpListener;

    use super::*;
    use crate::relay::{flushed, reset_on_drop};

    #[tokio::test]
    async fn what_a_target_sent_before_its_reset_arrives_though_the_client_still_sends() {
        const SENT: usize = 32 << 10;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        target.write_all(&[7; SENT]).await.unwrap();
        // The reset would overtake what has not arrived.
        flushed(&target).await;
        reset_on_drop(&target);
        drop(target);
        // The answer does not fit in.
        let (near, far) = duplex(4 << 10);
        let (mut answer, mut upload) = split(near);
        let copying = async move {
            let (mut read, mut write) = split(far);
            let traffic = Traffic::default();
            copy(&mut dialled, &mut read, &mut write, &traffic, Side::Server).await
        };
        let uploading = async { while upload.write_all(&[1; 1 << 10]).await.is_ok() {} };
        let mut arrived = Vec::new();
        let all = async { tokio::join!(copying, uploading, answer.read_to_end(&mut arrived)) };
        let (ended, (), _) = tokio::time::timeout(Duration::from_secs(30), all).await.expect("it ends");
        assert_eq!((ended.unwrap_err().0, arrived.len()), (Outcome::TargetReset, SENT));
    }
}

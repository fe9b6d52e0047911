//! Copies between a target's socket and a client when there is no link between them whose streams would limit the
//! reading.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::error::Side;
use super::socket::end_on_drop;
use super::traffic::Traffic;
use crate::outcome::Outcome;

/// Bytes copied at a time.
const PIECE: usize = 32 << 10;

/// Copies both ways until both directions have ended. Bytes are counted as they pass, from the point of view of the
/// socket of `side`: the client's on a server, the target's on an agent.
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
    let client = |error: io::Error| (Outcome::ClientReset, format!("the client: {error}"));
    let at_target = |error: io::Error| (Outcome::TargetReset, format!("the target: {error}"));
    let (mut from, mut to) = target.split();
    let count = |to_target: bool, bytes: usize| match (side, to_target) {
        (Side::Server, true) | (Side::Agent, false) => traffic.count_from_socket(bytes),
        (Side::Server, false) | (Side::Agent, true) => traffic.count_to_socket(bytes),
    };
    let waiting = |to_target: bool| match (side, to_target) {
        (Side::Server, true) | (Side::Agent, false) => &traffic.for_tunnel,
        (Side::Server, false) | (Side::Agent, true) => &traffic.for_socket,
    };
    // The failure of a write to the target. What it sent before must still arrive.
    let broken = OnceLock::new();
    let answered = AtomicBool::new(false);
    let up = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = read.read(&mut piece).await.map_err(client)?;
            if length == 0 {
                if let Err(error) = to.shutdown().await {
                    let _ = broken.set(at_target(error));
                }
                return Ok::<_, (Outcome, String)>(());
            }
            let wait = waiting(true).begin(length);
            let written = to.write_all(&piece[..length]).await;
            drop(wait);
            if let Err(error) = written {
                let _ = broken.set(at_target(error));
                // A client may write everything before it reads the answer.
                loop {
                    if answered.load(Ordering::Relaxed) || read.read(&mut piece).await.map_err(client)? == 0 {
                        return Ok(());
                    }
                }
            }
            count(true, length);
        }
    };
    let down = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = from.read(&mut piece).await.map_err(at_target)?;
            if length == 0 {
                // A failed write has consumed the error; the read then looks like an end of file.
                if let Some(failed) = broken.get() {
                    return Err(failed.clone());
                }
                answered.store(true, Ordering::Relaxed);
                return write.shutdown().await.map_err(client);
            }
            let wait = waiting(false).begin(length);
            write.write_all(&piece[..length]).await.map_err(client)?;
            write.flush().await.map_err(client)?;
            drop(wait);
            count(false, length);
        }
    };
    tokio::try_join!(up, down)?;
    if let Some(failed) = broken.into_inner() {
        return Err(failed);
    }
    end_on_drop(target);
    Ok(())
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

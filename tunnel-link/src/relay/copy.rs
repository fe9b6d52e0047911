//! Copies between a target's socket and a client when there is no link between them whose streams would limit the
//! reading.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::error::Side;
use super::traffic::Traffic;

/// Bytes copied at a time.
const PIECE: usize = 32 << 10;

/// The end that failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("the client: {0}")]
    Client(io::Error),
    #[error("the target: {0}")]
    Target(io::Error),
}

/// Copies both ways until both directions have ended. Bytes are counted as they pass, from the point of view of the
/// socket of `side`: the client's on a server, the target's on an agent.
///
/// # Errors
/// Fails if an end failed. Neither end is informed.
pub async fn copy(
    target: &mut TcpStream,
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    traffic: &Traffic,
    side: Side,
) -> Result<(), CopyError> {
    let (mut from, mut to) = target.split();
    let count = |to_target: bool, bytes: usize| match (side, to_target) {
        (Side::Server, true) | (Side::Agent, false) => traffic.count_from_socket(bytes),
        (Side::Server, false) | (Side::Agent, true) => traffic.count_to_socket(bytes),
    };
    let waiting = |to_target: bool| match (side, to_target) {
        (Side::Server, true) | (Side::Agent, false) => &traffic.for_tunnel,
        (Side::Server, false) | (Side::Agent, true) => &traffic.for_socket,
    };
    let up = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = read.read(&mut piece).await.map_err(CopyError::Client)?;
            if length == 0 {
                return to.shutdown().await.map_err(CopyError::Target);
            }
            let wait = waiting(true).begin(length);
            to.write_all(&piece[..length]).await.map_err(CopyError::Target)?;
            drop(wait);
            count(true, length);
        }
    };
    let down = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = from.read(&mut piece).await.map_err(CopyError::Target)?;
            if length == 0 {
                return write.shutdown().await.map_err(CopyError::Client);
            }
            let wait = waiting(false).begin(length);
            write.write_all(&piece[..length]).await.map_err(CopyError::Client)?;
            write.flush().await.map_err(CopyError::Client)?;
            drop(wait);
            count(false, length);
        }
    };
    tokio::try_join!(up, down).map(drop)
}

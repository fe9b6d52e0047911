//! Copies between a target's socket and a client when there is no link between them whose streams would limit the
//! reading.

use std::io;

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
    let up = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = read.read(&mut piece).await.map_err(client)?;
            if length == 0 {
                return to.shutdown().await.map_err(at_target);
            }
            let wait = waiting(true).begin(length);
            to.write_all(&piece[..length]).await.map_err(at_target)?;
            drop(wait);
            count(true, length);
        }
    };
    let down = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = from.read(&mut piece).await.map_err(at_target)?;
            if length == 0 {
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
    end_on_drop(target);
    Ok(())
}

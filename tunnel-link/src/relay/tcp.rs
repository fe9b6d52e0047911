//! Relays bytes between one TCP socket and one HTTP/2 stream.
//!
//! One task relays both directions. An idle connection holds no buffer: one is allocated only when the socket has
//! bytes, and its size follows the last reads. Flow control is returned to the sender only for bytes that the socket
//! has taken, so a receiver that does not read stops only its own stream.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use tokio::net::TcpStream;

use super::error::{RelayError, Sent, Side};
use super::inward::Inward;
use super::outward::{InwardProgress, Outward};
use super::parameters::Relay;
use super::socket::{end_on_drop, flushed};
use crate::outcome::Outcome;

/// Maximum time for a client to take what was written before the server or the agent stopped.
const LAST_BYTES: Duration = Duration::from_millis(500);

impl Relay<'_> {
    /// Relays both ways until both directions have ended. `socket` has been through [`super::prepare_socket`].
    /// `inbound` yields the receiving half: immediately on the agent; on the server once the agent has connected,
    /// while the client's first bytes are already being sent. `prefix` was already read from the socket.
    ///
    /// # Errors
    /// Returns the reason for an early end. The stream is then reset, and dropping the socket sends a TCP RST.
    pub async fn run(
        self,
        socket: &mut TcpStream,
        mut prefix: Bytes,
        send: &mut SendStream<Bytes>,
        inbound: impl Future<Output = Result<RecvStream, RelayError>>,
    ) -> Result<(), RelayError> {
        let side = self.side;
        let ended = {
            let (mut read, mut write) = socket.split();
            let answer = InwardProgress::default();
            tokio::select! {
                biased;
                (outcome, reason) = self.abort.triggered() => Err(RelayError::Aborted(outcome, reason)),
                // Build the futures where they are polled: moving a future doubles its memory.
                ended = async {
                    let outward = Outward { side, flow: self.flow, traffic: self.traffic, answer: &answer };
                    let inward = Inward { relay: &self, answer: &answer };
                    tokio::try_join!(outward.run(&mut read, send, &mut prefix), async {
                        let mut stream = inbound.await?;
                        let _ = answer.begun.set(());
                        inward.run(&mut write, &mut stream).await?;
                        let _ = answer.ended.set(());
                        Ok(())
                    })
                } => match ended {
                    Ok((Sent::All, ())) => Ok(()),
                    Ok((Sent::Unwanted, ())) => Err(RelayError::Reset(Reason::NO_ERROR)),
                    Err(error) => Err(error),
                },
            }
        };
        match &ended {
            Ok(()) => end_on_drop(socket),
            // A status has been sent; RST_STREAM would discard the data queued before it.
            Err(RelayError::Socket(_)) if side == Side::Agent => {}
            // A reset of the socket would discard its unsent data.
            Err(error @ (RelayError::TargetReset | RelayError::Reset(Reason::NO_ERROR))) => {
                send.send_reset(error.outcome(side).reset_reason());
                // Boxed: few connections end like this, but all would reserve its memory.
                Box::pin(async {
                    tokio::select! {
                        () = flushed(socket) => {}
                        _ = self.abort.triggered() => {}
                    }
                })
                .await;
            }
            Err(error) => {
                send.send_reset(error.outcome(side).reset_reason());
                if matches!(error, RelayError::Aborted(Outcome::Shutdown, _)) {
                    // The end of an answer may still be in the kernel.
                    let _ = Box::pin(tokio::time::timeout(LAST_BYTES, flushed(socket))).await;
                }
            }
        }
        ended
    }
}

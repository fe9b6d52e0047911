//! Reasons for the failure of a tunnelled connection, and the outcome that each end of the tunnel reports.

use std::io;

use h2::Reason;

use super::frame::FrameError;
use crate::outcome::Outcome;

/// End of a direction towards a stream, without a failure.
#[derive(Debug)]
pub(super) enum Sent {
    /// Everything up to the sender's end of file.
    All,
    /// Not everything was sent, because the receiver had answered in full before (RFC 9113 section 8.1). Its answer has
    /// the reason, for example a failed dial.
    Unwanted,
}

/// The end of the tunnel that relays. It decides whose reset a broken socket is, and which end sends gRPC trailers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The tunnel-server: the socket leads to the client, and this end made the gRPC call.
    Server,
    /// The tunnel-agent: the socket leads to the target, and this end answers the gRPC call.
    Agent,
}

/// Reason for the bad end of a tunnelled connection.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The socket on this end failed.
    #[error("{0}")]
    Socket(#[source] io::Error),
    /// The other end reset the stream.
    #[error("the other end of the tunnel reset the stream ({0})")]
    Reset(Reason),
    /// The target reset the connection after the data that has arrived.
    #[error("the target reset the connection")]
    TargetReset,
    /// The link failed.
    #[error("tunnel lost: {}", crate::link::reason(.0))]
    Link(#[source] h2::Error),
    /// The stream had something other than segments.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The stream ended without `grpc-status: 0`, so bytes may be missing.
    #[error("the agent ended the stream with {0}")]
    Status(String),
    /// The agent could not connect to the target, or the request was not sent.
    #[error("{1}")]
    Dial(Outcome, String),
    /// Ended by [`super::Abort`].
    #[error("{1}")]
    Aborted(Outcome, &'static str),
}

impl RelayError {
    /// Returns the outcome as seen from `side`.
    pub const fn outcome(&self, side: Side) -> Outcome {
        let (own, other) = match side {
            Side::Server => (Outcome::ClientReset, Outcome::TargetReset),
            Side::Agent => (Outcome::TargetReset, Outcome::ClientReset),
        };
        match self {
            Self::Socket(_) => own,
            Self::Reset(Reason::ENHANCE_YOUR_CALM) => Outcome::Stalled,
            Self::Reset(Reason::CONNECT_ERROR) => other,
            // NO_ERROR: the target took no more data after its complete answer.
            Self::TargetReset | Self::Reset(Reason::NO_ERROR) if matches!(side, Side::Server) => {
                Outcome::TargetReset
            }
            Self::TargetReset => Outcome::Protocol,
            Self::Reset(Reason::PROTOCOL_ERROR) | Self::Frame(_) | Self::Status(_) => Outcome::Protocol,
            // An agent or a server that stops cancels its connections.
            Self::Reset(_) => match side {
                Side::Server => Outcome::TunnelLost,
                Side::Agent => Outcome::ClientReset,
            },
            Self::Link(_) => Outcome::TunnelLost,
            Self::Dial(outcome, _) | Self::Aborted(outcome, _) => *outcome,
        }
    }

    /// Turns NO_ERROR into success: a peer that has answered in full may refuse further data (RFC 9113 section 8.1),
    /// and its answer tells the rest.
    pub(super) fn unless_unwanted(self) -> Result<Sent, Self> {
        match self {
            Self::Reset(Reason::NO_ERROR) => Ok(Sent::Unwanted),
            error => Err(error),
        }
    }
}

impl From<h2::Error> for RelayError {
    fn from(error: h2::Error) -> Self {
        match error.reason() {
            Some(reason) if error.is_reset() => Self::Reset(reason),
            _ => Self::Link(error),
        }
    }
}

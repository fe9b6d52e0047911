//! Outcomes of tunnelled connections, as named in the access log, the metrics and the protocol.

use std::fmt;

use h2::Reason;
use tonic::Code;

/// Response header in which an HTTP listener says why it answers itself: the word of an [`Outcome`].
pub const OUTCOME_HEADER: &str = "postern-outcome";

/// Outcome of a tunnelled connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    /// Both directions ended with an end of stream.
    Ok,
    /// No agent of the node is attached to this server.
    NoTunnel,
    /// The target answered the agent's SYN with a reset (`ECONNREFUSED`).
    Refused,
    /// The target did not answer before the dial's deadline.
    TimedOut,
    /// The agent has no route to the target (`EHOSTUNREACH`, `ENETUNREACH` and other local errors).
    Unreachable,
    /// The agent's policy does not allow the target.
    Denied,
    /// A limit was reached: that of a listener, or of the pending dials at the agent.
    Busy,
    /// The link was lost while the connection was open.
    TunnelLost,
    /// The cloud side of the connection was reset.
    ClientReset,
    /// The edge side of the connection was reset.
    TargetReset,
    /// A receiver did not read, and the bytes held for such receivers exceeded a limit.
    Stalled,
    /// The server or the agent stopped before the connection ended.
    Shutdown,
    /// The other end broke the protocol.
    Protocol,
}

/// Part of the path at which a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hop {
    Client,
    Server,
    Tunnel,
    /// Policy of the agent or of the server.
    Policy,
    Target,
}

impl Hop {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
            Self::Tunnel => "tunnel",
            Self::Policy => "policy",
            Self::Target => "target",
        }
    }
}

impl Outcome {
    /// Returns the hop at which it failed; `None` for [`Outcome::Ok`].
    pub const fn hop(self) -> Option<Hop> {
        match self {
            Self::Ok => None,
            Self::ClientReset => Some(Hop::Client),
            Self::Busy | Self::Stalled | Self::Shutdown => Some(Hop::Server),
            Self::NoTunnel | Self::TunnelLost | Self::Protocol => Some(Hop::Tunnel),
            Self::Denied => Some(Hop::Policy),
            Self::Refused | Self::TimedOut | Self::Unreachable | Self::TargetReset => Some(Hop::Target),
        }
    }

    /// Every outcome, for metrics that start at zero.
    pub const ALL: [Self; 13] = [
        Self::Ok,
        Self::NoTunnel,
        Self::Refused,
        Self::TimedOut,
        Self::Unreachable,
        Self::Denied,
        Self::Busy,
        Self::TunnelLost,
        Self::ClientReset,
        Self::TargetReset,
        Self::Stalled,
        Self::Shutdown,
        Self::Protocol,
    ];

    /// Returns the word for logs and metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NoTunnel => "no_tunnel",
            Self::Refused => "refused",
            Self::TimedOut => "timed_out",
            Self::Unreachable => "unreachable",
            Self::Denied => "denied",
            Self::Busy => "busy",
            Self::TunnelLost => "tunnel_lost",
            Self::ClientReset => "client_reset",
            Self::TargetReset => "target_reset",
            Self::Stalled => "stalled",
            Self::Shutdown => "shutdown",
            Self::Protocol => "protocol",
        }
    }

    /// Returns the outcome for the gRPC status of a failed Relay.
    pub const fn from_code(code: Code) -> Self {
        match code {
            Code::Unavailable => Self::Refused,
            Code::DeadlineExceeded => Self::TimedOut,
            Code::NotFound => Self::Unreachable,
            Code::PermissionDenied => Self::Denied,
            Code::ResourceExhausted => Self::Busy,
            _ => Self::Protocol,
        }
    }

    /// Returns the gRPC status by which the agent reports a failed dial with this outcome.
    pub const fn code(self) -> Code {
        match self {
            Self::Refused => Code::Unavailable,
            Self::TimedOut => Code::DeadlineExceeded,
            Self::Unreachable => Code::NotFound,
            Self::Denied => Code::PermissionDenied,
            Self::Busy => Code::ResourceExhausted,
            _ => Code::Internal,
        }
    }

    /// Returns the RST_STREAM code (RFC 9113 section 7) with which this end resets the stream.
    pub const fn reset_reason(self) -> Reason {
        match self {
            Self::ClientReset | Self::TargetReset => Reason::CONNECT_ERROR,
            Self::Stalled => Reason::ENHANCE_YOUR_CALM,
            Self::Protocol => Reason::PROTOCOL_ERROR,
            _ => Reason::CANCEL,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_dial_survives_the_round_trip() {
        for outcome in
            [Outcome::Refused, Outcome::TimedOut, Outcome::Unreachable, Outcome::Denied, Outcome::Busy]
        {
            assert_eq!(Outcome::from_code(outcome.code()), outcome);
        }
    }
}

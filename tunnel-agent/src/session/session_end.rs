//! Reasons for a session's end, and whether a new identity could help.

use std::error::Error;
use std::io;
use std::time::Duration;

use tunnel_link::link::{self, LinkDead, PING_INTERVAL};
use tunnel_pki::concerns_certificates;
use tunnel_runtime::log_once::LogOnce;

use crate::reach::tls_hint;

/// First step of a start.
pub(super) const TCP: &str = "TCP connection";

/// Reason why a session ended or was never established.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    /// The name does not resolve, or nothing accepts connections there.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// A step of the start took too long.
    #[error("no {step} within {} s", within.as_secs())]
    Slow { step: &'static str, within: Duration },
    /// The server's certificate is not one of ours, or the server refused ours. `proxy` is the one in use, if any.
    #[error("TLS failed: {source}{}", tls_hint(proxy.as_deref()))]
    Tls { source: io::Error, proxy: Option<String> },
    /// HTTP/2 failed.
    #[error("link lost: {}", link::reason(.0))]
    Link(#[source] h2::Error),
    /// The link went silent.
    #[error("link lost: {0}")]
    Dead(#[from] LinkDead),
    /// Nothing arrives on the link, or this node has lost its address, but another connection to the same server works.
    #[error("link lost: it is silent, and another connection to the server works")]
    Overtaken,
    #[error("the server closed the connection")]
    Closed,
    /// The proxy cut several links after the same idle time.
    #[error(
        "the proxy {proxy} closes links that are idle for about {:.0} s: it has to let CONNECT tunnels be idle for more \
         than {} s",
        idle.as_secs_f64(),
        PING_INTERVAL.as_secs()
    )]
    CutWhenIdle { proxy: String, idle: Duration },
    #[error("the server is draining")]
    Draining,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("another agent of this node has taken over")]
    Succeeded,
    #[error("this agent stops")]
    Stopping,
}

/// Reason why this agent or the server does not want a session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the server refused this session: {0}")]
    Session(String),
    /// The server may accept the next session.
    #[error("the server refused this session for now: {0}")]
    ForNow(String),
    /// The server will never accept this certificate again.
    #[error("the server takes no session under this certificate any more: {0}")]
    Certificate(String),
    /// An additional link led to another server behind the same address.
    #[error("another server answers at this address")]
    OtherServer,
    /// Another address of this agent leads to the same server.
    #[error("the same server is attached through {0}")]
    SameServer(String),
    /// This session must not replace the newer one in turn.
    #[error(
        "a newer session of this node took over, from {0}: is a second agent running with this node's identity?"
    )]
    Replaced(String),
}

impl SessionEnd {
    /// True if the server is attached through another address.
    pub(super) fn stands_by(&self) -> bool {
        matches!(self, Self::Refused(Refusal::SameServer(_)))
    }

    /// True if another session of this node may go on, which the next one must not replace.
    pub(super) fn yields(&self) -> bool {
        matches!(self, Self::Refused(Refusal::Session(_) | Refusal::Replaced(_)))
    }

    /// A TLS error without a proxy.
    pub(super) fn tls(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Tls { source: io::Error::other(error), proxy: None }
    }

    /// True if nothing answered at all, not even a name server. Then quick retries are no load for any server, and
    /// notice at once when the network is back. A name server that reports an unknown name has answered.
    pub(super) fn line_is_out(&self) -> bool {
        match self {
            Self::Slow { step, .. } => *step == TCP,
            Self::Connect(error) => matches!(
                error.kind(),
                io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
            ),
            _ => false,
        }
    }

    /// True if a name server says that the server's name has no address.
    pub(super) fn has_no_such_name(&self) -> bool {
        matches!(self, Self::Connect(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// True if the connection was closed or reset without a reason, by the server or by something on the path.
    pub(super) fn is_cut(&self) -> bool {
        match self {
            Self::Closed | Self::CutWhenIdle { .. } => true,
            Self::Link(error) | Self::Dead(LinkDead::Failed(error)) => error.get_io().is_some_and(|error| {
                matches!(
                    error.kind(),
                    io::ErrorKind::UnexpectedEof
                        | io::ErrorKind::ConnectionReset
                        | io::ErrorKind::ConnectionAborted
                        | io::ErrorKind::BrokenPipe
                )
            }),
            _ => false,
        }
    }

    /// True if the operator does not know it yet. While the network is down two attempts a second fail, maybe for
    /// hours. `out` holds the last such error.
    pub(super) fn is_news(&self, out: &mut LogOnce) -> bool {
        if self.line_is_out() {
            return out.is_new(self);
        }
        // Something has answered.
        out.clear();
        true
    }

    /// True if a new identity could help: the roots do not verify the server, or it refuses the certificate.
    pub(super) fn concerns_identity(&self) -> bool {
        match self {
            Self::Tls { source, .. } => concerns_certificates(source),
            // In TLS 1.3 the client learns only after its handshake that the server refuses its certificate.
            Self::Link(error) => error.get_io().is_some_and(concerns_certificates),
            Self::Refused(Refusal::Certificate(_)) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustls::{AlertDescription, CertificateError};

    use super::*;

    fn slow(step: &'static str) -> SessionEnd {
        SessionEnd::Slow { step, within: Duration::from_secs(10) }
    }

    #[test]
    fn a_refusal_is_an_answer() {
        assert!(slow(TCP).line_is_out());
        assert!(SessionEnd::Connect(io::ErrorKind::NetworkUnreachable.into()).line_is_out());
        assert!(
            SessionEnd::Connect(io::ErrorKind::HostUnreachable.into()).line_is_out(),
            "or no name server"
        );
        assert!(!SessionEnd::Connect(io::ErrorKind::NotFound.into()).line_is_out(), "no such name");
        assert!(!slow("TLS handshake").line_is_out());
        assert!(!SessionEnd::Connect(io::ErrorKind::ConnectionRefused.into()).line_is_out());
        assert!(!SessionEnd::Closed.line_is_out());
    }

    #[test]
    fn a_cut_is_an_end_without_a_word() {
        assert!(SessionEnd::Closed.is_cut());
        assert!(
            SessionEnd::CutWhenIdle { proxy: "proxy:3128".into(), idle: Duration::from_secs(3) }.is_cut()
        );
        for other in [
            SessionEnd::Dead(LinkDead::Timeout),
            SessionEnd::Draining,
            Refusal::Session("revoked".into()).into(),
            SessionEnd::Connect(io::ErrorKind::ConnectionReset.into()),
        ] {
            assert!(!other.is_cut(), "{other}");
        }
    }

    #[test]
    fn a_line_that_is_out_is_news_once() {
        let unreachable = || SessionEnd::Connect(io::ErrorKind::NetworkUnreachable.into());
        let mut out = LogOnce::default();
        assert!(unreachable().is_news(&mut out));
        assert!(!unreachable().is_news(&mut out));
        assert!(slow(TCP).is_news(&mut out), "it is out in another way");
        for _ in 0..2 {
            assert!(SessionEnd::Closed.is_news(&mut out), "each is a session's");
        }
        assert!(slow(TCP).is_news(&mut out), "it was back meanwhile");
    }

    #[test]
    fn only_certificate_errors_concern_the_identity() {
        let tls = |error: rustls::Error| SessionEnd::tls(error);
        assert!(tls(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)).concerns_identity());
        assert!(tls(rustls::Error::InvalidCertificate(CertificateError::Expired)).concerns_identity());
        assert!(tls(rustls::Error::AlertReceived(AlertDescription::UnknownCA)).concerns_identity());
        assert!(SessionEnd::from(Refusal::Certificate("older than its node".into())).concerns_identity());
        for other in [
            Refusal::Session("revoked".into()).into(),
            Refusal::ForNow("not in the inventory".into()).into(),
            tls(rustls::Error::AlertReceived(AlertDescription::InternalError)),
            tls(rustls::Error::HandshakeNotComplete),
            SessionEnd::tls(io::Error::from(io::ErrorKind::ConnectionReset)),
            SessionEnd::Connect(io::ErrorKind::ConnectionRefused.into()),
            SessionEnd::Closed,
        ] {
            assert!(!other.concerns_identity(), "{other}");
        }
    }
}

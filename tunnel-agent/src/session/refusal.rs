//! Which ends of a session say that the agent and the server do not take each other's certificate.

use std::error::Error;

use rustls::AlertDescription;

use super::SessionEnd;

impl SessionEnd {
    /// Whether a new identity could mend it: the server is not verified by the roots, or does not take the certificate.
    pub(super) fn concerns_identity(&self) -> bool {
        match self {
            Self::Tls(error) => is_about_certificates(error),
            // With TLS 1.3 the client learns only after its handshake that the server refuses its certificate.
            Self::Link(error) => error.get_io().is_some_and(is_about_certificates),
            _ => false,
        }
    }
}

fn is_about_certificates(error: &std::io::Error) -> bool {
    let mut next: Option<&(dyn Error + 'static)> =
        error.get_ref().map(|inner| inner as &(dyn Error + 'static));
    while let Some(cause) = next {
        if let Some(error) = cause.downcast_ref::<rustls::Error>() {
            return match error {
                rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => true,
                rustls::Error::AlertReceived(alert) => is_refusal(*alert),
                _ => false,
            };
        }
        next = cause.source();
    }
    false
}

/// The alerts by which a peer refuses a certificate (RFC 8446 §6.2).
fn is_refusal(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError
            | AlertDescription::CertificateRequired
    )
}

#[cfg(test)]
mod tests {
    use std::io;

    use rustls::CertificateError;

    use super::*;

    #[test]
    fn only_certificates_count() {
        let tls = |error: rustls::Error| SessionEnd::Tls(io::Error::new(io::ErrorKind::InvalidData, error));
        assert!(tls(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)).concerns_identity());
        assert!(tls(rustls::Error::InvalidCertificate(CertificateError::Expired)).concerns_identity());
        assert!(tls(rustls::Error::AlertReceived(AlertDescription::UnknownCA)).concerns_identity());
        for other in [
            tls(rustls::Error::AlertReceived(AlertDescription::InternalError)),
            tls(rustls::Error::HandshakeNotComplete),
            SessionEnd::Tls(io::ErrorKind::ConnectionReset.into()),
            SessionEnd::Connect(io::ErrorKind::ConnectionRefused.into()),
            SessionEnd::Closed,
        ] {
            assert!(!other.concerns_identity(), "{other}");
        }
    }
}

//! Certificates for agents, by CertificateSigningRequest.

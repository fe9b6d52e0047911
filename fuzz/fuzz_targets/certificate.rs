//! Certificates that unauthenticated peers present, before and after their signature is checked.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rustls_pki_types::CertificateDer;
use tunnel_pki::{ca_hash, holder_of_certificate, is_ca, parse_ca_hash, validity};

fuzz_target!(|bytes: &[u8]| {
    let certificate = CertificateDer::from(bytes);
    if let Ok((_, node)) = holder_of_certificate(&certificate) {
        assert!(!node.as_str().is_empty());
    }
    if let Ok(validity) = validity(&certificate) {
        // No date makes the arithmetic panic.
        let _ = (validity.life(), validity.renew_at(), validity.issued());
    }
    if let Ok(hash) = ca_hash(&certificate) {
        assert!(parse_ca_hash(&hash).is_ok(), "{hash}");
    }
    let _ = is_ca(&certificate);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = parse_ca_hash(text);
    }
});

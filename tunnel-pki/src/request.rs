//! Certificate signing requests.

use rcgen::{
    CertificateParams, CertificateSigningRequest, DistinguishedName, PublicKeyData, SigningKey,
    SubjectPublicKeyInfo,
};
use rustls_pki_types::CertificateDer;
use tunnel_runtime::NodeName;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;

use super::certificate::{public_key_hash, public_key_info};
use super::error::IdentityError;
use super::holder::Holder;

/// Maximum length of a request, in bytes. Our own have fewer than 300.
const MAX_CSR: usize = 4096;

/// Public key of a signing request, which has proved possession of the private key.
#[derive(Clone, Debug)]
pub struct CsrKey {
    /// The key, for use in a certificate.
    pub public_key: SubjectPublicKeyInfo,
    /// Its [`public_key_hash`].
    pub hash: String,
}

/// Creates a PKCS #10 request (RFC 2986, DER) that proves possession of `key` and holds nothing else. The holder of
/// the key follows from the token or the current certificate, never from the request.
pub fn create_csr(key: &impl SigningKey) -> Result<Vec<u8>, IdentityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let csr = params.serialize_request(key).map_err(|error| IdentityError::Csr(error.to_string()))?;
    Ok(csr.der().to_vec())
}

/// Like [`create_csr`], naming the holder.
pub fn create_named_csr(
    key: &impl SigningKey,
    holder: Holder,
    node: &NodeName,
) -> Result<CertificateSigningRequest, IdentityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = holder.distinguished_name(node);
    params.serialize_request(key).map_err(|error| IdentityError::Csr(error.to_string()))
}

/// Checks that the request is signed by its own key, and returns that key. Ignores names and extensions in the
/// request.
///
/// # Errors
/// [`IdentityError::Csr`] if it is malformed, longer than 4 KiB, or not signed by its own key, or if the key is not
/// ECDSA P-256.
pub fn public_key_of_csr(der: &[u8]) -> Result<CsrKey, IdentityError> {
    if der.len() > MAX_CSR {
        return Err(IdentityError::Csr(format!("it is longer than {MAX_CSR} bytes")));
    }
    let request = match X509CertificationRequest::from_der(der) {
        Ok(([], request)) => request,
        Ok(_) => return Err(IdentityError::Csr("bytes follow after its end".into())),
        Err(error) => return Err(IdentityError::Csr(format!("it cannot be parsed: {error}"))),
    };
    request
        .verify_signature()
        .map_err(|_| IdentityError::Csr("it is not signed by the key that it names".into()))?;
    let raw = request.certification_request_info.subject_pki.raw;
    let public_key = SubjectPublicKeyInfo::from_der(raw)
        .map_err(|error| IdentityError::Csr(format!("its public key: {error}")))?;
    if public_key.algorithm() != &rcgen::PKCS_ECDSA_P256_SHA256 {
        return Err(IdentityError::Csr("its key is not ECDSA P-256".into()));
    }
    Ok(CsrKey { public_key, hash: public_key_hash(raw) })
}

/// True if the certificate is for this key.
pub(super) fn matches(
    key: &impl PublicKeyData,
    certificate: &CertificateDer<'_>,
) -> Result<bool, IdentityError> {
    Ok(public_key_info(certificate)? == key.subject_public_key_info())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::KeyPair;

    use super::*;
    use crate::PrivateKey;

    #[test]
    fn only_the_key_is_read() {
        let key = PrivateKey::generate().unwrap();
        let found = public_key_of_csr(&create_csr(&key).unwrap()).unwrap();
        assert_eq!(found.public_key.subject_public_key_info(), key.subject_public_key_info());
        assert_eq!(found.hash, public_key_hash(&key.subject_public_key_info()));
        let mut params = CertificateParams::new(vec!["other.example".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:masters");
        let csr = params.serialize_request(&key).unwrap();
        assert_eq!(public_key_of_csr(csr.der()).unwrap().hash, found.hash);
    }

    #[test]
    fn without_proof_of_possession_it_is_refused() {
        let mut csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        let last = csr.len() - 1;
        csr[last] ^= 1;
        assert!(public_key_of_csr(&csr).unwrap_err().to_string().contains("not signed"));
        // Another party's public key under one's own signature: replace the key bits and keep the rest.
        let mut stolen = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        let victim = PrivateKey::generate().unwrap();
        let point = victim.der_bytes();
        let at = stolen.windows(2).position(|pair| pair == [0x00, 0x04]).unwrap() + 1;
        stolen[at..at + point.len()].copy_from_slice(point);
        assert!(public_key_of_csr(&stolen).unwrap_err().to_string().contains("not signed"));
    }

    #[test]
    fn other_algorithms_and_sizes_are_refused() {
        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        assert!(public_key_of_csr(&create_csr(&key).unwrap()).is_err());
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        assert!(public_key_of_csr(&create_csr(&key).unwrap()).unwrap_err().to_string().contains("P-256"));
        assert!(public_key_of_csr(&[0x30; 5000]).unwrap_err().to_string().contains("longer"));
        let mut csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        csr.push(0);
        assert!(public_key_of_csr(&csr).unwrap_err().to_string().contains("follow"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(public_key_of_csr(&bytes).is_err());
        }

        #[test]
        fn no_changed_byte_keeps_it_valid(at in any::<proptest::sample::Index>(), bit in 0u8..8) {
            let key = PrivateKey::generate().unwrap();
            let mut csr = create_csr(&key).unwrap();
            let at = at.index(csr.len());
            csr[at] ^= 1 << bit;
            if let Ok(found) = public_key_of_csr(&csr) {
                // Bits without a meaning may change; the key never does.
                prop_assert_eq!(found.public_key.subject_public_key_info(), key.subject_public_key_info());
            }
        }
    }
}

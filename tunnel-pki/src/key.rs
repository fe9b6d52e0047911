//! Private key that is wiped from memory on drop.

use std::fmt;

use rcgen::{KeyPair, PublicKeyData, SignatureAlgorithm, SigningKey};
use rustls_pki_types::PrivateKeyDer;
use zeroize::Zeroizing;

use super::error::IdentityError;

/// A private key. rcgen's copy is wiped on drop, and so are the PEM text and the DER; AWS-LC's copy, used for signing,
/// is not.
pub struct PrivateKey(Zeroizing<KeyPair>);

impl PrivateKey {
    /// Generates an ECDSA P-256 key.
    pub fn generate() -> Result<Self, IdentityError> {
        Self::wiped(KeyPair::generate())
    }

    /// Parses PKCS #8, as PEM.
    pub fn from_pem(pem: &str) -> Result<Self, IdentityError> {
        Self::wiped(KeyPair::from_pem(pem))
    }

    pub fn from_der(der: &PrivateKeyDer<'_>) -> Result<Self, IdentityError> {
        Self::wiped(KeyPair::try_from(der))
    }

    fn wiped(pair: Result<KeyPair, rcgen::Error>) -> Result<Self, IdentityError> {
        pair.map(|pair| Self(Zeroizing::new(pair))).map_err(|error| IdentityError::Key(error.to_string()))
    }

    /// Returns PKCS #8, as PEM.
    pub fn to_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(self.0.serialize_pem())
    }

    /// Returns PKCS #8, as DER.
    pub fn to_der(&self) -> Zeroizing<PrivateKeyDer<'static>> {
        Zeroizing::new(PrivateKeyDer::Pkcs8(self.0.serialize_der().into()))
    }
}

/// Omits the key.
impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivateKey").finish_non_exhaustive()
    }
}

impl PublicKeyData for PrivateKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        PublicKeyData::algorithm(&*self.0)
    }
}

impl SigningKey for PrivateKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.0.sign(message)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};
    use tunnel_link::proto::EnrollRequest;
    use tunnel_runtime::NodeName;
    use zeroize::Zeroize;

    use super::*;
    use crate::{AgentIdentity, Holder, SecretString, TrustBundle, pem_of_certificates};

    #[test]
    fn it_is_read_as_it_was_written() {
        let key = PrivateKey::generate().unwrap();
        let again = PrivateKey::from_pem(&key.to_pem()).unwrap();
        assert_eq!(again.to_der(), key.to_der());
        assert_eq!(PrivateKey::from_der(&key.to_der()).unwrap().der_bytes(), key.der_bytes());
        assert!(matches!(PrivateKey::from_pem("x"), Err(IdentityError::Key(_))));
    }

    /// Does what [`Zeroizing`] does on drop, after which the memory cannot be read any more.
    #[test]
    fn wiping_it_leaves_no_byte() {
        let mut key = PrivateKey::generate().unwrap();
        let (mut pem, mut der) = (key.to_pem(), key.to_der());
        key.0.zeroize();
        pem.zeroize();
        der.zeroize();
        assert!(key.0.serialized_der().is_empty() && pem.is_empty() && der.secret_der().is_empty());
    }

    fn identity(key: &PrivateKey) -> AgentIdentity {
        let ca = PrivateKey::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "ca");
        let root = params.self_signed(&ca).unwrap().der().clone();
        let issuer = rcgen::Issuer::new(params, ca);
        let node: NodeName = "edge-1".parse().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = Holder::Agent.distinguished_name(&node);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let leaf = params.signed_by(key, &issuer).unwrap().der().clone();
        let bundle = TrustBundle::new(vec![root]).unwrap();
        AgentIdentity::from_pem(&pem_of_certificates(&[leaf]), &key.to_pem(), bundle).unwrap()
    }

    #[test]
    fn no_debug_output_has_a_key_or_a_token() {
        let key = PrivateKey::generate().unwrap();
        let identity = identity(&key);
        let token = "abcdef.0123456789abcdefghijklmnop";
        let request = EnrollRequest { node: "edge-1".into(), token: token.into(), csr: vec![1, 2, 3] };
        let bytes = format!("{:?}", &key.to_der().secret_der()[..40]);
        let pem = key.to_pem();
        let body = pem.lines().nth(1).unwrap();
        for shown in [
            format!("{key:?} {key:#?}"),
            format!("{:?}", identity.key),
            format!("{identity:?}"),
            format!("{request:?} {request:#?}"),
            format!("{:?}", tonic::Request::new(request.clone())),
            format!("{:?}", SecretString::from(token)),
        ] {
            for secret in [body, bytes.trim_matches(['[', ']']), token] {
                assert!(!shown.contains(secret), "{shown}");
            }
        }
        assert!(format!("{request:?}").contains("edge-1"), "the rest is shown");
    }
}

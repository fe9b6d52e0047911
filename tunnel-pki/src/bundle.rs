//! Trusted roots.

use std::fmt;
use std::path::Path;

use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tunnel_runtime::files;
use tunnel_runtime::text::without_bom;
use x509_parser::certificate::X509Certificate;
use x509_parser::x509::X509Version;

use super::certificate::{ca_hash, is_signed_by, parse, pem_of_certificates};
use super::error::IdentityError;

/// Maximum number of roots. A rotation never needs that many: more are a mistake, or an attempt to exhaust memory.
const MAX_ROOTS: usize = 16;

/// One or more trusted roots. The first signs new certificates.
#[derive(Clone, PartialEq, Eq)]
pub struct TrustBundle {
    roots: Vec<CertificateDer<'static>>,
}

impl TrustBundle {
    /// Checks the roots. The first is the signing one.
    ///
    /// # Errors
    /// [`IdentityError::Bundle`] if there is no root, there are more than 16, or one is not a CA certificate.
    pub fn new(roots: Vec<CertificateDer<'static>>) -> Result<Self, IdentityError> {
        if roots.is_empty() {
            return Err(IdentityError::Bundle("it has no certificate".into()));
        }
        if roots.len() > MAX_ROOTS {
            return Err(IdentityError::Bundle(format!("it has more than {MAX_ROOTS} certificates")));
        }
        for (number, root) in (1..).zip(&roots) {
            check(root, |of| of.is_ca())
                .map_err(|reason| IdentityError::Bundle(format!("certificate {number}: {reason}")))?;
        }
        Ok(Self { roots })
    }

    /// Parses PEM; ignores sections other than certificates.
    pub fn from_pem(pem: &str) -> Result<Self, IdentityError> {
        Self::new(certificates(pem)?)
    }

    /// Parses the roots of another system. As Go does, ignores certificates that are not a CA's: OpenShift's `ca.crt` of pods
    /// has the one of its ingress too. One of X.509 version 1 cannot say that it is a CA's, but a root is its own issuer.
    ///
    /// # Errors
    /// [`IdentityError::Bundle`] if it is not PEM, or without a usable root.
    pub fn from_foreign_pem(pem: &str) -> Result<Self, IdentityError> {
        let is_root = |of: &X509Certificate<'_>| {
            of.is_ca() || of.version() != X509Version::V3 && of.subject() == of.issuer()
        };
        let (mut roots, mut unusable) = (Vec::new(), None);
        for (number, root) in (1..).zip(certificates(pem)?) {
            match check(&root, is_root) {
                Ok(()) => roots.push(root),
                Err(reason) => {
                    tracing::debug!(number, reason, "ignoring a certificate among trusted roots");
                    unusable.get_or_insert(format!("certificate {number}: {reason}"));
                }
            }
        }
        match unusable {
            _ if !roots.is_empty() => Ok(Self { roots }),
            Some(reason) => Err(IdentityError::Bundle(reason)),
            None => Self::new(roots),
        }
    }

    /// Reads a PEM file.
    pub fn from_file(path: &Path) -> Result<Self, IdentityError> {
        let fix = "restore it from a backup";
        let pem = files::read_optional(path)?
            .ok_or_else(|| IdentityError::file(path, &"there is no such file", fix))?;
        Self::from_pem(&pem).map_err(|error| IdentityError::file(path, &error, fix))
    }

    /// Returns the certificates as PEM (RFC 7468).
    pub fn to_pem(&self) -> String {
        pem_of_certificates(&self.roots)
    }

    /// Returns the roots, the signing one first.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Returns the roots for rustls.
    pub fn root_store(&self) -> RootCertStore {
        let mut store = RootCertStore::empty();
        // `check` has added each to a store.
        store.add_parsable_certificates(self.roots.iter().cloned());
        store
    }

    /// Returns the [`ca_hash`] of each root, in order.
    pub fn hashes(&self) -> Vec<String> {
        self.roots.iter().filter_map(|root| ca_hash(root).ok()).collect()
    }

    /// Returns the index of the root that signed this certificate; 0 is the root that signs now.
    pub fn issuer_of(&self, certificate: &CertificateDer<'_>) -> Option<usize> {
        self.roots.iter().position(|root| is_signed_by(certificate, root))
    }
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    // With the mark before it the first certificate would be a comment.
    CertificateDer::pem_slice_iter(without_bom(pem).as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| IdentityError::Bundle(format!("not PEM: {error}")))
}

/// Checks that a certificate can be trusted as a root.
fn check(
    root: &CertificateDer<'static>,
    is_root: impl Fn(&X509Certificate<'_>) -> bool,
) -> Result<(), String> {
    let parsed = parse(root).map_err(|error| error.to_string())?;
    if !is_root(&parsed) {
        return Err("not a CA".to_owned());
    }
    RootCertStore::empty().add(root.clone()).map_err(|error| error.to_string())
}

impl fmt::Debug for TrustBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TrustBundle").field(&self.hashes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    use super::*;

    /// A certificate of X.509 version 1, and its key, as `openssl x509 -req` of OpenSSL 3.0 makes them.
    const V1: &str = include_str!("../testdata/version_1.pem");

    fn root(ca: bool) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        if ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn order_is_kept_and_keys_are_ignored() {
        let (first, second) = (root(true), root(true));
        let key = KeyPair::generate().unwrap().serialize_pem();
        let pem = pem_of_certificates(std::slice::from_ref(&first))
            + &key
            + &pem_of_certificates(std::slice::from_ref(&second));
        let bundle = TrustBundle::from_pem(&pem).unwrap();
        assert_eq!(bundle.roots(), [first, second]);
        assert_eq!(bundle.hashes().len(), 2);
        assert_eq!(bundle.root_store().len(), 2);
        assert!(!bundle.to_pem().contains("PRIVATE"));
        assert_eq!(TrustBundle::from_pem(&bundle.to_pem()).unwrap(), bundle);
        assert_eq!(TrustBundle::from_pem(&format!("\u{feff}{pem}")).unwrap(), bundle);
    }

    #[test]
    fn unusable_bundles_are_refused_with_the_reason() {
        let good = pem_of_certificates(&[root(true)]);
        for (pem, reason) in [
            (String::new(), "no certificate"),
            ("hello".to_owned(), "no certificate"),
            (pem_of_certificates(&[root(false)]), "not a CA"),
            (good[..good.len() / 2].to_owned(), "not PEM"),
            (good.replacen("\nMII", "\nAAA", 1), "certificate 1"),
            (good.repeat(17), "more than 16"),
        ] {
            let error = TrustBundle::from_pem(&pem).unwrap_err().to_string();
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }

    #[test]
    fn roots_of_another_system_may_be_beside_other_certificates() {
        let roots: Vec<_> = (0..20).map(|_| root(true)).collect();
        let leaf = pem_of_certificates(&[root(false)]);
        let all = TrustBundle::from_foreign_pem(&(leaf.clone() + &pem_of_certificates(&roots) + V1)).unwrap();
        assert_eq!(all.roots().len(), 21, "more than of one's own, and the one of version 1");
        assert_eq!(all.roots()[..20], roots);
        assert_eq!(all.root_store().len(), 21);
        let cut = &leaf[..leaf.len() / 2];
        for (pem, reason) in
            [("", "no certificate"), (leaf.as_str(), "certificate 1: not a CA"), (cut, "not PEM")]
        {
            let error = TrustBundle::from_foreign_pem(pem).unwrap_err().to_string();
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in any::<String>(), cut in 0usize..600) {
            let _: Result<_, _> = TrustBundle::from_pem(&text);
            let _: Result<_, _> = TrustBundle::from_foreign_pem(&text);
            let pem = "-----BEGIN CERTIFICATE-----\n".to_owned() + &text + "\n-----END CERTIFICATE-----\n";
            prop_assert!(TrustBundle::from_pem(&pem).is_err());
            let cut = pem.char_indices().map(|(at, _)| at).take_while(|at| *at <= cut).last().unwrap_or(0);
            prop_assert!(TrustBundle::from_pem(&pem[..cut]).is_err());
        }
    }
}

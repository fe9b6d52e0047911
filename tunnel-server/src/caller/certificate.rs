//! Maps a client certificate, which TLS has verified, to the caller that it names, as kube-apiserver and the kubelet
//! do.

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::x509::AttributeTypeAndValue;

use super::identity::{AUTHENTICATED, Caller};

/// Returns the caller: the common name is the user, the organisations are the groups.
///
/// # Errors
/// The certificate has no common name, several, or one that is not text.
pub fn caller_of_certificate(certificate: &CertificateDer<'_>) -> Result<Caller, String> {
    let (_, parsed) =
        X509Certificate::from_der(certificate).map_err(|error| format!("the client certificate: {error}"))?;
    let subject = parsed.subject();
    let text = |attribute: &AttributeTypeAndValue<'_>| attribute.as_str().map(ToOwned::to_owned);
    let mut names = subject.iter_common_name();
    let name = match (names.next(), names.next()) {
        (Some(name), None) => {
            text(name).map_err(|error| format!("the certificate's common name: {error}"))?
        }
        _ => return Err(format!("the client certificate \"{subject}\" has not exactly one common name")),
    };
    if name.is_empty() {
        return Err("the client certificate's common name is empty".to_owned());
    }
    let mut groups = subject
        .iter_organization()
        .map(text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("the certificate's organisation: {error}"))?;
    groups.push(AUTHENTICATED.to_owned());
    Ok(Caller::new(name, groups))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    fn certificate(names: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in names {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_common_name_is_the_user_and_organisations_are_groups() {
        let certificate =
            certificate(&[(DnType::CommonName, "prometheus"), (DnType::OrganizationName, "monitoring")]);
        let caller = caller_of_certificate(&certificate).unwrap();
        assert_eq!(caller.name, "prometheus");
        assert_eq!(caller.groups, ["monitoring", "system:authenticated"]);
    }

    #[test]
    fn a_certificate_without_a_name_is_nobodys() {
        let error = caller_of_certificate(&certificate(&[(DnType::OrganizationName, "o")])).unwrap_err();
        assert!(error.contains("not exactly one common name"), "{error}");
        let error = caller_of_certificate(&certificate(&[(DnType::CommonName, "")])).unwrap_err();
        assert!(error.contains("common name"), "{error}");
        assert!(caller_of_certificate(&CertificateDer::from(vec![1, 2, 3])).is_err());
    }
}

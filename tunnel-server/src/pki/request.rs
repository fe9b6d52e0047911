//! Checks certificate requests of agents and redirectors, however they arrive: a request has its exact subject or none,
//! a key, and nothing else.

use std::fmt::Display;

use tunnel_pki::{CsrKey, Holder, public_key_of_csr};
use tunnel_runtime::NodeName;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::prelude::FromDer;
use x509_parser::x509::AttributeTypeAndValue;

/// A request that may be signed if the node is allowed to have the certificate.
#[derive(Debug)]
pub(crate) struct AskedCertificate {
    /// None if the subject is empty; the requester is known otherwise.
    pub subject: Option<(Holder, NodeName)>,
    /// The key; the request proves possession of it.
    pub key: CsrKey,
}

/// Why a request is refused: in one word, and in a message.
#[derive(Debug)]
pub(crate) struct Denial(pub &'static str, pub String);

/// The subject in the request of a node's agent or redirector.
pub(crate) fn subject_of(holder: Holder, node: &dyn Display) -> String {
    format!("O={} and CN={}{node}", holder.organization(), holder.common_name_prefix())
}

/// Parses and checks a PKCS #10 request (RFC 2986, DER).
///
/// # Errors
/// If it is malformed, does not prove possession of a P-256 key, names anything but an agent or a redirector, or
/// requests extensions.
pub(crate) fn examine_request(der: &[u8]) -> Result<AskedCertificate, Denial> {
    let refuse = |reason, message| Err(Denial(reason, message));
    let request = match X509CertificationRequest::from_der(der) {
        Ok(([], request)) => request,
        Ok(_) => return refuse("InvalidRequest", "bytes follow after the request's end".into()),
        Err(error) => return refuse("InvalidRequest", format!("the request cannot be parsed: {error}")),
    };
    let info = &request.certification_request_info;
    let subject = &info.subject;
    let wrong = || {
        let message =
            format!("the subject is \"{subject}\"; want exactly {}", subject_of(Holder::Agent, &"NODE"));
        Denial("WrongSubject", message)
    };
    let subject = if subject.iter_attributes().next().is_none() {
        None
    } else {
        let organization = single(subject.iter_organization()).ok_or_else(wrong)?;
        let common_name = single(subject.iter_common_name()).ok_or_else(wrong)?;
        let mut holders = [Holder::Agent, Holder::Redirector].into_iter();
        let holder = holders.find(|holder| holder.organization() == organization).ok_or_else(wrong)?;
        if subject.iter_attributes().count() != 2 {
            return Err(wrong());
        }
        let name = common_name.strip_prefix(holder.common_name_prefix()).ok_or_else(wrong)?;
        let node = name.parse().map_err(|error| Denial("WrongSubject", format!("the subject: {error}")))?;
        Some((holder, node))
    };
    // No attribute would be granted, so requesting one is a mistake or an attack.
    for attribute in info.iter_attributes() {
        match attribute.parsed_attribute() {
            ParsedCriAttribute::ExtensionRequest(asked) if asked.extensions.is_empty() => {}
            ParsedCriAttribute::ExtensionRequest(asked) => {
                let names: Vec<_> =
                    asked.extensions.iter().map(|extension| extension.oid.to_id_string()).collect();
                return refuse(
                    "ExtensionsRequested",
                    format!(
                        "the request asks for extensions ({}), such as alternative names; a certificate here \
                         has none of its holder's choice",
                        names.join(", ")
                    ),
                );
            }
            _ => {
                return refuse(
                    "ExtensionsRequested",
                    format!("the request has the attribute {}", attribute.oid),
                );
            }
        }
    }
    let key = public_key_of_csr(der).map_err(|error| Denial("InvalidRequest", error.to_string()))?;
    Ok(AskedCertificate { subject, key })
}

fn single<'a>(mut attributes: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Option<&'a str> {
    match (attributes.next(), attributes.next()) {
        (Some(only), None) => only.as_str().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tunnel_pki::{PrivateKey, create_csr};

    use super::*;

    #[test]
    fn a_request_is_all_that_was_sent() {
        let request = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        assert!(examine_request(&request).unwrap().subject.is_none());
        let followed = [&request[..], &[0x30, 0x00]].concat();
        let Denial(reason, message) = examine_request(&followed).unwrap_err();
        assert_eq!((reason, message.as_str()), ("InvalidRequest", "bytes follow after the request's end"));
        for length in 0..request.len() {
            let Denial(reason, _) = examine_request(&request[..length]).unwrap_err();
            assert_eq!(reason, "InvalidRequest", "{length}");
        }
        // The last byte belongs to the signature, which proves possession of the key.
        let (last, rest) = request.split_last().unwrap();
        assert_eq!(examine_request(&[rest, &[last ^ 1]].concat()).unwrap_err().0, "InvalidRequest");
    }
}

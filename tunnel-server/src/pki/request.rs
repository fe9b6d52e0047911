//! What a certificate request of an agent may hold, however it arrives: an agent's exact subject or none, a key, and
//! nothing else.

use std::fmt::Display;

use tunnel_core::identity::{
    AGENT_COMMON_NAME_PREFIX, AGENT_ORGANIZATION, CsrKey, NodeName, public_key_of_csr,
};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::prelude::FromDer;
use x509_parser::x509::AttributeTypeAndValue;

/// A request that may be signed, for a node that is allowed to have it.
#[derive(Debug)]
pub(crate) struct AskedCertificate {
    /// None: the subject is empty, and who asks is known otherwise.
    pub node: Option<NodeName>,
    /// The key, whose possession the request proves.
    pub key: CsrKey,
}

#[derive(Debug)]
pub(crate) struct RequestDenial {
    /// One word.
    pub reason: &'static str,
    pub message: String,
}

/// The subject that a node's request has.
pub(crate) fn subject_of(node: &dyn Display) -> String {
    format!("O={AGENT_ORGANIZATION} and CN={AGENT_COMMON_NAME_PREFIX}{node}")
}

/// Reads a PKCS #10 request (RFC 2986, DER).
///
/// # Errors
/// It is malformed, proves no possession of a P-256 key, names anything but an agent, or asks for extensions.
pub(crate) fn examine_request(der: &[u8]) -> Result<AskedCertificate, RequestDenial> {
    let denial = |reason, message| RequestDenial { reason, message };
    let refuse = |reason: &'static str, message: String| Err(denial(reason, message));
    let request = match X509CertificationRequest::from_der(der) {
        Ok(([], request)) => request,
        Ok(_) => return refuse("InvalidRequest", "bytes follow after the request's end".into()),
        Err(error) => return refuse("InvalidRequest", format!("the request cannot be parsed: {error}")),
    };
    let info = &request.certification_request_info;
    let subject = &info.subject;
    let wrong = || {
        let message = format!("the subject is \"{subject}\"; want exactly {}", subject_of(&"NODE"));
        denial("WrongSubject", message)
    };
    let node = if subject.iter_attributes().next().is_none() {
        None
    } else {
        let organization = single(subject.iter_organization()).ok_or_else(wrong)?;
        let common_name = single(subject.iter_common_name()).ok_or_else(wrong)?;
        if organization != AGENT_ORGANIZATION || subject.iter_attributes().count() != 2 {
            return Err(wrong());
        }
        let name = common_name.strip_prefix(AGENT_COMMON_NAME_PREFIX).ok_or_else(wrong)?;
        Some(name.parse().map_err(|error| denial("WrongSubject", format!("the subject: {error}")))?)
    };
    // Nothing of them would be granted, so asking for them is a mistake or an attempt.
    for attribute in info.iter_attributes() {
        match attribute.parsed_attribute() {
            ParsedCriAttribute::ExtensionRequest(asked) if asked.extensions.is_empty() => {}
            ParsedCriAttribute::ExtensionRequest(asked) => {
                let names: Vec<_> =
                    asked.extensions.iter().map(|extension| extension.oid.to_id_string()).collect();
                return refuse(
                    "ExtensionsRequested",
                    format!(
                        "the request asks for extensions ({}), such as alternative names; an agent's certificate \
                         has none of its choice",
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
    let key = public_key_of_csr(der).map_err(|error| denial("InvalidRequest", error.to_string()))?;
    Ok(AskedCertificate { node, key })
}

fn single<'a>(mut attributes: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Option<&'a str> {
    match (attributes.next(), attributes.next()) {
        (Some(only), None) => only.as_str().ok(),
        _ => None,
    }
}

//! Whether a request is to be signed: a pure function of the object.

use std::time::Duration;

use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use rustls_pki_types::pem::{PemObject, SectionKind};
use tunnel_core::identity::{
    AGENT_COMMON_NAME_PREFIX, AGENT_ORGANIZATION, CsrKey, NodeName, public_key_of_csr,
};
use tunnel_core::text::printable;
use tunnel_kube::SIGNER;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::prelude::FromDer;
use x509_parser::x509::AttributeTypeAndValue;

const NODE_USER: &str = "system:node:";
const NODE_GROUP: &str = "system:nodes";
/// The API server sets it for a token that is bound to a pod: the node that the pod runs on.
const NODE_NAME_EXTRA: &str = "authentication.kubernetes.io/node-name";
/// Without it the token is bound to a Node, not to a pod that runs there: anyone who may create tokens of the
/// ServiceAccount could choose the node.
const POD_NAME_EXTRA: &str = "authentication.kubernetes.io/pod-name";
const CLIENT_AUTH: &str = "client auth";
const DIGITAL_SIGNATURE: &str = "digital signature";
/// A request of ours has some 500 bytes.
const MAX_REQUEST: usize = 8192;
const MAX_MESSAGE: usize = 1000;

#[derive(Debug)]
pub(super) enum Verdict {
    /// The requester is this node, and asks for exactly what it may have.
    Approve(Approved),
    /// It is for our signer, and must not be signed.
    Deny {
        /// The condition's reason, one word.
        reason: &'static str,
        message: String,
    },
    NotOurs,
}

#[derive(Debug)]
pub(super) struct Approved {
    /// The node, which the requester is.
    pub(super) node: NodeName,
    /// The key, whose possession the request proves.
    pub(super) key: CsrKey,
    /// The longest lifetime that the requester wants.
    pub(super) life: Option<Duration>,
}

struct Denial(&'static str, String);

/// Judges a request. `namespace` and `account` name the ServiceAccount of agents that run as pods.
pub(super) fn judge(csr: &CertificateSigningRequest, namespace: &str, account: &str) -> Verdict {
    let spec = &csr.spec;
    if spec.signer_name != SIGNER {
        return Verdict::NotOurs;
    }
    match examine(spec, namespace, account) {
        Ok(approved) => Verdict::Approve(approved),
        // Some of it is the requester's text.
        Err(Denial(reason, message)) => Verdict::Deny { reason, message: printable(&message, MAX_MESSAGE) },
    }
}

fn examine(spec: &CertificateSigningRequestSpec, namespace: &str, account: &str) -> Result<Approved, Denial> {
    let requester = requester(spec, namespace, account)?;
    usages(spec)?;
    let life = match spec.expiration_seconds {
        None => None,
        Some(seconds) => match u64::try_from(seconds) {
            Ok(seconds @ 1..) => Some(Duration::from_secs(seconds)),
            _ => return Err(Denial("InvalidExpiration", format!("spec.expirationSeconds is {seconds}"))),
        },
    };
    let der = der_of(&spec.request.0)?;
    let node = node_of(&der)?;
    if node != requester {
        return Err(Denial(
            "OtherNode",
            format!("the requester is node {requester}, but the certificate would be for node {node}"),
        ));
    }
    let key = public_key_of_csr(&der).map_err(|error| Denial("InvalidRequest", error.to_string()))?;
    Ok(Approved { node, key, life })
}

/// The node that the requester is, as the API server has authenticated it.
fn requester(
    spec: &CertificateSigningRequestSpec,
    namespace: &str,
    account: &str,
) -> Result<NodeName, Denial> {
    let user = spec.username.as_deref().unwrap_or_default();
    let refuse = |message: String| Err(Denial("NotANode", message));
    let name = if let Some(name) = user.strip_prefix(NODE_USER) {
        let groups = spec.groups.as_deref().unwrap_or_default();
        if !groups.iter().any(|group| group == NODE_GROUP) {
            return refuse(format!("user {user:?} is not in the group {NODE_GROUP}"));
        }
        name
    } else if user == format!("system:serviceaccount:{namespace}:{account}") {
        match spec.extra.as_ref().and_then(|extra| extra.get(NODE_NAME_EXTRA)).map(Vec::as_slice) {
            Some([_]) if spec.extra.as_ref().is_none_or(|extra| !extra.contains_key(POD_NAME_EXTRA)) => {
                return refuse(format!(
                    "the token of user {user:?} is not bound to a pod: {POD_NAME_EXTRA} is missing"
                ));
            }
            Some([name]) => name,
            Some(names) => {
                return refuse(format!("user {user:?} has {} values of {NODE_NAME_EXTRA}", names.len()));
            }
            None => {
                return refuse(format!(
                    "the token of user {user:?} is not bound to a pod on a node: {NODE_NAME_EXTRA} is missing \
                     (tokens that the kubelet gives to pods have it from Kubernetes 1.30 on; on an older one give \
                     the agent the kubelet's --kubeconfig)"
                ));
            }
        }
    } else {
        return refuse(format!(
            "user {user:?} is neither a node ({NODE_USER}NAME) nor \
             system:serviceaccount:{namespace}:{account}"
        ));
    };
    name.parse().map_err(|error| Denial("NotANode", format!("user {user:?}: {error}")))
}

fn usages(spec: &CertificateSigningRequestSpec) -> Result<(), Denial> {
    let given = spec.usages.as_deref().unwrap_or_default();
    let count = |usage: &str| given.iter().filter(|given| *given == usage).count();
    let (client, signature) = (count(CLIENT_AUTH), count(DIGITAL_SIGNATURE));
    if client == 1 && signature <= 1 && given.len() == client + signature {
        return Ok(());
    }
    Err(Denial(
        "WrongUsages",
        format!("the usages are {given:?}; want {CLIENT_AUTH:?} and at most {DIGITAL_SIGNATURE:?} with it"),
    ))
}

/// The one PEM section of the request.
fn der_of(pem: &[u8]) -> Result<Vec<u8>, Denial> {
    let refuse = |message: String| Err(Denial("InvalidRequest", message));
    if pem.len() > MAX_REQUEST {
        return refuse(format!("spec.request is longer than {MAX_REQUEST} bytes"));
    }
    // Of any kind: a second section must be seen, whatever it is.
    let mut sections = <(SectionKind, Vec<u8>)>::pem_slice_iter(pem);
    match (sections.next(), sections.next()) {
        (Some(Ok((SectionKind::Csr, der))), None) => Ok(der),
        (Some(Err(error)), _) => refuse(format!("spec.request is not PEM: {error}")),
        _ => refuse("spec.request is not one PEM section CERTIFICATE REQUEST".into()),
    }
}

/// The node that the request names, if it has an agent's exact subject and asks for nothing else.
fn node_of(der: &[u8]) -> Result<NodeName, Denial> {
    let refuse = |reason: &'static str, message: String| Err(Denial(reason, message));
    let request = match X509CertificationRequest::from_der(der) {
        Ok(([], request)) => request,
        Ok(_) => return refuse("InvalidRequest", "bytes follow after the request's end".into()),
        Err(error) => return refuse("InvalidRequest", format!("the request cannot be parsed: {error}")),
    };
    let info = &request.certification_request_info;
    let subject = &info.subject;
    let wrong = || {
        Denial(
            "WrongSubject",
            format!(
                "the subject is \"{subject}\"; want exactly O={AGENT_ORGANIZATION} and \
                 CN={AGENT_COMMON_NAME_PREFIX}NODE"
            ),
        )
    };
    let organization = single(subject.iter_organization()).ok_or_else(wrong)?;
    let common_name = single(subject.iter_common_name()).ok_or_else(wrong)?;
    if organization != AGENT_ORGANIZATION || subject.iter_attributes().count() != 2 {
        return Err(wrong());
    }
    let name = common_name.strip_prefix(AGENT_COMMON_NAME_PREFIX).ok_or_else(wrong)?;
    let node = name.parse().map_err(|error| Denial("WrongSubject", format!("the subject: {error}")))?;
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
    Ok(node)
}

fn single<'a>(mut attributes: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Option<&'a str> {
    match (attributes.next(), attributes.next()) {
        (Some(only), None) => only.as_str().ok(),
        _ => None,
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;

//! Decides if a request is to be signed: a pure function of the object.

use std::time::Duration;

use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use rustls_pki_types::pem::{PemObject, SectionKind};
use tunnel_pki::{CsrKey, Holder};
use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

use crate::caller::node_of_pod;
use crate::pki::{Denial, examine_request, subject_of};

const NODE_USER: &str = "system:node:";
const NODE_GROUP: &str = "system:nodes";
const CLIENT_AUTH: &str = "client auth";
const DIGITAL_SIGNATURE: &str = "digital signature";
/// Maximum size in bytes. Our requests have about 500.
const MAX_REQUEST: usize = 8192;
const MAX_MESSAGE: usize = 1000;

/// The requester is this node, and requests exactly what it may have.
#[derive(Debug)]
pub(super) struct Approved {
    /// Role of the requester on the node.
    pub(super) holder: Holder,
    /// The requester's node.
    pub(super) node: NodeName,
    /// The key; the request proves possession of it.
    pub(super) key: CsrKey,
    /// Maximum lifetime that the requester wants.
    pub(super) life: Option<Duration>,
}

/// ServiceAccounts whose pods may get a certificate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accounts<'a> {
    pub(super) namespace: &'a str,
    pub(super) agent: &'a str,
    pub(super) redirector: &'a str,
}

impl Accounts<'_> {
    /// Returns the role of a user that is one of the ServiceAccounts.
    fn holder(&self, user: &str) -> Option<Holder> {
        let name =
            user.strip_prefix("system:serviceaccount:")?.strip_prefix(self.namespace)?.strip_prefix(':')?;
        match name {
            _ if name == self.agent => Some(Holder::Agent),
            _ if name == self.redirector => Some(Holder::Redirector),
            _ => None,
        }
    }
}

/// Judges a request for our signer.
///
/// # Errors
/// It must not be signed.
pub(super) fn judge(csr: &CertificateSigningRequest, accounts: Accounts<'_>) -> Result<Approved, Denial> {
    // The message has text of the requester.
    examine(&csr.spec, accounts)
        .map_err(|Denial(reason, message)| Denial(reason, printable(&message, MAX_MESSAGE)))
}

fn examine(spec: &CertificateSigningRequestSpec, accounts: Accounts<'_>) -> Result<Approved, Denial> {
    let (holder, requester) = requester(spec, accounts)?;
    usages(spec)?;
    let life = match spec.expiration_seconds {
        None => None,
        Some(seconds) => match u64::try_from(seconds) {
            Ok(seconds @ 1..) => Some(Duration::from_secs(seconds)),
            _ => return Err(Denial("InvalidExpiration", format!("spec.expirationSeconds is {seconds}"))),
        },
    };
    let der = der_of(&spec.request.0)?;
    let asked = examine_request(&der)?;
    let Some((asked_holder, node)) = asked.subject else {
        let message = format!("the subject is empty; want exactly {}", subject_of(holder, &requester));
        return Err(Denial("WrongSubject", message));
    };
    if asked_holder != holder {
        let message = format!(
            "the requester is entitled to the certificate of a node's {holder}, not of its {asked_holder}"
        );
        return Err(Denial("OtherHolder", message));
    }
    if node != requester {
        return Err(Denial(
            "OtherNode",
            format!("the requester is node {requester}, but the certificate would be for node {node}"),
        ));
    }
    Ok(Approved { holder, node, key: asked.key, life })
}

/// Returns the requester's role and node, as authenticated by the API server.
fn requester(
    spec: &CertificateSigningRequestSpec,
    accounts: Accounts<'_>,
) -> Result<(Holder, NodeName), Denial> {
    let user = spec.username.as_deref().unwrap_or_default();
    let refuse = |message: String| Err(Denial("NotANode", message));
    let (holder, node) = if let Some(name) = user.strip_prefix(NODE_USER) {
        let groups = spec.groups.as_deref().unwrap_or_default();
        if !groups.iter().any(|group| group == NODE_GROUP) {
            return refuse(format!("user {user:?} is not in the group {NODE_GROUP}"));
        }
        // Kubelet credentials give access to the kubelet's own node only.
        (Holder::Agent, name.parse::<NodeName>().map_err(|error| format!("user {user:?}: {error}")))
    } else if let Some(holder) = accounts.holder(user) {
        (holder, node_of_pod(user, spec.extra.as_ref()))
    } else {
        return refuse(format!(
            "user {user:?} is neither a node ({NODE_USER}NAME) nor \
             system:serviceaccount:{0}:{1} or system:serviceaccount:{0}:{2}",
            accounts.namespace, accounts.agent, accounts.redirector
        ));
    };
    Ok((holder, node.map_err(|reason| Denial("NotANode", reason))?))
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

/// Decodes the only PEM section of the request.
fn der_of(pem: &[u8]) -> Result<Vec<u8>, Denial> {
    let refuse = |message: String| Err(Denial("InvalidRequest", message));
    if pem.len() > MAX_REQUEST {
        return refuse(format!("spec.request is longer than {MAX_REQUEST} bytes"));
    }
    // Sections of any kind, so that a second one is noticed.
    let mut sections = <(SectionKind, Vec<u8>)>::pem_slice_iter(pem);
    match (sections.next(), sections.next()) {
        (Some(Ok((SectionKind::Csr, der))), None) => Ok(der),
        (Some(Err(error)), _) => refuse(format!("spec.request is not PEM: {error}")),
        _ => refuse("spec.request is not one PEM section CERTIFICATE REQUEST".into()),
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;

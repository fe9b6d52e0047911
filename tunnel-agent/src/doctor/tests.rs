//! Tests, and certificates for those of other modules.

use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::CertificateDer;
use tunnel_pki::{AgentIdentity, Holder, PrivateKey, TrustBundle, pem_of_certificates};

use super::wanted;

pub(crate) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    root: CertificateDer<'static>,
}

impl Ca {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "postern");
        let root = params.self_signed(&key).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), root }
    }
}

/// An agent's identity.
pub(crate) fn agent(ca: &Ca, node: &str, from: SystemTime, to: SystemTime) -> AgentIdentity {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name = Holder::Agent.distinguished_name(&node.parse().unwrap());
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_before = from.into();
    params.not_after = to.into();
    let certificate = params.signed_by(&key, &ca.issuer).unwrap();
    let pem = PrivateKey::from_pem(&key.serialize_pem()).unwrap().to_pem();
    let roots = TrustBundle::new(vec![ca.root.clone()]).unwrap();
    AgentIdentity::from_pem(&pem_of_certificates(&[certificate.der().clone()]), &pem, roots).unwrap()
}

#[test]
fn only_its_own_node_must_be_readable() {
    let node = "edge-1".parse().unwrap();
    let with_pods = wanted("x-tunnel-server-svc", Some(&node));
    let nodes: Vec<_> = with_pods.iter().filter(|right| right.resource == "nodes").collect();
    assert!(nodes.len() == 1 && nodes[0].name.as_deref() == Some("edge-1"), "{nodes:?}");
    assert_eq!(wanted("x-tunnel-server-svc", None).len(), with_pods.len() - 1);
}

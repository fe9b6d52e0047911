//! Judges a server by its TLS handshake, and what may intercept it.

use std::io;
use std::time::SystemTime;

use rustls_pki_types::CertificateDer;
use tunnel_pki::{TrustBundle, ca_hash, describe_certificate, is_ca, names_a_tunnel_server, validity};
use tunnel_runtime::error::chain as causes;

use super::checkup::Finding;
use super::codes;
use super::files::validity_of;

/// Servers that are trusted.
#[derive(Clone, Debug)]
pub enum Trusted {
    /// Servers whose certificate is signed by one of these roots.
    Roots(TrustBundle),
    /// Servers of the CA with this hash.
    Hash(String),
}

impl Trusted {
    fn shown(&self) -> String {
        match self {
            Self::Roots(roots) => roots.hashes().join(", "),
            Self::Hash(hash) => hash.clone(),
        }
    }

    /// Returns the trusted roots. If only a hash is known, they are taken from the presented certificates.
    fn roots(&self, presented: &[CertificateDer<'static>]) -> Option<TrustBundle> {
        match self {
            Self::Roots(roots) => Some(roots.clone()),
            Self::Hash(hash) => {
                let is_it = |root: &&CertificateDer<'static>| {
                    is_ca(root) && ca_hash(root).is_ok_and(|found| found == *hash)
                };
                TrustBundle::new(presented.iter().find(is_it).into_iter().cloned().collect()).ok()
            }
        }
    }
}

/// Returns a finding if the chain presented by `server` cannot be trusted.
pub fn judge_chain(
    server: &str,
    chain: &[CertificateDer<'static>],
    trusted: &Trusted,
    now: SystemTime,
) -> Option<Finding> {
    let Some(leaf) = chain.first() else {
        let found = format!("{server} shows no certificate");
        return Some(Finding::new(&codes::NOT_A_TUNNEL_SERVER, found, fix_address(server)));
    };
    if !names_a_tunnel_server(leaf) {
        let found = format!("{server} shows {}", describe_certificate(leaf));
        let fix = format!(
            "exempt {server} from TLS inspection on the way; if there is none, the address is \
             another service's: compare it with `tunnel-server token create`"
        );
        return Some(Finding::new(&codes::TLS_INTERCEPTED, found, fix));
    }
    let roots = trusted.roots(chain).filter(|roots| {
        // During a rotation the leaf is signed by a new root, which an old root has signed.
        chain.iter().any(|certificate| roots.issuer_of(certificate).is_some())
    });
    let Some(roots) = roots else {
        let presented: Vec<String> = chain
            .iter()
            .filter(|certificate| is_ca(certificate))
            .filter_map(|root| ca_hash(root).ok())
            .collect();
        let found = format!(
            "{server} is of the CA {}, and {} is trusted",
            if presented.is_empty() { "?".to_owned() } else { presented.join(", ") },
            trusted.shown()
        );
        let fix = "if the servers have a new CA (compare `tunnel-server ca status`), remove the agent's state directory and \
                   enrol it again with a new token; if not, it is another installation's server: correct --server";
        return Some(Finding::new(&codes::CA_MISMATCH, found, fix));
    };
    if let Some(reason) = validity(leaf).ok().and_then(|validity| validity_of(&validity, now)) {
        let fix = "compare `date -u` on both ends and start a time service (`timedatectl set-ntp true`)";
        return Some(Finding::new(
            &codes::CLOCK_SKEW,
            format!("the certificate of {server} is {reason}"),
            fix,
        ));
    }
    let error = roots.verify_server(chain, now).err()?;
    let fix = "`tunnel-server ca status` on the server, and restart it: it issues itself a new certificate";
    Some(Finding::new(&codes::SERVER_CERTIFICATE_UNTRUSTED, format!("{server}: {error}"), fix))
}

/// Returns the finding for a handshake that failed before a certificate arrived.
pub fn judge_handshake_error(server: &str, error: &io::Error) -> Finding {
    let reason = causes(error);
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        // An alert: the peer speaks TLS, but not like a tunnel-server.
        Some(rustls::Error::AlertReceived(_)) => {
            let found = format!("{server} refuses the handshake: {reason}");
            let fix = format!("exempt {server} from TLS inspection on the way");
            Finding::new(&codes::TLS_INTERCEPTED, found, fix)
        }
        _ => {
            let found = format!("{server} does not answer as a tunnel-server: {reason}");
            Finding::new(&codes::NOT_A_TUNNEL_SERVER, found, fix_address(server))
        }
    }
}

fn fix_address(server: &str) -> String {
    format!(
        "correct --server: `tunnel-server token create` prints the right one, and {server} is another service's"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    };
    use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::TlsAcceptor;
    use tunnel_pki::{ALPN_TUNNEL, SERVER_NAME, presented_chain};

    use super::*;

    struct Ca {
        issuer: Issuer<'static, KeyPair>,
        root: CertificateDer<'static>,
    }

    fn ca() -> Ca {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(rcgen::DnType::CommonName, "a CA");
        let root = params.self_signed(&key).unwrap().der().clone();
        Ca { issuer: Issuer::new(params, key), root }
    }

    /// Creates a certificate for `name`, valid in this range of days from now.
    fn leaf(ca: &Ca, name: &str, days: (i64, i64)) -> (Vec<CertificateDer<'static>>, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = std::time::SystemTime::now();
        let at = |days: i64| {
            let span = Duration::from_secs(days.unsigned_abs() * 86_400);
            if days < 0 { now - span } else { now + span }
        };
        params.not_before = at(days.0).into();
        params.not_after = at(days.1).into();
        let certificate = params.signed_by(&key, &ca.issuer).unwrap();
        (vec![certificate.der().clone(), ca.root.clone()], key)
    }

    fn code(chain: &[CertificateDer<'static>], trusted: &Trusted) -> Option<&'static str> {
        judge_chain("tunnel:10262", chain, trusted, SystemTime::now()).map(|finding| finding.code)
    }

    #[test]
    fn who_answers_is_told_by_its_certificate() {
        let (ours, other) = (ca(), ca());
        let roots = Trusted::Roots(TrustBundle::new(vec![ours.root.clone()]).unwrap());
        let hash = Trusted::Hash(ca_hash(&ours.root).unwrap());
        for trusted in [&roots, &hash] {
            assert_eq!(code(&leaf(&ours, SERVER_NAME, (-1, 30)).0, trusted), None);
            assert_eq!(code(&leaf(&other, SERVER_NAME, (-1, 30)).0, trusted), Some("ca-mismatch"));
            assert_eq!(
                code(&leaf(&other, "tunnel.example.org", (-1, 30)).0, trusted),
                Some("tls-intercepted")
            );
            // This host's clock is behind or ahead.
            assert_eq!(code(&leaf(&ours, SERVER_NAME, (2, 30)).0, trusted), Some("clock-skew"));
            assert_eq!(code(&leaf(&ours, SERVER_NAME, (-30, -2)).0, trusted), Some("clock-skew"));
            assert_eq!(code(&[], trusted), Some("not-a-tunnel-server"));
        }
        // A trusted root is in the chain, but another key signed the leaf.
        let (mut chain, _) = leaf(&other, SERVER_NAME, (-1, 30));
        chain.push(ours.root.clone());
        assert_eq!(code(&chain, &roots), Some("server-certificate-untrusted"));
        let shown = judge_chain("s:1", &leaf(&other, "proxy", (-1, 9)).0, &roots, SystemTime::now()).unwrap();
        assert!(shown.found.contains("issued by \"CN=a CA\""), "{shown:?}");
    }

    async fn connected() -> (TcpListener, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (listener, stream)
    }

    #[tokio::test]
    async fn an_interceptor_of_any_tls_version_is_seen() {
        let ca = ca();
        for versions in [&[&rustls::version::TLS12][..], &[&rustls::version::TLS13]] {
            let (chain, key) = leaf(&ca, "*.example.org", (-1, 1));
            let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let config = rustls::ServerConfig::builder_with_provider(provider)
                .with_protocol_versions(versions)
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(chain.clone(), key)
                .unwrap();
            let (listener, stream) = connected().await;
            tokio::spawn(async move {
                let (stream, _) = listener.accept().await.unwrap();
                TlsAcceptor::from(Arc::new(config)).accept(stream).await
            });
            let presented = presented_chain(stream, ALPN_TUNNEL).await.unwrap();
            assert_eq!(presented, chain);
            assert_eq!(code(&presented, &Trusted::Hash("sha256:0".into())), Some("tls-intercepted"));
        }
    }

    #[tokio::test]
    async fn what_speaks_no_tls_is_no_tunnel_server() {
        let (listener, stream) = connected().await;
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await.unwrap();
            stream
        });
        let error = presented_chain(stream, ALPN_TUNNEL).await.unwrap_err();
        assert_eq!(judge_handshake_error("s:22", &error).code, "not-a-tunnel-server");
        // A server that knows none of our protocols answers with an alert.
        let alert =
            io::Error::other(rustls::Error::AlertReceived(rustls::AlertDescription::NoApplicationProtocol));
        assert_eq!(judge_handshake_error("s:443", &alert).code, "tls-intercepted");
    }
}

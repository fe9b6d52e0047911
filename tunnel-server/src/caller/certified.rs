//! A caller's certificate while its connection lasts. A handshake verifies it only once.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use tokio::time::sleep;
use tunnel_pki::validity;

use crate::metrics::{Judgement, Permit};

/// Interval at which a chain is verified again although the roots are the same: an intermediate CA may have expired.
const VERIFIED: Duration = Duration::from_secs(20);
/// Longest wait for an expiry: the clock may be set meanwhile.
const LOOK: Duration = Duration::from_secs(60);

type Verifier = Arc<dyn ClientCertVerifier>;

/// The verifier of callers' certificates in effect; clones share it. The default accepts no certificate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accepted(watch::Sender<Option<Verifier>>);

impl Accepted {
    pub(crate) fn set(&self, verifier: Verifier) {
        self.0.send_replace(Some(verifier));
    }

    pub(crate) fn changes(&self) -> watch::Receiver<Option<Verifier>> {
        self.0.subscribe()
    }
}

/// The certificate that a caller has shown.
#[derive(Debug)]
pub(crate) struct Certified {
    pub(crate) leaf: CertificateDer<'static>,
    intermediates: Vec<CertificateDer<'static>>,
    /// `None` if it cannot be read, which the verifier then reports.
    not_after: Option<SystemTime>,
    accepted: Accepted,
    verified: Mutex<Option<(Verifier, Instant)>>,
}

impl Certified {
    /// Returns `None` if the chain is empty.
    pub(crate) fn new(chain: &[CertificateDer<'_>], accepted: Accepted) -> Option<Self> {
        let (leaf, intermediates) = chain.split_first()?;
        Some(Self {
            leaf: leaf.clone().into_owned(),
            intermediates: intermediates.iter().map(|one| one.clone().into_owned()).collect(),
            not_after: validity(leaf).ok().map(|validity| validity.not_after),
            accepted,
            verified: Mutex::default(),
        })
    }

    /// Checks that a handshake would accept the certificate now.
    ///
    /// # Errors
    /// It has expired, or the roots in effect have not signed it.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.check_at(SystemTime::now(), Instant::now())
    }

    fn check_at(&self, clock: SystemTime, now: Instant) -> Result<(), String> {
        if self.not_after.is_some_and(|not_after| clock > not_after) {
            return Err("the client certificate has expired; connect again with a valid one".to_owned());
        }
        let verifier = self.accepted.0.borrow().clone();
        let Some(verifier) = verifier else { return Err("client certificates are not accepted".to_owned()) };
        let mut verified = self.verified.lock();
        let fresh = |(by, at): &(Verifier, Instant)| {
            Arc::ptr_eq(by, &verifier) && now.saturating_duration_since(*at) < VERIFIED
        };
        if verified.as_ref().is_some_and(fresh) {
            return Ok(());
        }
        let time =
            UnixTime::since_unix_epoch(clock.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        verifier.verify_client_cert(&self.leaf, &self.intermediates, time).map_err(|error| {
            format!("the client certificate is no longer accepted: {error}; connect again with a valid one")
        })?;
        *verified = Some((verifier, now));
        Ok(())
    }

    /// Waits until the certificate is accepted no longer.
    pub(crate) async fn lapsed(&self) {
        let mut changes = self.accepted.changes();
        loop {
            changes.mark_unchanged();
            if self.check().is_err() {
                return;
            }
            let left = self.not_after.and_then(|until| until.duration_since(SystemTime::now()).ok());
            // notAfter itself is part of the validity.
            let left = left.map_or(LOOK, |left| left + Duration::from_millis(10)).min(LOOK);
            tokio::select! {
                // The sender is in `self`.
                _ = changes.changed() => {}
                () = sleep(left) => {}
            }
        }
    }
}

/// For a listener where every certificate of the CA may do everything.
#[tonic::async_trait]
impl Permit for Certified {
    async fn judge(&self) -> Judgement {
        match self.check() {
            Ok(()) => Judgement::Holds,
            Err(reason) => Judgement::Withdrawn(reason),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use tunnel_pki::{TrustBundle, caller_verifier};

    use super::*;

    /// A CA of callers.
    pub(crate) struct CallersCa(Issuer<'static, KeyPair>, TrustBundle);

    impl CallersCa {
        pub(crate) fn new() -> Self {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(DnType::CommonName, "callers");
            let key = KeyPair::generate().unwrap();
            let root = params.self_signed(&key).unwrap().der().clone();
            Self(Issuer::new(params, key), TrustBundle::new(vec![root]).unwrap())
        }

        pub(crate) fn bundle(&self) -> &TrustBundle {
            &self.1
        }

        pub(crate) fn verifier(&self) -> Verifier {
            caller_verifier(self.1.root_store(), false).unwrap()
        }

        pub(crate) fn sign(&self, name: &str, lasts: Duration) -> CertificateDer<'static> {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
            params.not_after = (SystemTime::now() + lasts).into();
            params.signed_by(&KeyPair::generate().unwrap(), &self.0).unwrap().der().clone()
        }

        /// A certificate as a listener holds it that accepts this CA.
        pub(crate) fn certified(&self, lasts: Duration) -> (Accepted, Arc<Certified>) {
            let accepted = Accepted::default();
            accepted.set(self.verifier());
            let certified = Certified::new(&[self.sign("alice", lasts)], accepted.clone()).unwrap();
            (accepted, Arc::new(certified))
        }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn it_is_accepted_until_it_expires_or_its_ca_is_gone() {
        let (ca, clock, now) = (CallersCa::new(), SystemTime::now(), Instant::now());
        let (accepted, certified) = ca.certified(HOUR);
        assert_eq!(certified.check_at(clock, now), Ok(()));
        assert_eq!(certified.check_at(clock, now + VERIFIED), Ok(()));
        let expired = certified.check_at(clock + HOUR + Duration::from_secs(2), now).unwrap_err();
        assert!(expired.contains("has expired"), "{expired}");
        accepted.set(CallersCa::new().verifier());
        let foreign = certified.check_at(clock, now).unwrap_err();
        assert!(foreign.contains("no longer accepted"), "{foreign}");
        accepted.set(ca.verifier());
        assert_eq!(certified.check_at(clock, now), Ok(()));
        assert!(Certified::new(&[], accepted).is_none());
    }

    #[tokio::test]
    async fn its_end_is_noticed_at_once() {
        let (accepted, certified) = CallersCa::new().certified(HOUR);
        let lapsed = tokio::spawn(async move { certified.lapsed().await });
        tokio::task::yield_now().await;
        assert!(!lapsed.is_finished());
        accepted.set(CallersCa::new().verifier());
        tokio::time::timeout(Duration::from_secs(10), lapsed).await.expect("its CA is gone").unwrap();
        let (_accepted, short) = CallersCa::new().certified(Duration::from_secs(1));
        tokio::time::timeout(Duration::from_secs(10), short.lapsed()).await.expect("it has expired");
    }
}

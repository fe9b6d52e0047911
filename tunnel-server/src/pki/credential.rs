//! The parts of a link's certificate that are kept, to judge it while the link lasts: TLS verifies it only when the link is made.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use rustls_pki_types::CertificateDer;
use tokio::time::Instant;
use tunnel_pki::{IdentityError, TrustBundle, validity};
use tunnel_runtime::clock::Clock;

use super::standing::Refusal;

/// Time for which a link outlasts its certificate, whose holder may not reach a server that renews it.
const AFTER_EXPIRY: Duration = Duration::from_secs(3600);

/// By what a client was let in.
#[derive(Clone, Debug)]
pub struct Credential {
    /// Time of issue.
    pub issued: SystemTime,
    /// None: a token, which the API server has reviewed.
    certificate: Option<Certificate>,
}

#[derive(Clone, Debug)]
struct Certificate {
    not_after: SystemTime,
    /// Time at which links end that were made while it was valid. A wall clock that jumps ends none.
    ends: Instant,
    /// Those of its time, which all links share, and which of them has signed it.
    roots: Arc<TrustBundle>,
    signer: Option<usize>,
}

impl Credential {
    /// `roots` are those in force.
    ///
    /// # Errors
    /// The certificate cannot be read.
    pub fn of(
        certificate: &CertificateDer<'_>,
        roots: &Arc<TrustBundle>,
        clock: Clock,
    ) -> Result<Self, IdentityError> {
        let (validity, signer) = (validity(certificate)?, roots.issuer_of(certificate));
        let (roots, not_after, now) = (roots.clone(), validity.not_after, Instant::now());
        // TLS does not verify the certificate of a resumed session: it may have expired.
        let ends = not_after.duration_since(clock.now()).map_or(now, |left| now + left + AFTER_EXPIRY);
        let certificate = Certificate { not_after, ends, roots, signer };
        Ok(Self { issued: validity.issued(), certificate: Some(certificate) })
    }

    /// A token that was reviewed at `issued`.
    pub fn token(issued: SystemTime) -> Self {
        Self { issued, certificate: None }
    }

    /// Judges it by the roots in force and the time.
    ///
    /// # Errors
    /// Its root was retired, or its time is over.
    pub fn judge(&self, roots: &Arc<TrustBundle>, now: Instant) -> Result<(), Refusal> {
        let Some(certificate) = &self.certificate else { return Ok(()) };
        let signer = certificate.signer.and_then(|signer| certificate.roots.roots().get(signer));
        if signer.is_none_or(|signer| !roots.roots().contains(signer)) {
            return Err(Refusal::Retired);
        }
        if now >= certificate.ends {
            return Err(Refusal::Expired(Timestamp::try_from(certificate.not_after).unwrap_or_default()));
        }
        Ok(())
    }
}

impl Refusal {
    /// The time at which it ends a link. `before`: the time that an earlier refusal of the same link has set. `renewed`: the
    /// time for a new link of a client whose certificate or root is over, which is asked for one first.
    pub(crate) fn ends(&self, before: Option<Instant>, now: Instant, renewed: Duration) -> Instant {
        let end = match self {
            Self::Retired | Self::Expired(_) => now + renewed,
            // Perhaps for a moment only.
            Self::Recreated(_) | Self::Unknown(_) => now + MISSING,
            _ => now,
        };
        before.map_or(end, |before| before.min(end))
    }
}

/// Time that a node may be missing: an inventory file may be replaced in two steps, and a Node created again at once.
const MISSING: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tunnel_pki::{PrivateKey, create_csr, public_key_of_csr};
    use tunnel_runtime::NodeName;

    use super::super::{Ca, Lifetimes};
    use super::*;

    #[test]
    fn a_retired_root_and_the_end_of_a_certificate_are_noticed_while_a_link_lasts() {
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::load_or_create(&directory.path().join("server"), Lifetimes::default()).unwrap();
        let roots = || Arc::new(ca.state().unwrap().bundle().clone());
        let issue = || {
            let key = public_key_of_csr(&create_csr(&PrivateKey::generate().unwrap()).unwrap()).unwrap();
            let issued = ca.state().unwrap().issue_agent(&"edge-1".parse().unwrap(), &key).unwrap();
            (Credential::of(&issued.chain[0], &roots(), Clock::default()).unwrap(), issued.not_after)
        };
        let (old, not_after) = issue();
        let now = Instant::now();
        assert_eq!(old.judge(&roots(), now), Ok(()));
        // It was shown while it was valid: the link has another hour, whatever the wall clock says.
        let end = now + not_after.duration_since(SystemTime::now()).unwrap() + AFTER_EXPIRY;
        assert_eq!(old.judge(&roots(), end - Duration::from_secs(60)), Ok(()));
        assert!(matches!(old.judge(&roots(), end + Duration::from_secs(60)), Err(Refusal::Expired(_))));
        ca.introduce().unwrap();
        ca.activate().unwrap();
        let (new, _) = issue();
        assert_eq!(
            (old.judge(&roots(), now), new.judge(&roots(), now)),
            (Ok(()), Ok(())),
            "both are trusted"
        );
        ca.retire(true).unwrap();
        assert_eq!((old.judge(&roots(), now), new.judge(&roots(), now)), (Err(Refusal::Retired), Ok(())));
        // A certificate of a root that is not in force is none, whenever it was shown.
        let other = tempfile::tempdir().unwrap();
        let other = Ca::load_or_create(&other.path().join("server"), Lifetimes::default()).unwrap();
        let key = public_key_of_csr(&create_csr(&PrivateKey::generate().unwrap()).unwrap()).unwrap();
        let foreign = other.state().unwrap().issue_agent(&"edge-1".parse().unwrap(), &key).unwrap();
        let foreign = Credential::of(&foreign.chain[0], &roots(), Clock::default()).unwrap();
        assert_eq!(foreign.judge(&roots(), now), Err(Refusal::Retired));
        assert_eq!(Credential::token(SystemTime::now()).judge(&roots(), end + AFTER_EXPIRY), Ok(()));
    }

    #[test]
    fn a_refusal_says_when_it_ends_a_link() {
        let (now, drain) = (Instant::now(), Duration::from_secs(30));
        let ends = |refusal: &Refusal, before: Option<Instant>| refusal.ends(before, now, drain) - now;
        let (edge, at): (NodeName, _) = ("edge-1".parse().unwrap(), Timestamp::now());
        let later = Some(now + Duration::from_secs(100_000));
        for (refusal, seconds) in [
            (Refusal::Revoked((&edge).into(), at), 0),
            (Refusal::Damaged((&edge).into()), 0),
            (Refusal::Token(String::new()), 0),
            (Refusal::Superseded(edge.clone(), at), 0),
            (Refusal::Edge(edge.clone()), 0),
            (Refusal::Recreated(edge.clone()), 5),
            (Refusal::Unknown(edge), 5),
            (Refusal::Retired, 30),
            (Refusal::Expired(at), 30),
        ] {
            assert_eq!(ends(&refusal, None).as_secs(), seconds, "{refusal}");
            assert_eq!(ends(&refusal, later).as_secs(), seconds, "{refusal}");
            assert_eq!(ends(&refusal, Some(now)).as_secs(), 0, "{refusal}: an earlier one counts on");
        }
    }
}

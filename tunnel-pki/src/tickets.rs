//! Session tickets (RFC 8446 §4.6.1) that every server of an installation can read.
//!
//! A ticket holds the agent's certificate, which is not verified again when the session is resumed. So the key of tickets is
//! derived from the signing root's key *and all roots*: where others are in force, a ticket cannot be read and the handshake
//! is a full one. What changes while the roots stay, the time and who is revoked, is judged after each handshake of
//! either kind, by the same code.

use std::fmt;
use std::time::SystemTime;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Prk, Salt};
use rand::TryRngCore as _;
use rand::rngs::OsRng;
use rustls::server::ProducesTickets;
use sha2::{Digest as _, Sha256};
use tunnel_runtime::clock::Clock;

use super::bundle::TrustBundle;
use super::key::PrivateKey;

/// Time for which a key makes tickets, in seconds. It reads them for twice as long.
const EPOCH: u32 = 6 * 3600;
/// Bytes of a ticket that are random.
const SALT: usize = 32;
const LABEL: &[u8] = b"postern session tickets 1";
/// A session in which the client showed no certificate is always smaller, one with a certificate never: it gets no ticket.
const LEAST: usize = 360;

/// Makes and reads tickets. Nothing is stored: each key is derived when it is needed.
pub struct Tickets(Prk, Clock);

impl Tickets {
    /// `key` is the signing root's.
    pub fn new(key: &PrivateKey, roots: &TrustBundle, clock: Clock) -> Self {
        let mut all = Sha256::new();
        roots.roots().iter().for_each(|root| all.update(root));
        Self(Salt::new(HKDF_SHA256, &all.finalize()).extract(key.to_der().secret_der()), clock)
    }

    /// Each ticket has a key of its own, so that a nonce repeats with its salt only.
    fn key(&self, epoch: u32, salt: &[u8; SALT]) -> Option<LessSafeKey> {
        let epoch = epoch.to_be_bytes();
        let info = [LABEL, &epoch, salt];
        Some(LessSafeKey::new(UnboundKey::from(self.0.expand(&info, &AES_256_GCM).ok()?)))
    }

    fn seal(&self, session: &[u8], epoch: u32) -> Option<Vec<u8>> {
        let mut salt = [0; SALT];
        // The kernel's: AWS-LC's generator does not notice that a virtual machine was cloned, and all servers have one key.
        OsRng.try_fill_bytes(&mut salt).ok()?;
        let mut sealed = session.to_vec();
        self.key(epoch, &salt)?.seal_in_place_append_tag(only(), Aad::empty(), &mut sealed).ok()?;
        Some([&epoch.to_be_bytes()[..], &salt, &sealed].concat())
    }

    fn open(&self, ticket: &[u8], now: u32) -> Option<Vec<u8>> {
        let (epoch, rest) = ticket.split_first_chunk()?;
        let (salt, sealed) = rest.split_first_chunk()?;
        let epoch = u32::from_be_bytes(*epoch);
        // The next one is that of a server whose clock is ahead. A client may show many that are too short, for little.
        if epoch.abs_diff(now) > 1 || sealed.len() < LEAST + AES_256_GCM.tag_len() {
            return None;
        }
        let mut sealed = sealed.to_vec();
        let length = self.key(epoch, salt)?.open_in_place(only(), Aad::empty(), &mut sealed).ok()?.len();
        sealed.truncate(length);
        Some(sealed)
    }
}

/// The nonce of a key that seals once.
fn only() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

fn epoch(clock: Clock) -> Option<u32> {
    let now = clock.now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    u32::try_from(now.as_secs() / u64::from(EPOCH)).ok()
}

impl ProducesTickets for Tickets {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        EPOCH
    }

    fn encrypt(&self, session: &[u8]) -> Option<Vec<u8>> {
        if session.len() < LEAST {
            return None;
        }
        self.seal(session, epoch(self.1)?)
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        self.open(ticket, epoch(self.1)?)
    }
}

/// Omits the key.
impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tickets").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyUsagePurpose};

    use super::*;

    fn root(key: &PrivateKey) -> TrustBundle {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        TrustBundle::new(vec![params.self_signed(key).unwrap().der().clone()]).unwrap()
    }

    #[test]
    fn every_server_reads_them_until_the_time_or_the_roots_change() {
        let (key, other) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        let (old, new) = (root(&key), root(&other));
        let both = [old.roots(), new.roots()].concat();
        let (issuer, another) =
            (Tickets::new(&key, &old, Clock::default()), Tickets::new(&key, &old, Clock::default()));
        let session = vec![7; LEAST];
        let ticket = issuer.seal(&session, 100).unwrap();
        for now in 99..=101 {
            assert_eq!(another.open(&ticket, now).as_deref(), Some(&session[..]), "{now}");
        }
        assert_eq!((another.open(&ticket, 98), another.open(&ticket, 102)), (None, None));
        for (key, roots) in [
            (&key, TrustBundle::new(both.clone()).unwrap()),
            (&key, TrustBundle::new(both.into_iter().rev().collect()).unwrap()),
            (&key, new.clone()),
            (&other, old.clone()),
        ] {
            assert_eq!(Tickets::new(key, &roots, Clock::default()).open(&ticket, 100), None);
        }
        // Nor does anyone read a part of it, or a changed one, such as one with a later epoch.
        for length in 0..ticket.len() {
            assert_eq!(another.open(&ticket[..length], 100), None);
            let mut changed = ticket.clone();
            changed[length] ^= 1;
            assert_eq!(another.open(&changed, 100), None, "byte {length}");
        }
        assert_ne!(issuer.seal(&session, 100).unwrap(), ticket);
    }
}

//! The enrolment tokens on disk: creates, lists, revokes and redeems them.

use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tunnel_pki::Holder;
use tunnel_runtime::NodeName;
use tunnel_runtime::files;

use super::error::PkiError;
use super::records::Records;
use super::token::{Token, is_id};

/// Time for which an expired token is still listed.
const KEEP_EXPIRED: SignedDuration = SignedDuration::from_hours(7 * 24);

/// A token as stored: everything but the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRecord {
    /// The part before the dot.
    pub id: String,
    /// Hexadecimal SHA-256 of the secret.
    pub secret_sha256: String,
    /// The only node that may use it.
    pub node: NodeName,
    /// Its holder on the node.
    #[serde(default)]
    pub holder: Holder,
    pub created: Timestamp,
    pub expires: Timestamp,
    /// Hash of the public key that used it. That key may use it again, because the response may have been lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_by: Option<String>,
    /// Time of the first use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_at: Option<Timestamp>,
}

/// State of a token at a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenState {
    Valid,
    /// Only the key that used it may use it again, until it expires.
    Used,
    Expired,
}

impl TokenRecord {
    pub fn state(&self, now: Timestamp) -> TokenState {
        if now >= self.expires {
            TokenState::Expired
        } else if self.used_by.is_some() {
            TokenState::Used
        } else {
            TokenState::Valid
        }
    }
}

/// Reason to refuse a token. All but the first are reported only to a client that knows the secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    #[error("unknown token: it was never made here, was revoked, or is mistyped")]
    Unknown,
    #[error("the token expired at {0}")]
    Expired(Timestamp),
    #[error("the token was already used with another key at {0}")]
    Used(Timestamp),
    #[error("the token is void: it was made before its node was revoked at {0:.0}; make a new one")]
    Void(Timestamp),
    #[error("the token is for node {token}, not for {asked}")]
    OtherNode { token: NodeName, asked: NodeName },
    #[error("the token is for the {token} of its node, not for its {asked}")]
    OtherHolder { token: Holder, asked: Holder },
}

/// `id` must have the form of a token id.
fn file_name(id: &str) -> String {
    format!("{id}.json")
}

/// The enrolment tokens of a state directory. Nothing is cached: changes by the command line take effect immediately.
#[derive(Clone, Debug)]
pub struct TokenStore(Records);

impl TokenStore {
    pub fn new(state_dir: &Path) -> Self {
        Self(Records::new(state_dir, "tokens"))
    }

    fn read(&self, id: &str) -> Result<Option<TokenRecord>, PkiError> {
        let fix = "remove it and make a new token";
        let name = file_name(id);
        let Some(record) = self.0.read::<TokenRecord>(&name, fix)? else { return Ok(None) };
        if record.id != id {
            let reason = format!("it holds token {:?}", record.id);
            return Err(PkiError::file(&self.0.path(&name), &reason, fix));
        }
        Ok(Some(record))
    }

    /// Creates a token for a node's agent or redirector. Also removes tokens that expired more than a week ago.
    pub fn create(
        &self,
        (holder, node): (Holder, &NodeName),
        ttl: Duration,
        now: Timestamp,
    ) -> Result<(Token, TokenRecord), PkiError> {
        let expires = now.checked_add(ttl).map_err(|error| PkiError::Duration {
            text: format!("{}s", ttl.as_secs()),
            reason: error.to_string(),
        })?;
        let _lock = self.0.lock()?;
        let (records, _broken) = self.list()?;
        for old in records.iter().filter(|record| now.duration_since(record.expires) > KEEP_EXPIRED) {
            files::remove_if_present(&self.0.path(&file_name(&old.id)))?;
        }
        let mut token = Token::generate();
        while self.0.path(&file_name(token.id())).exists() {
            token = Token::generate();
        }
        let record = TokenRecord {
            id: token.id().to_owned(),
            secret_sha256: token.hash(),
            node: node.clone(),
            holder,
            created: now,
            expires,
            used_by: None,
            used_at: None,
        };
        self.0.write(&file_name(&record.id), &record)?;
        Ok((token, record))
    }

    /// Returns all tokens, oldest first, and an error for each unusable file.
    pub fn list(&self) -> Result<(Vec<TokenRecord>, Vec<PkiError>), PkiError> {
        let (mut records, mut broken) = (Vec::new(), Vec::new());
        for name in self.0.names()? {
            let Some(id) = name.strip_suffix(".json").filter(|id| is_id(id)) else { continue };
            match self.read(id) {
                Ok(record) => records.extend(record),
                Err(error) => broken.push(error),
            }
        }
        records.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        Ok((records, broken))
    }

    /// Removes a token, given its id or the whole token. Certificates issued for it stay valid.
    pub fn revoke(&self, id_or_token: &str) -> Result<String, PkiError> {
        let id = id_or_token.split('.').next().unwrap_or_default();
        if !is_id(id) {
            // Not shown in full: it could be a mistyped token.
            return Err(PkiError::NoSuchToken(id.chars().take(6).collect()));
        }
        let _lock = self.0.lock()?;
        let path = self.0.path(&file_name(id));
        if !path.exists() {
            return Err(PkiError::NoSuchToken(id.to_owned()));
        }
        files::remove_if_present(&path)?;
        Ok(id.to_owned())
    }

    /// Uses a token for a node and the key with this hash. The first use binds it to the key. Tokens created at or
    /// before `void_until` are void, even for the key that used them.
    ///
    /// # Errors
    /// The outer error is the store's own; the inner one is the reason for the agent.
    pub fn redeem(
        &self,
        token: &Token,
        (holder, node): (Holder, &NodeName),
        key_hash: &str,
        void_until: Option<Timestamp>,
        now: Timestamp,
    ) -> Result<Result<(), TokenRefusal>, PkiError> {
        let _lock = self.0.lock()?;
        let Some(mut record) = self.read(token.id())? else { return Ok(Err(TokenRefusal::Unknown)) };
        if !token.matches(&record.secret_sha256) {
            return Ok(Err(TokenRefusal::Unknown));
        }
        if record.node != *node {
            return Ok(Err(TokenRefusal::OtherNode { token: record.node, asked: node.clone() }));
        }
        if record.holder != holder {
            return Ok(Err(TokenRefusal::OtherHolder { token: record.holder, asked: holder }));
        }
        if let Some(revoked) = void_until.filter(|revoked| record.created <= *revoked) {
            return Ok(Err(TokenRefusal::Void(revoked)));
        }
        if now >= record.expires {
            return Ok(Err(TokenRefusal::Expired(record.expires)));
        }
        match &record.used_by {
            Some(key) if key == key_hash => {}
            Some(_) => return Ok(Err(TokenRefusal::Used(record.used_at.unwrap_or(record.created)))),
            None => {
                record.used_by = Some(key_hash.to_owned());
                record.used_at = Some(now);
                self.0.write(&file_name(&record.id), &record)?;
            }
        }
        Ok(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn store() -> (tempfile::TempDir, TokenStore, Timestamp) {
        let directory = tempfile::tempdir().unwrap();
        let store = TokenStore::new(&directory.path().join("server"));
        (directory, store, "2026-01-01T00:00:00Z".parse().unwrap())
    }

    #[test]
    fn a_redirectors_token_enrols_no_agent() {
        let (_directory, store, now) = store();
        let holders = [Holder::Agent, Holder::Redirector];
        for (holder, other) in holders.into_iter().zip(holders.into_iter().rev()) {
            let (token, _) = store.create((holder, &node("cloud-2")), HOUR, now).unwrap();
            let redeem = |holder| store.redeem(&token, (holder, &node("cloud-2")), "a", None, now).unwrap();
            assert_eq!(redeem(other), Err(TokenRefusal::OtherHolder { token: holder, asked: other }));
            assert_eq!(redeem(holder), Ok(()));
        }
    }

    #[test]
    fn a_token_is_bound_to_its_first_key() {
        let (_directory, store, now) = store();
        let (token, _) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let redeem = |key| store.redeem(&token, (Holder::Agent, &node("edge-1")), key, None, now).unwrap();
        assert_eq!(redeem("a"), Ok(()));
        assert_eq!(redeem("a"), Ok(()), "a lost response can be repeated");
        assert_eq!(redeem("b"), Err(TokenRefusal::Used(now)));
        let (records, broken) = store.list().unwrap();
        assert_eq!((records[0].state(now), broken.len()), (TokenState::Used, 0));
        assert_eq!(records[0].state(records[0].expires), TokenState::Expired, "not even by its key");
    }

    #[test]
    fn wrong_tokens_are_refused_with_the_reason() {
        let (_directory, store, now) = store();
        let (token, record) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let at = |seconds| now + SignedDuration::from_secs(seconds);
        let redeem = |token: &Token, name: &str, at| {
            store.redeem(token, (Holder::Agent, &node(name)), "k", None, at).unwrap()
        };
        let other = TokenRefusal::OtherNode { token: node("edge-1"), asked: node("edge-2") };
        assert_eq!(redeem(&token, "edge-2", now), Err(other));
        assert_eq!(redeem(&token, "edge-1", at(3600)), Err(TokenRefusal::Expired(record.expires)));
        assert_eq!(record.state(at(3600)), TokenState::Expired);
        let guessed: Token = format!("{}.{}", token.id(), "a".repeat(26)).parse().unwrap();
        // Without the secret, neither the node nor the expiry can be learnt.
        assert_eq!(redeem(&guessed, "edge-2", at(3600)), Err(TokenRefusal::Unknown));
        assert_eq!(redeem(&Token::generate(), "edge-1", now), Err(TokenRefusal::Unknown));
        assert_eq!(redeem(&token, "edge-1", at(3599)), Ok(()));
        store.revoke(token.id()).unwrap();
        assert_eq!(redeem(&token, "edge-1", now), Err(TokenRefusal::Unknown));
        assert!(matches!(store.revoke(token.id()), Err(PkiError::NoSuchToken(_))));
        assert!(store.revoke("../../etc").is_err());
    }

    #[test]
    fn tokens_from_before_a_revocation_are_void_even_for_the_key_that_used_them() {
        let (_directory, store, now) = store();
        let (token, _) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let redeem = |void| store.redeem(&token, (Holder::Agent, &node("edge-1")), "k", void, now).unwrap();
        assert_eq!(redeem(None), Ok(()));
        assert_eq!(redeem(Some(now)), Err(TokenRefusal::Void(now)));
        assert_eq!(redeem(Some(now - SignedDuration::from_secs(1))), Ok(()), "it was made later");
    }

    #[test]
    fn the_secret_is_nowhere_on_disk() {
        let (_directory, store, now) = store();
        let (token, record) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let path = store.0.path(&file_name(&record.id));
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&token.expose()[7..]));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(store.0.directory()).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn expired_tokens_are_removed_after_a_week() {
        let (_directory, store, now) = store();
        let (old, _) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let later = now + SignedDuration::from_hours(24);
        let (recent, _) = store.create((Holder::Agent, &node("edge-1")), HOUR, later).unwrap();
        store
            .create((Holder::Agent, &node("edge-1")), HOUR, now + SignedDuration::from_hours(7 * 24 + 2))
            .unwrap();
        let ids: Vec<_> = store.list().unwrap().0.into_iter().map(|record| record.id).collect();
        assert!(!ids.contains(&old.id().to_owned()) && ids.contains(&recent.id().to_owned()), "{ids:?}");
    }

    #[test]
    fn a_broken_file_is_reported_and_kept() {
        let (_directory, store, now) = store();
        let (token, _) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let path = store.0.path(&file_name(token.id()));
        fs::write(&path, "{\"id\":").unwrap();
        let error =
            store.redeem(&token, (Holder::Agent, &node("edge-1")), "k", None, now).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()) && error.contains("make a new token"), "{error}");
        let (records, broken) = store.list().unwrap();
        assert_eq!((records.len(), broken.len()), (0, 1));
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"id\":");
    }

    #[test]
    fn a_copied_file_is_no_second_token_and_time_has_an_end() {
        let (_directory, store, now) = store();
        let (token, record) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let copy: Token = format!("aaaaaa{}", &token.expose()[6..]).parse().unwrap();
        fs::copy(store.0.path(&file_name(token.id())), store.0.path(&file_name(copy.id()))).unwrap();
        let redeem = |token| store.redeem(token, (Holder::Agent, &node("edge-1")), "k", None, now);
        let error = redeem(&copy).unwrap_err().to_string();
        let parts = ["aaaaaa.json", &format!("it holds token \"{}\"", record.id), "make a new token"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert_eq!(redeem(&token).unwrap(), Ok(()));
        let error =
            store.create((Holder::Agent, &node("edge-2")), Duration::MAX, now).unwrap_err().to_string();
        assert!(error.contains("18446744073709551615s"), "{error}");
        assert_eq!(store.list().unwrap().0.len(), 1);
    }

    #[test]
    fn one_of_several_concurrent_keys_wins() {
        let (_directory, store, now) = store();
        let (token, _) = store.create((Holder::Agent, &node("edge-1")), HOUR, now).unwrap();
        let wins = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..8)
                .map(|key| {
                    let (store, token) = (&store, &token);
                    scope.spawn(move || {
                        store
                            .redeem(token, (Holder::Agent, &node("edge-1")), &key.to_string(), None, now)
                            .unwrap()
                            .is_ok()
                    })
                })
                .collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).filter(|won| *won).count()
        });
        assert_eq!(wins, 1);
    }
}

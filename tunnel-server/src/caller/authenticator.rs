//! Finds the owners of tokens, in the file or in the cluster, by rules that hold at every listener that takes tokens:
//! none that others can read, and no guessing.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::identity::{Caller, Refusal};
use super::review::Reviewer;
use super::tokens::Tokens;
use crate::admission::{SourceBuckets, source_key};
use crate::caller::answer_cache::AnswerCache;

/// Length from which a token is not guessed at any rate. Those of Kubernetes are much longer, so that a neighbour who
/// guesses keeps nobody out who has one.
const LONG: usize = 32;
/// Time for which a source may show a token that was good there, whatever else was guessed from it.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// A token that a client has shown.
#[derive(Clone, Copy)]
pub(crate) struct ShownToken<'a> {
    pub(crate) token: &'a str,
    pub(crate) client: IpAddr,
    /// Set if others can read it: what the client should do instead.
    pub(crate) exposed: Option<&'static str>,
}

/// Finds the owners of tokens.
pub(crate) struct Authenticator {
    tokens: ArcSwap<Tokens>,
    /// `None` without a cluster.
    reviewer: Option<Arc<Reviewer>>,
    failures: Mutex<SourceBuckets>,
    /// Hashes of short tokens, each with the source that has shown it.
    good: AnswerCache<([u8; 32], IpAddr), ()>,
}

impl Authenticator {
    pub(crate) fn new(tokens: Tokens, reviewer: Option<Arc<Reviewer>>) -> Self {
        tokens.warn_of_short();
        Self {
            tokens: ArcSwap::from_pointee(tokens),
            reviewer,
            failures: Mutex::new(SourceBuckets::of_failures()),
            good: AnswerCache::default(),
        }
    }

    pub(crate) fn set_tokens(&self, tokens: Tokens) {
        tokens.warn_of_short();
        self.tokens.store(tokens.into());
    }

    pub(crate) fn reviewer(&self) -> Option<&Arc<Reviewer>> {
        self.reviewer.as_ref()
    }

    /// True if the API server has to be asked whose the token is.
    pub(crate) fn asks_about(&self, token: &str) -> bool {
        self.reviewer.is_some() && self.tokens.load().caller(token).is_none()
    }

    /// Returns the owner of a token of the file or the cluster.
    ///
    /// # Errors
    /// The token has no owner or is not looked up, or the API server does not answer.
    pub(crate) async fn caller_of_token(&self, shown: ShownToken<'_>) -> Result<Caller, Refusal> {
        self.judge(shown, async || {
            if let Some(caller) = self.tokens.load().caller(shown.token) {
                return Ok(caller.clone());
            }
            self.ask(shown, "the token is not in --token-auth-file").await
        })
        .await
    }

    /// Returns the owner of a token of the cluster only, where the cluster's rules decide.
    ///
    /// # Errors
    /// Same as [`Self::caller_of_token`].
    pub(crate) async fn caller_in_cluster(&self, shown: ShownToken<'_>) -> Result<Caller, Refusal> {
        self.judge(shown, async || {
            self.ask(shown, "without a cluster there is nobody who knows bearer tokens").await
        })
        .await
    }

    async fn ask(&self, shown: ShownToken<'_>, no_cluster: &str) -> Result<Caller, Refusal> {
        match &self.reviewer {
            Some(reviewer) => reviewer.caller_of_token(shown.token, shown.client).await,
            None => Err(Refusal::Unauthenticated(no_cluster.to_owned())),
        }
    }

    /// Looks the token up if the rules permit that.
    async fn judge(
        &self,
        ShownToken { token, client, exposed }: ShownToken<'_>,
        look_up: impl AsyncFnOnce() -> Result<Caller, Refusal>,
    ) -> Result<Caller, Refusal> {
        if let Some(instead) = exposed {
            return Err(Refusal::Forbidden(format!(
                "a token or password is taken over TLS only: {instead}, and renew the token, which others may have seen"
            )));
        }
        if token.len() >= LONG {
            return look_up().await;
        }
        let key = (Sha256::digest(token).into(), source_key(client));
        let counted = self.good.get(&key).is_none();
        if counted {
            // Counted before it is looked up, as many may be looked up at a time.
            if !self.failures.lock().take(client, Instant::now()) {
                let reason = "too many tokens from this address had no owner, and this one was not shown there before; \
                              try again later";
                return Err(Refusal::TooManyFailures(reason.to_owned()));
            }
        }
        let found = look_up().await;
        if counted && !matches!(found, Err(Refusal::Unauthenticated(_))) {
            self.failures.lock().give_back(client);
        }
        if found.is_ok() {
            self.good.put(key, (), REMEMBERED);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authenticator() -> Authenticator {
        Authenticator::new(Tokens::parse("secret,alice,1,\"ops,dev\"\nothers,bob,2\n").unwrap(), None)
    }

    fn shown(token: &str, last: u8) -> ShownToken<'_> {
        ShownToken { token, client: IpAddr::from([10, 0, 0, last]), exposed: None }
    }

    #[tokio::test]
    async fn a_token_of_the_file_shows_its_user() {
        let authenticator = authenticator();
        let alice = authenticator.caller_of_token(shown("secret", 1)).await.unwrap();
        assert_eq!((alice.name.as_str(), alice.uid.as_deref()), ("alice", Some("1")));
        assert_eq!(alice.groups, ["ops", "dev", "system:authenticated"]);
        let unknown = |refused| matches!(refused, Err(Refusal::Unauthenticated(_)));
        assert!(unknown(authenticator.caller_of_token(shown("Secret", 1)).await));
        // The file's users have no rights in a cluster.
        assert!(unknown(authenticator.caller_in_cluster(shown("secret", 1)).await));
        authenticator.set_tokens(Tokens::default());
        assert!(unknown(authenticator.caller_of_token(shown("secret", 1)).await));
    }

    #[tokio::test]
    async fn a_token_that_others_can_read_is_not_looked_up() {
        let exposed = ShownToken { exposed: Some("use https://"), ..shown("secret", 1) };
        let refused = authenticator().caller_of_token(exposed).await.unwrap_err();
        assert!(matches!(&refused, Refusal::Forbidden(why) if why.contains("use https://")), "{refused}");
    }

    #[tokio::test]
    async fn guessing_is_slowed_down_and_keeps_nobody_out() {
        let authenticator = authenticator();
        let limited = |refused| matches!(refused, Err(Refusal::TooManyFailures(_)));
        assert!(authenticator.caller_of_token(shown("others", 1)).await.is_ok());
        let mut tried = 0;
        while !limited(authenticator.caller_of_token(shown(&format!("guess-{tried}"), 1)).await) {
            tried += 1;
            assert!(tried < 100, "guesses are not limited");
        }
        assert_eq!(tried, 10);
        // The next guess would be right, and is not told so.
        assert!(limited(authenticator.caller_of_token(shown("secret", 1)).await));
        assert!(limited(authenticator.caller_in_cluster(shown("secret", 1)).await));
        // A token that was known there before is accepted, and so is one from elsewhere.
        assert!(authenticator.caller_of_token(shown("others", 1)).await.is_ok());
        assert!(authenticator.caller_of_token(shown("secret", 2)).await.is_ok());
        // A token that nobody can guess is looked up.
        let long = "x".repeat(LONG);
        let refused = authenticator.caller_of_token(shown(&long, 1)).await;
        assert!(matches!(refused, Err(Refusal::Unauthenticated(_))));
    }

    #[tokio::test]
    async fn good_tokens_are_no_failures() {
        let authenticator = authenticator();
        for _ in 0..50 {
            assert!(authenticator.caller_of_token(shown("secret", 1)).await.is_ok());
        }
        assert!(authenticator.caller_of_token(shown("others", 1)).await.is_ok());
    }
}

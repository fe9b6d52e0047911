//! Finds the owners of tokens, in the file or in the cluster, at every listener that takes tokens: none that others can
//! read. Wrong tokens are not counted: guessing is hopeless, as the file's tokens are to be random and have a minimum
//! length, and a cluster's are long.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::identity::{Caller, Refusal};
use super::review::Reviewer;
use super::tokens::Tokens;

/// A token that a client has shown.
#[derive(Clone, Copy)]
pub(crate) struct ShownToken<'a> {
    pub(crate) token: &'a str,
    pub(crate) client: IpAddr,
    /// Set if others can read it: what the client should do instead.
    pub(crate) exposed: Option<&'static str>,
}

impl ShownToken<'_> {
    fn check(&self) -> Result<(), Refusal> {
        let Some(instead) = self.exposed else { return Ok(()) };
        Err(Refusal::Forbidden(format!(
            "a token or password is taken over TLS only: {instead}, and renew the token, which others may have seen"
        )))
    }
}

/// Finds the owners of tokens.
pub(crate) struct Authenticator {
    tokens: ArcSwap<Tokens>,
    /// `None` without a cluster.
    pub(crate) reviewer: Option<Arc<Reviewer>>,
}

impl Authenticator {
    pub(crate) fn new(tokens: Tokens, reviewer: Option<Arc<Reviewer>>) -> Self {
        Self { tokens: ArcSwap::from_pointee(tokens), reviewer }
    }

    pub(crate) fn set_tokens(&self, tokens: Tokens) {
        self.tokens.store(tokens.into());
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
        shown.check()?;
        if let Some(caller) = self.tokens.load().caller(shown.token) {
            return Ok(caller.clone());
        }
        self.ask(shown, "the token is not in --token-auth-file").await
    }

    /// Returns the owner of a token of the cluster only, where the cluster's rules decide.
    ///
    /// # Errors
    /// Same as [`Self::caller_of_token`].
    pub(crate) async fn caller_in_cluster(&self, shown: ShownToken<'_>) -> Result<Caller, Refusal> {
        shown.check()?;
        self.ask(shown, "without a cluster there is nobody who knows bearer tokens").await
    }

    async fn ask(&self, shown: ShownToken<'_>, no_cluster: &str) -> Result<Caller, Refusal> {
        match &self.reviewer {
            Some(reviewer) => reviewer.caller_of_token(shown.token, shown.client).await,
            None => Err(Refusal::Unauthenticated(no_cluster.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authenticator() -> Authenticator {
        Authenticator::new(
            Tokens::parse("alices-own-token,alice,1,\"ops,dev\"\nbobs-random-token,bob,2\n").unwrap(),
            None,
        )
    }

    fn shown(token: &str, last: u8) -> ShownToken<'_> {
        ShownToken { token, client: IpAddr::from([10, 0, 0, last]), exposed: None }
    }

    #[tokio::test]
    async fn a_token_of_the_file_shows_its_user() {
        let authenticator = authenticator();
        let alice = authenticator.caller_of_token(shown("alices-own-token", 1)).await.unwrap();
        assert_eq!((alice.name.as_str(), alice.uid.as_deref()), ("alice", Some("1")));
        assert_eq!(alice.groups, ["ops", "dev", "system:authenticated"]);
        let unknown = |refused| matches!(refused, Err(Refusal::Unauthenticated(_)));
        assert!(unknown(authenticator.caller_of_token(shown("Alices-own-token", 1)).await));
        // The file's users have no rights in a cluster.
        assert!(unknown(authenticator.caller_in_cluster(shown("alices-own-token", 1)).await));
        authenticator.set_tokens(Tokens::default());
        assert!(unknown(authenticator.caller_of_token(shown("alices-own-token", 1)).await));
    }

    #[tokio::test]
    async fn a_token_that_others_can_read_is_not_looked_up() {
        let exposed = ShownToken { exposed: Some("use https://"), ..shown("alices-own-token", 1) };
        let refused = authenticator().caller_of_token(exposed).await.unwrap_err();
        assert!(matches!(&refused, Refusal::Forbidden(why) if why.contains("use https://")), "{refused}");
    }
}

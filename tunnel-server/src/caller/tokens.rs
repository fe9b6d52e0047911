//! Tokens of a file in the format of kube-apiserver's `--token-auth-file`: `TOKEN,USER,UID[,"GROUP,GROUP"]` on each
//! line. Also looks up the owner of a token, in the file or in the cluster.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use sha2::{Digest as _, Sha256};

use super::identity::{AUTHENTICATED, Caller, Refusal};
use super::review::Reviewer;

/// Minimum length of a token: shorter ones can be guessed.
const LEAST: usize = 6;

/// Owners of tokens, by the token's hash: the tokens themselves are not kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens(HashMap<[u8; 32], Caller>);

impl Tokens {
    /// Parses the text of a token file. Skips empty lines and those that begin with `#`.
    ///
    /// # Errors
    /// Names the line and the reason, never the token.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tokens = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |reason: &str| format!("line {}: {reason}", number + 1);
            let mut fields = line.splitn(4, ',').map(str::trim);
            let (Some(token), Some(user), Some(uid)) = (fields.next(), fields.next(), fields.next()) else {
                return Err(wrong("not TOKEN,USER,UID[,\"GROUP,GROUP\"]"));
            };
            if token.len() < LEAST {
                return Err(wrong("the token has fewer than 6 characters"));
            }
            if user.is_empty() {
                return Err(wrong("the user is empty"));
            }
            let groups = fields.next().unwrap_or_default();
            let groups = match groups.strip_prefix('"') {
                Some(rest) => {
                    rest.strip_suffix('"').ok_or_else(|| wrong("the quote of the groups is not closed"))?
                }
                None if groups.contains(',') => return Err(wrong("put several groups in double quotes")),
                None => groups,
            };
            let groups = groups.split(',').map(str::trim);
            let groups = groups.filter(|group| !group.is_empty() && *group != AUTHENTICATED);
            let groups = groups.chain([AUTHENTICATED]).map(str::to_owned);
            let mut caller = Caller::new(user.to_owned(), groups.collect());
            caller.uid = Some(uid.to_owned()).filter(|uid| !uid.is_empty());
            if tokens.insert(Sha256::digest(token.as_bytes()).into(), caller).is_some() {
                return Err(wrong("the token of an earlier line"));
            }
        }
        Ok(Self(tokens))
    }

    /// Compares tokens by their hashes, so that the time it takes reveals nothing about them.
    fn caller(&self, token: &str) -> Option<&Caller> {
        self.0.get::<[u8; 32]>(&Sha256::digest(token.as_bytes()).into())
    }
}

/// Looks up the owners of tokens.
pub(crate) struct Authenticator {
    tokens: ArcSwap<Tokens>,
    /// `None` without a cluster.
    reviewer: Option<Arc<Reviewer>>,
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

    /// Returns the owner of the token. A client at the address `source` has shown it.
    ///
    /// # Errors
    /// The token has no owner, or the API server does not answer.
    pub(crate) async fn caller_of_token(&self, token: &str, source: IpAddr) -> Result<Caller, Refusal> {
        if let Some(caller) = self.tokens.load().caller(token) {
            return Ok(caller.clone());
        }
        match &self.reviewer {
            Some(reviewer) => reviewer.caller_of_token(token, source).await,
            None => Err(Refusal::Unauthenticated("the token is not in --token-auth-file".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_token_of_the_file_shows_its_user() {
        let tokens = Tokens::parse("secret,alice,1,\"ops,dev\"\nothers,bob,2\n").unwrap();
        let authenticator = Authenticator::new(tokens, None);
        let source = IpAddr::from([10, 0, 0, 1]);
        let alice = authenticator.caller_of_token("secret", source).await.unwrap();
        assert_eq!((alice.name.as_str(), alice.uid.as_deref()), ("alice", Some("1")));
        assert_eq!(alice.groups, ["ops", "dev", "system:authenticated"]);
        let unknown = |refused| matches!(refused, Err(Refusal::Unauthenticated(_)));
        assert!(unknown(authenticator.caller_of_token("Secret", source).await));
        authenticator.set_tokens(Tokens::default());
        assert!(unknown(authenticator.caller_of_token("secret", source).await));
    }

    #[test]
    fn errors_name_the_line_and_not_the_token() {
        assert_eq!(Tokens::parse("# a comment\n\nsecret,a,1\n").unwrap().0.len(), 1);
        for (text, reason) in [
            ("\nsecret", "line 2: not TOKEN,USER,UID[,\"GROUP,GROUP\"]"),
            ("abc,a,1", "line 1: the token has fewer than 6 characters"),
            ("secret,,1", "line 1: the user is empty"),
            ("secret,a,1,\"x,y", "line 1: the quote of the groups is not closed"),
            ("secret,a,1,x,y", "line 1: put several groups in double quotes"),
            ("secret,a,1\nsecret,b,2", "line 2: the token of an earlier line"),
        ] {
            assert_eq!(Tokens::parse(text).unwrap_err(), reason, "{text}");
        }
    }
}

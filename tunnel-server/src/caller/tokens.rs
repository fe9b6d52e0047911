//! Tokens of a file in the format of kube-apiserver's `--token-auth-file`: `TOKEN,USER,UID[,"GROUP,GROUP"]` on each
//! line.

use std::collections::HashMap;

use sha2::{Digest as _, Sha256};
use tunnel_runtime::text::without_bom;

use super::identity::{AUTHENTICATED, Caller};

/// Minimum length of a token: shorter ones can be guessed. Longer ones are to be random, which cannot be checked.
const LEAST: usize = 16;

/// Owners of tokens, by the token's hash: the tokens themselves are not kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    callers: HashMap<[u8; 32], Caller>,
}

impl Tokens {
    /// Parses the text of a token file. Skips empty lines and those that begin with `#`.
    ///
    /// # Errors
    /// Names the line and the reason, never the token. A file without any line is an error: a shell empties a file before the
    /// program runs that writes it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("it is empty; to accept no token, write a line that begins with #".to_owned());
        }
        let mut callers = HashMap::new();
        for (number, line) in without_bom(text).lines().enumerate() {
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
                return Err(wrong(
                    "the token has fewer than 16 characters and can be guessed: make a random one \
                     (`openssl rand -hex 16`)",
                ));
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
            if callers.insert(Sha256::digest(token.as_bytes()).into(), caller).is_some() {
                return Err(wrong("the token of an earlier line"));
            }
        }
        Ok(Self { callers })
    }

    /// Compares tokens by their hashes, so that the time it takes reveals nothing about them.
    pub(super) fn caller(&self, token: &str) -> Option<&Caller> {
        self.callers.get::<[u8; 32]>(&Sha256::digest(token.as_bytes()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_line_and_not_the_token() {
        assert_eq!(Tokens::parse("# a comment\n\nalices-own-token,a,1\n").unwrap().callers.len(), 1);
        assert!(Tokens::parse("# none").unwrap().callers.is_empty());
        assert!(
            Tokens::parse("\u{feff}alices-own-token,a,1\r\n").unwrap().caller("alices-own-token").is_some()
        );
        for (text, reason) in [
            ("\n", "it is empty; to accept no token, write a line that begins with #"),
            ("\nalices-own-token", "line 2: not TOKEN,USER,UID[,\"GROUP,GROUP\"]"),
            (
                "alices-token-15,a,1",
                "line 1: the token has fewer than 16 characters and can be guessed: make a random one \
                 (`openssl rand -hex 16`)",
            ),
            ("alices-own-token,,1", "line 1: the user is empty"),
            ("alices-own-token,a,1,\"x,y", "line 1: the quote of the groups is not closed"),
            ("alices-own-token,a,1,x,y", "line 1: put several groups in double quotes"),
            ("alices-own-token,a,1\nalices-own-token,b,2", "line 2: the token of an earlier line"),
        ] {
            assert_eq!(Tokens::parse(text).unwrap_err(), reason, "{text}");
        }
    }
}

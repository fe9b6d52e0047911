//! The format of an enrolment token, and of a time to live.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand::Rng;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tunnel_pki::{ExposeSecret, SecretString};
use tunnel_runtime::config::value;

use super::error::PkiError;

const ID_LENGTH: usize = 6;
/// 26 characters of 36 are 134 bits.
const SECRET_LENGTH: usize = 26;
const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
/// An agent's first enrolment may have to wait for a visit to the site, but a token must not replace a certificate.
const MAX_TTL: Duration = Duration::from_secs(366 * 86_400);

/// `<id>.<secret>`: the id names the token in lists and logs; only the operator and the agent know the secret.
#[derive(Clone)]
pub struct Token {
    id: String,
    secret: SecretString,
}

impl Token {
    pub fn generate() -> Self {
        Self { id: random_text(ID_LENGTH), secret: random_text(SECRET_LENGTH).into() }
    }

    /// The part before the dot, which is not secret.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The whole token, for the operator.
    pub fn expose(&self) -> String {
        format!("{}.{}", self.id, self.secret.expose_secret())
    }

    /// Hexadecimal SHA-256 of the secret, as stored. The secret is random, so it needs no salt.
    pub fn hash(&self) -> String {
        format!("{:x}", Sha256::digest(self.secret.expose_secret()))
    }

    /// Compares with a stored hash in constant time.
    pub fn matches(&self, hash: &str) -> bool {
        self.hash().as_bytes().ct_eq(hash.as_bytes()).into()
    }
}

fn random_text(length: usize) -> String {
    // rand's thread generator is a CSPRNG seeded by the system.
    let mut random = rand::rng();
    (0..length).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())])).collect()
}

/// True if a text has the form of a token id, and so is a safe file name.
pub(super) fn is_id(text: &str) -> bool {
    text.len() == ID_LENGTH && text.bytes().all(|byte| ALPHABET.contains(&byte))
}

impl FromStr for Token {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('.') {
            Some((id, secret))
                if is_id(id)
                    && secret.len() == SECRET_LENGTH
                    && secret.bytes().all(|byte| ALPHABET.contains(&byte)) =>
            {
                Ok(Self { id: id.to_owned(), secret: secret.into() })
            }
            _ => Err(PkiError::Token),
        }
    }
}

/// Masks the secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.***", self.id)
    }
}

/// Parses a time to live such as `24h`, `90m`, `2d` or ISO 8601's `PT2H`. A day has 24 hours. It must be more than zero
/// and at most 366 days.
pub fn parse_ttl(text: &str) -> Result<Duration, String> {
    let duration = value::duration(text)?;
    if duration.is_zero() {
        return Err("it is zero".to_owned());
    }
    if duration > MAX_TTL {
        return Err("it is longer than 366 days".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn round_trips_and_hides_its_secret() {
        let token = Token::generate();
        let text = token.expose();
        assert_eq!(text.parse::<Token>().unwrap().expose(), text);
        assert!(token.matches(&token.hash()));
        assert!(!token.matches(&Token::generate().hash()));
        assert!(!token.matches(""));
        assert!(!format!("{token:?}").contains(&text[7..]));
        assert!(!token.hash().contains(&text[7..]));
    }

    #[test]
    fn durations() {
        for (text, seconds) in [
            ("24h", 86_400),
            ("90m", 5_400),
            ("2d", 172_800),
            ("1h30m", 5_400),
            ("45s", 45),
            ("PT2H", 7_200),
            (" 1w ", 604_800),
        ] {
            assert_eq!(parse_ttl(text).unwrap().as_secs(), seconds, "{text}");
        }
        for (text, reason) in [
            ("", ""),
            ("24", ""),
            ("x", ""),
            ("0s", "zero"),
            ("-2h", ""),
            ("400d", "longer"),
            ("1y", ""),
            ("2 h x", ""),
        ] {
            let error = parse_ttl(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn only_the_exact_form_is_a_token(text in "[a-z0-9A./ ]{0,40}") {
            let well_formed = text.len() == 33
                && text.as_bytes()[6] == b'.'
                && text.bytes().enumerate().all(|(at, b)| at == 6 || b.is_ascii_lowercase() || b.is_ascii_digit());
            prop_assert_eq!(text.parse::<Token>().is_ok(), well_formed);
        }

        #[test]
        fn well_formed_tokens_round_trip(text in "[a-z0-9]{6}\\.[a-z0-9]{26}") {
            prop_assert_eq!(text.parse::<Token>().unwrap().expose(), text);
        }

        #[test]
        fn parsers_never_panic(text in any::<String>()) {
            if let Ok(token) = text.parse::<Token>() {
                prop_assert_eq!(token.expose(), text.clone());
            }
            if let Ok(duration) = parse_ttl(&text) {
                prop_assert!(!duration.is_zero());
            }
        }
    }
}

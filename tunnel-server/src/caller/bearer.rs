//! The bearer token of a request (RFC 6750 section 2.1).

use http::{HeaderMap, header};

/// Longer than any ServiceAccount token.
const MOST: usize = 16 << 10;

/// Returns the token of the Authorization header; `None` if there is no such header.
///
/// # Errors
/// The header is not exactly one bearer token.
pub fn bearer_token(headers: &HeaderMap) -> Result<Option<&str>, String> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = match (values.next(), values.next()) {
        (None, _) => return Ok(None),
        (Some(value), None) => value,
        _ => return Err("more than one header Authorization".to_owned()),
    };
    // The value never appears in an error: it is secret.
    let value = value.to_str().map_err(|_| "the header Authorization is not text".to_owned())?;
    let (scheme, token) = value.trim().split_once(' ').unwrap_or((value, ""));
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() || token.contains(' ') {
        return Err("the header Authorization has no bearer token".to_owned());
    }
    if token.len() > MOST {
        return Err(format!("the bearer token is longer than {MOST} bytes"));
    }
    Ok(Some(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&'static str]) -> HeaderMap {
        let value = |value: &&'static str| (header::AUTHORIZATION, http::HeaderValue::from_static(value));
        values.iter().map(value).collect()
    }

    #[test]
    fn one_bearer_token_is_found() {
        assert_eq!(bearer_token(&HeaderMap::new()), Ok(None));
        assert_eq!(bearer_token(&of(&["Bearer a.b.c"])), Ok(Some("a.b.c")));
        assert_eq!(bearer_token(&of(&["bearer  a"])), Ok(Some("a")));
        for wrong in
            [&["Basic YTpi"][..], &["Bearer"], &["Bearer "], &["Bearer a b"], &["Bearer a", "Bearer b"]]
        {
            assert!(bearer_token(&of(wrong)).is_err(), "{wrong:?}");
        }
        let error = bearer_token(&of(&["Basic c2VjcmV0"])).unwrap_err();
        assert!(!error.contains("c2VjcmV0"), "{error}");
    }
}

//! The audiences that a token may be for.

/// Postern's own, then the API server's, which every token has that asks for no other.
pub const DEFAULT_AUDIENCES: &str = "postern.internal,api-server";
/// Stands for the API server's own audience, whatever it is.
const API_SERVER: &str = "api-server";

/// The audiences that a token may be for; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audiences {
    pub(super) own: Vec<String>,
    /// True if tokens for the API server are accepted too.
    pub(super) api_server: bool,
}

impl Audiences {
    pub(crate) fn only(audience: &str) -> Self {
        Self { own: vec![audience.to_owned()], api_server: false }
    }
}

/// Parses `--token-audience`.
///
/// # Errors
/// There is none, or one is empty.
pub fn parse_audiences(value: &str) -> Result<Audiences, String> {
    let mut audiences = Audiences { own: Vec::new(), api_server: false };
    for audience in value.split(',').map(str::trim) {
        match audience {
            "" => {
                return Err(format!("an audience is empty; name one or more, such as {DEFAULT_AUDIENCES}"));
            }
            API_SERVER => audiences.api_server = true,
            own => audiences.own.push(own.to_owned()),
        }
    }
    Ok(audiences)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audiences_are_a_list_in_which_api_server_stands_for_its_own() {
        let own = vec!["postern.internal".to_owned()];
        assert_eq!(parse_audiences(DEFAULT_AUDIENCES), Ok(Audiences { own, api_server: true }));
        assert_eq!(parse_audiences("a"), Ok(Audiences::only("a")));
        assert_eq!(parse_audiences(" api-server"), Ok(Audiences { own: Vec::new(), api_server: true }));
        for wrong in ["", "a,", ",", "a,,b"] {
            assert!(parse_audiences(wrong).is_err(), "{wrong:?}");
        }
    }
}

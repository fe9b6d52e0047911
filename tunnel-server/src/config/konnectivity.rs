//! How konnectivity's agents attach.

use tunnel_core::config::ConfigError;

use super::Config;

/// Default of `--konnectivity-service-account`: that of konnectivity's own manifests.
pub const DEFAULT_KONNECTIVITY_ACCOUNT: &str = "kube-system/konnectivity-agent";
/// Default of `--konnectivity-audience`: likewise.
pub const DEFAULT_KONNECTIVITY_AUDIENCE: &str = "system:konnectivity-server";

/// The port of konnectivity's agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KonnectivityConfig {
    pub port: u16,
    /// `NAMESPACE/NAME` of the ServiceAccount whose tokens are taken.
    pub account: String,
    /// Whom these tokens must be for.
    pub audience: String,
}

impl KonnectivityConfig {
    /// The user that the ServiceAccount is.
    pub(crate) fn user(&self) -> String {
        format!("system:serviceaccount:{}", self.account.replace('/', ":"))
    }
}

/// Checks the value of `--konnectivity-service-account`.
///
/// # Errors
/// It is not `NAMESPACE/NAME`.
pub fn service_account(value: &str) -> Result<String, ConfigError> {
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    match value.split_once('/') {
        Some((namespace, name)) if is_name(namespace) && is_name(name) => Ok(value.to_owned()),
        _ => {
            let reason = "not NAMESPACE/NAME of a ServiceAccount";
            Err(ConfigError::new("--konnectivity-service-account", value, reason))
        }
    }
}

impl Config {
    pub(super) fn add_konnectivity(&self, flags: &mut Vec<(&'static str, String)>) {
        let konnectivity = self.konnectivity.as_ref();
        let port = konnectivity.map_or(0, |konnectivity| konnectivity.port);
        flags.push(("konnectivity-agent-port", port.to_string()));
        let Some(konnectivity) = konnectivity else { return };
        flags.push(("konnectivity-service-account", konnectivity.account.clone()));
        flags.push(("konnectivity-audience", konnectivity.audience.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_account_has_a_namespace_and_a_name() {
        let account = service_account(DEFAULT_KONNECTIVITY_ACCOUNT).unwrap();
        let config =
            KonnectivityConfig { port: 8091, account, audience: DEFAULT_KONNECTIVITY_AUDIENCE.to_owned() };
        assert_eq!(config.user(), "system:serviceaccount:kube-system:konnectivity-agent");
        for value in ["", "konnectivity-agent", "/a", "a/", "a/b/c", "a/b:c"] {
            assert!(service_account(value).is_err(), "{value:?}");
        }
    }
}

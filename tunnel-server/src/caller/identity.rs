//! A caller's identity, as Kubernetes sees it.

use std::collections::BTreeMap;
use std::fmt;

use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

/// Set by the API server for a token bound to a pod: the node on which the pod runs.
pub(crate) const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// Without this key the token is bound to a Node instead of a pod running there: anyone who may create tokens of the
/// ServiceAccount could choose the node.
pub(crate) const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// The group of every authenticated caller.
pub(super) const AUTHENTICATED: &str = "system:authenticated";

/// The sender of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub name: String,
    pub groups: Vec<String>,
    /// Set for tokens only.
    pub uid: Option<String>,
    /// Further attributes from the authenticator, for the authoriser.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl Caller {
    pub(crate) fn new(name: String, groups: Vec<String>) -> Self {
        Self { name, groups, uid: None, extra: BTreeMap::new() }
    }
}

/// Writes the name, for logs.
impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.name, 200))
    }
}

/// Parses `NAMESPACE/NAME` of a ServiceAccount.
///
/// # Errors
/// It is not that.
pub(crate) fn service_account(value: &str) -> Result<String, String> {
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    match value.split_once('/') {
        Some((namespace, name)) if is_name(namespace) && is_name(name) => Ok(value.to_owned()),
        _ => Err("not NAMESPACE/NAME of a ServiceAccount".to_owned()),
    }
}

/// Returns the user in the tokens of such a ServiceAccount.
pub(crate) fn service_account_user(account: &str) -> String {
    format!("system:serviceaccount:{}", account.replace('/', ":"))
}

/// Returns the node of the pod that a token is bound to, by what the API server says of its user.
///
/// # Errors
/// It is not bound to a pod on one node; the error has the user.
pub(crate) fn node_of_pod(
    user: &str,
    extra: Option<&BTreeMap<String, Vec<String>>>,
) -> Result<NodeName, String> {
    let values = |key: &str| extra.and_then(|extra| extra.get(key)).map(Vec::as_slice);
    let name = match (values(NODE_NAME), values(POD_NAME)) {
        (Some([name]), Some([_])) => name,
        (Some([_]), _) => {
            return Err(format!("the token of user {user:?} is not bound to a pod: {POD_NAME} is missing"));
        }
        (Some(names), _) => return Err(format!("user {user:?} has {} values of {NODE_NAME}", names.len())),
        (None, _) => {
            return Err(format!(
                "the token of user {user:?} is not bound to a pod on a node: {NODE_NAME} is missing (tokens that the \
                 kubelet gives to pods have it from Kubernetes 1.30 on; on an older one give the agent the kubelet's \
                 --kubeconfig, or konnectivity's a client certificate)"
            ));
        }
    };
    name.parse().map_err(|error| format!("user {user:?}: {error}"))
}

/// Reason for which a caller is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The caller's identity is not known.
    #[error("{0}")]
    Unauthenticated(String),
    /// The caller is known, but not allowed.
    #[error("{0}")]
    Forbidden(String),
    /// The question cannot be answered now.
    #[error("{0}")]
    Unavailable(String),
}

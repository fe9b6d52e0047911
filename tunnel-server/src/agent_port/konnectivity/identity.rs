//! Determines the node of an agent with a service account token, from the API server's review and not from the agent's
//! claim.

use std::net::IpAddr;

use tonic::Status;
use tonic::metadata::MetadataMap;
use tunnel_runtime::NodeName;

use super::context::Tokens;
use crate::caller::{Caller, Refusal};

/// The API server sets these for a token that is bound to a pod. A token bound to a node only was made by somebody who
/// may create tokens and could choose the node.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const WANTED: &str =
    "a client certificate of this server's CA or a service account's token (authorization: Bearer) is needed";

/// The node of the token in a call's metadata; the call came from `agent`.
///
/// # Errors
/// There is no token, it is invalid or another user's, or it names no node.
pub(super) async fn node_by_token(
    tokens: &Tokens,
    metadata: &MetadataMap,
    agent: IpAddr,
) -> Result<NodeName, Status> {
    let token = metadata
        .get("authorization")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .ok_or_else(|| Status::unauthenticated(WANTED))?;
    let Some(reviewer) = &tokens.reviewer else {
        let reason = "tokens are checked by a cluster's API server, which this server has not: use a client certificate";
        return Err(Status::unauthenticated(reason));
    };
    let caller = reviewer.caller_of_token(token.trim(), agent).await.map_err(|refusal| match refusal {
        Refusal::Unavailable(reason) => Status::unavailable(reason),
        other => Status::unauthenticated(other.to_string()),
    })?;
    node_of(&caller, &tokens.user)
}

fn node_of(caller: &Caller, user: &str) -> Result<NodeName, Status> {
    if caller.name != user {
        let reason = format!("{caller} is not {user}, whose tokens are taken here");
        return Err(Status::permission_denied(reason));
    }
    let single = |key: &str| match caller.extra.get(key).map(Vec::as_slice) {
        Some([one]) => Some(one.as_str()),
        _ => None,
    };
    let (Some(node), Some(_)) = (single(NODE_NAME), single(POD_NAME)) else {
        return Err(Status::permission_denied("the token is not bound to a pod that runs on a node"));
    };
    node.parse().map_err(|error| Status::permission_denied(format!("the token's node {node:?}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: &str = "system:serviceaccount:kube-system:konnectivity-agent";

    fn caller(name: &str, extra: &[(&str, &[&str])]) -> Caller {
        let extra = extra
            .iter()
            .map(|(key, values)| ((*key).to_owned(), values.iter().map(ToString::to_string).collect()));
        Caller { name: name.to_owned(), groups: Vec::new(), uid: None, extra: extra.collect() }
    }

    #[test]
    fn a_pods_token_names_its_node() {
        let bound = [(NODE_NAME, &["edge-1"][..]), (POD_NAME, &["konnectivity-agent-x"])];
        assert_eq!(node_of(&caller(USER, &bound), USER).unwrap().as_str(), "edge-1");
        for (caller, reason) in [
            (caller("system:serviceaccount:shop:konnectivity-agent", &bound), "whose tokens"),
            (caller(USER, &[]), "not bound"),
            // Made for the node, not for a pod on it.
            (caller(USER, &bound[..1]), "not bound"),
            (caller(USER, &bound[1..]), "not bound"),
            (caller(USER, &[(NODE_NAME, &["edge-1", "edge-2"]), bound[1]]), "not bound"),
            (caller(USER, &[(NODE_NAME, &["Edge 1"]), bound[1]]), "the token's node"),
        ] {
            let error = node_of(&caller, USER).unwrap_err();
            assert!(error.message().contains(reason), "{caller:?}: {error}");
        }
    }
}

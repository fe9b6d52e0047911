//! Asks the API server who owns a token and what a caller may do. Answers are cached briefly.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Api;
use kube::api::PostParams;
use sha2::{Digest as _, Sha256};
use tunnel_kube::request;
use tunnel_runtime::NodeName;

use super::access::Access;
use super::audiences::Audiences;
use super::identity::{Caller, Refusal};
use super::questions::{Asker, Questions};
use crate::caller::verdict_cache::VerdictCache;

/// Time for which a positive answer is cached. A deleted token or a withdrawn right still works here that long.
const YES: Duration = Duration::from_secs(30);
/// Time for which a negative answer is cached: a right that was just granted is asked for again soon.
const NO: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(4);

/// An action that a caller wants to perform.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Right {
    Node(Access, NodeName),
    /// The same action on every node.
    AllNodes(Access),
    /// GET of a path of this server itself.
    Path(&'static str),
}

/// Asks the API server about callers.
pub struct Reviewer {
    client: kube::Client,
    audiences: Audiences,
    /// Keyed by the token's hash: tokens themselves are not kept.
    tokens: VerdictCache<[u8; 32], Caller, String>,
    rights: VerdictCache<(Caller, Right), (), String>,
    questions: Arc<Questions>,
}

impl Reviewer {
    /// Tokens have to be for one of these audiences.
    pub fn new(client: kube::Client, audiences: Audiences) -> Self {
        Self {
            client,
            audiences,
            tokens: VerdictCache::new(YES, NO),
            rights: VerdictCache::new(YES, NO),
            questions: Arc::default(),
        }
    }

    /// Returns the turns at the API server, for code that asks it other questions about the same callers.
    pub(crate) fn questions(&self) -> Arc<Questions> {
        self.questions.clone()
    }

    /// Returns the owner of the token (TokenReview). A client at the address `source` has shown it.
    ///
    /// # Errors
    /// The token has no owner, or the API server does not answer.
    pub async fn caller_of_token(&self, token: &str, source: IpAddr) -> Result<Caller, Refusal> {
        let (key, asker) = (Sha256::digest(token).into(), Asker::new(None, source));
        let ask = || self.review_token(token);
        let answer = self.tokens.get_or_ask(key, &self.questions, asker, ask).await?;
        answer.map_err(Refusal::Unauthenticated)
    }

    /// Asks about the token of a known caller, whatever was answered before.
    ///
    /// # Errors
    /// The token has no owner, or the API server does not answer.
    pub(crate) async fn caller_again(
        &self,
        token: &str,
        known: &Caller,
        source: IpAddr,
    ) -> Result<Caller, Refusal> {
        let _turn = self.questions.turn(Asker::new(Some(known), source)).await?;
        self.review_token(token).await?.map_err(Refusal::Unauthenticated)
    }

    async fn review_token(&self, token: &str) -> Result<Result<Caller, String>, Refusal> {
        let Audiences { own, api_server } = &self.audiences;
        if !own.is_empty() {
            let status = self.review_for(token, Some(own.clone())).await?;
            let named = status.audiences.as_deref().unwrap_or_default();
            // An authenticator that does not know audiences names none: the token is for the API server.
            let ours = own.iter().any(|own| named.contains(own)) || named.is_empty() && *api_server;
            match status.authenticated == Some(true) {
                true if ours => return Ok(owner(status)),
                true if !api_server => return Ok(Err(format!("the token is not for {}", own.join(" or ")))),
                false if !api_server => {
                    let refused = owner(status);
                    return Ok(refused.map_err(|why| format!("{why}; it has to be for {}", own.join(" or "))));
                }
                _ => {}
            }
        }
        Ok(owner(self.review_for(token, None).await?))
    }

    /// `audiences`: `None` for the API server's own.
    async fn review_for(
        &self,
        token: &str,
        audiences: Option<Vec<String>>,
    ) -> Result<TokenReviewStatus, Refusal> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences };
        let review = TokenReview { spec, ..TokenReview::default() };
        Ok(self.ask(review).await?.status.unwrap_or_default())
    }

    /// Checks that the caller may do one of these to the node (SubjectAccessReview). They are asked in turn.
    ///
    /// # Errors
    /// The caller may do none of them, or the API server does not answer.
    pub async fn allow(&self, caller: &Caller, accesses: &[Access], node: &NodeName) -> Result<(), Refusal> {
        self.allow_any(caller, accesses, |access| Right::Node(access, node.clone())).await
    }

    /// Checks that the caller may do one of these to the node of a pod. With `None`, the pod has no edge node; only
    /// callers that may do it to all nodes are told so. To others all pods look alike.
    ///
    /// # Errors
    /// The caller may do none of them, or the API server does not answer.
    pub async fn allow_at_pod(
        &self,
        caller: &Caller,
        accesses: &[Access],
        node: Option<&NodeName>,
    ) -> Result<(), Refusal> {
        let allowed = match node {
            Some(node) => self.allow(caller, accesses, node).await,
            None => self.allow_any(caller, accesses, Right::AllNodes).await,
        };
        allowed.map_err(|refusal| match refusal {
            Refusal::Forbidden(_) => {
                let wanted: Vec<_> = accesses.iter().map(in_words).collect();
                let wanted = wanted.join(" or ");
                Refusal::Forbidden(format!(
                    "{caller} cannot {wanted} of this pod's node, or there is no such pod on an edge node: who can {wanted} \
                     of all nodes is told more"
                ))
            }
            other => other,
        })
    }

    async fn allow_any(
        &self,
        caller: &Caller,
        accesses: &[Access],
        right: impl Fn(Access) -> Right,
    ) -> Result<(), Refusal> {
        let mut reasons = Vec::new();
        for access in accesses {
            match self.has(caller, &right(access.clone())).await? {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(Refusal::Forbidden(reasons.join("; ")))
    }

    /// Checks that the caller may GET this path, a nonResourceURL (SubjectAccessReview).
    ///
    /// # Errors
    /// The caller may not, or the API server does not answer.
    pub async fn allow_path(&self, caller: &Caller, path: &'static str) -> Result<(), Refusal> {
        self.has(caller, &Right::Path(path)).await?.map_err(Refusal::Forbidden)
    }

    async fn has(&self, caller: &Caller, right: &Right) -> Result<Result<(), String>, Refusal> {
        let (key, asker) = ((caller.clone(), right.clone()), Asker::Known(caller.name.clone()));
        let ask = || self.review_access(caller, right);
        self.rights.get_or_ask(key, &self.questions, asker, ask).await
    }

    async fn review_access(&self, caller: &Caller, right: &Right) -> Result<Result<(), String>, Refusal> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(caller.name.clone()),
                groups: Some(caller.groups.clone()),
                uid: caller.uid.clone(),
                extra: Some(caller.extra.clone()).filter(|extra| !extra.is_empty()),
                ..right.asked()
            },
            ..SubjectAccessReview::default()
        };
        let status = self.ask(review).await?.status.unwrap_or_default();
        if status.allowed && status.denied != Some(true) {
            return Ok(Ok(()));
        }
        let why = status.reason.filter(|reason| !reason.is_empty());
        Ok(Err(format!("{caller} cannot {right}{}", why.map(|why| format!(": {why}")).unwrap_or_default())))
    }

    async fn ask<K>(&self, review: K) -> Result<K, Refusal>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        let api = Api::<K>::all(self.client.clone());
        let (params, kind) = (PostParams::default(), K::kind(&()));
        request(DEADLINE, "creating", &kind, api.create(&params, &review)).await.map_err(|error| {
            Refusal::Unavailable(format!("failed to review the caller at the API server: {error}"))
        })
    }
}

/// Returns the owner of a reviewed token, or the reason for having none.
fn owner(status: TokenReviewStatus) -> Result<Caller, String> {
    let user = status.user.unwrap_or_default();
    match user.username.filter(|name| !name.is_empty()) {
        Some(name) if status.authenticated == Some(true) => Ok(Caller {
            name,
            groups: user.groups.unwrap_or_default(),
            uid: user.uid,
            extra: user.extra.unwrap_or_default(),
        }),
        _ => Err(match status.error.filter(|error| !error.is_empty()) {
            Some(error) => format!("the API server does not accept the bearer token: {error}"),
            None => "the API server does not accept the bearer token".to_owned(),
        }),
    }
}

/// Formats the access as in "get nodes/metrics".
fn in_words(Access { verb, subresource }: &Access) -> String {
    let verb = if verb.is_empty() { "use this method on" } else { *verb };
    format!("{verb} nodes/{subresource}")
}

/// Returns the question about a node, or about all nodes if there is no name, without the caller.
fn of_nodes(access: &Access, node: Option<&NodeName>) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        resource_attributes: Some(ResourceAttributes {
            verb: Some(access.verb.to_owned()),
            group: Some(String::new()),
            version: Some("v1".to_owned()),
            resource: Some("nodes".to_owned()),
            subresource: Some(access.subresource.to_owned()),
            name: node.map(ToString::to_string),
            ..ResourceAttributes::default()
        }),
        ..SubjectAccessReviewSpec::default()
    }
}

impl Right {
    /// Returns the question about this right, without the caller.
    fn asked(&self) -> SubjectAccessReviewSpec {
        match self {
            Self::Node(access, node) => of_nodes(access, Some(node)),
            Self::AllNodes(access) => of_nodes(access, None),
            Self::Path(path) => SubjectAccessReviewSpec {
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some((*path).to_owned()),
                    verb: Some("get".to_owned()),
                }),
                ..SubjectAccessReviewSpec::default()
            },
        }
    }
}

/// Formats the right as in "cannot get nodes/metrics of edge-1".
impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(access, node) => write!(f, "{} of {node}", in_words(access)),
            Self::AllNodes(access) => write!(f, "{} of all nodes", in_words(access)),
            Self::Path(path) => write!(f, "get the nonResourceURL {path}"),
        }
    }
}

#[cfg(test)]
mod tests;

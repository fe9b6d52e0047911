//! Which node a pod runs on, as the API server says.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tunnel_core::text::printable;
use tunnel_kube::request;

use super::answer::Failure;
use crate::answer_cache::AnswerCache;

/// How long an answer is kept. A pod never moves; one of the same name may run elsewhere.
const KEPT: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(4);
/// Longer names than Kubernetes allows are not asked for.
const LONGEST: usize = 253;

/// Finds pods' nodes.
pub(crate) struct Pods {
    client: kube::Client,
    known: AnswerCache<(String, String), Arc<str>>,
}

impl Pods {
    pub(crate) fn new(client: kube::Client) -> Self {
        Self { client, known: AnswerCache::default() }
    }

    /// The name of the pod's node.
    ///
    /// # Errors
    /// There is no such pod, it runs nowhere yet, or the API server does not say.
    pub(super) async fn node_of(&self, namespace: &str, name: &str) -> Result<Arc<str>, Failure> {
        let shown = || format!("pod {}/{}", printable(namespace, 100), printable(name, 100));
        if ![namespace, name].into_iter().all(is_name) {
            return Err(Failure::bad_request(format!(
                "{} cannot exist: not the names of Kubernetes",
                shown()
            )));
        }
        let key = (namespace.to_owned(), name.to_owned());
        if let Some(node) = self.known.get(&key) {
            return Ok(node);
        }
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let pod = request(DEADLINE, api.get(name)).await.map_err(|error| {
            if error.is_not_found() {
                Failure::new(http::StatusCode::NOT_FOUND, format!("{} does not exist", shown()))
            } else {
                let reason = format!("the API server does not say where {} runs: {error}", shown());
                Failure::new(http::StatusCode::SERVICE_UNAVAILABLE, reason)
            }
        })?;
        let node = pod.spec.and_then(|spec| spec.node_name).filter(|node| !node.is_empty());
        let node: Arc<str> =
            node.ok_or_else(|| Failure::bad_request(format!("{} runs on no node yet", shown())))?.into();
        self.known.put(key, node.clone(), KEPT);
        Ok(node)
    }
}

/// What may be a part of a URL of the API server.
fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    !name.is_empty() && name.len() <= LONGEST && name.bytes().all(plain) && !name.starts_with('.')
}

//! Looks up the node on which a pod runs.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tunnel_runtime::text::printable;

use crate::caller::verdict_cache::VerdictCache;
use crate::caller::{Asker, Questions};
use crate::listener::answer::Failure;
use crate::listener::cluster::Cluster;

/// Time for which an answer is cached, also a negative one. A pod never moves, but another one of the same name may run
/// elsewhere.
const KEPT: Duration = Duration::from_secs(5);
/// Maximum length of a name in Kubernetes; longer ones are not asked for.
const LONGEST: usize = 253;

/// Looks up pods' nodes.
pub(crate) struct Pods {
    cluster: Arc<dyn Cluster>,
    questions: Arc<Questions>,
    known: VerdictCache<(String, String), Arc<str>, Failure>,
}

impl Pods {
    pub(crate) fn new(cluster: Arc<dyn Cluster>, questions: Arc<Questions>) -> Self {
        Self { cluster, questions, known: VerdictCache::new(KEPT, KEPT) }
    }

    /// Returns the name of the pod's node, or the reason why it has none: the pod does not exist, or is not scheduled
    /// yet. Not every caller may know which pods exist.
    ///
    /// # Errors
    /// The name cannot be a pod's, or the API server does not answer.
    pub(super) async fn node_of(
        &self,
        asker: Asker,
        namespace: &str,
        name: &str,
    ) -> Result<Result<Arc<str>, Failure>, Failure> {
        let shown = || format!("pod {}/{}", printable(namespace, 100), printable(name, 100));
        if ![namespace, name].into_iter().all(is_name) {
            return Err(Failure::bad_request(format!(
                "{} cannot exist: not the names of Kubernetes",
                shown()
            )));
        }
        let key = (namespace.to_owned(), name.to_owned());
        let ask = async {
            let node = self.cluster.node_of_pod(namespace, name).await.map_err(|error| {
                let reason = format!("the API server does not say where {} runs: {error}", shown());
                Failure::new(StatusCode::SERVICE_UNAVAILABLE, reason)
            })?;
            let found: Result<Arc<str>, Failure> = match node {
                None => Err(Failure::new(StatusCode::NOT_FOUND, format!("{} does not exist", shown()))),
                Some(node) if node.is_empty() => {
                    Err(Failure::bad_request(format!("{} runs on no node yet", shown())))
                }
                Some(node) => Ok(node.into()),
            };
            Ok(found)
        };
        self.known.get_or_ask(key, &self.questions, asker, || ask).await
    }
}

/// True if the name may be part of a URL of the API server.
fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    !name.is_empty() && name.len() <= LONGEST && name.bytes().all(plain) && !name.starts_with('.')
}

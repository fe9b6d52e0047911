//! One object of the namespace, for the server and for commands.

use std::fmt;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tunnel_kube::FIELD_MANAGER;

use super::error::ClusterError;

/// Time limit of a request; after it the API server counts as unavailable.
const ANSWER: Duration = Duration::from_secs(10);

/// An object that may be missing.
pub struct ClusterObject<K> {
    pub(super) api: Api<K>,
    namespace: String,
    pub(super) name: String,
}

/// Namespace and name.
impl<K> fmt::Display for ClusterObject<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl<K> ClusterObject<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + fmt::Debug
        + Serialize
        + DeserializeOwned,
{
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        let api = Api::namespaced(client, namespace);
        Self { api, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// Sends one request about the object.
    pub(super) async fn request<T>(
        &self,
        action: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        Ok(tunnel_kube::request(ANSWER, action, &self.named(), request).await?)
    }

    pub(super) async fn get(&self) -> Result<Option<K>, ClusterError> {
        self.request("reading", self.api.get_opt(&self.name)).await
    }

    /// Kind, namespace and name.
    pub(super) fn named(&self) -> String {
        format!("{} {self}", K::kind(&()))
    }

    /// The metadata of a new object.
    pub(super) fn metadata(&self) -> ObjectMeta {
        ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() }
    }

    /// Creates the object.
    ///
    /// Uses apply instead of create because an apply request has the object's name, so RBAC can be limited to this
    /// object. A field manager that is unique to the attempt makes it as atomic as a create: values applied by another
    /// one conflict, even those of an earlier attempt that timed out here and arrives late.
    ///
    /// # Errors
    /// A conflict if another was first, with other values.
    pub(super) async fn create_once(&self, object: &K) -> Result<(), ClusterError> {
        let params = PatchParams::apply(&format!("{FIELD_MANAGER}-{:016x}", rand::random::<u64>()));
        self.request("creating", self.api.patch(&self.name, &params, &Patch::Apply(object))).await?;
        Ok(())
    }
}

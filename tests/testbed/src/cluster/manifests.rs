//! The shipped manifests, as `kubectl kustomize` renders them.
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::kubectl::Kubectl;

/// The objects of one folder below deploy/.
#[derive(Clone, Debug)]
pub struct Manifests(Vec<Value>);

impl Manifests {
    /// Renders `deploy/FOLDER`.
    pub async fn render(kubectl: &Kubectl, folder: &str) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(folder);
        let path = path.to_str().context("the repository's path is not UTF-8")?;
        let text = kubectl.run(&["kustomize", path]).await?;
        let args = ["create", "--dry-run=client", "--output=json", "--filename=-"];
        let documents = kubectl.run_with_input(&args, text.as_bytes()).await?;
        let objects = serde_json::Deserializer::from_str(&documents).into_iter().collect::<Result<_, _>>();
        Ok(Self(objects.context("what kubectl rendered")?))
    }

    pub fn object(&self, kind: &str, name: &str) -> Result<&Value> {
        self.0
            .iter()
            .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
            .with_context(|| format!("the manifests have no {kind} {name}"))
    }

    /// The arguments of a DaemonSet's container.
    pub fn arguments(&self, daemon_set: &str) -> Result<Vec<String>> {
        let container = &self.object("DaemonSet", daemon_set)?["spec"]["template"]["spec"]["containers"][0];
        ensure!(
            container["name"] == daemon_set,
            "the first container of {daemon_set} is {}",
            container["name"]
        );
        let arguments = container["args"].as_array().map_or(&[][..], Vec::as_slice);
        let text =
            |argument: &Value| argument.as_str().map(str::to_owned).context("an argument that is not text");
        arguments.iter().map(text).collect()
    }

    /// Applies the objects that `accept` takes.
    pub async fn apply(&self, kubectl: &Kubectl, accept: impl Fn(&Value) -> bool) -> Result<()> {
        let objects: Vec<&Value> = self.0.iter().filter(|object| accept(object)).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        kubectl.run_with_input(&["apply", "--filename=-"], list.to_string().as_bytes()).await?;
        Ok(())
    }
}

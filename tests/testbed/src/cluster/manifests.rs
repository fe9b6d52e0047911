//! The shipped manifests, as `kubectl kustomize` renders them.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::kubectl::Kubectl;

/// The objects of one folder below deploy/.
#[derive(Clone, Debug)]
pub struct Manifests(Vec<Value>);

impl Manifests {
    /// Renders `deploy/FOLDER`.
    pub async fn render(kubectl: &Kubectl, folder: &str) -> Result<Self> {
        Self::render_at(kubectl, &deploy().join(folder)).await
    }

    /// Renders the folder at `path`.
    pub async fn render_at(kubectl: &Kubectl, path: &Path) -> Result<Self> {
        let path = path.to_str().context("the path is not UTF-8")?;
        let text = kubectl.run(&["kustomize", path]).await?;
        Self::parse(kubectl, &text).await
    }

    /// Parses YAML, without asking the API server.
    pub async fn parse(kubectl: &Kubectl, text: &str) -> Result<Self> {
        let args = ["create", "--dry-run=client", "--output=json", "--filename=-"];
        let documents = kubectl.run_with_input(&args, text.as_bytes()).await?;
        let objects = serde_json::Deserializer::from_str(&documents).into_iter().collect::<Result<_, _>>();
        Ok(Self(objects.context("what kubectl rendered")?))
    }

    pub fn objects(&self) -> &[Value] {
        &self.0
    }

    pub fn object(&self, kind: &str, name: &str) -> Result<&Value> {
        self.0
            .iter()
            .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
            .with_context(|| format!("the manifests have no {kind} {name}"))
    }

    /// Returns the arguments of a DaemonSet's container.
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

    /// Applies the objects for which `accept` returns true.
    pub async fn apply(&self, kubectl: &Kubectl, accept: impl Fn(&Value) -> bool) -> Result<()> {
        let objects: Vec<&Value> = self.0.iter().filter(|object| accept(object)).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        kubectl.run_with_input(&["apply", "--filename=-"], list.to_string().as_bytes()).await?;
        Ok(())
    }
}

/// Returns the folder of the manifests.
pub fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// Writes an overlay of `deploy/FOLDER` into `dir`, as an administrator would: with `components` (names below
/// deploy/components) and `patches` in Kustomize's form.
pub fn write_overlay(dir: &Path, folder: &str, components: &[&str], patches: &Value) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let dir = fs::canonicalize(dir).with_context(|| dir.display().to_string())?;
    // Kustomize does not accept absolute paths.
    let up = "../".repeat(dir.components().count() - 1);
    let relative = |path: PathBuf| -> Result<String> {
        let path = fs::canonicalize(&path).with_context(|| path.display().to_string())?;
        let path = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
        Ok(format!("{up}{}", path.trim_start_matches('/')))
    };
    let components = components.iter().map(|name| relative(deploy().join("components").join(name)));
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(deploy().join(folder))?],
        "components": components.collect::<Result<Vec<_>>>()?,
        "patches": patches,
    });
    // JSON is YAML too.
    fs::write(dir.join("kustomization.yaml"), kustomization.to_string()).context("writing the overlay")
}

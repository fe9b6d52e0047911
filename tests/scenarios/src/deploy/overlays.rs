//! What Kustomize makes of folders and components together, without a cluster.
use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::manifests::write_overlay;
use serde_json::{Value, json};

use super::render::{Objects, kustomize};

/// What `deploy/FOLDER` with these components renders.
async fn rendered(testbed: &Testbed, folder: &str, components: &[&str]) -> Result<Objects> {
    let overlay = testbed.dir().join("rendered");
    write_overlay(&overlay, folder, components, &json!([]))?;
    kustomize(&overlay).await.with_context(|| format!("{folder} with {components:?}"))
}

fn object<'a>(objects: &'a Objects, kind: &str, name: &str) -> Result<&'a Value> {
    let object = objects.get(&(kind.to_owned(), name.to_owned()));
    object.with_context(|| format!("there is no {kind} {name}"))
}

/// AppArmor's profile for containers goes by the path in the container, and denies writing below /sys.
pub(super) async fn programs_can_be_pinned(testbed: &Testbed) -> Result<()> {
    let objects = rendered(testbed, "base", &["everywhere"]).await?;
    for name in ["tunnel-server", "tunnel-redirector"] {
        let pod = &object(&objects, "DaemonSet", name)?["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let volume = list(&pod["volumes"]).into_iter().find(|one| one["hostPath"]["path"] == "/sys/fs/bpf");
        let volume = volume.with_context(|| format!("{name} has no BPF file system"))?;
        let mounts = list(&container["volumeMounts"]).into_iter();
        let mounts: Vec<Value> = mounts.filter(|mount| mount["name"] == volume["name"]).collect();
        ensure!(mounts.len() == 1, "{name} mounts it {} times", mounts.len());
        let path = mounts[0]["mountPath"].as_str().context("no mountPath")?;
        ensure!(
            !path.starts_with("/sys/") && mounts[0]["readOnly"] != true,
            "{name} mounts it so: {mounts:?}"
        );
        let variable = list(&container["env"]).into_iter().find(|one| one["name"] == "POSTERN_BPFFS");
        let told = variable.with_context(|| format!("{name} is not told where it is"))?;
        ensure!(told["value"] == path, "{name} is told {told}, and it is at {path}");
    }
    Ok(())
}

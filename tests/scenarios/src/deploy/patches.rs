//! Overlays of deploy/ as an administrator would write them, and their patches.
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::cluster::manifests::write_overlay;
use serde_json::{Value, json};

use super::text;

/// Writes an overlay of `folder`, as an administrator would, that only sets the cgroup and the BPF file system: a test
/// must not redirect the whole machine.
pub(super) fn overlay(testbed: &Testbed, folder: &str) -> Result<PathBuf> {
    overlay_with(testbed, folder, &[], Vec::new())
}

/// As [`overlay`], with components and patches.
pub(super) fn overlay_with(
    testbed: &Testbed,
    folder: &str,
    components: &[&str],
    patches: Vec<Value>,
) -> Result<PathBuf> {
    overlay_in(testbed, folder, components, &testbed.cloud_cgroup.path().display().to_string(), patches)
}

/// As [`overlay_with`], with this cgroup.
pub(super) fn overlay_in(
    testbed: &Testbed,
    folder: &str,
    components: &[&str],
    cgroup: &str,
    mut patches: Vec<Value>,
) -> Result<PathBuf> {
    let dir = fs::canonicalize(testbed.dir()).context("the run's folder")?.join("overlay");
    patches.push(redirects("tunnel-server", testbed, cgroup)?);
    write_overlay(&dir, folder, components, &json!(patches))?;
    Ok(dir)
}

/// Limits the redirect of a DaemonSet's pods to this cgroup of the host, and gives them the run's BPF file system.
pub(super) fn redirects(daemon_set: &str, testbed: &Testbed, cgroup: &str) -> Result<Value> {
    let bpffs = testbed.bpffs().join("postern");
    let patch = json!([
        argument(&redirect_cgroup(cgroup)?),
        // This host may have none of its own.
        { "op": "replace", "path": "/spec/template/spec/volumes/2/hostPath/path", "value": text(&bpffs)? },
    ]);
    Ok(of(daemon_set, &patch))
}

/// Returns the flag for this cgroup of the host, as seen from the pods.
pub(super) fn redirect_cgroup(cgroup: &str) -> Result<String> {
    let below = cgroup.strip_prefix("/sys/fs/cgroup").context("the pods mount /sys/fs/cgroup only")?;
    Ok(format!("--redirect-cgroup=/host/cgroup{below}"))
}

/// Returns a patch of a DaemonSet in Kustomize's form.
pub(super) fn of(daemon_set: &str, patch: &Value) -> Value {
    json!({ "target": { "kind": "DaemonSet", "name": daemon_set }, "patch": patch.to_string() })
}

/// Returns a patch operation that adds an argument of the program.
pub(super) fn argument(flag: &str) -> Value {
    json!({ "op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": flag })
}

//! kubectl's plugin (deploy/krew) as a release has it.
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::archive::pack;
use crate::command::root;
use crate::files::{self, copy, write};
use crate::image::VERSION;
use crate::image::oci::sha256;

/// kubectl's plugin, and its manifest for krew.
pub(crate) fn write_release(out: &Path, epoch: u64) -> Result<()> {
    let contents = tempfile::tempdir().context("a folder for the plugin")?;
    for file in ["deploy/krew/kubectl_complete-postern", "LICENSE"] {
        let from = root().join(file);
        copy(&from, &contents.path().join(from.file_name().unwrap_or_default()))?;
    }
    let script = contents.path().join("kubectl-postern");
    write(&script, &released_script()?)?;
    fs::set_permissions(&script, Permissions::from_mode(0o755)).context("the plugin's script")?;
    let archive = out.join(format!("kubectl-postern-{VERSION}.tar.gz"));
    pack(epoch, contents.path(), &archive, &["LICENSE", "kubectl-postern", "kubectl_complete-postern"])?;
    let sum = sha256(&files::bytes(&archive)?);
    let manifest = include_str!("../../deploy/krew/plugin.yaml");
    let manifest = manifest.replace("VERSION", VERSION).replace("SHA256", &sum);
    write(&out.join("postern.yaml"), &manifest)
}

/// The plugin as one file, with its version.
fn released_script() -> Result<String> {
    let mut script = include_str!("../../deploy/krew/kubectl-postern").to_owned();
    let mut replace = |from: &str, to: &str| {
        ensure!(script.matches(from).count() == 1, "deploy/krew/kubectl-postern: {from} is not there once");
        script = script.replace(from, to);
        Ok(())
    };
    replace("version='(not of a release)'", &format!("version='{VERSION}'"))?;
    let read = |file: &str| format!(r#". "$(dirname "$(readlink -f "$0")")/{file}""#);
    replace(&read("pods.sh"), include_str!("../../deploy/krew/pods.sh"))?;
    replace(&read("check.sh"), include_str!("../../deploy/krew/check.sh"))?;
    replace(&read("bundle.sh"), include_str!("../../deploy/krew/bundle.sh"))?;
    Ok(script)
}

#[cfg(test)]
mod tests;

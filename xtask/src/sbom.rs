//! SBOMs of the binaries in CycloneDX, made by cargo-cyclonedx from Cargo's own metadata.
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::command::{cargo, need_cargo_tool, packages, root, run};
use crate::cross::Arch;
use crate::files;
use crate::source::Source;

const VERSION: &str = "0.5.9";
/// The tool writes one file beside every Cargo.toml of the workspace; git ignores them.
const FILE: &str = "postern-sbom.cdx";

/// The SBOM of each of these programs, for one architecture.
pub(crate) fn of(names: &[&str], arch: Arch, source: &Source) -> Result<BTreeMap<String, Vec<u8>>> {
    need_cargo_tool("cargo-cyclonedx", VERSION)?;
    let folders: BTreeMap<_, _> =
        packages()?.into_iter().map(|package| (package.name, package.folder)).collect();
    let _written = Written(folders.values().map(|folder| folder.join(format!("{FILE}.json"))).collect());
    let mut command = cargo();
    command.args(["cyclonedx", "--quiet", "--format=json", "--spec-version=1.5", "--no-build-deps"]);
    command.args(["--override-filename", FILE, "--target", arch.target()]);
    // Instead of the present time and a random serial number.
    command.env("SOURCE_DATE_EPOCH", source.epoch.to_string());
    run(&mut command)?;
    let mut found = BTreeMap::new();
    for name in names {
        let folder = folders.get(*name).with_context(|| format!("the workspace has no {name}"))?;
        let path = folder.join(format!("{FILE}.json"));
        let text = files::text(&path)?;
        // Our own crates are named by their folders; a clone elsewhere has the same SBOM.
        let text = text.replace(&format!("file://{}/", root().display()), "file:///");
        found.insert((*name).to_owned(), text.into_bytes());
    }
    Ok(found)
}

/// Files that are removed on drop.
struct Written(Vec<PathBuf>);

impl Drop for Written {
    fn drop(&mut self) {
        for path in &self.0 {
            fs::remove_file(path).ok();
        }
    }
}

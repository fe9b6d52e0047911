//! Running other programs.
use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::build_ebpf;

/// The project's root folder.
pub(crate) fn root() -> PathBuf {
    let xtask = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().map(PathBuf::from).unwrap_or(xtask)
}

/// A program that `cargo build` made.
pub(crate) fn built(name: &str) -> Result<PathBuf> {
    Ok(build_ebpf::target_dir(&root())?.join("debug").join(name))
}

/// Builds these packages.
pub(crate) fn build(packages: &[&str]) -> Result<()> {
    run(cargo().arg("build").args(packages.iter().flat_map(|package| ["-p", package])))
}

/// The packages that a plain `cargo test` tests: their names and folders.
pub(crate) fn default_packages() -> Result<Vec<(String, PathBuf)>> {
    let output = cargo().args(["metadata", "--no-deps", "--format-version", "1"]).output();
    let metadata: Value = serde_json::from_slice(&output.context("starting cargo metadata")?.stdout)
        .context("reading what cargo metadata prints")?;
    let list = |key: &str| metadata[key].as_array().cloned().unwrap_or_default();
    let default = list("workspace_default_members");
    let mut packages = Vec::new();
    for package in list("packages").iter().filter(|package| default.contains(&package["id"])) {
        let text = |key: &str| package[key].as_str().with_context(|| format!("cargo metadata has no {key}"));
        let manifest = PathBuf::from(text("manifest_path")?);
        let folder = manifest.parent().context("a manifest has a folder")?;
        packages.push((text("name")?.to_owned(), folder.to_owned()));
    }
    Ok(packages)
}

/// A program, to be run in the project's root.
pub(crate) fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    command
}

/// The cargo that runs this xtask.
pub(crate) fn cargo() -> Command {
    program(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Shows the command, runs it to its end; anything but success is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    eprintln!("+ {}", shown(command));
    let status = command.status().with_context(|| format!("starting {}", shown(command)))?;
    if !status.success() {
        bail!("`{}` ended with {status}", shown(command));
    }
    Ok(())
}

/// Whether the command can be started and succeeds; says nothing.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The command as one would type it.
pub(crate) fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

/// Installs a cargo subcommand when it is missing, saying so. It is built outside the project's target folder.
pub(crate) fn need_cargo_tool(name: &str, version: &str) -> Result<()> {
    let subcommand = name.trim_start_matches("cargo-");
    if succeeds(cargo().args([subcommand, "--version"])) {
        return Ok(());
    }
    println!("{name} is missing: installing it with `cargo install {name}`");
    run(cargo().args(["install", name, "--version", version, "--locked"]))
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    nix::unistd::Uid::effective().is_root()
}

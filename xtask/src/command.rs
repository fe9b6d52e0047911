//! Running other programs.
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use serde_json::Value;

/// The project's root folder.
pub(crate) fn root() -> PathBuf {
    // As cargo says now: with a target directory that several checkouts share, this program may be another one's build.
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask.parent().map(PathBuf::from).unwrap_or(xtask)
}

/// A program that `cargo build` made.
pub(crate) fn built(name: &str) -> Result<PathBuf> {
    Ok(target_dir()?.join("debug").join(name))
}

/// Builds these packages.
pub(crate) fn build(packages: &[&str]) -> Result<()> {
    build_as("dev", packages)
}

/// Builds these packages with a profile of Cargo.toml.
pub(crate) fn build_as(profile: &str, packages: &[&str]) -> Result<()> {
    let packages = packages.iter().flat_map(|package| ["-p", package]);
    run(cargo().args(["build", "--profile", profile]).args(packages))
}

/// A package that a plain `cargo test` tests.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// The integration tests: programs of their own below `tests/`.
    pub(crate) tests: Vec<String>,
}

pub(crate) fn default_packages() -> Result<Vec<Package>> {
    let metadata = metadata()?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let default = list(&metadata["workspace_default_members"]);
    let mut packages = Vec::new();
    for package in list(&metadata["packages"]).iter().filter(|package| default.contains(&package["id"])) {
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let folder = manifest.parent().context("cargo metadata has a package without a folder")?.to_owned();
        let targets = list(&package["targets"]);
        let tests = targets.iter().filter(|target| target["kind"][0] == "test");
        let tests = tests.map(|target| text(&target["name"])).collect();
        packages.push(Package { name: text(&package["name"]), folder, tests });
    }
    ensure!(!packages.is_empty(), "cargo metadata names no default packages");
    Ok(packages)
}

/// The folder of every package of the workspace, by name.
pub(crate) fn member_folders() -> Result<BTreeMap<String, PathBuf>> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let text = |package: &Value, key: &str| {
        package[key].as_str().map(str::to_owned).with_context(|| format!("a package without a {key}"))
    };
    packages
        .iter()
        .map(|package| {
            let manifest = PathBuf::from(text(package, "manifest_path")?);
            let folder = manifest.parent().context("cargo metadata has a package without a folder")?;
            Ok((text(package, "name")?, folder.to_owned()))
        })
        .collect()
}

/// Where cargo puts what it builds, whatever CARGO_TARGET_DIR and configuration files say.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
    Ok(PathBuf::from(dir))
}

fn metadata() -> Result<Value> {
    let mut command = cargo();
    command.args(["metadata", "--no-deps", "--format-version=1", "--offline"]).stderr(Stdio::inherit());
    let output = command.output().context("starting cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata ended with {}", output.status);
    serde_json::from_slice(&output.stdout).context("cargo metadata did not print JSON")
}

/// A program, to be run in the project's root.
pub(crate) fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    command
}

/// The cargo that runs this xtask. What it has set for xtask alone is removed: ring's build script watches some of it, and
/// would rebuild ring, and most of the tree with it, whenever `cargo build` and `cargo xtask` alternate.
pub(crate) fn cargo() -> Command {
    let mut command = program(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(own)) {
        command.env_remove(name);
    }
    command
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

/// Runs a program that cleans up after itself when it is interrupted, and returns its exit code. Ctrl-C reaches the whole
/// foreground group: this process only waits for the program.
pub(crate) fn run_in_foreground(command: &mut Command) -> Result<ExitCode> {
    let status = holding_back(&[Signal::SIGINT], || {
        command.status().with_context(|| format!("starting {}", shown(command)))
    })?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Runs `work` to its end whatever of these signals comes: it takes effect afterwards. What `work` starts inherits that.
pub(crate) fn holding_back<T>(signals: &[Signal], work: impl FnOnce() -> Result<T>) -> Result<T> {
    let mask: SigSet = signals.iter().copied().collect();
    let previous = mask.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("blocking signals")?;
    let result = work();
    previous.thread_set_mask().context("unblocking signals")?;
    result
}

/// Runs a program to its end and returns what it prints; anything but success is an error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("starting {}", shown(command)))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{}` ended with {}: {errors}", shown(command), output.status);
    String::from_utf8(output.stdout).with_context(|| format!("what `{}` prints", shown(command)))
}

/// Where a program is, as the shell finds it.
pub(crate) fn which(name: &str) -> Result<PathBuf> {
    let path = output(program("sh").args(["-c", &format!("command -v {name}")]))?;
    Ok(PathBuf::from(path.trim()))
}

/// Whether the command can be started and succeeds. Prints nothing.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The end of a long output, for an error: what went wrong is there.
pub(crate) fn end_of(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

/// The command as typed in a shell.
pub(crate) fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

/// Installs a cargo subcommand when it is missing, and prints that it does. It is built outside the project's target folder.
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

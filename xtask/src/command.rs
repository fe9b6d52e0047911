//! Running other programs.
use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use serde_json::Value;

/// The project's root folder.
pub(crate) fn root() -> PathBuf {
    // From the environment: where several checkouts share a target directory, another one may have built this program.
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask.parent().map(PathBuf::from).unwrap_or(xtask)
}

/// Name of a value on the command line, which also names files and variables.
pub(crate) fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Cargo's folder for the user, where `cargo install` puts programs.
pub(crate) fn cargo_home() -> Result<PathBuf> {
    user_folder("CARGO_HOME", ".cargo")
}

/// The folder in this variable, or the default one below the user's home.
pub(crate) fn user_folder(variable: &str, default: &str) -> Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = set(variable).or_else(|| Some(set("HOME")?.join(default)));
    folder.with_context(|| format!("neither {variable} nor HOME is set"))
}

/// Path of a program that `cargo build` made.
pub(crate) fn built(name: &str) -> Result<PathBuf> {
    Ok(target_dir()?.join("debug").join(name))
}

/// Builds these packages with a profile of Cargo.toml.
pub(crate) fn build_as(profile: &str, packages: &[&str]) -> Result<()> {
    let packages = packages.iter().flat_map(|package| ["-p", package]);
    run(cargo().args(["build", "--profile", profile]).args(packages))
}

/// Builds these programs as `cargo build --all-targets` does: without `--examples`, of which there are none, cargo leaves out
/// features that only tests ask for, and compiles tokio and all that uses it once more.
pub(crate) fn build_programs(names: &[&str]) -> Result<()> {
    run(&mut building(names))
}

/// The command that does so.
pub(crate) fn building(names: &[&str]) -> Command {
    let mut build = cargo();
    build.args(["build", "--examples"]).args(names.iter().flat_map(|name| ["--bin", name]));
    build
}

/// A package of the workspace.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    is_default: bool,
}

/// Packages that a plain `cargo test` tests.
pub(crate) fn default_packages() -> Result<Vec<Package>> {
    Ok(packages()?.into_iter().filter(|package| package.is_default).collect())
}

pub(crate) fn packages() -> Result<Vec<Package>> {
    let metadata = metadata()?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let default = list(&metadata["workspace_default_members"]);
    let mut packages = Vec::new();
    for package in &list(&metadata["packages"]) {
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let folder = manifest.parent().context("cargo metadata has a package without a folder")?.to_owned();
        let is_default = default.contains(&package["id"]);
        packages.push(Package { name: text(&package["name"]), folder, is_default });
    }
    ensure!(packages.iter().any(|package| package.is_default), "cargo metadata names no default packages");
    Ok(packages)
}

/// Cargo's target directory, as CARGO_TARGET_DIR and configuration files set it.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
    Ok(PathBuf::from(dir))
}

fn metadata() -> Result<Value> {
    let mut command = cargo();
    command.args(["metadata", "--no-deps", "--format-version=1", "--offline"]).stderr(Stdio::inherit());
    serde_json::from_str(&output(&mut command)?).context("cargo metadata did not print JSON")
}

/// A program, to be run in the project's root.
pub(crate) fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    command
}

/// The cargo that runs this xtask, without the variables that it has set for xtask alone: a build script may watch
/// some, and would rebuild its crate, and most of the tree with it, whenever `cargo build` and `cargo xtask` alternate.
pub(crate) fn cargo() -> Command {
    let mut command = program(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(own)) {
        command.env_remove(name);
    }
    command
}

/// Prints the command and runs it to its end; fails unless it succeeds.
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

/// Runs `work` with these signals blocked: they take effect afterwards. Processes that `work` starts inherit the mask.
pub(crate) fn holding_back<T>(signals: &[Signal], work: impl FnOnce() -> Result<T>) -> Result<T> {
    let mask: SigSet = signals.iter().copied().collect();
    let previous = mask.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("blocking signals")?;
    let result = work();
    previous.thread_set_mask().context("unblocking signals")?;
    result
}

/// Runs a program to its end and returns its output; fails unless it succeeds.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("starting {}", shown(command)))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{}` ended with {}: {errors}", shown(command), output.status);
    String::from_utf8(output.stdout).with_context(|| format!("what `{}` prints", shown(command)))
}

/// Path of a program, as the shell finds it.
pub(crate) fn which(name: &str) -> Result<PathBuf> {
    let path = output(program("sh").args(["-c", &format!("command -v {name}")]))?;
    Ok(PathBuf::from(path.trim()))
}

/// Reports whether the command can be started and succeeds. Prints nothing.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The last lines of a long output, for an error: the cause is there.
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

/// Installs a cargo subcommand if it is missing or of another version, and prints that. The files that it makes, such as SBOMs, are
/// those of one version.
pub(crate) fn need_cargo_tool(name: &str, version: &str) -> Result<()> {
    let subcommand = name.trim_start_matches("cargo-");
    let is_there = || {
        let installed = output(cargo().args([subcommand, "--version"])).unwrap_or_default();
        is_version(&installed, version)
    };
    if is_there() {
        return Ok(());
    }
    install(name, version, &["--locked"])?;
    ensure!(
        is_there(),
        "{name} {version} was installed, but `cargo {subcommand} --version` shows another one: PATH has it in an earlier folder"
    );
    Ok(())
}

/// Returns the path of a program that is installed beside cargo's other tools if it is missing there, or of another version: that
/// would make other files of a release.
pub(crate) fn need_program(name: &str, version: &str, options: &[&str]) -> Result<PathBuf> {
    let path = cargo_home()?.join("bin").join(name);
    let installed = output(program(&path).arg("--version")).unwrap_or_default();
    if !is_version(&installed, version) {
        install(name, version, options)?;
    }
    Ok(path)
}

/// Compares with an output such as `mdbook v0.5.4`.
fn is_version(output: &str, version: &str) -> bool {
    output.split_whitespace().any(|word| word.trim_start_matches('v') == version)
}

/// Cargo builds it in a temporary folder, outside of the project's.
fn install(name: &str, version: &str, options: &[&str]) -> Result<()> {
    println!("{name} {version} is missing: installing it with `cargo install {name}`");
    let mut install = cargo();
    install.args(["install", name, "--version", version]).args(options).env_remove("CARGO_TARGET_DIR");
    run(install.current_dir("/"))
}

/// Reports whether this process runs as root.
pub(crate) fn is_root() -> bool {
    nix::unistd::Uid::effective().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_another_version_does_not_count() {
        assert!(is_version("mdbook v0.5.4\n", "0.5.4"));
        assert!(is_version("cargo-cyclonedx-cyclonedx 0.5.9\n", "0.5.9"));
        assert!(!is_version("mdbook v0.5.40\n", "0.5.4"));
        assert!(!is_version("", "0.5.4"));
    }
}

//! `cargo xtask build-ebpf`: builds the BPF programs into `<target dir>/bpf/object/`, where
//! `tunnel-redirect/build.rs` finds them.
//!
//! The programs need `core` built for a BPF target (`-Z build-std`), hence a toolchain with `rust-src`
//! that accepts unstable options: any stable one with `RUSTC_BOOTSTRAP=1`, or nightly.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::command::{self, cargo_home, root, run as run_command, succeeds, target_dir};
use crate::cross::sysroot;
use crate::ebpf_sources;

/// The last linker that brings its own LLVM by way of rustc's (0.11 needs a system LLVM).
const BPF_LINKER_VERSION: &str = "0.10.4";

/// Builds the object and returns its path. Cargo skips what has not changed; the object's file is only
/// touched when its contents differ, so that the server is not rebuilt for nothing.
pub(crate) fn run() -> Result<PathBuf> {
    let workspace = root();
    let fingerprint = ebpf_sources::fingerprint(&workspace).context("cannot read the programs' sources")?;
    let target_dir = target_dir()?;
    publish(&compile(&workspace, &target_dir)?, &target_dir, &fingerprint)
}

/// Builds the object of these sources, which may be another version's, and returns its path in the target directory.
pub(crate) fn compile(workspace: &Path, target_dir: &Path) -> Result<PathBuf> {
    need_sources()?;
    ensure_linker()?;
    run_command(&mut cargo("build", workspace, target_dir)?)
        .context("the programs could not be built; the compiler's messages are above")?;
    Ok(build_dir(target_dir).join(TRIPLE).join("release").join("tunnel-ebpf"))
}

/// Installs the sources of Rust's library if this toolchain lacks them. Another toolchain is not used: it may compile another object.
fn need_sources() -> Result<()> {
    let are_there =
        || -> Result<bool> { Ok(sysroot()?.join("lib/rustlib/src/rust/library/core/Cargo.toml").exists()) };
    if are_there()? {
        return Ok(());
    }
    eprintln!("build-ebpf: this toolchain has no rust-src: running `rustup component add rust-src`");
    run_command(Command::new("rustup").args(["component", "add", "rust-src"]))
        .context("this toolchain has no rust-src; install rustup")?;
    ensure!(are_there()?, "rust-src was installed, but this toolchain does not show it; check `rustup show`");
    Ok(())
}

/// Cargo without its settings for xtask itself, or those of the user for host builds: they must not reach a BPF build.
fn without_settings() -> Command {
    let mut command = command::cargo();
    for name in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "RUSTC_WRAPPER",
        "CARGO_BUILD_RUSTFLAGS",
    ] {
        command.env_remove(name);
    }
    command
}

/// PATH with cargo's own bin directory, where `cargo install` puts the linker.
fn path_with_cargo_bin() -> Result<std::ffi::OsString> {
    let mut paths: Vec<PathBuf> = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect();
    paths.push(cargo_home()?.join("bin"));
    env::join_paths(paths).context("PATH cannot be extended")
}

fn ensure_linker() -> Result<()> {
    if succeeds(Command::new("bpf-linker").arg("--version").env("PATH", path_with_cargo_bin()?)) {
        return Ok(());
    }
    eprintln!("build-ebpf: bpf-linker is missing: installing it takes a few minutes");
    let mut command = without_settings();
    command.args(["install", "bpf-linker", "--version", BPF_LINKER_VERSION, "--locked"]);
    // A separate host build, without this workspace's settings.
    run_command(command.env_remove("RUSTC_BOOTSTRAP").env_remove("CARGO_TARGET_DIR").current_dir("/"))
}

/// `cargo clippy -D warnings` over the programs, which a workspace-wide clippy leaves out.
pub(crate) fn clippy() -> Result<()> {
    let workspace = root();
    let target_dir = target_dir()?;
    need_sources()?;
    run_command(cargo("clippy", &workspace, &target_dir)?.args(["--", "-D", "warnings"]))
}

/// BPF target with the byte order of the machine that the programs will run on, which is this one.
const TRIPLE: &str = if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };

/// A separate target directory: the host's builds and these never wait for each other's lock.
fn build_dir(target_dir: &Path) -> PathBuf {
    target_dir.join("bpf").join("build")
}

/// `cargo <subcommand>` for the programs.
fn cargo(subcommand: &str, workspace: &Path, target_dir: &Path) -> Result<Command> {
    let mut command = without_settings();
    command
        .args([
            subcommand,
            "--package",
            "tunnel-ebpf",
            "--release",
            "-Z",
            "build-std=core",
            "--target",
            TRIPLE,
        ])
        .arg("--target-dir")
        .arg(build_dir(target_dir))
        .env("RUSTC_BOOTSTRAP", "1")
        // bpf-linker optimises the whole program itself.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("PATH", path_with_cargo_bin()?)
        .current_dir(workspace)
        .stdout(Stdio::null());
    Ok(command)
}

/// Copies the object and its sources' fingerprint to where the server's build script looks.
fn publish(built: &Path, target_dir: &Path, fingerprint: &str) -> Result<PathBuf> {
    let dir = ebpf_sources::object_dir(target_dir);
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let object = dir.join(ebpf_sources::OBJECT);
    let contents = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    write_if_changed(&object, &contents)?;
    write_if_changed(&dir.join(ebpf_sources::FINGERPRINT), fingerprint.as_bytes())?;
    Ok(object)
}

fn write_if_changed(path: &Path, contents: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == contents) {
        return Ok(());
    }
    // Through a sibling outside the watched directory, so that a build never sees half a file.
    let temporary = path.parent().and_then(Path::parent).unwrap_or(Path::new("/tmp")).join(format!(
        "{}.{}",
        path.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id()
    ));
    fs::write(&temporary, contents).with_context(|| format!("cannot write {}", temporary.display()))?;
    fs::rename(&temporary, path).with_context(|| format!("cannot write {}", path.display()))
}

//! `cargo xtask build-ebpf`: builds the BPF programs into `<target dir>/bpf/object/`, where
//! `tunnel-redirect/build.rs` finds them.
//!
//! The programs need `core` built for a BPF target (`-Z build-std`), hence a toolchain with `rust-src`
//! that accepts unstable options: any stable one with `RUSTC_BOOTSTRAP=1`, or nightly.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::command::{cargo_home, root, run as run_command, succeeds, target_dir};
use crate::ebpf_sources;

/// The last linker that brings its own LLVM by way of rustc's (0.11 needs a system LLVM).
const BPF_LINKER_VERSION: &str = "0.10.4";

/// A compiler that can build the programs.
#[derive(Debug, Clone)]
enum Toolchain {
    /// The one that runs this command.
    Active,
    /// Another one that rustup manages.
    Rustup(&'static str),
}

impl Toolchain {
    fn describe(&self) -> String {
        match self {
            Self::Active => "the active toolchain (RUSTC_BOOTSTRAP=1)".into(),
            Self::Rustup(name) => format!("rustup's {name}"),
        }
    }

    fn command(&self, tool: &str) -> Command {
        let mut command = match self {
            Self::Active => {
                Command::new(env::var_os("CARGO").filter(|_| tool == "cargo").unwrap_or(tool.into()))
            }
            Self::Rustup(name) => {
                let mut command = Command::new("rustup");
                command.args(["run", name, tool]);
                command
            }
        };
        if !matches!(self, Self::Active) {
            command.env_remove("RUSTUP_TOOLCHAIN");
        }
        // Settings of cargo for xtask itself, or of the user for host builds, must not reach a BPF build.
        for name in [
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_BUILD_TARGET",
            "RUSTC_WRAPPER",
            "CARGO_BUILD_RUSTFLAGS",
        ] {
            command.env_remove(name);
        }
        command.env("RUSTC_BOOTSTRAP", "1");
        command
    }

    fn sysroot(&self) -> Option<PathBuf> {
        let output =
            self.command("rustc").args(["--print", "sysroot"]).stderr(Stdio::null()).output().ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        (output.status.success() && !path.trim().is_empty()).then(|| PathBuf::from(path.trim()))
    }

    fn has_sources(&self) -> bool {
        self.sysroot().is_some_and(|root| root.join("lib/rustlib/src/rust/library/core/Cargo.toml").exists())
    }
}

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
    let toolchains = usable_toolchains()?;
    ensure_linker()?;

    let mut failed = Vec::new();
    for toolchain in &toolchains {
        match build(toolchain, workspace, target_dir) {
            Ok(built) => return Ok(built),
            Err(error) => {
                eprintln!("build-ebpf: {} cannot build the programs: {error:#}", toolchain.describe());
                failed.push(toolchain.describe());
            }
        }
    }
    bail!(
        "the programs could not be built with {}; the compiler's messages are above",
        failed.join(", nor with ")
    )
}

fn usable_toolchains() -> Result<Vec<Toolchain>> {
    let candidates = [Toolchain::Active, Toolchain::Rustup("stable"), Toolchain::Rustup("nightly")];
    let usable = |toolchains: &[Toolchain]| -> Vec<Toolchain> {
        toolchains.iter().filter(|toolchain| toolchain.has_sources()).cloned().collect()
    };
    let found = usable(&candidates);
    if !found.is_empty() {
        return Ok(found);
    }
    eprintln!("build-ebpf: no toolchain has rust-src: running `rustup component add rust-src`");
    run_command(Command::new("rustup").args(["component", "add", "rust-src"]))
        .context("no toolchain has rust-src; install rustup")?;
    let found = usable(&candidates);
    if found.is_empty() {
        bail!("rust-src was installed, but no toolchain shows it; check `rustup show`");
    }
    Ok(found)
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
    let mut command = Toolchain::Active.command("cargo");
    command.args(["install", "bpf-linker", "--version", BPF_LINKER_VERSION, "--locked"]);
    // A separate host build, without this workspace's settings.
    run_command(command.env_remove("RUSTC_BOOTSTRAP").env_remove("CARGO_TARGET_DIR").current_dir("/"))
}

/// `cargo clippy -D warnings` over the programs, which a workspace-wide clippy leaves out.
pub(crate) fn clippy() -> Result<()> {
    let workspace = root();
    let target_dir = target_dir()?;
    let toolchains = usable_toolchains()?;
    let toolchain = toolchains.first().context("no usable toolchain")?;
    run_command(cargo(toolchain, "clippy", &workspace, &target_dir)?.args(["--", "-D", "warnings"]))
}

/// BPF target with the byte order of the machine that the programs will run on, which is this one.
const TRIPLE: &str = if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };

/// A separate target directory: the host's builds and these never wait for each other's lock.
fn build_dir(target_dir: &Path) -> PathBuf {
    target_dir.join("bpf").join("build")
}

/// `cargo <subcommand>` for the programs.
fn cargo(toolchain: &Toolchain, subcommand: &str, workspace: &Path, target_dir: &Path) -> Result<Command> {
    let mut command = toolchain.command("cargo");
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
        // bpf-linker optimises the whole program itself.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("PATH", path_with_cargo_bin()?)
        .current_dir(workspace)
        .stdout(Stdio::null());
    Ok(command)
}

/// Compiles the programs and returns the path of the object.
fn build(toolchain: &Toolchain, workspace: &Path, target_dir: &Path) -> Result<PathBuf> {
    run_command(&mut cargo(toolchain, "build", workspace, target_dir)?)?;
    Ok(build_dir(target_dir).join(TRIPLE).join("release").join("tunnel-ebpf"))
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

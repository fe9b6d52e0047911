//! Builds static binaries for amd64 and arm64 on either, without a trace of the building machine in them.
//!
//! cargo-zigbuild has zig compile the C of some crates and link: one tool for both architectures, with the same libc everywhere.
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use memchr::memmem;

use crate::command::{cargo, cargo_home, default_packages, output, program, root, run, succeeds, target_dir};
use crate::{cache, files, packages};

/// cargo-zigbuild and zig, by their hashes.
const REQUIREMENTS: &str = include_str!("../zigbuild.txt");

/// Named as in Go and OCI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    pub(crate) const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];
    pub(crate) const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Arm64 } else { Self::Amd64 };

    pub(crate) fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-musl",
            Self::Arm64 => "aarch64-unknown-linux-musl",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    Dev,
    Release,
}

/// mimalloc embeds the time of its compilation. SOURCE_DATE_EPOCH does not help: zig's cache ignores it.
const WITHOUT_TIME: [&str; 3] = ["-Wno-builtin-macro-redefined", r#"-D__DATE__="""#, r#"-D__TIME__="""#];

/// Builds these packages for `arch`, and returns the folder with their binaries.
pub(crate) fn build(arch: Arch, profile: Profile, names: &[&str]) -> Result<PathBuf> {
    need_target(arch)?;
    let tools = tools()?;
    let target_dir = target_dir()?;
    let mut compile = program(tools.join("bin/cargo-zigbuild"));
    // Variables that cargo has set for xtask alone: see `command::cargo`.
    for (name, value) in cargo().get_envs() {
        if value.is_none() {
            compile.env_remove(name);
        }
    }
    compile.env("CARGO_ZIGBUILD_ZIG_PATH", tools.join("ziglang/zig"));
    compile.args(["zigbuild", "--locked", "--target", arch.target()]);
    compile.args(names.iter().flat_map(|name| ["-p", name]));
    match profile {
        Profile::Release => {
            compile.arg("--release");
        }
        // Test images carry few bytes, in a cluster or in emulation: optimising our own crates would take longer than it saves.
        // Dependencies are those of any dev build.
        Profile::Dev => {
            let own = default_packages()?.into_iter().filter(|package| package.name.starts_with("tunnel-"));
            compile.args(
                own.map(|package| format!("--config=profile.dev.package.{}.opt-level=0", package.name)),
            );
        }
    }
    // Told to strip debug information, as the profile says, zig's linker strips symbols too: `strip_debug` does it instead.
    compile.env("CARGO_PROFILE_RELEASE_STRIP", "none");
    let places = places(&target_dir)?;
    let variable = arch.target().replace('-', "_");
    // Dev builds of all clones share their dependencies, which are compiled again where the flags differ. Debug information alone
    // names the clone's folder there, and is removed.
    let own = root();
    let replaced = || places.iter().filter(|(from, _)| profile == Profile::Release || *from != own);
    let rustflags: Vec<String> =
        replaced().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())).collect();
    // The unit separator, because a path may have a space.
    compile.env("CARGO_ENCODED_RUSTFLAGS", rustflags.join("\x1f"));
    let prefixes = replaced().map(|(from, to)| format!("-ffile-prefix-map={}={to}", from.display()));
    let cflags: Vec<String> = prefixes.chain(WITHOUT_TIME.map(str::to_owned)).collect();
    compile.env(format!("CFLAGS_{variable}"), cflags.join(" "));
    run(&mut compile)?;

    let (made, folder) = (made(arch, profile)?, folder(arch, profile)?);
    files::create(&folder)?;
    for name in names {
        let binary = folder.join(name);
        strip_debug(&made.join(name), &binary)?;
        let bytes = files::bytes(&binary)?;
        names_no_folder(&binary, &bytes, &places)?;
        names_no_time(&binary, &bytes)?;
        keeps_symbols(&binary, &bytes)?;
    }
    Ok(folder)
}

/// Folder of the binaries without debug information.
pub(crate) fn folder(arch: Arch, profile: Profile) -> Result<PathBuf> {
    Ok(made(arch, profile)?.join("without-debug"))
}

/// Folder of the binaries as cargo builds them.
fn made(arch: Arch, profile: Profile) -> Result<PathBuf> {
    let name = match profile {
        Profile::Dev => "debug",
        Profile::Release => "release",
    };
    Ok(target_dir()?.join(arch.target()).join(name))
}

/// Folders of this machine that a compiler would name in panic messages and debug information, and their replacements.
/// Of two that match, the later one counts.
fn places(target_dir: &Path) -> Result<Vec<(PathBuf, String)>> {
    // The path that Rust's own library has where rust-src is not installed.
    let sources = format!("/rustc/{}", rustc_says("commit-hash")?);
    Ok(vec![
        (root(), "/postern".to_owned()),
        (cargo_home()?, "/cargo".to_owned()),
        (target_dir.to_owned(), "/target".to_owned()),
        (sysroot()?.join("lib/rustlib/src/rust"), sources),
    ])
}

/// Copies a program without debug information, most of which is of Rust's own library: a sixth of what an edge node has to
/// download. Uses the objcopy that comes with rustc, for every architecture.
fn strip_debug(from: &Path, to: &Path) -> Result<()> {
    let sysroot = sysroot()?;
    let tool = sysroot.join("lib/rustlib").join(rustc_says("host")?).join("bin/rust-objcopy");
    ensure!(
        tool.exists(),
        "{} is missing, which comes with rustc from rustup (https://rustup.rs), not with every other",
        tool.display()
    );
    let mut objcopy = program(&tool);
    // It uses rustc's LLVM, and does not find it by itself.
    objcopy.env("LD_LIBRARY_PATH", sysroot.join("lib"));
    // Names of tables and constants, of which neither a profile nor a backtrace has one: a fiftieth.
    objcopy.args(["--wildcard", "--strip-symbol=GCC_except_table*", "--strip-symbol=anon.*"]);
    run(objcopy.arg("--strip-debug").arg(from).arg(to))
}

/// The folder of the toolchain.
pub(crate) fn sysroot() -> Result<PathBuf> {
    Ok(PathBuf::from(output(program("rustc").args(["--print", "sysroot"]))?.trim()))
}

/// A field of `rustc --version --verbose`.
fn rustc_says(field: &str) -> Result<String> {
    let version = output(program("rustc").args(["--version", "--verbose"]))?;
    let value = version.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(": "));
    value.map(str::to_owned).with_context(|| format!("rustc names no {field}"))
}

/// Fails if the binary names a folder of this machine: a build on another machine, or in another folder, would differ.
fn names_no_folder(binary: &Path, bytes: &[u8], places: &[(PathBuf, String)]) -> Result<()> {
    for (place, _) in places {
        let place = format!("{}/", place.display());
        ensure!(
            !contains(bytes, place.as_bytes()),
            "{} names {place}: it would be another one if it were built elsewhere",
            binary.display()
        );
    }
    Ok(())
}

/// Fails if the binary contains a time of compilation, as C programs do (`__TIME__`).
fn names_no_time(binary: &Path, bytes: &[u8]) -> Result<()> {
    let is_time = |text: &&[u8]| {
        let mut places = text.iter().enumerate();
        places.all(|(at, byte)| if at % 3 == 2 { *byte == b':' } else { byte.is_ascii_digit() })
    };
    // Examples of time formats have 00:00:00.
    let time = bytes.windows(8).filter(is_time).find(|time| *time != b"00:00:00");
    ensure!(
        time.is_none(),
        "{} names the time {}: it would be another one if it were built again",
        binary.display(),
        String::from_utf8_lossy(time.unwrap_or_default())
    );
    Ok(())
}

/// Fails if the binary has no symbols, by which profilers and backtraces name functions.
fn keeps_symbols(binary: &Path, bytes: &[u8]) -> Result<()> {
    // In two parts, because a test searches this program, which would contain the whole name.
    let section = ["\0.sym", "tab\0"].concat();
    ensure!(
        contains(bytes, section.as_bytes()),
        "{} has no symbols: its profile strips them",
        binary.display()
    );
    Ok(())
}

pub(crate) fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    memmem::find(bytes, wanted).is_some()
}

/// The folder with cargo-zigbuild and zig, which pip installs.
fn tools() -> Result<PathBuf> {
    cache::once("tools", "zigbuild", &[REQUIREMENTS], |folder| {
        packages::install(&[packages::PIP])?;
        println!(
            "cargo-zigbuild and zig are missing: installing them with pip in postern's cache, about 100 MB"
        );
        let requirements = root().join("xtask/zigbuild.txt");
        let mut pip = program("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]);
        pip.args(["--no-deps", "--only-binary", ":all:"]);
        pip.args([OsString::from("--target"), folder.into(), "--requirement".into(), requirements.into()]);
        run(&mut pip)
    })
}

/// Installs Rust's standard library for `arch` if it is missing.
pub(crate) fn need_target(arch: Arch) -> Result<()> {
    let target = arch.target();
    let libraries = || {
        let output = program("rustc").args(["--print", "target-libdir", "--target", target]).output().ok()?;
        let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        path.is_dir().then_some(())
    };
    if libraries().is_some() {
        return Ok(());
    }
    println!("the Rust target {target} is missing: installing it with `rustup target add {target}`");
    ensure!(
        succeeds(program("rustup").arg("--version")),
        "this machine has no rustup: install Rust's standard library for {target} yourself"
    );
    run(program("rustup").args(["target", "add", target]))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn this_program_has_symbols_and_a_text_has_none() {
        let this = std::env::current_exe().unwrap();
        keeps_symbols(&this, &fs::read(&this).unwrap()).unwrap();
        assert!(keeps_symbols(&this, b"\x7fELF .symtab").unwrap_err().to_string().contains("has no symbols"));
    }

    #[test]
    fn debug_information_goes_and_symbols_stay() {
        let (this, dir) = (std::env::current_exe().unwrap(), tempfile::tempdir().unwrap());
        let stripped = dir.path().join("stripped");
        strip_debug(&this, &stripped).unwrap();
        let (before, after) = (fs::read(&this).unwrap(), fs::read(&stripped).unwrap());
        assert!(after.len() < before.len(), "{} of {} bytes are left", after.len(), before.len());
        keeps_symbols(&stripped, &after).unwrap();
    }

    #[test]
    fn a_folder_in_a_binary_is_found() {
        assert!(contains(b"panicked at /home/me/src/main.rs", b"/home/me/"));
        assert!(contains(b"//home/me/", b"/home/me/"));
        assert!(!contains(b"panicked at /home/m", b"/home/me/"));
        assert!(!contains(b"", b"/"));

        let (binary, bytes) = (Path::new("tunnel-agent"), b"panicked at /home/me/src/main.rs");
        let places = |at: &str| [(PathBuf::from(at), "/cargo".to_owned())];
        let error = names_no_folder(binary, bytes, &places("/home/me")).unwrap_err().to_string();
        assert!(error.contains("names /home/me/:"), "{error}");
        names_no_folder(binary, bytes, &places("/home/you")).unwrap();
    }

    #[test]
    fn a_time_in_a_binary_is_found() {
        let binary = Path::new("tunnel-agent");
        let error = names_no_time(binary, b"Nov 25 2026, 23:21:14)").unwrap_err().to_string();
        assert!(error.contains("names the time 23:21:14:"), "{error}");
        for text in [&b"0000 00:00:00 GMT"[..], b"fd:12:34", b"12:34:5", b"1:23:456:7", b""] {
            names_no_time(binary, text).unwrap();
        }
    }
}

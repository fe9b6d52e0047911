//! Embeds the BPF object that `cargo xtask build-ebpf` left in the target directory.
//!
//! Without a current object an empty stub is embedded, so that `cargo build` and `cargo clippy` need no
//! BPF toolchain; the server then refuses `--redirect=on` and names the command to run. A release
//! build without the object is an error.

#[path = "../xtask/src/ebpf_sources.rs"]
mod ebpf_sources;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

const FIX: &str = "run `cargo xtask build-ebpf`";

fn main() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=POSTERN_BPF_OBJECT");
    println!("cargo::rerun-if-env-changed=POSTERN_WITHOUT_BPF");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../xtask/src/ebpf_sources.rs");

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    let (object, state) = match find(&out)? {
        Found::Object(bytes) => (bytes, "present"),
        Found::Nothing(why) if env::var("PROFILE").as_deref() == Ok("release") => {
            if env::var_os("POSTERN_WITHOUT_BPF").is_none_or(|value| value != "1") {
                return Err(format!(
                    "{why}: {FIX}, or set POSTERN_WITHOUT_BPF=1 for a server that can only run with --redirect=off"
                ));
            }
            (Vec::new(), why)
        }
        Found::Nothing(why) => {
            println!("cargo::warning={why}; the redirect will not work: {FIX}");
            (Vec::new(), why)
        }
    };
    let path = out.join(ebpf_sources::OBJECT);
    fs::write(&path, object).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("cargo::rustc-env=POSTERN_BPF_STATE={state}");
    Ok(())
}

enum Found {
    Object(Vec<u8>),
    Nothing(&'static str),
}

fn find(out: &Path) -> Result<Found, String> {
    if let Some(given) = env::var_os("POSTERN_BPF_OBJECT") {
        let given = PathBuf::from(given);
        println!("cargo::rerun-if-changed={}", given.display());
        let bytes =
            fs::read(&given).map_err(|error| format!("POSTERN_BPF_OBJECT={}: {error}", given.display()))?;
        return Ok(Found::Object(bytes));
    }
    let workspace = workspace()?;
    for source in ebpf_sources::SOURCES {
        println!("cargo::rerun-if-changed={}", workspace.join(source).display());
    }
    // OUT_DIR is <target>[/<triple>]/<profile>/build/<crate>-<hash>/out. The tool that builds the object
    // creates <target>/bpf; until then an empty directory next to the profile's gives cargo something to
    // watch (a path that does not exist would mean "always rebuild").
    let profile = out.ancestors().nth(3).ok_or("OUT_DIR has an unknown shape")?;
    let candidates: Vec<&Path> = profile.ancestors().skip(1).take(2).collect();
    let target = candidates
        .iter()
        .find(|dir| dir.join("bpf").is_dir())
        .or(candidates.first())
        .ok_or("OUT_DIR has an unknown shape")?;
    let dir = ebpf_sources::object_dir(target);
    fs::create_dir_all(&dir).map_err(|error| format!("cannot create {}: {error}", dir.display()))?;
    println!("cargo::rerun-if-changed={}", dir.display());

    let Ok(bytes) = fs::read(dir.join(ebpf_sources::OBJECT)) else {
        return Ok(Found::Nothing("the BPF programs have not been built"));
    };
    let built_from = fs::read_to_string(dir.join(ebpf_sources::FINGERPRINT)).unwrap_or_default();
    let current = ebpf_sources::fingerprint(&workspace)
        .map_err(|error| format!("cannot read the sources of the BPF programs: {error}"))?;
    if built_from == current {
        Ok(Found::Object(bytes))
    } else {
        Ok(Found::Nothing("the BPF programs were built from other sources than these"))
    }
}

fn workspace() -> Result<PathBuf, String> {
    let manifest =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo sets no CARGO_MANIFEST_DIR")?);
    manifest.parent().map(Path::to_path_buf).ok_or_else(|| "the crate has no workspace".to_owned())
}

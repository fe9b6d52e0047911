//! A fingerprint of everything that the BPF object is built from.
//!
//! `xtask build-ebpf` writes it next to the object and `tunnel-redirect/build.rs` (which includes this very
//! file) compares it, so that an object older than its sources is never embedded. Only `std`: it also
//! compiles into a build script.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the object inside [`object_dir`].
pub(crate) const OBJECT: &str = "tunnel-ebpf.o";
/// Name of the fingerprint's file inside [`object_dir`].
pub(crate) const FINGERPRINT: &str = "tunnel-ebpf.sources";

/// The object's directory below cargo's target directory: a separate one, because the build script
/// watches it.
pub(crate) fn object_dir(target_dir: &Path) -> PathBuf {
    target_dir.join("bpf").join("object")
}

/// Files and directories, relative to the workspace, that the object is built from.
pub(crate) const SOURCES: [&str; 4] =
    ["tunnel-abi/Cargo.toml", "tunnel-abi/src", "tunnel-ebpf/Cargo.toml", "tunnel-ebpf/src"];

/// FNV-1a over the names and contents of all sources, as 16 hex digits. It detects edits, not attacks.
pub(crate) fn fingerprint(workspace: &Path) -> io::Result<String> {
    let mut files = Vec::new();
    for source in SOURCES {
        collect(&workspace.join(source), &mut files)?;
    }
    files.sort();
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for file in files {
        let name = file.strip_prefix(workspace).unwrap_or(&file).to_string_lossy().into_owned();
        let contents = fs::read(&file)?;
        let length = (contents.len() as u64).to_le_bytes();
        for byte in name.bytes().chain([0]).chain(length).chain(contents) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    Ok(format!("{hash:016x}"))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}

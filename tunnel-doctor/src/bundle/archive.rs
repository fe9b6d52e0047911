//! Writes the bundle file.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::SystemTime;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::redact::redacted;

/// Maximum size of a part in bytes; of a longer one, the end is kept.
pub(super) const MAX_PART: usize = 8 << 20;

/// Stands for standard output or standard input.
pub(super) const STANDARD: &str = "-";

/// A text of a bundle, or the reason for its absence.
pub(super) struct Part {
    name: String,
    what: String,
    text: Result<String, String>,
}

impl Part {
    pub(super) fn new(
        name: impl Into<String>,
        what: impl Into<String>,
        text: Result<String, String>,
    ) -> Self {
        Self { name: name.into(), what: what.into(), text }
    }
}

/// Writes the parts, without their secrets, to a folder of this name in the archive. Returns the list of parts.
///
/// # Errors
/// Fails if the file exists or cannot be created, or if the disk is full.
pub(super) fn write(path: &Path, folder: &str, parts: &[Part]) -> io::Result<String> {
    if path.as_os_str() != STANDARD {
        // Must be a new file, so that only its owner can read it.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        let manifest = write_to(&file, folder, parts)?;
        return file.sync_all().map(|()| manifest);
    }
    let out = io::stdout();
    if out.is_terminal() {
        return Err(io::Error::other("standard output is a terminal, and a bundle is no text"));
    }
    write_to(out, folder, parts)
}

fn write_to(out: impl Write, folder: &str, parts: &[Part]) -> io::Result<String> {
    let mut tar = tar::Builder::new(GzEncoder::new(out, Compression::default()));
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut append = |name: &str, text: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(time);
        tar.append_data(&mut header, format!("{folder}/{name}"), text.as_bytes())
    };
    let mut manifest = "What this bundle has. Keys, tokens and passwords are not in it.\n\n".to_owned();
    for Part { name, what, text } in parts {
        // Writing to a String never fails.
        let _ = match text {
            Ok(text) => {
                // Before the cut, which may leave the end of a key without its first line.
                let text = redacted(text);
                let (tail, cut) = tail(&text);
                append(name, tail)?;
                writeln!(manifest, "{name}: {what}{}", if cut { " (its end only)" } else { "" })
            }
            Err(reason) => writeln!(manifest, "{name}: NOT THERE: {}", redacted(reason)),
        };
    }
    append("manifest.txt", &manifest)?;
    tar.into_inner()?.finish()?.flush()?;
    Ok(manifest)
}

/// Returns the end of a text, starting at a line's beginning, and true if something is missing.
fn tail(text: &str) -> (&str, bool) {
    if text.len() <= MAX_PART {
        return (text, false);
    }
    let from = text.ceil_char_boundary(text.len() - MAX_PART);
    let from = text[from..].find('\n').map_or(from, |line| from + line + 1);
    (&text[from..], true)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn a_bundle_has_its_parts_without_secrets_and_says_what_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bundle.tar.gz");
        let parts = [
            Part::new("a.txt", "a text", Ok("--token=s3cret\nline\n".to_owned())),
            Part::new("log.txt", "the log", Err("no journal".to_owned())),
            Part::new("long.txt", "much", Ok("a line\n".repeat(MAX_PART / 7 + 10))),
        ];
        let manifest = write(&path, "postern-a", &parts).unwrap();
        assert!(manifest.contains("log.txt: NOT THERE: no journal\n"), "{manifest}");
        assert!(manifest.contains("long.txt: much (its end only)\n"), "{manifest}");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let mut archive = tar::Archive::new(GzDecoder::new(File::open(&path).unwrap()));
        let mut names = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            match name.as_str() {
                "postern-a/a.txt" => assert_eq!(text, "--token=***\nline\n"),
                "postern-a/long.txt" => {
                    assert!(text.len() <= MAX_PART && text.starts_with("a line\n"), "{}", text.len());
                }
                _ => {}
            }
            names.push(name);
        }
        assert_eq!(names, ["postern-a/a.txt", "postern-a/long.txt", "postern-a/manifest.txt"]);
        let error = write(&path, "x", &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}

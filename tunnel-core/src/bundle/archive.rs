//! The file.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Stdout, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::redact::redacted;

/// Of a part so much of its end is kept.
pub(super) const MAX_PART: usize = 8 << 20;

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
#[error("--file={}: {reason}", path.display())]
pub struct BundleError {
    path: PathBuf,
    reason: io::Error,
}

/// Stands for standard output or input.
pub(super) const STANDARD: &str = "-";

/// Where a bundle goes.
enum Sink {
    File(File),
    Standard(Stdout),
}

impl Sink {
    /// A file must not exist: only its owner can read it then.
    fn open(path: &Path) -> io::Result<Self> {
        if path.as_os_str() != STANDARD {
            return OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map(Self::File);
        }
        let out = io::stdout();
        if out.is_terminal() {
            return Err(io::Error::other("standard output is a terminal, and a bundle is no text"));
        }
        Ok(Self::Standard(out))
    }

    fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        if let Self::File(file) = self { file.sync_all() } else { Ok(()) }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Standard(out) => out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.flush(),
            Self::Standard(out) => out.flush(),
        }
    }
}

/// Parts of a bundle that is being written.
pub(super) struct Bundle {
    path: PathBuf,
    folder: String,
    tar: tar::Builder<GzEncoder<Sink>>,
    /// What is in it, and what is not and why.
    manifest: String,
    time: u64,
}

impl Bundle {
    /// Creates the file, or takes standard output for [`STANDARD`].
    ///
    /// # Errors
    /// It exists, or cannot be made.
    pub(super) fn create(path: &Path, folder: &str) -> Result<Self, BundleError> {
        let sink = Sink::open(path).map_err(|reason| BundleError { path: path.to_owned(), reason })?;
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        Ok(Self {
            path: path.to_owned(),
            folder: folder.to_owned(),
            tar: tar::Builder::new(GzEncoder::new(sink, Compression::default())),
            manifest: "What this bundle has. Keys, tokens and passwords are not in it.\n\n".to_owned(),
            time,
        })
    }

    /// Adds a text without its secrets, or notes why it is not there.
    ///
    /// # Errors
    /// The disk is full.
    pub(super) fn add(
        &mut self,
        name: &str,
        what: &str,
        text: Result<String, String>,
    ) -> Result<(), BundleError> {
        match text {
            Ok(text) => {
                let (tail, cut) = tail(&text);
                // Writing to a String does not fail.
                let _ = writeln!(self.manifest, "{name}: {what}{}", if cut { " (its end only)" } else { "" });
                self.append(name, &redacted(tail))
            }
            Err(reason) => {
                let _ = writeln!(self.manifest, "{name}: NOT THERE: {}", redacted(&reason));
                Ok(())
            }
        }
    }

    /// Ends the file, and returns the list of its parts.
    ///
    /// # Errors
    /// The disk is full.
    pub(super) fn finish(mut self) -> Result<String, BundleError> {
        let manifest = std::mem::take(&mut self.manifest);
        self.append("manifest.txt", &manifest)?;
        let path = self.path.clone();
        let done = self.tar.into_inner().and_then(GzEncoder::finish).and_then(Sink::finish);
        done.map_err(|reason| BundleError { path, reason })?;
        Ok(manifest)
    }

    fn append(&mut self, name: &str, text: &str) -> Result<(), BundleError> {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        let path = format!("{}/{name}", self.folder);
        let appended = self.tar.append_data(&mut header, path, text.as_bytes());
        appended.map_err(|reason| BundleError { path: self.path.clone(), reason })
    }
}

/// The end of a text from a line's beginning on, and whether something is missing.
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
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn a_bundle_has_its_parts_without_secrets_and_says_what_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bundle.tar.gz");
        let mut bundle = Bundle::create(&path, "postern-a").unwrap();
        bundle.add("a.txt", "a text", Ok("--token=s3cret\nline\n".to_owned())).unwrap();
        bundle.add("log.txt", "the log", Err("no journal".to_owned())).unwrap();
        let long = "a line\n".repeat(MAX_PART / 7 + 10);
        bundle.add("long.txt", "much", Ok(long)).unwrap();
        let manifest = bundle.finish().unwrap();
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
        let error = Bundle::create(&path, "x").err().unwrap().to_string();
        assert!(error.contains("--file=") && error.contains("exists"), "{error}");
    }
}

//! A directory of JSON files in the state directory, one per record.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tunnel_runtime::files::{self, DirectoryLock, FileError, PRIVATE_FILE};

use super::LOCK;
use super::error::PkiError;

/// The records of one kind. Nothing is cached: changes by the command line take effect immediately.
#[derive(Clone, Debug)]
pub(super) struct Records {
    state_dir: PathBuf,
    kind: &'static str,
}

impl Records {
    /// `kind` is the directory's name; the first record creates the directory.
    pub(super) fn new(state_dir: &Path, kind: &'static str) -> Self {
        Self { state_dir: state_dir.to_owned(), kind }
    }

    pub(super) fn directory(&self) -> PathBuf {
        self.state_dir.join(self.kind)
    }

    /// `name` must be a safe file name.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    /// Takes the lock of all writers in the state directory.
    pub(super) fn lock(&self) -> Result<DirectoryLock, PkiError> {
        files::create_private_directory(&self.state_dir)?;
        Ok(DirectoryLock::acquire(&self.state_dir, LOCK)?)
    }

    /// Returns `None` if there is no such file. `fix` is the advice about an unusable one.
    pub(super) fn read<T: DeserializeOwned>(&self, name: &str, fix: &str) -> Result<Option<T>, PkiError> {
        let path = self.path(name);
        let unusable = |error: &dyn std::fmt::Display| PkiError::file(&path, error, fix);
        let text = files::read_optional(&path).map_err(|error| match error {
            FileError::Unusable { reason, .. } => unusable(&reason),
            other => other.into(),
        })?;
        let Some(text) = text else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| unusable(&error))
    }

    pub(super) fn write(&self, name: &str, record: &impl Serialize) -> Result<(), PkiError> {
        let path = self.path(name);
        let json = serde_json::to_vec_pretty(record)
            .map_err(|error| PkiError::file(&path, &error, "report this"))?;
        files::create_private_directory(&self.directory())?;
        Ok(files::replace(&path, &json, PRIVATE_FILE)?)
    }

    /// Returns the names of the files; none if the directory does not exist.
    pub(super) fn names(&self) -> Result<Vec<String>, PkiError> {
        let directory = self.directory();
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(PkiError::io(&directory, error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(|error| PkiError::io(&directory, error))?.file_name();
            // Temporary files of writes in progress begin with a dot.
            names.extend(name.into_string().ok().filter(|name| !name.starts_with('.')));
        }
        Ok(names)
    }
}

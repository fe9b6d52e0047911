//! Reads YAML files; errors name the line and the path of the value.

use std::cell::RefCell;
use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

/// Maximum nesting depth.
pub const MAX_DEPTH: usize = 64;

thread_local! {
    /// The path of the value that could not be read. serde's errors cannot hold it, and the library drives the
    /// deserializer document by document.
    static PATH: RefCell<String> = const { RefCell::new(String::new()) };
}

/// An error with its place in the file.
#[derive(Debug)]
pub struct Located {
    /// Counted from 1; None for the file as a whole.
    pub line: Option<u64>,
    /// Such as `items[3].metadata.name`; empty for the whole document.
    pub key: String,
    pub reason: String,
}

impl fmt::Display for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Located {}

/// A value whose errors [`locate`] can place.
pub struct Traced<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Traced<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut track = serde_path_to_error::Track::new();
        let traced = serde_path_to_error::Deserializer::new(deserializer, &mut track);
        match T::deserialize(traced) {
            Ok(value) => Ok(Self(value)),
            Err(error) => {
                PATH.set(track.path().to_string());
                Err(error)
            }
        }
    }
}

/// Forgets the path of an earlier error of this thread.
pub fn begin() {
    PATH.take();
}

/// Returns the place of the error in the last value that this thread read.
pub fn locate(error: &serde_saphyr::Error) -> Located {
    let error = error.without_snippet();
    let location = error.location();
    let mut reason = error.to_string();
    // Removed, because the location has a field of its own.
    if let Some(at) = reason.find(" at line ") {
        reason.truncate(at);
    } else if let Some((head, rest)) = reason.split_once(": ")
        && head.starts_with("line ")
    {
        reason = rest.to_owned();
    }
    // An option of the library.
    if let Some(at) = reason.find(", set DuplicateKeyPolicy") {
        reason.truncate(at);
    }
    let key = PATH.take();
    Located {
        line: location.map(|location| location.line()).filter(|line| *line > 0),
        key: if key == "." { String::new() } else { key },
        reason,
    }
}

/// Reads one document.
///
/// # Errors
/// Names the line, the key and the reason.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    begin();
    let options = serde_saphyr::options! {
        with_snippet: false,
        // In YAML 1.1 `off` is false, and a flag may have it as a text.
        strict_booleans: true,
        budget: serde_saphyr::budget! { max_depth: MAX_DEPTH },
    };
    serde_saphyr::from_str_with_options::<Traced<T>>(text, options)
        .map(|Traced(value)| value)
        .map_err(|error| locate(&error).to_string())
}

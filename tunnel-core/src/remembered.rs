//! Files with what was last found, for a restart while the API server is away.

use std::fmt::Display;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::identity::IdentityError;
use crate::identity::files::{self, PUBLIC_FILE};

/// A file of the state directory with one value a line.
#[derive(Debug)]
pub struct Remembered<T> {
    path: PathBuf,
    of: PhantomData<fn() -> T>,
}

impl<T> Clone for Remembered<T> {
    fn clone(&self) -> Self {
        Self { path: self.path.clone(), of: PhantomData }
    }
}

impl<T> Remembered<T>
where
    T: FromStr<Err: Display> + Display + PartialEq,
{
    /// The file of that name.
    pub fn new(state_dir: &Path, file: &str) -> Self {
        Self { path: state_dir.join(file), of: PhantomData }
    }

    /// Lines that cannot be parsed are left out: they will be found anew.
    pub fn read(&self) -> Vec<T> {
        let text = match files::read_optional(&self.path) {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "the last known values cannot be read");
                return Vec::new();
            }
        };
        let mut values: Vec<T> = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            match line.parse() {
                Ok(value) if !values.contains(&value) => values.push(value),
                Ok(_) => {}
                Err(reason) => {
                    tracing::warn!(path = %self.path.display(), line, %reason, "a line is left out");
                }
            }
        }
        values
    }

    /// Replaces them all.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, values: &[T]) -> Result<(), IdentityError> {
        let text: String = values.iter().map(|value| format!("{value}\n")).collect();
        if let Some(directory) = self.path.parent() {
            files::create_private_directory(directory)?;
        }
        files::replace(&self.path, text.as_bytes(), PUBLIC_FILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HostPort;

    #[test]
    fn written_values_are_read_and_broken_lines_are_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let file = Remembered::<HostPort>::new(&directory.path().join("agent"), "servers");
        assert!(file.read().is_empty());
        let servers: Vec<HostPort> =
            ["a.example:1", "[fd00::1]:2"].iter().map(|text| text.parse().unwrap()).collect();
        file.write(&servers).unwrap();
        assert_eq!(file.read(), servers);
        std::fs::write(&file.path, "a.example:1\nnonsense\n\na.example:1\n[fd00::1]:2\n").unwrap();
        assert_eq!(file.read(), servers);
        std::fs::write(&file.path, [0xff]).unwrap();
        assert!(file.read().is_empty());
    }
}

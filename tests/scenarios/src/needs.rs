//! Builds that scenarios need and that `cargo xtask test` makes while other scenarios run.
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

/// Folder in which a file appears for each kind of scenarios once its builds are ready; if unset, everything is built.
const VARIABLE: &str = "POSTERN_NEEDS";
/// Prefix of a file about a failed build.
const FAILED: &str = "failed: ";
/// File in the folder that is locked by the building process.
const RUNNING: &str = "running";

/// Waits until the builds for scenarios of this kind are ready. Returns the variables with their paths.
pub(crate) fn wait(kind: &str) -> Result<Vec<(String, String)>> {
    let Some(folder) = std::env::var_os(VARIABLE) else { return Ok(Vec::new()) };
    let (file, running) = (Path::new(&folder).join(kind), Path::new(&folder).join(RUNNING));
    loop {
        // Checked before the file is read, which may be the last that is built.
        let ended = has_ended(&running)?;
        if let Some(variables) = read(&file)? {
            return Ok(variables);
        }
        ensure!(!ended, "what builds {} has ended without it: see the log beside it", file.display());
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn has_ended(running: &Path) -> Result<bool> {
    let file = File::open(running).with_context(|| format!("opening {}", running.display()))?;
    // The lock is released at once.
    Ok(file.try_lock_shared().is_ok())
}

/// Reads the file; None: it is not built yet.
fn read(file: &Path) -> Result<Option<Vec<(String, String)>>> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", file.display())),
    };
    if let Some(reason) = text.strip_prefix(FAILED) {
        bail!("what this scenario needs could not be built: {reason}");
    }
    let variable = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(Some(text.lines().filter_map(variable).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_and_failures_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("images");
        assert_eq!(read(&file).unwrap(), None);
        fs::write(&file, "A=/b=c\nD=e\n").unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(read(&file).unwrap(), Some(vec![pair("A", "/b=c"), pair("D", "e")]));
        fs::write(&file, "failed: no zig").unwrap();
        assert!(read(&file).unwrap_err().to_string().ends_with("no zig"));
        let running = File::create(folder.path().join(RUNNING)).unwrap();
        running.lock().unwrap();
        assert!(!has_ended(&folder.path().join(RUNNING)).unwrap());
        drop(running);
        assert!(has_ended(&folder.path().join(RUNNING)).unwrap());
    }
}

//! Checks of files on disk.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use tunnel_pki::Validity;

use super::checkup::Finding;
use super::codes;

/// Minimum free space, in bytes: with less, the next certificate or token could be lost.
const FREE: u64 = 64 << 10;

/// Returns a finding if the directory cannot be written or has no room. Leaves nothing in it.
pub fn state_directory(dir: &Path) -> Option<Finding> {
    let shown = dir.display();
    let fault = |found: String, fix: String| Some(Finding::new(&codes::STATE_DIRECTORY_UNUSABLE, found, fix));
    match fs::metadata(dir) {
        // The program creates it.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => {
            return fault(
                format!("--state-dir={shown}: {error}"),
                format!("ls -ld {shown}, and make it readable"),
            );
        }
        Ok(metadata) if !metadata.is_dir() => {
            let found = format!("--state-dir={shown}: it is not a directory");
            return fault(found, format!("move {shown} away, or name a directory with --state-dir"));
        }
        Ok(_) => {}
    }
    if let Err(error) = tempfile::tempfile_in(dir) {
        let found = format!("--state-dir={shown}: a file cannot be made in it: {error}");
        return fault(
            found,
            format!("`mount -o remount,rw` its file system, or chown {shown} to the program's user"),
        );
    }
    match nix::sys::statvfs::statvfs(dir) {
        Ok(disk) if disk.blocks_available() * disk.fragment_size() < FREE => fault(
            format!("--state-dir={shown}: its disk is full"),
            format!("make room on the file system that `df {shown}` shows"),
        ),
        _ => None,
    }
}

/// Returns a finding if users other than the owner can read this key. A missing file is fine.
pub fn private_file(path: &Path) -> Option<Finding> {
    let mode = fs::metadata(path).ok()?.permissions().mode() & 0o7777;
    let shown = path.display();
    (mode & 0o077 != 0).then(|| {
        let found = format!("{shown} has the mode {mode:04o}");
        Finding::new(&codes::KEY_READABLE_BY_OTHERS, found, format!("chmod 600 {shown}"))
    })
}

/// Returns the reason for a certificate not being valid now, in words; `None` if it is valid.
pub fn validity_of(validity: &Validity, now: SystemTime) -> Option<String> {
    let shown = |time: SystemTime| {
        // Fails beyond the year 9999.
        Timestamp::try_from(time).map_or_else(|_| "?".to_owned(), |time| format!("{time:.0}"))
    };
    if validity.not_before > now {
        let ahead = validity.not_before.duration_since(now).unwrap_or(Duration::ZERO).as_secs();
        return Some(format!(
            "valid from {} on, {} after this host's clock ({})",
            shown(validity.not_before),
            tunnel_runtime::text::age(ahead),
            shown(now)
        ));
    }
    let over = now.duration_since(validity.not_after).ok()?.as_secs();
    Some(format!(
        "expired at {}, {} ago by this host's clock",
        shown(validity.not_after),
        tunnel_runtime::text::age(over)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_directory_that_is_a_file_is_found() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(state_directory(dir.path()), None);
        assert_eq!(state_directory(&dir.path().join("not yet")), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let finding = state_directory(&file).unwrap();
        assert_eq!(finding.code, "state-directory-unusable");
        assert!(finding.found.contains("not a directory"), "{finding:?}");
    }

    #[test]
    fn a_full_or_read_only_disk_is_found() {
        // Nobody can create a file there, not even root.
        let finding = state_directory(Path::new("/proc/self")).unwrap();
        assert_eq!(finding.code, "state-directory-unusable");
        assert!(finding.found.contains("cannot be made"), "{finding:?}");
    }

    #[test]
    fn a_key_that_others_can_read_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("agent.key");
        assert_eq!(private_file(&key), None);
        fs::write(&key, "").unwrap();
        for (mode, bad) in [(0o600, false), (0o400, false), (0o640, true), (0o604, true)] {
            fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
            let finding = private_file(&key);
            assert_eq!(finding.is_some(), bad, "{mode:o}");
            if let Some(finding) = finding {
                assert_eq!(finding.code, "key-readable-by-others");
                assert_eq!(finding.fix, format!("chmod 600 {}", key.display()));
            }
        }
    }

    #[test]
    fn validity_is_told_in_words() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let validity = Validity { not_before: at(86_400), not_after: at(2 * 86_400) };
        assert_eq!(validity_of(&validity, at(90_000)), None);
        let early = validity_of(&validity, at(80_000)).unwrap();
        assert_eq!(
            early,
            "valid from 1970-01-02T00:00:00Z on, 1h46m after this host's clock (1970-01-01T22:13:20Z)"
        );
        let late = validity_of(&validity, at(3 * 86_400)).unwrap();
        assert_eq!(late, "expired at 1970-01-03T00:00:00Z, 1d0h ago by this host's clock");
    }
}

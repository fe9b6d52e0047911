//! Finds the cgroup to attach to, and checks it.

use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs};
use tunnel_runtime::cgroup::{self, Mount};

use super::error::RedirectError;

/// A cgroup v2 directory.
#[derive(Debug)]
pub(super) struct Cgroup {
    pub(super) path: PathBuf,
    pub(super) dir: File,
}

impl Cgroup {
    /// Opens the given cgroup, or the host's root.
    ///
    /// # Errors
    /// None is usable, or this process is not inside it.
    pub(super) fn find(given: Option<&Path>) -> Result<Self, RedirectError> {
        let mounts = mounts()?;
        let found = match given {
            Some(path) => Self::open(path)?,
            None => Self::host_root(&mounts)?,
        };
        let path = found.path.canonicalize().unwrap_or_else(|_| found.path.clone());
        match own_directory(&mounts, &path)? {
            Some(own) if !own.starts_with(&path) => Err(RedirectError::Outside { path, own }),
            _ => Ok(found),
        }
    }

    fn open(path: &Path) -> Result<Self, RedirectError> {
        let refuse = |reason: String| RedirectError::NotCgroup { path: path.to_path_buf(), reason };
        let dir = File::open(path).map_err(|error| refuse(error.to_string()))?;
        let magic = fstatfs(&dir).map_err(|error| refuse(error.to_string()))?.filesystem_type();
        if magic != CGROUP2_SUPER_MAGIC {
            return Err(refuse("it is not on a cgroup v2 file system".into()));
        }
        if !dir.metadata().is_ok_and(|metadata| metadata.is_dir()) {
            return Err(refuse("it is not a directory".into()));
        }
        Ok(Self { path: path.to_path_buf(), dir })
    }

    fn host_root(mounts: &[Mount]) -> Result<Self, RedirectError> {
        // Only the real root lacks these files; the root of a cgroup namespace appears as `/` otherwise.
        let is_root = |mount: &&Mount| {
            !mount.point.join("cgroup.type").exists() && !mount.point.join("cgroup.events").exists()
        };
        let Some(first) = mounts.first() else { return Err(RedirectError::NoCgroup) };
        match mounts.iter().find(is_root) {
            Some(mount) => Self::open(&mount.point),
            None => Err(RedirectError::NotRoot { path: first.point.clone() }),
        }
    }
}

/// Lists all cgroup v2 directories visible to this process.
pub(super) fn all() -> Result<Vec<PathBuf>, RedirectError> {
    let mut found: Vec<PathBuf> = mounts()?.into_iter().map(|mount| mount.point).collect();
    let mut visited = 0;
    while let Some(dir) = found.get(visited) {
        // A directory removed meanwhile has no children.
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let children = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let children: Vec<_> = children.map(|entry| entry.path()).collect();
        found.extend(children);
        visited += 1;
    }
    Ok(found)
}

/// Mounts of cgroup v2.
fn mounts() -> Result<Vec<Mount>, RedirectError> {
    let mounts = cgroup::mounts().map_err(|source| RedirectError::Io {
        what: "cannot read /proc/self/mountinfo".to_owned(),
        source,
    })?;
    Ok(mounts.into_iter().filter(Mount::is_v2).collect())
}

/// Directory of this process's own cgroup, in the mount that contains `dir`. None if it is outside the namespace or
/// that mount: then only the self-test can tell.
fn own_directory(mounts: &[Mount], dir: &Path) -> Result<Option<PathBuf>, RedirectError> {
    let path = "/proc/self/cgroup";
    let text = fs::read_to_string(path)
        .map_err(|source| RedirectError::Io { what: format!("cannot read {path}"), source })?;
    let Some(own) = text.lines().find_map(|line| line.strip_prefix("0::")) else { return Ok(None) };
    let Some(own) = seen_beside(mounts, dir, Path::new(own)) else { return Ok(None) };
    match own.canonicalize() {
        Ok(own) => Ok(Some(own)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(RedirectError::Io { what: format!("cannot resolve {}", own.display()), source }),
    }
}

/// Path of the cgroup `own` through the mount that contains `dir`. A container may also have its own cgroup mounted,
/// which contains nothing inside `dir`.
fn seen_beside(mounts: &[Mount], dir: &Path, own: &Path) -> Option<PathBuf> {
    if own.components().any(|part| part == Component::ParentDir) {
        return None;
    }
    // Of several mounts at one point the last one covers the others.
    let mount = mounts
        .iter()
        .filter(|mount| dir.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())?;
    Some(mount.point.join(own.strip_prefix(&mount.root).ok()?))
}

#[cfg(test)]
mod tests {
    use tunnel_runtime::cgroup::parse_mounts;

    use super::*;

    #[test]
    fn a_cgroup_is_looked_for_on_the_mount_that_is_attached_to() {
        // A container's own cgroup, and the host's hierarchy, both as seen from the container's namespace.
        let mounts = parse_mounts(
            "\
40 39 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw
41 39 0:26 /../../.. /host/cgroup ro - cgroup2 cgroup rw
",
        );
        let seen = |dir: &str, own: &str| seen_beside(&mounts, Path::new(dir), Path::new(own));
        assert_eq!(seen("/host/cgroup", "/"), None);
        assert_eq!(seen("/host/cgroup/kubepods", "/init"), None);
        assert_eq!(seen("/sys/fs/cgroup", "/init"), Some("/sys/fs/cgroup/init".into()));
        assert_eq!(seen("/sys/fs/cgroup", "/../other"), None);
        assert_eq!(seen("/sys/fs/cgroups", "/init"), None);
        // The host's hierarchy mounted over it, as with hostPath: /sys/fs/cgroup, and a subtree on a host without a
        // namespace.
        let mounts = parse_mounts(
            "\
40 39 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw
41 40 0:26 /../../.. /sys/fs/cgroup ro - cgroup2 cgroup rw
42 39 0:26 /a.slice /mnt/a rw - cgroup2 cgroup rw
",
        );
        let seen = |dir: &str, own: &str| seen_beside(&mounts, Path::new(dir), Path::new(own));
        assert_eq!(seen("/sys/fs/cgroup", "/"), None);
        assert_eq!(seen("/mnt/a/b", "/a.slice/b/c"), Some("/mnt/a/b/c".into()));
        assert_eq!(seen("/mnt/a", "/b.slice"), None);
    }

    #[test]
    fn a_directory_outside_cgroupfs_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = Cgroup::open(dir.path()).unwrap_err();
        assert!(error.to_string().contains("not on a cgroup v2 file system"), "{error}");
        let error = Cgroup::open(&dir.path().join("nothing")).unwrap_err();
        assert!(error.to_string().contains("No such file"), "{error}");
    }
}

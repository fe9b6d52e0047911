//! Control groups of this process (cgroups(7)): their mounts, and the process's own directories.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// A mounted hierarchy.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mounted cgroup, as seen from this process's cgroup namespace: `/../..` is two above the namespace's root.
    pub root: PathBuf,
    pub point: PathBuf,
    /// Controllers of a version 1 hierarchy; `None` for version 2.
    controllers: Option<Vec<String>>,
}

/// A directory of this process's own cgroup, and the mount that shows it.
#[derive(Debug, PartialEq, Eq)]
pub struct Own {
    pub dir: PathBuf,
    pub point: PathBuf,
    pub is_v2: bool,
}

impl Mount {
    pub fn is_v2(&self) -> bool {
        self.controllers.is_none()
    }

    fn has(&self, controller: &str) -> bool {
        self.controllers.as_ref().is_none_or(|all| all.iter().any(|one| one == controller))
    }
}

/// Returns the hierarchies mounted in this mount namespace.
///
/// # Errors
/// Fails if /proc cannot be read.
pub fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse_mounts(&fs::read_to_string("/proc/self/mountinfo")?))
}

/// Finds the hierarchies in mountinfo (proc(5)): `id parent maj:min root point options… - type source options`.
pub fn parse_mounts(mountinfo: &str) -> Vec<Mount> {
    let of_line = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let controllers = match right.next()? {
            "cgroup2" => None,
            "cgroup" => Some(right.nth(1)?.split(',').map(str::to_owned).collect()),
            _ => return None,
        };
        let mut left = left.split(' ').skip(3);
        Some(Mount { root: unescape(left.next()?), point: unescape(left.next()?), controllers })
    };
    mountinfo.lines().filter_map(of_line).collect()
}

/// Decodes mountinfo's octal escapes such as `\040`, used for space, tab, newline and backslash.
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let value = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match value {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// Returns the directories of the cgroup that has `controller` for the process `pid`, whose /proc/PID/cgroup is
/// `cgroups`: one per mount that shows it, those of its own cgroup namespace first. The mount points are below `tree`,
/// which is `/` except in tests.
pub fn own_dirs(mounts: &[Mount], cgroups: &str, controller: &str, pid: u32, tree: &Path) -> Vec<Own> {
    let paths = cgroups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let is_v2 = controllers.is_empty();
        (is_v2 || controllers.split(',').any(|one| one == controller)).then_some((is_v2, Path::new(path)))
    });
    let mut found = Vec::new();
    for (is_v2, path) in paths {
        for mount in mounts.iter().filter(|mount| mount.is_v2() == is_v2 && mount.has(controller)) {
            let point = tree.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
            let Some((unknown, path)) = below(&mount.root, path) else { continue };
            if let Some(dir) = find(&point, unknown, &path, pid) {
                found.push((unknown, Own { dir, point, is_v2 }));
            }
        }
    }
    found.sort_by_key(|(unknown, _)| *unknown);
    found.into_iter().map(|(_, own)| own).collect()
}

/// Locates the cgroup `path` in a mount of `root`: the number of directories with unknown names, and the path below
/// them. `None` if the mount does not show it. Both paths start at the root of the cgroup namespace, in which its own
/// name and those of its ancestors are not visible.
fn below(root: &Path, path: &Path) -> Option<(usize, PathBuf)> {
    let ((root_up, root), (up, path)) = (split(root), split(path));
    if root_up == up {
        return Some((0, path.strip_prefix(&root).ok()?.to_owned()));
    }
    // With names behind the `..`, the mount belongs to another branch.
    (root_up > up && root.as_os_str().is_empty()).then(|| (root_up - up, path))
}

/// Returns the number of `..` that a path begins with, and the names after them.
fn split(path: &Path) -> (usize, PathBuf) {
    let up = path.components().filter(|part| *part == Component::ParentDir).count();
    (up, path.components().filter(|part| matches!(part, Component::Normal(_))).collect())
}

/// Finds the directory `path`, `unknown` directories below `point`, that contains `pid`.
fn find(point: &Path, unknown: usize, path: &Path, pid: u32) -> Option<PathBuf> {
    let mut candidates = vec![point.to_owned()];
    for _ in 0..unknown {
        let below = candidates.iter().flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten());
        candidates = below
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .collect();
    }
    // Another mount may cover this one; the directory then belongs to another cgroup.
    let is_own = |dir: &PathBuf| match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(members) => members.lines().any(|member| member.parse() == Ok(pid)),
        Err(_) => unknown == 0,
    };
    candidates.into_iter().map(|dir| dir.join(path)).find(is_own)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
24 1 0:22 / /proc rw - proc proc rw
30 24 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
31 24 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
32 24 0:27 /kube\\040pods /mnt/a\\134b rw - cgroup2 none rw
";

    #[test]
    fn the_hierarchies_are_found_among_the_mounts() {
        let of = |root: &str, point: &str, controllers: Option<&[&str]>| Mount {
            root: root.into(),
            point: point.into(),
            controllers: controllers.map(|all| all.iter().map(ToString::to_string).collect()),
        };
        assert_eq!(
            parse_mounts(HYBRID),
            [
                of("/", "/sys/fs/cgroup/cpu,cpuacct", Some(&["rw", "cpu", "cpuacct"])),
                of("/", "/sys/fs/cgroup/unified", None),
                of("/kube pods", "/mnt/a\\b", None),
            ]
        );
    }

    #[test]
    fn broken_lines_and_escapes_are_skipped_or_kept() {
        assert_eq!(
            parse_mounts("1 2 3 - cgroup2\n - cgroup2 x\n\n1 2 0:1 /\n1 2 0:1 / /a rw - cgroup x"),
            []
        );
        assert_eq!(unescape("a\\0"), PathBuf::from("a\\0"));
        assert_eq!(unescape("\\999"), PathBuf::from("\\999"));
    }

    #[test]
    fn a_mount_shows_what_is_below_its_root() {
        let shown = |root: &str, path: &str| {
            below(Path::new(root), Path::new(path))
                .map(|(unknown, path)| (unknown, path.display().to_string()))
        };
        let at = |unknown, path: &str| Some((unknown, path.to_owned()));
        assert_eq!(shown("/", "/"), at(0, ""));
        assert_eq!(shown("/", "/a/b"), at(0, "a/b"));
        assert_eq!(shown("/a", "/a/b"), at(0, "b"));
        assert_eq!(shown("/a", "/ab"), None);
        // From within a namespace: an ancestor's mount, one of another branch, and a process outside its namespace's
        // root.
        assert_eq!(shown("/../../..", "/a"), at(3, "a"));
        assert_eq!(shown("/../other", "/a"), None);
        assert_eq!(shown("/", "/../other"), None);
        assert_eq!(shown("/..", "/../other"), at(0, "other"));
        assert_eq!(shown("/../..", "/../other"), at(1, "other"));
    }
}

//! Removes the remains of a run, found by the run's name alone: that works from any process, and after `kill -9`.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::id::{Id, Kind};
use crate::{cgroup, netns};

const NETNS: &str = "/run/netns";

/// Name of the marker file in the folder of a demo that is kept up on purpose.
pub const KEPT: &str = "KEPT";

/// Returns the mount point of a run's BPF file system.
pub(crate) fn bpffs(id: &Id) -> PathBuf {
    id.dir().join("bpf")
}

/// Kills the run's processes and removes its cgroups and namespaces (and with them all links, routes, rules and
/// mounts). Every process of a run, including a container's, is in its v2 cgroup.
pub fn namespaces_and_cgroups(id: &Id) -> Result<()> {
    cgroup::destroy(&cgroup::unified_mount()?.join(id.to_string()))?;
    for group in v1_groups(id)? {
        cgroup::destroy(&group)?;
    }
    for (name, _) in namespaces(id) {
        netns::run(Command::new("ip").args(["netns", "delete", &name]))?;
    }
    let bpffs = bpffs(id);
    match umount2(&bpffs, MntFlags::MNT_DETACH) {
        // It is not mounted, or does not exist.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("unmounting {}", bpffs.display())),
    }
}

/// Removes all remains of a run: [`namespaces_and_cgroups`] and the run's folder.
pub fn remove(id: &Id) -> Result<()> {
    namespaces_and_cgroups(id)?;
    match fs::remove_dir_all(id.dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", id.dir().display()))
        }
        _ => Ok(()),
    }
}

/// Lists the remains of a run, apart from its folder; a clean end leaves none.
pub fn leftovers(id: &Id) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let group = cgroup::unified_mount()?.join(id.to_string());
    if group.exists() {
        found.push(format!("cgroup {}", group.display()));
    }
    found.extend(v1_groups(id)?.into_iter().map(|group| format!("cgroup {}", group.display())));
    found.extend(namespaces(id).map(|(name, _)| format!("network namespace {name}")));
    Ok(found)
}

/// Returns every run of this kind with remains and a dead owner; includes demos that are kept up.
pub fn dead_runs(kind: Kind) -> Result<Vec<Id>> {
    let mount = cgroup::unified_mount()?;
    let mut runs = BTreeSet::new();
    for place in [Path::new(NETNS), mount.as_path(), std::env::temp_dir().as_path()] {
        for name in names_in(place) {
            if let Some(id) = Id::of_name(&name)
                && id.kind() == kind
                && !id.owner_is_alive()
            {
                runs.insert(id.to_string());
            }
        }
    }
    runs.iter().map(|name| name.parse()).collect()
}

/// Reports whether this run is to stay up (`demo --keep`).
pub fn is_kept(id: &Id) -> bool {
    id.dir().join(KEPT).exists()
}

/// Cgroups of a run's kubelets in the v1 hierarchies.
fn v1_groups(id: &Id) -> Result<Vec<PathBuf>> {
    let groups = cgroup::v1_mounts()?.into_iter().map(|mount| mount.join(id.to_string()));
    Ok(groups.filter(|group| group.exists()).collect())
}

/// Returns the run's network namespaces, each with its path.
pub(crate) fn namespaces(id: &Id) -> impl Iterator<Item = (String, PathBuf)> {
    let own =
        names_in(Path::new(NETNS)).into_iter().filter(move |name| Id::of_name(name).as_ref() == Some(id));
    own.map(|name| {
        let path = Path::new(NETNS).join(&name);
        (name, path)
    })
}

fn names_in(dir: &Path) -> Vec<String> {
    // The folder does not exist: no namespace was ever made.
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

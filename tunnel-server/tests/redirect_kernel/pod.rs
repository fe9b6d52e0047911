//! From a pod as the shipped DaemonSet makes it, at the root of the machine's cgroups: in a virtual machine only, because the
//! connects of all its processes are redirected meanwhile.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use tunnel_server::redirect::RedirectConfig;

use crate::Case;
use crate::failures::{DOCUMENTED, have_only};
use crate::harness::{cgroup_mount, own_cgroup};
use crate::support::{EDGE, PORT, World, ask, at, config, desired};

pub(crate) const CASES: &[Case] = &[("pod::processes_outside_of_it_are_redirected", outside_of_it)];

fn outside_of_it() {
    let (pod, host) = (own_cgroup().join("pod"), own_cgroup().join("host"));
    for cgroup in [&pod, &host] {
        fs::create_dir(cgroup).unwrap();
    }
    let me = std::process::id().to_string();
    // From within the pod it could not be opened.
    let mut leave = OpenOptions::new().write(true).open(host.join("cgroup.procs")).unwrap();
    fs::write(pod.join("cgroup.procs"), &me).unwrap();
    as_containerd_mounts();
    assert_eq!(own_line(), "0::/", "this is the root of the pod's namespace");
    have_only(DOCUMENTED);
    let world = World::with(RedirectConfig { cgroup: None, ..config() }, &desired(&[EDGE]));
    ask(at(EDGE.0, PORT)).unwrap();

    leave.write_all(me.as_bytes()).unwrap();
    assert_eq!(own_line(), "0::/../host");
    ask(at(EDGE.0, PORT)).unwrap();
    assert_eq!(world.counter("connect4/redirected"), 3, "two connects and the self-test");
}

/// A cgroup namespace, with what it shows mounted where programs look for it, and over that the volume: the host's whole
/// hierarchy, read-only.
fn as_containerd_mounts() {
    let (root, hosts) = (cgroup_mount(), tempfile::tempdir().unwrap());
    let bind =
        |from: &Path, to: &Path| mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    bind(&root, hosts.path());
    umount2(&root, MntFlags::MNT_DETACH).unwrap();
    unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
    mount(Some("none"), &root, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
    assert!(root.join("cgroup.type").exists(), "the pod's own cgroup looks like a root");
    bind(hosts.path(), &root);
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, &root, None::<&str>, read_only, None::<&str>).unwrap();
    umount2(hosts.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(!root.join("cgroup.type").exists(), "the host's root has no such file");
}

/// The cgroup of this process in v2, as it sees it.
fn own_line() -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    text.lines().find(|line| line.starts_with("0::")).unwrap().to_owned()
}

//! Redirects from a pod as the shipped DaemonSet makes it, at the root of the machine's cgroups: in a virtual machine
//! only, because the connects of all its processes are redirected meanwhile.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use tunnel_redirect::{Pods, RedirectConfig};
use tunnel_runtime::limits::{Limit, Limits};

use crate::Case;
use crate::by_route::{devices, rules};
use crate::failures::{DOCUMENTED, have_only};
use crate::harness::{cgroup_mount, own_cgroup};
use crate::peer::Peer;
use crate::support::{EDGE, POD_RANGE, PORT, World, ask, at, config, desired, parse, with_client};

pub(crate) const CASES: &[Case] = &[
    ("pod::processes_outside_of_it_are_redirected", outside_of_it),
    ("pod::by_route_in_the_hosts_namespace", by_route_in_the_hosts_namespace),
    ("pod::its_limits_are_found_below_the_hosts_hierarchy", its_limits_are_found_below_the_hosts_hierarchy),
];

const MANIFEST: &str = include_str!("../../../deploy/base/server-daemonset.yaml");
/// Limits of the pod, in bytes, and in thousandths of a CPU.
const MEMORY: u64 = 256 << 20;
const CPU: u64 = 1500;

fn outside_of_it() {
    let (_, host) = enter_pod();
    // From within the pod it could not be opened.
    let mut leave = OpenOptions::new().write(true).open(host.join("cgroup.procs")).unwrap();
    let root = as_containerd_mounts(&shipped_mount());
    assert_eq!(own_line(), "0::/", "this is the root of the pod's namespace");
    expect_limits(&root);
    have_only(DOCUMENTED);
    let world = World::with(RedirectConfig { cgroup: None, ..config() }, &desired(&[EDGE]));
    ask(at(EDGE.0, PORT)).unwrap();

    leave.write_all(std::process::id().to_string().as_bytes()).unwrap();
    assert_eq!(own_line(), "0::/../host");
    ask(at(EDGE.0, PORT)).unwrap();
    assert_eq!(world.counter("connect4/redirected"), 3, "two connects and the self-test");
}

/// Before Linux 5.14 a server knows its own network namespace only if it is the initial one.
fn by_route_in_the_hosts_namespace() {
    setns(File::open("/proc/1/ns/net").unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
    let mut pod = Peer::spawn();
    pod.link("pod0", "10.244.1.1/24", "10.244.1.5/24");
    let world = World::with(
        RedirectConfig { pods: Pods::Route, ..config() },
        &with_client(desired(&[EDGE]), POD_RANGE),
    );
    let (_, _, greeting) = pod.connect(None, "10.8.0.7:10250").unwrap();
    assert_eq!(parse(&greeting).unwrap().local, at(EDGE.0, PORT));
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    world.redirect.stop();
    assert_eq!((rules(), devices()), (Vec::new(), 0));
    drop(pod);
}

/// Manifests of earlier versions mount the host's hierarchy over the pod's own.
fn its_limits_are_found_below_the_hosts_hierarchy() {
    let (pod, _) = enter_pod();
    let root = cgroup_mount();
    as_containerd_mounts(&root);
    expect_limits(&root.join(pod.strip_prefix(&root).unwrap()));
}

/// Moves this process into a cgroup with limits, and returns it and one beside it.
fn enter_pod() -> (PathBuf, PathBuf) {
    let (pod, host) = (own_cgroup().join("pod"), own_cgroup().join("host"));
    for cgroup in [&pod, &host] {
        fs::create_dir(cgroup).unwrap();
    }
    fs::write(pod.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    // Only a cgroup without processes of its own can have children with limits.
    for parent in [cgroup_mount(), own_cgroup()] {
        fs::write(parent.join("cgroup.subtree_control"), "+memory +cpu").unwrap();
    }
    fs::write(pod.join("memory.max"), MEMORY.to_string()).unwrap();
    fs::write(pod.join("cpu.max"), format!("{} 100000", CPU * 100)).unwrap();
    (pod, host)
}

/// Checks the limits that the program finds, and that it finds them in this directory.
fn expect_limits(own: &Path) {
    let Limits { memory, cpu } = Limits::of_process();
    assert_eq!(*memory, Limit { amount: MEMORY, from: own.join("memory.max") });
    let usable = std::thread::available_parallelism().unwrap().get() as u64;
    assert!(cpu.amount <= CPU && (usable < 2 || cpu.from == own.join("cpu.max")), "{cpu:?}");
}

/// Mount point of the host's hierarchy in the manifest.
fn shipped_mount() -> PathBuf {
    let lines = MANIFEST.lines().map(str::trim).skip_while(|line| *line != "- name: cgroup");
    PathBuf::from(lines.filter_map(|line| line.strip_prefix("mountPath: ")).next().unwrap())
}

/// Enters a cgroup namespace, and mounts its view where programs look for it, and at `hosts` the volume: the host's whole
/// hierarchy, read-only. Returns the mount point of the pod's own.
fn as_containerd_mounts(hosts: &Path) -> PathBuf {
    let (root, aside) = (cgroup_mount(), tempfile::tempdir().unwrap());
    let bind =
        |from: &Path, to: &Path| mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    bind(&root, aside.path());
    umount2(&root, MntFlags::MNT_DETACH).unwrap();
    unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
    mount(Some("none"), &root, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
    assert!(root.join("cgroup.type").exists(), "the pod's own cgroup looks like a root");
    fs::create_dir_all(hosts).unwrap();
    bind(aside.path(), hosts);
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, hosts, None::<&str>, read_only, None::<&str>).unwrap();
    umount2(aside.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(!hosts.join("cgroup.type").exists(), "the host's root has no such file");
    root
}

/// The cgroup of this process in v2, as it sees it.
fn own_line() -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    text.lines().find(|line| line.starts_with("0::")).unwrap().to_owned()
}

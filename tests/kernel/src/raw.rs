//! System calls that no library in use wraps.
#![expect(unsafe_code, reason = "tests of kernel interfaces")]

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use aya::programs::loaded_links;
use nix::libc;
use nix::unistd::{ForkResult, Pid, pause};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_DETACH: libc::c_int = 9;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_GET_FD_BY_ID: libc::c_int = 30;
const BPF_LINK_DETACH: libc::c_int = 34;
const BPF_MAP_TYPE_SOCKMAP: u32 = 15;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;
const BPF_PROG_TYPE_SK_LOOKUP: u32 = 30;
const BPF_F_ALLOW_MULTI: u32 = 2;
const BPF_F_REPLACE: u32 = 4;
pub(crate) const CONNECT4: u32 = 10;
const CONNECT6: u32 = 11;
const GETPEERNAME4: u32 = 29;
const GETPEERNAME6: u32 = 30;
pub(crate) const SK_LOOKUP: u32 = 36;
/// Hooks of a cgroup that the redirect attaches to, with their names.
pub(crate) const CGROUP_HOOKS: [(&str, u32); 4] = [
    ("connect4", CONNECT4),
    ("connect6", CONNECT6),
    ("getpeername4", GETPEERNAME4),
    ("getpeername6", GETPEERNAME6),
];

/// bpf(2) with an attribute of 32-bit words, zero-padded.
fn bpf(command: libc::c_int, words: &[u32]) -> io::Result<i64> {
    let mut attr = [0_u64; 16];
    for (index, word) in words.iter().enumerate() {
        attr[index / 2] |= u64::from(*word) << (32 * (index % 2));
    }
    // SAFETY: a live, zero-padded attribute of the size passed; the pointers in it are the callers'.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_mut_ptr(), size_of_val(&attr)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn split(pointer: *const u8) -> [u32; 2] {
    let pointer = pointer as u64;
    [pointer as u32, (pointer >> 32) as u32]
}

/// `r0 = 1; exit`: let it pass.
const PASS: [u64; 2] = [0x0000_0001_0000_00b7, 0x0000_0000_0000_0095];

fn load(kind: u32, hook: u32, name: &str, program: &[u64]) -> OwnedFd {
    let license = c"GPL";
    let mut padded = [0_u8; 16];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    let length = u32::try_from(program.len()).expect("a short program");
    let mut words = [[kind, length], split(program.as_ptr().cast()), split(license.as_ptr().cast())].concat();
    words.resize(12, 0);
    words.extend(padded.chunks(4).map(|part| u32::from_le_bytes(part.try_into().expect("four bytes"))));
    words.extend([0, hook]);
    owned(bpf(BPF_PROG_LOAD, &words).expect("load"))
}

fn owned(fd: i64) -> OwnedFd {
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("a descriptor")) }
}

/// Loads `return 1` for connect4 and attaches it the old way, without flags: no other program may attach.
pub(crate) fn attach_exclusively(cgroup: &File) -> io::Result<OwnedFd> {
    let fd = load(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, CONNECT4, "old_cilium", &PASS);
    let attach = [cgroup.as_raw_fd() as u32, fd.as_raw_fd() as u32, CONNECT4, 0];
    bpf(BPF_PROG_ATTACH, &attach)?;
    Ok(fd)
}

/// A process that keeps what `open` returns, until it is killed or the case's cgroup is removed.
pub(crate) fn fork<T>(open: impl FnOnce() -> T) -> Pid {
    // SAFETY: this process has no other thread yet, whose locks the child would find taken.
    match unsafe { nix::unistd::fork() }.expect("fork") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let _held = open();
            loop {
                pause();
            }
        }
    }
}

/// Attaches a load balancer of Services at connect(), as Cilium's: beside other programs, and `service` becomes `backend`.
pub(crate) fn attach_balancer(cgroup: &File, service: Ipv4Addr, backend: Ipv4Addr) -> OwnedFd {
    let fd = load_balancer("cil_sock4", service, backend);
    let attach = [cgroup.as_raw_fd() as u32, fd.as_raw_fd() as u32, CONNECT4, BPF_F_ALLOW_MULTI];
    bpf(BPF_PROG_ATTACH, &attach).expect("attach");
    fd
}

fn load_balancer(name: &str, service: Ipv4Addr, backend: Ipv4Addr) -> OwnedFd {
    let word = |address: Ipv4Addr| u64::from(u32::from_ne_bytes(address.octets())) << 32;
    let program = [
        0x0004_1261,                 // r2 = ctx->user_ip4
        word(service) | 0x0002_0255, // if r2 != service: skip two
        word(backend) | 0x03b7,      // r3 = backend
        0x0004_3163,                 // ctx->user_ip4 = r3
        PASS[0],
        PASS[1],
    ];
    load(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, CONNECT4, name, &program)
}

/// The same by a link, as Cilium since 1.14 and Calico since 3.31 attach theirs; it ends with the descriptor.
pub(crate) fn link_balancer(cgroup: &File, service: Ipv4Addr, backend: Ipv4Addr) -> OwnedFd {
    let program = load_balancer("calico_connect4", service, backend);
    let create = [program.as_raw_fd() as u32, cgroup.as_raw_fd() as u32, CONNECT4, 0];
    owned(bpf(BPF_LINK_CREATE, &create).expect("link"))
}

/// Puts a program that lets everything pass in the place of another.
pub(crate) fn replace(cgroup: &File, id: u32) -> OwnedFd {
    let old = owned(bpf(BPF_PROG_GET_FD_BY_ID, &[id]).expect("program by id"));
    let fd = load(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, CONNECT4, "replacement", &PASS);
    let [cgroup, new, old] = [cgroup.as_raw_fd(), fd.as_raw_fd(), old.as_raw_fd()].map(|fd| fd as u32);
    bpf(BPF_PROG_ATTACH, &[cgroup, new, CONNECT4, BPF_F_ALLOW_MULTI | BPF_F_REPLACE, old]).expect("replace");
    fd
}

/// Attaches another owner's lookup to a network namespace, which leaves all to the next; it ends with the descriptor.
pub(crate) fn attach_lookup(netns: &File) -> OwnedFd {
    link_lookup(netns, "cil_lookup", &PASS)
}

/// Attaches one that gives everything to a listener of its own, unless that was given away already.
pub(crate) fn attach_taker(netns: &File, listener: &TcpListener) -> OwnedFd {
    let map = owned(bpf(BPF_MAP_CREATE, &[BPF_MAP_TYPE_SOCKMAP, 4, 4, 1]).expect("map"));
    let (key, value) = (0_u32, listener.as_raw_fd() as u32);
    let [key, value] = [&raw const key, &raw const value].map(|word| split(word.cast()));
    let update = [map.as_raw_fd() as u32, 0, key[0], key[1], value[0], value[1], 0, 0];
    bpf(BPF_MAP_UPDATE_ELEM, &update).expect("update");
    let program = [
        0x16bf,                                           // r6 = ctx
        0xfffc_0a62,                                      // *(u32 *)(fp - 4) = 0
        0xa2bf,                                           // r2 = fp
        0xffff_fffc_0000_0207,                            // r2 += -4
        u64::from(map.as_raw_fd() as u32) << 32 | 0x1118, // r1 = map
        0,
        0x0000_0001_0000_0085, // r0 = bpf_map_lookup_elem
        0x0007_0015,           // if r0 == 0: skip seven
        0x07bf,                // r7 = r0
        0x61bf,                // r1 = ctx
        0x72bf,                // r2 = r7
        0x03b7,                // r3 = 0
        0x0000_007c_0000_0085, // bpf_sk_assign
        0x71bf,                // r1 = r7
        0x0000_0056_0000_0085, // bpf_sk_release
        PASS[0],
        PASS[1],
    ];
    link_lookup(netns, "cil_taker", &program)
}

fn link_lookup(netns: &File, name: &str, program: &[u64]) -> OwnedFd {
    let program = load(BPF_PROG_TYPE_SK_LOOKUP, SK_LOOKUP, name, program);
    let create = [program.as_raw_fd() as u32, netns.as_raw_fd() as u32, SK_LOOKUP, 0];
    owned(bpf(BPF_LINK_CREATE, &create).expect("link"))
}

/// Number of programs that are attached to a hook of a cgroup or network namespace.
pub(crate) fn attached(target: &File, hook: u32) -> usize {
    programs(target, hook).len()
}

/// Detaches every program from the hooks of a cgroup that concern connects, whatever its owner: Cilium 1.14 to 1.18 do
/// so at the root of the cgroups when they start without socket load balancing.
pub(crate) fn detach_all(cgroup: &File) -> io::Result<()> {
    for (_, hook) in CGROUP_HOOKS {
        for id in programs(cgroup, hook) {
            let program = owned(bpf(BPF_PROG_GET_FD_BY_ID, &[id])?);
            bpf(BPF_PROG_DETACH, &[cgroup.as_raw_fd() as u32, program.as_raw_fd() as u32, hook, 0])?;
        }
    }
    Ok(())
}

/// The ids of the programs that are attached to a hook.
pub(crate) fn programs(target: &File, hook: u32) -> Vec<u32> {
    let mut ids = [0_u32; 64];
    let [low, high] = split(ids.as_mut_ptr().cast());
    // The kernel answers in the attribute, so this one is built here.
    let mut attr = [0_u32; 32];
    attr[..7].copy_from_slice(&[target.as_raw_fd() as u32, hook, 0, 0, low, high, 64]);
    // SAFETY: a live, zero-padded attribute of the size passed, whose pointer is to 64 live words.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, attr.as_mut_ptr(), size_of_val(&attr)) };
    assert!(result >= 0, "BPF_PROG_QUERY: {}", io::Error::last_os_error());
    ids.into_iter().filter(|id| *id != 0).collect()
}

/// Detaches a program's link behind its owner's back, as `bpftool link detach` does.
pub(crate) fn detach_link_of(program: u32) {
    let link =
        loaded_links().filter_map(Result::ok).find(|link| link.program_id() == program).expect("its link");
    let fd = owned(bpf(BPF_LINK_GET_FD_BY_ID, &[link.id()]).expect("link by id"));
    bpf(BPF_LINK_DETACH, &[fd.as_raw_fd() as u32]).expect("detach");
}

/// Dissolves a TCP socket's connection: connect() with AF_UNSPEC.
pub(crate) fn disconnect(socket: &impl AsRawFd) {
    let address = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    // SAFETY: a live address of the length passed.
    let result =
        unsafe { libc::connect(socket.as_raw_fd(), &raw const address, size_of::<libc::sockaddr>() as u32) };
    assert_eq!(result, 0, "connect(AF_UNSPEC): {}", io::Error::last_os_error());
}

//! Queries attached programs, and attaches to cgroups without a link. aya can neither query cgroups and network
//! namespaces nor use BPF_PROG_ATTACH on kernels that have links, hence raw system calls.
#![expect(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper for BPF_PROG_QUERY, BPF_PROG_ATTACH and BPF_PROG_DETACH"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;

use aya::programs::{ProgramError, loaded_programs};
use nix::libc;
use tunnel_abi::names;

use super::error::RedirectError;

const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_DETACH: libc::c_int = 9;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_F_ALLOW_OVERRIDE: u32 = 1;
const BPF_F_ALLOW_MULTI: u32 = 2;
/// Maximum number of programs at one hook (the kernel's BPF_CGROUP_MAX_PROGS).
const MAX_PROGRAMS: usize = 64;

/// A hook of the redirect, as in the kernel's `enum bpf_attach_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AttachType {
    Connect4 = 10,
    Connect6 = 11,
    Getpeername4 = 29,
    Getpeername6 = 30,
    SkLookup = 36,
}

impl AttachType {
    pub(super) const CGROUP: [Self; 4] =
        [Self::Connect4, Self::Connect6, Self::Getpeername4, Self::Getpeername6];

    /// Name of our program at the hook.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::Connect4 => names::CONNECT4,
            Self::Connect6 => names::CONNECT6,
            Self::Getpeername4 => names::GETPEERNAME4,
            Self::Getpeername6 => names::GETPEERNAME6,
            Self::SkLookup => names::SK_LOOKUP,
        }
    }

    /// The hook's name in bpftool.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Connect4 => "connect4",
            Self::Connect6 => "connect6",
            Self::Getpeername4 => "getpeername4",
            Self::Getpeername6 => "getpeername6",
            Self::SkLookup => "sk_lookup",
        }
    }
}

pub(super) struct Attached {
    pub(super) ids: Vec<u32>,
    flags: u32,
}

/// `union bpf_attr` for BPF_PROG_QUERY, padded: newer kernels write fields beyond `prog_cnt`.
#[repr(C, align(8))]
struct QueryAttr {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    rest: [u32; 25],
}

const _: () = assert!(size_of::<QueryAttr>() == 128);

/// Lists the programs attached to `hook` of `target`, a cgroup directory or a network namespace. Needs CAP_NET_ADMIN.
pub(super) fn attached(target: &File, hook: AttachType) -> io::Result<Attached> {
    let mut ids = [0_u32; MAX_PROGRAMS];
    let mut attr = QueryAttr {
        target_fd: word(target.as_raw_fd())?,
        attach_type: hook as u32,
        query_flags: 0,
        attach_flags: 0,
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: MAX_PROGRAMS as u32,
        rest: [0; 25],
    };
    // SAFETY: `attr` is a live, zero-padded bpf_attr of the size passed, `prog_ids` points to `prog_cnt` live words,
    // and the kernel writes to nothing else.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut attr, size_of::<QueryAttr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let count = (attr.prog_cnt as usize).min(MAX_PROGRAMS);
    Ok(Attached { ids: ids[..count].to_vec(), flags: attr.attach_flags })
}

/// The part of `union bpf_attr` that BPF_PROG_ATTACH and BPF_PROG_DETACH read here; the kernel takes the rest as zeros.
#[repr(C)]
struct AttachAttr {
    target_fd: u32,
    program_fd: u32,
    attach_type: u32,
    flags: u32,
}

fn call(
    command: libc::c_int,
    cgroup: &File,
    hook: AttachType,
    program: BorrowedFd<'_>,
    flags: u32,
) -> io::Result<()> {
    let attr = AttachAttr {
        target_fd: word(cgroup.as_raw_fd())?,
        program_fd: word(program.as_raw_fd())?,
        attach_type: hook as u32,
        flags,
    };
    // SAFETY: `attr` is a live bpf_attr of the size passed, and these commands do not write to it.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const attr, size_of::<AttachAttr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn word(fd: RawFd) -> io::Result<u32> {
    u32::try_from(fd).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Attaches the program after all others at the hook. The attachment outlives this process, and any process may end it
/// with BPF_PROG_DETACH.
pub(super) fn attach(cgroup: &File, hook: AttachType, program: BorrowedFd<'_>) -> io::Result<()> {
    call(BPF_PROG_ATTACH, cgroup, hook, program, BPF_F_ALLOW_MULTI)
}

/// Detaches the program if it is attached. If it were not, the kernel would detach another one that has no
/// BPF_F_ALLOW_MULTI.
pub(super) fn detach(cgroup: &File, hook: AttachType, program: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    if !attached(cgroup, hook)?.ids.contains(&id) {
        return Ok(());
    }
    call(BPF_PROG_DETACH, cgroup, hook, program, 0)
}

/// Searches from `cgroup` upwards for a program whose attach flags exclude ours.
pub(super) fn foreign(cgroup: &Path, hook: AttachType) -> Option<RedirectError> {
    for (depth, dir) in cgroup.ancestors().enumerate() {
        // The query fails above the mount point, which is not a cgroup.
        let attached = File::open(dir).and_then(|file| attached(&file, hook)).ok()?;
        // In this cgroup itself an overridable program excludes ours too.
        let tolerant = if depth == 0 { BPF_F_ALLOW_MULTI } else { BPF_F_ALLOW_MULTI | BPF_F_ALLOW_OVERRIDE };
        if let Some(&id) = attached.ids.first()
            && attached.flags & tolerant == 0
        {
            let program = program_name(id).unwrap_or_else(|| "<unnamed>".into());
            return Some(RedirectError::Foreign { hook: hook.name(), program, id, path: dir.to_path_buf() });
        }
    }
    None
}

/// Name of a loaded program; None if it has none, is gone or may not be read.
fn program_name(id: u32) -> Option<String> {
    let program = loaded_programs().filter_map(Result::ok).find(|program| program.id() == id)?;
    program.name_as_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// Names and ids of the sk_lookup programs that are not a Postern server's. A single one with an unreadable name is
/// assumed to be the server's.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`]: there are several with unreadable names, and some may be foreign.
pub(super) fn foreign_lookups(netns: &File) -> io::Result<Vec<String>> {
    let ids = attached(netns, AttachType::SkLookup)?.ids;
    let mut foreign = Vec::new();
    for id in &ids {
        match is_server(*id) {
            Some(true) => {}
            Some(false) => {
                let name = program_name(*id).unwrap_or_else(|| "<unnamed>".into());
                foreign.push(format!("{name} (id {id})"));
            }
            None if ids.len() == 1 => {}
            None => {
                let reason = format!("there are {}, whose names only CAP_SYS_ADMIN may read", ids.len());
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
            }
        }
    }
    Ok(foreign)
}

/// Reports whether a program is a Postern server's; None if its name may not be read.
fn is_server(id: u32) -> Option<bool> {
    for program in loaded_programs() {
        match program {
            Ok(program) if program.id() == id => {
                return Some(program.name_as_str() == Some(names::SK_LOOKUP));
            }
            Ok(_) => {}
            // Some program was unloaded meanwhile.
            Err(ProgramError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return None,
        }
    }
    Some(false)
}

//! Loading the object and attaching its programs.

use std::fs::File;
use std::io;
use std::path::Path;

use aya::programs::cgroup_sock_addr::CgroupSockAddrLinkId;
use aya::programs::sk_lookup::SkLookupLinkId;
use aya::programs::{CgroupAttachMode, CgroupSockAddr, ProgramError, ProgramType, SkLookup};
use aya::sys::{BpfHelper, is_helper_supported};
use aya::util::KernelVersion;
use aya::{Ebpf, EbpfError, EbpfLoader};
use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tunnel_abi::{Prefix, V4, V6, names};

use super::cgroup::Cgroup;
use super::checks::{missing_capabilities, release};
use super::query::{self, Hook};
use super::{ProgramInfo, RedirectConfig, RedirectError};

/// The object that the build script found, or nothing.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/tunnel-ebpf.o"));
/// What the build script says about it.
pub(super) const OBJECT_STATE: &str = env!("POSTERN_BPF_STATE");
/// The lowest supported kernel.
const FLOOR: (u8, u8) = (5, 10);
/// aya-log's level "debug"; 0 is off.
const LOG_DEBUG: u8 = 4;

/// Whether this binary carries its programs.
pub(super) fn embedded() -> Result<&'static [u8], RedirectError> {
    if OBJECT.is_empty() { Err(RedirectError::NoObject { reason: OBJECT_STATE }) } else { Ok(OBJECT) }
}

/// What depends on the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    /// `bpf_set_retval` (5.18): fail at connect().
    pub(super) set_retval: bool,
    /// `bpf_sk_lookup.ingress_ifindex` (5.17).
    pub(super) ingress_ifindex: bool,
}

/// The loaded programs and what holds them attached. Dropping it detaches them.
pub(super) struct Programs {
    ebpf: Ebpf,
    cgroup: [Option<CgroupSockAddrLinkId>; 4],
    lookup: Option<SkLookupLinkId>,
}

/// Object name and hook of each cgroup program, in the order of attachment: peers' names first, so that
/// no redirected client ever sees a token.
const CGROUP_PROGRAMS: [(&str, Hook); 4] = [
    (names::GETPEERNAME4, Hook::Getpeername4),
    (names::GETPEERNAME6, Hook::Getpeername6),
    (names::CONNECT4, Hook::Connect4),
    (names::CONNECT6, Hook::Connect6),
];

/// Loads the object, not yet its programs.
pub(super) fn open(config: &RedirectConfig, features: Features, log: bool) -> Result<Ebpf, RedirectError> {
    let object = embedded()?;
    let v4 = config.token_range.trunc();
    let v6 = config.token_range_v6.trunc();
    let tokens_v4 = Prefix { base: V4::from(v4.network()), mask: V4::from(v4.netmask()) };
    let tokens_v6 = Prefix { base: V6::from(v6.network()), mask: V6::from(v6.netmask()) };
    let set_retval = u8::from(features.set_retval);
    let ingress_ifindex = u8::from(features.ingress_ifindex);
    let level = if log { LOG_DEBUG } else { 0 };
    EbpfLoader::new()
        // The object has no relocations against the kernel's types.
        .btf(None)
        .override_global(names::MARK, &config.mark, true)
        .override_global(names::SET_RETVAL, &set_retval, true)
        .override_global(names::INGRESS_IFINDEX, &ingress_ifindex, true)
        .override_global(names::TOKENS_V4, &tokens_v4, true)
        .override_global(names::TOKENS_V6, &tokens_v6, true)
        .override_global(names::LOG_LEVEL, &level, true)
        .load(object)
        .map_err(|error| object_error(&error))
}

fn object_error(error: &EbpfError) -> RedirectError {
    let errno = errno_of(error);
    let reason = chain(error);
    if errno == Some(libc::EPERM) {
        let missing = missing_capabilities();
        if !missing.is_empty() {
            return RedirectError::Capabilities { missing };
        }
        return RedirectError::NotPermitted {
            operation: format!("creating the maps ({reason})"),
            mend: "raise RLIMIT_MEMLOCK (`ulimit -l unlimited`, systemd: LimitMEMLOCK=infinity) on kernels before \
                   5.11; otherwise a seccomp or LSM policy forbids bpf(2): allow it",
        };
    }
    RedirectError::Load { program: "object", reason }
}

/// The `io::Error` at the end of a chain of causes.
fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut current = Some(error);
    while let Some(error) = current {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.raw_os_error();
        }
        current = error.source();
    }
    None
}

/// An error with its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// Kernels before 5.11 charge maps to the process's locked memory.
pub(super) fn raise_memlock() {
    let modern = KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(5, 11, 0));
    let unlimited = getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(soft, _)| soft == libc::RLIM_INFINITY);
    if !modern
        && !unlimited
        && setrlimit(Resource::RLIMIT_MEMLOCK, libc::RLIM_INFINITY, libc::RLIM_INFINITY).is_err()
    {
        tracing::warn!(
            "cannot raise RLIMIT_MEMLOCK; if the maps do not fit, raise it (systemd: LimitMEMLOCK=infinity)"
        );
    }
}

/// Asks the kernel what it can do; an error names what is missing.
pub(super) fn probe(config: &RedirectConfig) -> Result<Features, RedirectError> {
    let lacks = |feature: &'static str| RedirectError::Kernel { release: release(), feature };
    let version = KernelVersion::current().map_err(|_| lacks("readable version"))?;
    if version < KernelVersion::new(FLOOR.0, FLOOR.1, 0) {
        return Err(lacks("sk_lookup together with getpeername hooks (Linux 5.10)"));
    }
    let missing = missing_capabilities();
    if !missing.is_empty() {
        return Err(RedirectError::Capabilities { missing });
    }
    for (kind, feature) in [
        (ProgramType::CgroupSockAddr, "cgroup socket address programs (CONFIG_CGROUP_BPF)"),
        (ProgramType::SkLookup, "sk_lookup programs (CONFIG_NET, Linux 5.9)"),
    ] {
        // An error of the probe itself says nothing; then the load decides.
        if let Ok(false) = aya::sys::is_program_supported(kind) {
            return Err(lacks(feature));
        }
    }
    // Distributions backport the helper, so the probe decides and not the version.
    let helper = is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval);
    Ok(Features {
        set_retval: config.fail_at_connect && helper.unwrap_or(false),
        ingress_ifindex: version >= KernelVersion::new(5, 17, 0),
    })
}

impl Programs {
    /// Loads all programs into the kernel; nothing is attached yet.
    pub(super) fn load(mut ebpf: Ebpf) -> Result<Self, RedirectError> {
        for (name, _) in CGROUP_PROGRAMS {
            cgroup_program(&mut ebpf, name)?.load().map_err(|error| load_error(name, &error))?;
        }
        lookup_program(&mut ebpf)?.load().map_err(|error| load_error(names::SK_LOOKUP, &error))?;
        Ok(Self { ebpf, cgroup: [const { None }; 4], lookup: None })
    }

    /// Attaches whatever is not: the lookup first, so that no connect is sent to a token that leads nowhere.
    /// True when something had to be attached.
    pub(super) fn attach(&mut self, cgroup: &Cgroup, netns: &File) -> Result<bool, RedirectError> {
        let mut changed = false;
        if !self.is_attached(Hook::SkLookup, netns)? {
            let program = lookup_program(&mut self.ebpf)?;
            if let Some(lost) = self.lookup.take() {
                // The link's other end is gone; closing ours cannot do more.
                drop(program.detach(lost));
            }
            let link = program.attach(netns).map_err(|error| RedirectError::Attach {
                program: names::SK_LOOKUP,
                target: "this network namespace".into(),
                reason: chain(&error),
            })?;
            self.lookup = Some(link);
            changed = true;
        }
        for (slot, (name, hook)) in CGROUP_PROGRAMS.into_iter().enumerate() {
            if self.is_attached(hook, &cgroup.dir)? {
                continue;
            }
            let program = cgroup_program(&mut self.ebpf, name)?;
            if let Some(lost) = self.cgroup[slot].take() {
                drop(program.detach(lost));
            }
            let link = program
                // The only mode that link_create accepts here; a link is always "multi" to the kernel.
                .attach(&cgroup.dir, CgroupAttachMode::Single)
                .map_err(|error| attach_error(name, hook, &cgroup.path, &error))?;
            self.cgroup[slot] = Some(link);
            changed = true;
        }
        Ok(changed)
    }

    /// Stops redirecting new connects, and then steering. Peers' names stay until [`Self`] is dropped.
    pub(super) fn release(&mut self) {
        for (slot, (name, hook)) in CGROUP_PROGRAMS.into_iter().enumerate() {
            if matches!(hook, Hook::Connect4 | Hook::Connect6)
                && let Some(link) = self.cgroup[slot].take()
                && let Ok(program) = cgroup_program(&mut self.ebpf, name)
            {
                drop(program.detach(link));
            }
        }
        if let Some(link) = self.lookup.take()
            && let Ok(program) = lookup_program(&mut self.ebpf)
        {
            drop(program.detach(link));
        }
    }

    /// Detaches everything.
    pub(super) fn detach(&mut self) {
        self.release();
        for (slot, (name, _)) in CGROUP_PROGRAMS.into_iter().enumerate() {
            if let Some(link) = self.cgroup[slot].take()
                && let Ok(program) = cgroup_program(&mut self.ebpf, name)
            {
                drop(program.detach(link));
            }
        }
    }

    /// Whether the kernel still runs our program at `hook` of `target`.
    fn is_attached(&self, hook: Hook, target: &File) -> Result<bool, RedirectError> {
        let own = self.id(hook);
        let attached = query::attached(target, hook).map_err(|source| RedirectError::Io {
            what: format!("cannot ask which programs are attached to {}", hook.name()),
            source,
        })?;
        Ok(own.is_some_and(|own| attached.ids.contains(&own)))
    }

    /// Hooks that our programs are missing from.
    pub(super) fn lost(&self, cgroup: &Cgroup, netns: &File) -> Result<Vec<&'static str>, RedirectError> {
        let mut lost = Vec::new();
        for hook in Hook::CGROUP {
            if !self.is_attached(hook, &cgroup.dir)? {
                lost.push(hook.name());
            }
        }
        if !self.is_attached(Hook::SkLookup, netns)? {
            lost.push(Hook::SkLookup.name());
        }
        Ok(lost)
    }

    /// The kernel's id of the program at `hook`.
    pub(super) fn id(&self, hook: Hook) -> Option<u32> {
        let name = program_of(hook);
        self.ebpf.program(name)?.info().ok().map(|info| info.id())
    }

    pub(super) fn info(&self) -> Vec<ProgramInfo> {
        Hook::CGROUP
            .into_iter()
            .chain([Hook::SkLookup])
            .filter_map(|hook| {
                let info = self.ebpf.program(program_of(hook))?.info().ok()?;
                Some(ProgramInfo {
                    hook: hook.name(),
                    id: info.id(),
                    verified_instructions: info.verified_instruction_count(),
                    jited_bytes: info.size_jitted(),
                })
            })
            .collect()
    }
}

fn program_of(hook: Hook) -> &'static str {
    match hook {
        Hook::Connect4 => names::CONNECT4,
        Hook::Connect6 => names::CONNECT6,
        Hook::Getpeername4 => names::GETPEERNAME4,
        Hook::Getpeername6 => names::GETPEERNAME6,
        Hook::SkLookup => names::SK_LOOKUP,
    }
}

fn cgroup_program<'a>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut CgroupSockAddr, RedirectError> {
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| RedirectError::Load { program: name, reason: "the object has no such program".into() })
}

fn lookup_program(ebpf: &mut Ebpf) -> Result<&mut SkLookup, RedirectError> {
    let name = names::SK_LOOKUP;
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| RedirectError::Load { program: name, reason: "the object has no such program".into() })
}

fn load_error(program: &'static str, error: &ProgramError) -> RedirectError {
    if errno_of(error) == Some(libc::EPERM) {
        let missing = missing_capabilities();
        if !missing.is_empty() {
            return RedirectError::Capabilities { missing };
        }
    }
    let mut reason = chain(error);
    if let ProgramError::LoadError { io_error, verifier_log } = error {
        // The end of the log has the cause; the rest is a trace of thousands of lines.
        let log = verifier_log.to_string();
        let tail: Vec<&str> = log.lines().rev().take(6).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        reason = format!("{io_error}: {}", tail.join(" | "));
    }
    RedirectError::Load { program, reason }
}

fn attach_error(program: &'static str, hook: Hook, cgroup: &Path, error: &ProgramError) -> RedirectError {
    if errno_of(error) == Some(libc::EPERM) {
        if let Some(exclusive) = query::exclusive(cgroup, hook) {
            let name = query::program_name(exclusive.id);
            let program = if name.is_empty() { "<unnamed>".to_owned() } else { name };
            return RedirectError::Foreign {
                hook: hook.name(),
                program,
                id: exclusive.id,
                path: exclusive.path,
            };
        }
        return RedirectError::NotPermitted {
            operation: format!("attaching {program} to {}", cgroup.display()),
            mend: "grant CAP_BPF and CAP_NET_ADMIN in the initial user namespace, and check for a program attached \
                   without BPF_F_ALLOW_MULTI (`bpftool cgroup tree`)",
        };
    }
    RedirectError::Attach { program, target: cgroup.display().to_string(), reason: chain(error) }
}

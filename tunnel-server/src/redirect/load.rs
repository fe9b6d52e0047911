//! Loading the object and attaching its programs.

use std::fs::File;
use std::io;
use std::path::Path;

use aya::programs::links::{FdLink, LinkError};
use aya::programs::{CgroupAttachMode, CgroupSockAddr, Program, ProgramError, SkLookup};
use aya::{Ebpf, EbpfError, EbpfLoader};
use nix::libc;
use tunnel_abi::{Prefix, V4, V6, names};
use tunnel_core::error::{causes, chain};

use super::attached::{self, AttachType};
use super::cgroup::Cgroup;
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::pins::Pins;
use super::preflight::{Features, PERMIT, lacks_perfmon, missing_capabilities};

/// The object that the build script found, or nothing.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/tunnel-ebpf.o"));
/// What the build script reported about it.
const OBJECT_STATE: &str = env!("POSTERN_BPF_STATE");
/// aya-log's level "debug"; 0 is off.
const LOG_DEBUG: u8 = 4;

/// Whether this binary carries its programs.
pub(super) fn embedded() -> Result<&'static [u8], RedirectError> {
    if OBJECT.is_empty() { Err(RedirectError::NoObject { reason: OBJECT_STATE }) } else { Ok(OBJECT) }
}

/// One loaded program.
#[derive(Clone, Debug)]
pub struct ProgramInfo {
    /// Where it is attached, such as `connect4`.
    pub hook: &'static str,
    pub id: u32,
    /// Instructions that the verifier walked (5.16).
    pub verified_instructions: Option<u32>,
    /// Machine code, in bytes.
    pub jited_bytes: u32,
}

/// The loaded programs and what holds them attached. Dropping it detaches them.
pub(super) struct Programs {
    ebpf: Ebpf,
    cgroup: [Option<FdLink>; 4],
    lookup: Option<FdLink>,
    /// Where the links are pinned as well.
    pins: Option<Pins>,
}

/// Object name and hook of each cgroup program, in the order of attachment: peers' names first, so that
/// no redirected client ever sees a token.
const CGROUP_PROGRAMS: [(&str, AttachType); 4] = [
    (names::GETPEERNAME4, AttachType::Getpeername4),
    (names::GETPEERNAME6, AttachType::Getpeername6),
    (names::CONNECT4, AttachType::Connect4),
    (names::CONNECT6, AttachType::Connect6),
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
    let orphan_after = u64::try_from(config.orphan_timeout.as_nanos()).unwrap_or(u64::MAX);
    let level = if log { LOG_DEBUG } else { 0 };
    EbpfLoader::new()
        // The object has no relocations against the kernel's types.
        .btf(None)
        .override_global(names::SET_RETVAL, &set_retval, true)
        .override_global(names::INGRESS_IFINDEX, &ingress_ifindex, true)
        .override_global(names::ORPHAN_AFTER, &orphan_after, true)
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
            fix: PERMIT,
        };
    }
    RedirectError::Load { program: "object", reason }
}

/// The errno of the first `io::Error` among an error's causes.
fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    causes(error).find_map(|cause| cause.downcast_ref::<io::Error>())?.raw_os_error()
}

impl Programs {
    /// Loads all programs into the kernel; nothing is attached yet.
    pub(super) fn load(mut ebpf: Ebpf) -> Result<Self, RedirectError> {
        for (name, _) in CGROUP_PROGRAMS {
            program::<CgroupSockAddr>(&mut ebpf, name)?.load().map_err(|error| load_error(name, &error))?;
        }
        let lookup = program::<SkLookup>(&mut ebpf, names::SK_LOOKUP)?;
        lookup.load().map_err(|error| load_error(names::SK_LOOKUP, &error))?;
        Ok(Self { ebpf, cgroup: [const { None }; 4], lookup: None, pins: None })
    }

    /// From now on what is attached stays attached when this process dies.
    pub(super) fn pin(&mut self, pins: Pins) -> Result<(), RedirectError> {
        let pins = self.pins.insert(pins);
        for (link, hook) in self.cgroup.iter_mut().zip(CGROUP_PROGRAMS.map(|(_, hook)| hook)) {
            pins.pin(link, hook)?;
        }
        pins.pin(&mut self.lookup, AttachType::SkLookup)
    }

    /// Where what is attached is pinned.
    pub(super) fn pinned_in(&self) -> Option<&Path> {
        self.pins.as_ref().map(Pins::dir)
    }

    /// Attaches the programs that are not: the lookup first, so that no connect is sent to a token that leads nowhere.
    pub(super) fn attach(&mut self, cgroup: &Cgroup, netns: &File) -> Result<(), RedirectError> {
        if !self.is_attached(AttachType::SkLookup, netns)? {
            self.let_go(AttachType::SkLookup);
            let program = program::<SkLookup>(&mut self.ebpf, names::SK_LOOKUP)?;
            let attached = program.attach(netns).and_then(|id| program.take_link(id));
            let link = attached.map_err(|error| RedirectError::Attach {
                program: names::SK_LOOKUP,
                target: "this network namespace".into(),
                reason: chain(&error),
            })?;
            self.lookup = Some(link.into());
            if let Some(pins) = &self.pins {
                pins.pin(&mut self.lookup, AttachType::SkLookup)?;
            }
        }
        for (slot, (name, hook)) in CGROUP_PROGRAMS.into_iter().enumerate() {
            if self.is_attached(hook, &cgroup.dir)? {
                continue;
            }
            self.let_go(hook);
            let program = program::<CgroupSockAddr>(&mut self.ebpf, name)?;
            let attached = program
                // The only mode that link_create accepts here; a link is always "multi" to the kernel.
                .attach(&cgroup.dir, CgroupAttachMode::Single)
                .and_then(|id| program.take_link(id))
                .map_err(|error| attach_error(name, hook, &cgroup.path, &error))?;
            let link = FdLink::try_from(attached).map_err(|error: LinkError| RedirectError::Attach {
                program: name,
                target: cgroup.path.display().to_string(),
                reason: chain(&error),
            })?;
            self.cgroup[slot] = Some(link);
            if let Some(pins) = &self.pins {
                pins.pin(&mut self.cgroup[slot], hook)?;
            }
        }
        Ok(())
    }

    /// Stops redirecting new connects, and then steering. Peers' names stay until [`Self`] is dropped.
    pub(super) fn release(&mut self) {
        for hook in [AttachType::Connect4, AttachType::Connect6, AttachType::SkLookup] {
            self.let_go(hook);
        }
    }

    pub(super) fn detach(&mut self) {
        self.release();
        for hook in [AttachType::Getpeername4, AttachType::Getpeername6] {
            self.let_go(hook);
        }
        self.pins = None;
    }

    /// Detaches what is attached at `hook`: the kernel does that when nothing refers to the link any more.
    fn let_go(&mut self, hook: AttachType) {
        if let Some(pins) = &self.pins {
            pins.unpin(hook);
        }
        match CGROUP_PROGRAMS.iter().position(|(_, other)| *other == hook) {
            Some(slot) => self.cgroup[slot] = None,
            None => self.lookup = None,
        }
    }

    /// Whether the kernel still runs our program at `hook` of `target`.
    fn is_attached(&self, hook: AttachType, target: &File) -> Result<bool, RedirectError> {
        let own = self.id(hook);
        let attached = attached::attached(target, hook).map_err(|source| RedirectError::Io {
            what: format!("cannot list the programs attached to {}", hook.name()),
            source,
        })?;
        Ok(own.is_some_and(|own| attached.ids.contains(&own)))
    }

    /// Hooks that our programs are missing from.
    pub(super) fn lost(&self, cgroup: &Cgroup, netns: &File) -> Result<Vec<&'static str>, RedirectError> {
        let hooks = AttachType::CGROUP.map(|hook| (hook, &cgroup.dir)).into_iter();
        let mut lost = Vec::new();
        for (hook, target) in hooks.chain([(AttachType::SkLookup, netns)]) {
            if !self.is_attached(hook, target)? {
                lost.push(hook.name());
            }
        }
        Ok(lost)
    }

    /// The kernel's id of the program at `hook`.
    pub(super) fn id(&self, hook: AttachType) -> Option<u32> {
        let name = program_of(hook);
        self.ebpf.program(name)?.info().ok().map(|info| info.id())
    }

    pub(super) fn info(&self) -> Vec<ProgramInfo> {
        AttachType::CGROUP
            .into_iter()
            .chain([AttachType::SkLookup])
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

fn program_of(hook: AttachType) -> &'static str {
    match hook {
        AttachType::Connect4 => names::CONNECT4,
        AttachType::Connect6 => names::CONNECT6,
        AttachType::Getpeername4 => names::GETPEERNAME4,
        AttachType::Getpeername6 => names::GETPEERNAME6,
        AttachType::SkLookup => names::SK_LOOKUP,
    }
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut P, RedirectError>
where
    &'a mut P: TryFrom<&'a mut Program>,
{
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
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(6)..];
        reason = format!("{io_error}: {}", tail.join(" | "));
        if lacks_perfmon() {
            reason.push_str(
                "; without CAP_PERFMON the verifiers of older kernels (6.1) refuse it: grant that too",
            );
        }
    }
    RedirectError::Load { program, reason }
}

fn attach_error(
    program: &'static str,
    hook: AttachType,
    cgroup: &Path,
    error: &ProgramError,
) -> RedirectError {
    if errno_of(error) == Some(libc::EPERM) {
        if let Some(foreign) = attached::foreign(cgroup, hook) {
            return foreign;
        }
        return RedirectError::NotPermitted {
            operation: format!("attaching {program} to {}", cgroup.display()),
            fix: "grant CAP_BPF and CAP_NET_ADMIN in the initial user namespace, and check for a program attached \
                   without BPF_F_ALLOW_MULTI (`bpftool cgroup tree`)",
        };
    }
    RedirectError::Attach { program, target: cgroup.display().to_string(), reason: chain(error) }
}

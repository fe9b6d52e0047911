//! Loads the object and attaches its programs.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use aya::programs::links::FdLink;
use aya::programs::{CgroupAttachMode, CgroupSockAddr, Program, ProgramError, SkLookup};
use aya::{Ebpf, EbpfError, EbpfLoader};
use nix::libc;
use tunnel_abi::{INITIAL_NETNS, Prefix, V4, V6, names};
use tunnel_runtime::error::{causes, chain};

use super::attached::{self, AttachType};
use super::cgroup::Cgroup;
use super::config::{OrphanPolicy, RedirectConfig};
use super::error::RedirectError;
use super::freed;
use super::pins::Pins;
use super::preflight::{self, Features, PERMIT, lacks_perfmon};

/// The object that the build script found; empty if none.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/tunnel-ebpf.o"));
/// The build script's report about it.
const OBJECT_STATE: &str = env!("POSTERN_BPF_STATE");
/// aya-log's level "debug"; 0 is off.
const LOG_DEBUG: u8 = 4;

/// The embedded object, or an error if this binary has none.
pub(super) fn embedded() -> Result<&'static [u8], RedirectError> {
    if OBJECT.is_empty() { Err(RedirectError::NoObject { reason: OBJECT_STATE }) } else { Ok(OBJECT) }
}

/// The loaded programs. Call [`Self::detach`] before dropping it.
///
/// Cgroup programs that must outlive this process are attached with BPF_PROG_ATTACH and not with links: at its start
/// Cilium 1.14 to 1.18 without socket load balancing detaches everything attached to the root cgroup, and has no
/// datapath while that fails, as it does for links. Programs that others detach are reattached within a second.
pub(super) struct Programs {
    ebpf: Ebpf,
    /// Links of the cgroup programs, used if they end with this process.
    cgroup: [Option<FdLink>; 4],
    lookup: Option<FdLink>,
    /// Pins of the programs and of the lookup's link; if None, they end with this process.
    pins: Option<Pins>,
}

/// Cgroup hooks in the order of attachment: getpeername first, so that no redirected client ever sees a virtual address.
const CGROUP_HOOKS: [AttachType; 4] =
    [AttachType::Getpeername4, AttachType::Getpeername6, AttachType::Connect4, AttachType::Connect6];

/// Loads the object, but not its programs. `host_netns` is 0 unless routes take the connections of other namespaces.
pub(super) fn open(
    config: &RedirectConfig,
    features: Features,
    host_netns: u64,
    log: bool,
) -> Result<Ebpf, RedirectError> {
    let object = embedded()?;
    let v4 = config.redirect_range.trunc();
    let v6 = config.redirect_range_v6.trunc();
    let virtual_addresses_v4 = Prefix { base: V4::from(v4.network()), mask: V4::from(v4.netmask()) };
    let virtual_addresses_v6 = Prefix { base: V6::from(v6.network()), mask: V6::from(v6.netmask()) };
    let set_retval = u8::from(features.set_retval);
    let ingress_ifindex = u8::from(features.ingress_ifindex);
    let orphan_after = u64::try_from(config.orphan_timeout.as_nanos()).unwrap_or(u64::MAX);
    let refuse_orphaned = u8::from(config.orphan_policy == OrphanPolicy::Refuse);
    let level = if log { LOG_DEBUG } else { 0 };
    freed::keep_little();
    let loaded = EbpfLoader::new()
        // The object has no relocations against the kernel's types.
        .btf(None)
        .override_global(names::SET_RETVAL, &set_retval, true)
        .override_global(names::INGRESS_IFINDEX, &ingress_ifindex, true)
        .override_global(names::HOST_NETNS, &host_netns, true)
        .override_global(names::ORPHAN_AFTER, &orphan_after, true)
        .override_global(names::REFUSE_ORPHANED, &refuse_orphaned, true)
        .override_global(names::VIRTUAL_V4, &virtual_addresses_v4, true)
        .override_global(names::VIRTUAL_V6, &virtual_addresses_v6, true)
        .override_global(names::LOG_LEVEL, &level, true)
        .load(object)
        .map_err(|error| object_error(&error));
    freed::give_back();
    loaded
}

/// Loads the programs and unloads them again, with all that their log level could add.
pub(super) fn try_out(config: &RedirectConfig) -> Result<(), RedirectError> {
    // With a namespace, so that all code is verified.
    let ebpf = open(config, preflight::probe(config)?, INITIAL_NETNS, true)?;
    Programs::load(ebpf, None).map(drop)
}

fn object_error(error: &EbpfError) -> RedirectError {
    let reason = chain(error);
    // Not for lack of a capability, which `preflight::probe` would have named.
    if errno_of(error) == Some(libc::EPERM) {
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
    /// Loads all programs into the kernel and pins the cgroup ones, as a dead server's program can only be detached
    /// through a pin. Attaches nothing.
    pub(super) fn load(mut ebpf: Ebpf, pins: Option<Pins>) -> Result<Self, RedirectError> {
        for hook in CGROUP_HOOKS {
            let program = program::<CgroupSockAddr>(&mut ebpf, hook)?;
            program.load().map_err(|error| load_error(hook.program(), &error))?;
            if let Some(pins) = &pins {
                pins.pin_program(program, hook)?;
            }
        }
        let lookup = program::<SkLookup>(&mut ebpf, AttachType::SkLookup)?;
        lookup.load().map_err(|error| load_error(names::SK_LOOKUP, &error))?;
        Ok(Self { ebpf, cgroup: [const { None }; 4], lookup: None, pins })
    }

    /// Directory of the pins.
    pub(super) fn pinned_in(&self) -> Option<&Path> {
        self.pins.as_ref().map(Pins::dir)
    }

    /// Attaches the programs that are not attached. The lookup comes first, so that no connect is sent to an address
    /// without a listener.
    pub(super) fn attach(&mut self, cgroup: &Cgroup, netns: &File) -> Result<(), RedirectError> {
        if !self.is_attached(AttachType::SkLookup, netns)? {
            self.let_go_of_lookup();
            let program = program::<SkLookup>(&mut self.ebpf, AttachType::SkLookup)?;
            let attached = program.attach(netns).and_then(|id| program.take_link(id));
            let link = attached.map_err(|error| RedirectError::Attach {
                program: names::SK_LOOKUP,
                target: "this network namespace".into(),
                reason: chain(&error),
            })?;
            self.lookup = Some(link.into());
            if let Some(pins) = &self.pins {
                pins.pin_lookup(&mut self.lookup)?;
            }
        }
        for (slot, hook) in CGROUP_HOOKS.into_iter().enumerate() {
            if self.is_attached(hook, &cgroup.dir)? {
                continue;
            }
            let program = program::<CgroupSockAddr>(&mut self.ebpf, hook)?;
            if self.pins.is_some() {
                let fd = program.fd().map_err(|error| attach_error(hook, &cgroup.path, &error))?;
                attached::attach(&cgroup.dir, hook, fd.as_fd())
                    .map_err(|error| attach_error(hook, &cgroup.path, &error))?;
                continue;
            }
            // A link whose program somebody has detached.
            self.cgroup[slot] = None;
            let link = program
                // The only mode that link_create accepts here; to the kernel a link is always "multi".
                .attach(&cgroup.dir, CgroupAttachMode::Single)
                .and_then(|id| program.take_link(id))
                .map_err(|error| attach_error(hook, &cgroup.path, &error))?;
            let link = FdLink::try_from(link).map_err(|error| attach_error(hook, &cgroup.path, &error))?;
            self.cgroup[slot] = Some(link);
        }
        Ok(())
    }

    /// Stops redirecting new connects, then steering. The getpeername programs stay until [`Self::detach`].
    pub(super) fn release(&mut self, cgroup: &Cgroup) {
        self.let_go(AttachType::Connect4, cgroup);
        self.let_go(AttachType::Connect6, cgroup);
        self.let_go_of_lookup();
    }

    pub(super) fn detach(&mut self, cgroup: &Cgroup) {
        self.release(cgroup);
        self.let_go(AttachType::Getpeername4, cgroup);
        self.let_go(AttachType::Getpeername6, cgroup);
        self.pins = None;
    }

    /// Drops the lookup's link: the kernel detaches its program once nothing refers to the link.
    fn let_go_of_lookup(&mut self) {
        if let Some(pins) = &self.pins {
            pins.unpin_lookup();
        }
        self.lookup = None;
    }

    fn let_go(&mut self, hook: AttachType, cgroup: &Cgroup) {
        if let Some(slot) = CGROUP_HOOKS.iter().position(|other| *other == hook) {
            self.cgroup[slot] = None;
        }
        let Some(Program::CgroupSockAddr(program)) = self.ebpf.program(hook.program()) else { return };
        if let (Some(id), Ok(fd)) = (self.id(hook), program.fd())
            && let Err(error) = attached::detach(&cgroup.dir, hook, fd.as_fd(), id)
        {
            tracing::warn!(hook = hook.name(), %error, "failed to detach a BPF program");
        }
    }

    /// Reports whether the kernel still runs our program at `hook` of `target`.
    fn is_attached(&self, hook: AttachType, target: &File) -> Result<bool, RedirectError> {
        let attached = Self::attached(hook, target)?;
        Ok(self.id(hook).is_some_and(|own| attached.contains(&own)))
    }

    /// Ids of all programs at `hook` of `target`.
    fn attached(hook: AttachType, target: &File) -> Result<Vec<u32>, RedirectError> {
        let attached = attached::attached(target, hook).map_err(|source| RedirectError::Io {
            what: format!("cannot list the programs attached to {}", hook.name()),
            source,
        })?;
        Ok(attached.ids)
    }

    /// Reports whether somebody else steers connections too: a server, a dead one's program, or one of another kind.
    pub(super) fn have_others(&self, netns: &File) -> Result<bool, RedirectError> {
        let own = self.id(AttachType::SkLookup);
        Ok(Self::attached(AttachType::SkLookup, netns)?.iter().any(|id| Some(*id) != own))
    }

    /// Hooks that lack our programs.
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
        self.ebpf.program(hook.program())?.info().ok().map(|info| info.id())
    }
}

fn program<'a, P>(ebpf: &'a mut Ebpf, hook: AttachType) -> Result<&'a mut P, RedirectError>
where
    &'a mut P: TryFrom<&'a mut Program>,
{
    ebpf.program_mut(hook.program()).and_then(|program| program.try_into().ok()).ok_or_else(|| {
        RedirectError::Load { program: hook.program(), reason: "the object has no such program".into() }
    })
}

fn load_error(program: &'static str, error: &ProgramError) -> RedirectError {
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

fn attach_error(hook: AttachType, cgroup: &Path, error: &(dyn std::error::Error + 'static)) -> RedirectError {
    let program = hook.program();
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

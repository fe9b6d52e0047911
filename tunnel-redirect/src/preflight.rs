//! Requirements of this host, checked before anything is loaded: kernel version and features, capabilities, IPv6.

use std::fs;
use std::io;

use aya::programs::{ProgramError, ProgramType};
use aya::sys::{BpfHelper, is_helper_supported, is_program_supported};
use aya::util::KernelVersion;
use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, Pid, capabilities};
use tunnel_runtime::kernel::release;

use super::config::RedirectConfig;
use super::error::RedirectError;

/// Advice if bpf(2) is refused despite the capabilities.
pub(super) const PERMIT: &str = "raise RLIMIT_MEMLOCK (`ulimit -l unlimited`, systemd: LimitMEMLOCK=infinity) on kernels before \
                                 5.11; otherwise a seccomp or LSM policy forbids bpf(2), or the capabilities are those of a \
                                 user namespace only (a rootless container): allow it, or run on the host";
/// Minimum supported kernel.
const FLOOR: KernelVersion = KernelVersion::new(5, 10, 0);

/// Features that depend on the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    /// `bpf_set_retval` (6.1): fail at connect().
    pub(super) set_retval: bool,
    /// `bpf_sk_lookup.ingress_ifindex` (5.17).
    pub(super) ingress_ifindex: bool,
}

/// Probes the kernel's features; an error names the missing one.
pub(super) fn probe(config: &RedirectConfig) -> Result<Features, RedirectError> {
    let lacks = |feature: &'static str| RedirectError::Kernel { release: release(), feature };
    let version = KernelVersion::current().map_err(|_| lacks("readable version"))?;
    if version < FLOOR {
        return Err(lacks("sk_lookup together with getpeername hooks (Linux 5.10)"));
    }
    let missing = missing_capabilities();
    if !missing.is_empty() {
        return Err(RedirectError::Capabilities { missing });
    }
    raise_memlock();
    for (kind, feature) in [
        (ProgramType::CgroupSockAddr, "cgroup socket address programs (CONFIG_CGROUP_BPF)"),
        (ProgramType::SkLookup, "sk_lookup programs (CONFIG_NET, Linux 5.9)"),
    ] {
        match is_program_supported(kind) {
            Ok(false) => return Err(lacks(feature)),
            Err(ProgramError::SyscallError(error))
                if error.io_error.kind() == io::ErrorKind::PermissionDenied =>
            {
                let operation = format!("loading a program ({})", error.io_error);
                return Err(RedirectError::NotPermitted { operation, fix: PERMIT });
            }
            // If the probe itself fails otherwise, loading decides.
            Ok(true) | Err(_) => {}
        }
    }
    // Distributions backport the helper, so the probe decides and not the version.
    let helper = is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval);
    Ok(Features {
        set_retval: config.fail_at_connect && helper.unwrap_or(false),
        ingress_ifindex: version >= KernelVersion::new(5, 17, 0),
    })
}

/// Raises RLIMIT_MEMLOCK: kernels before 5.11 charge programs and maps to the process's locked memory.
pub(super) fn raise_memlock() {
    let modern = KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(5, 11, 0));
    let unlimited = getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(soft, _)| soft == libc::RLIM_INFINITY);
    if !modern
        && !unlimited
        && setrlimit(Resource::RLIMIT_MEMLOCK, libc::RLIM_INFINITY, libc::RLIM_INFINITY).is_err()
    {
        tracing::warn!(
            "failed to raise RLIMIT_MEMLOCK, set it if the maps do not fit (systemd: LimitMEMLOCK=infinity)"
        );
    }
}

/// Required capabilities that are not effective. CAP_SYS_ADMIN substitutes for CAP_BPF.
fn missing_capabilities() -> Vec<&'static str> {
    lacking(&[
        ("CAP_BPF", CapabilitySet::BPF | CapabilitySet::SYS_ADMIN),
        ("CAP_NET_ADMIN", CapabilitySet::NET_ADMIN),
    ])
}

/// True if the verifier treats this process's programs as strictly as an unprivileged user's.
pub(super) fn lacks_perfmon() -> bool {
    !lacking(&[("CAP_PERFMON", CapabilitySet::PERFMON | CapabilitySet::SYS_ADMIN)]).is_empty()
}

/// The names of those of which none is effective.
fn lacking(needed: &[(&'static str, CapabilitySet)]) -> Vec<&'static str> {
    // If they are unreadable, the system calls report what is missing.
    let Ok(has) = capabilities(None) else { return Vec::new() };
    needed.iter().filter(|(_, any)| !has.effective.intersects(*any)).map(|(name, _)| *name).collect()
}

/// Reports whether a process may have programs attached: it is root, or has CAP_NET_ADMIN. Nothing is known of the
/// capabilities of a process in a PID namespace that is not visible here (pid 0).
pub(super) fn may_redirect(pid: i32, uid: u32) -> bool {
    let has = || capabilities(Some(Pid::from_raw(pid)?)).ok();
    uid == 0 || has().is_some_and(|has| has.effective.contains(CapabilitySet::NET_ADMIN))
}

/// Returns the reason if IPv6 destinations cannot be redirected.
pub(super) fn ipv6_usable() -> Result<(), &'static str> {
    match fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6") {
        Ok(value) if value.trim() == "0" => Ok(()),
        Ok(_) => Err("net.ipv6.conf.lo.disable_ipv6 is set"),
        Err(_) => Err("the kernel has no IPv6"),
    }
}

//! What the redirect needs of this host, one by one: the loader's own checks, and `doctor`'s later.

use std::fs;

use nix::sys::utsname::uname;

use super::cgroup::Cgroup;
use super::query::{self, Hook};
use super::{RedirectConfig, RedirectError, load};

/// Outcome of one check.
#[derive(Clone, Debug)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// What was found, or what is wrong and how to mend it.
    pub outcome: Result<String, String>,
}

/// Looks at everything that [`Redirect::start`](super::Redirect::start) needs, without changing anything.
pub fn checks(config: &RedirectConfig) -> Vec<Check> {
    let check = |name, outcome: Result<String, RedirectError>| Check {
        name,
        outcome: outcome.map_err(|error| error.to_string()),
    };
    let mut all = vec![
        check("programs", load::embedded().map(|object| format!("embedded, {} bytes", object.len()))),
        check(
            "kernel",
            load::probe(config).map(|features| {
                let connect =
                    if features.set_retval { "fails at connect()" } else { "is accepted and reset" };
                format!("{}; a connect to a node without a tunnel {connect}", release())
            }),
        ),
        Check {
            name: "ipv6",
            outcome: Ok(match ipv6_usable() {
                Ok(()) => "on".into(),
                Err(reason) => format!("off ({reason}); IPv6 destinations are not redirected"),
            }),
        },
    ];
    let cgroup = Cgroup::find(config.cgroup.as_deref());
    if let Ok(cgroup) = &cgroup {
        let exclusive =
            Hook::CGROUP.into_iter().find_map(|hook| Some((hook, query::exclusive(&cgroup.path, hook)?)));
        all.push(Check {
            name: "other programs",
            outcome: match exclusive {
                None => Ok("none that excludes ours".into()),
                Some((hook, found)) => Err(RedirectError::Foreign {
                    hook: hook.name(),
                    program: query::program_name(found.id),
                    id: found.id,
                    path: found.path,
                }
                .to_string()),
            },
        });
    }
    all.push(check("cgroup", cgroup.map(|cgroup| cgroup.path.display().to_string())));
    all
}

/// Capabilities that are needed and not effective. CAP_SYS_ADMIN stands in for CAP_BPF.
pub(super) fn missing_capabilities() -> Vec<&'static str> {
    const NET_ADMIN: u64 = 1 << 12;
    const SYS_ADMIN: u64 = 1 << 21;
    const BPF: u64 = 1 << 39;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    // Unreadable: let the system calls themselves say it.
    let Some(effective) = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()) else {
        return Vec::new();
    };
    let mut missing = Vec::new();
    if effective & (BPF | SYS_ADMIN) == 0 {
        missing.push("CAP_BPF");
    }
    if effective & NET_ADMIN == 0 {
        missing.push("CAP_NET_ADMIN");
    }
    missing
}

/// Why IPv6 destinations cannot be redirected, if so.
pub(super) fn ipv6_usable() -> Result<(), &'static str> {
    match fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6") {
        Ok(value) if value.trim() == "0" => Ok(()),
        Ok(_) => Err("net.ipv6.conf.lo.disable_ipv6 is set"),
        Err(_) => Err("the kernel has no IPv6"),
    }
}

/// `uname -r`.
pub(super) fn release() -> String {
    uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default()
}

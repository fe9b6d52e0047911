//! Installing packages without their services: none is started, and none is enabled for the next boot.
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

use crate::cache;
use crate::command::holding_back;

/// Debian asks this program whether a service may start; 101 means no (invoke-rc.d).
const POLICY: &str = "/usr/sbin/policy-rc.d";
/// The comment distinguishes it from others' policies, which are often these lines without it.
const OURS: &str = "#!/bin/sh\n# Of Postern's cargo xtask, while it installs packages.\nexit 101\n";
/// Folder of systemd's enabled units. Debian's packages make links there themselves where no systemd runs.
const ENABLED: &str = "/etc/systemd/system";
const LOCK: &str = "/run/postern-packages.lock";

/// Runs `install`. Signals that end this process, such as Ctrl-C, do so once everything has been restored.
pub(crate) fn without_services(install: impl FnOnce() -> Result<()>) -> Result<()> {
    // One run must not remove the policy of another.
    let _lock = cache::lock(Path::new(LOCK))?;
    holding_back(&[Signal::SIGINT, Signal::SIGHUP, Signal::SIGTERM], || {
        let _no_services = NoServices::put()?;
        install()
    })
}

/// While it exists, installing a package starts no service; on drop it disables those that were enabled meanwhile.
struct NoServices {
    /// True unless the user has a policy, which has to stay.
    ours: bool,
    enabled: BTreeSet<PathBuf>,
}

impl NoServices {
    fn put() -> Result<Self> {
        let enabled = enabled(Path::new(ENABLED))?;
        let ours = match fs::read(POLICY) {
            Ok(text) => is_ours(&text),
            Err(error) if error.kind() == ErrorKind::NotFound => true,
            Err(error) => return Err(error).with_context(|| format!("reading {POLICY}")),
        };
        // Made before the file, so that a failure from here on removes that.
        let put = Self { ours, enabled };
        if ours {
            fs::write(POLICY, OURS).with_context(|| format!("writing {POLICY}"))?;
            fs::set_permissions(POLICY, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("making {POLICY} executable"))?;
        }
        Ok(put)
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        // Printing comes last: it panics where the terminal is gone.
        let disabled = disable_new(Path::new(ENABLED), &self.enabled);
        if self.ours
            && let Err(error) = fs::remove_file(POLICY)
            && error.kind() != ErrorKind::NotFound
        {
            eprintln!("xtask: remove {POLICY} yourself: {error}");
        }
        match disabled {
            Ok(units) if units.is_empty() => {}
            Ok(units) => {
                let units: Vec<_> = units.into_iter().collect();
                println!(
                    "installed, but not enabled (`systemctl enable UNIT` starts one at boot): {}",
                    units.join(" ")
                );
            }
            Err(error) => eprintln!("xtask: services of the new packages may start at boot: {error:#}"),
        }
    }
}

/// Reports whether a policy is one that a killed run has left.
fn is_ours(text: &[u8]) -> bool {
    text == OURS.as_bytes()
}

/// The links by which units are started at boot.
fn enabled(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut links = BTreeSet::new();
    for target in paths_in(folder)? {
        if matches!(extension(&target), Some("wants" | "requires")) && target.is_dir() {
            links.extend(paths_in(&target)?.into_iter().filter(|path| path.is_symlink()));
        }
    }
    Ok(links)
}

/// Paths in a folder; none if it does not exist, as where there is no systemd.
fn paths_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let reading = || format!("reading {}", folder.display());
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(reading)?,
    };
    entries.map(|entry| Ok(entry.with_context(reading)?.path())).collect()
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(OsStr::to_str)
}

/// Disables services, sockets and timers that are enabled now and were not `before`; returns their names.
fn disable_new(folder: &Path, before: &BTreeSet<PathBuf>) -> Result<BTreeSet<String>> {
    let mut units = BTreeSet::new();
    for link in new_units(before, &enabled(folder)?) {
        fs::remove_file(link).with_context(|| format!("removing {}", link.display()))?;
        units.extend(link.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    Ok(units)
}

fn new_units<'a>(before: &'a BTreeSet<PathBuf>, after: &'a BTreeSet<PathBuf>) -> Vec<&'a PathBuf> {
    let starts = |link: &&PathBuf| matches!(extension(link), Some("service" | "socket" | "timer"));
    after.difference(before).filter(starts).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn links(names: &[&str]) -> BTreeSet<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn only_new_services_sockets_and_timers_are_disabled() {
        let before = links(&["m.wants/cron.service", "m.wants/gone.service"]);
        let after = links(&[
            "m.wants/cron.service",
            "m.wants/remote-fs.target",
            "m.wants/ssh.service",
            "s.requires/ssh.socket",
            "t.wants/man-db.timer",
        ]);
        let new = links(&["m.wants/ssh.service", "s.requires/ssh.socket", "t.wants/man-db.timer"]);
        assert_eq!(new_units(&before, &after), new.iter().collect::<Vec<_>>());
        assert!(new_units(&after, &after).is_empty());
    }

    #[test]
    fn what_was_enabled_before_stays() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let link = |name: &str| symlink("/usr/lib/systemd/system/any.service", at(name)).unwrap();
        for folder in ["multi-user.target.wants", "sockets.target.wants", "ssh.service.d"] {
            fs::create_dir(at(folder)).unwrap();
        }
        link("multi-user.target.wants/cron.service");
        let before = enabled(dir.path()).unwrap();
        assert_eq!(before, BTreeSet::from([at("multi-user.target.wants/cron.service")]));

        for folder in ["multi-user.target.wants", "sockets.target.wants"] {
            link(&format!("{folder}/ssh.service"));
        }
        let others = ["sshd.service", "ssh.service.d/of-the-user.service"];
        others.iter().copied().for_each(link);
        fs::write(at("multi-user.target.wants/file.service"), "no link").unwrap();
        let disabled = disable_new(dir.path(), &before).unwrap();
        assert_eq!(disabled, BTreeSet::from(["ssh.service".to_owned()]));
        assert_eq!(enabled(dir.path()).unwrap(), before);
        assert!(others.iter().all(|name| at(name).is_symlink()));
        assert!(at("multi-user.target.wants/file.service").exists());
    }

    #[test]
    fn without_systemd_nothing_is_enabled() {
        let dir = tempfile::tempdir().unwrap();
        let none = dir.path().join("system");
        assert!(enabled(&none).unwrap().is_empty());
        assert!(disable_new(&none, &BTreeSet::new()).unwrap().is_empty());
    }

    #[test]
    fn a_policy_of_others_is_not_ours() {
        assert!(is_ours(OURS.as_bytes()));
        assert!(!is_ours(b"#!/bin/sh\nexit 101\n"));
        assert!(!is_ours(format!("{OURS}# and mine\n").as_bytes()));
    }
}

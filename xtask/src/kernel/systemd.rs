//! A machine whose first process is systemd, for the units of deploy/systemd. It has this machine's systemd and the Debian
//! units that every boot has; none of them is started on this machine itself.
use std::fs;
use std::path::Path;

use anyhow::Result;

use super::guest::Guest;
use crate::command::which;
use crate::cross::Arch;
use crate::deb_rpm::{Programs, Stage};
use crate::image::Image;

/// The init, and the name of the case.
pub(super) const INIT: &str = "init-systemd";
pub(super) const CASE: &str = "systemd";
/// The program that tests the units: `tests/units`.
pub(super) const PROGRAM: &str = "units";

/// Folder of this machine's systemd.
const FOLDER: &str = "/lib/systemd";
const SYSTEMD: &[&str] = &["systemd", "systemd-journald"];
/// Program that starts services in releases after 252.
const EXECUTOR: &str = "systemd-executor";
/// `install`, because busybox has none, and what dpkg needs.
const TOOLS: &[&str] = &[
    "dpkg",
    "dpkg-deb",
    "dpkg-query",
    "dpkg-split",
    "install",
    "journalctl",
    "ldconfig",
    "start-stop-daemon",
    "systemctl",
    "tar",
];
/// Folders in the machine with the server's package, and with a newer one.
const PACKAGES: [&str; 2] = ["/root/download", "/root/download/new"];
const UNITS: &[&str] = &[
    "basic.target",
    "local-fs.target",
    "multi-user.target",
    "network.target",
    "network-online.target",
    "paths.target",
    "shutdown.target",
    "slices.target",
    "sockets.target",
    "swap.target",
    "sysinit.target",
    "systemd-journald.service",
    "systemd-journald.socket",
    "systemd-journald-dev-log.socket",
    "timers.target",
    "umount.target",
];
/// The target that wants a unit, as Debian's links have it, and the unit.
const WANTED: &[(&str, &str)] = &[
    ("sysinit.target", "systemd-journald.service"),
    ("sockets.target", "systemd-journald.socket"),
    ("sockets.target", "systemd-journald-dev-log.socket"),
];

/// systemd calls pivot_root(2) for each service with mounts of its own, which fails on the root of an initramfs: a bind mount
/// takes its place.
const INIT_SCRIPT: &str = "\
#!/bin/sh
/bin/busybox --install -s /usr/bin 2>/dev/null
# As udev does at boot, which is not here.
/sbin/modprobe tun
/bin/busybox mount -o bind / /sysroot
cd /sysroot
/bin/busybox mount -o move /sysroot /
exec /bin/busybox chroot . /lib/systemd/systemd
";

/// The test reports its exit status, and the machine ends with it. A crash of the first process ends it too.
const MANAGER: &str = "[Manager]\nCrashReboot=yes\n";
const SERVICE: &str = "\
[Unit]
Description=The test of the units
SuccessAction=poweroff-immediate
FailureAction=poweroff-immediate

[Service]
Type=exec
Environment=HOME=/root POSTERN_UNITS_WHOLE_MACHINE=1
WorkingDirectory=/root
ExecStart=/postern/units
ExecStopPost=/bin/sh -c 'echo systemd=$$EXIT_STATUS > /dev/ttyS1'
StandardOutput=file:/dev/ttyS0
StandardError=inherit
LimitMEMLOCK=infinity
";
const TEST: &str = "postern-test.service";

/// Puts systemd and the test's service into the machine, which has the programs already.
pub(super) fn add(guest: &Guest<'_>) -> Result<()> {
    let folder = Path::new(FOLDER);
    for name in SYSTEMD {
        guest.add_tool(&folder.join(name))?;
    }
    if fs::exists(folder.join(EXECUTOR)).unwrap_or(false) {
        guest.add_tool(&folder.join(EXECUTOR))?;
    }
    for name in TOOLS {
        guest.add_tool(&which(name)?)?;
    }
    for unit in UNITS {
        guest.add_file(&format!("{FOLDER}/system/{unit}"))?;
    }
    for (target, unit) in WANTED {
        guest.link(&format!("{FOLDER}/system/{target}.wants/{unit}"), &format!("../{unit}"))?;
    }
    for folder in
        ["/sysroot", "/usr/local/bin", "/var/lib/dpkg/info", "/var/lib/dpkg/updates", "/var/log", "/var/tmp"]
    {
        guest.add_folder(folder)?;
    }
    guest.write("/var/lib/dpkg/status", "")?;
    for (folder, revision) in PACKAGES.iter().zip(1..) {
        guest.add_folder(folder)?;
        let programs = Programs {
            folder: &guest.inside("/postern")?,
            arch: Arch::HOST,
            revision,
            epoch: 0,
            documents: None,
        };
        Stage::new(Image::Server, &programs)?.deb(&guest.inside(folder)?)?;
    }
    guest.write("/etc/machine-id", "00112233445566778899aabbccddeeff\n")?;
    guest.write("/etc/hostname", "cloud-1\n")?;
    guest.write("/etc/systemd/system.conf", MANAGER)?;
    guest.link("/etc/systemd/system/default.target", &format!("{FOLDER}/system/multi-user.target"))?;
    guest.write(&format!("/etc/systemd/system/{TEST}"), SERVICE)?;
    guest.link(&format!("/etc/systemd/system/multi-user.target.wants/{TEST}"), &format!("../{TEST}"))?;
    guest.write_script(&format!("/{INIT}"), INIT_SCRIPT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_runs_the_program_and_says_how_its_case_ended() {
        assert!(SERVICE.contains(&format!("\nExecStart=/postern/{PROGRAM}\n")));
        // systemd turns `$$` into `$`, and the shell expands the variable.
        assert!(SERVICE.contains(&format!("echo {CASE}=$$EXIT_STATUS > /dev/ttyS1")));
    }

    #[test]
    fn what_is_wanted_is_there() {
        for (target, unit) in WANTED {
            assert!(UNITS.contains(target) && UNITS.contains(unit), "{target}: {unit}");
        }
    }
}

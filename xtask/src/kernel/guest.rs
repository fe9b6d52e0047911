//! The virtual machine: an initramfs of this machine's own programs, and qemu.
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use super::debian::Unpacked;
use crate::command::{output, program, run, which};
use crate::files::{copy, create, paths_in, write};

/// Programs that tests and demo run.
const TOOLS: &[&str] = &[
    "sh",
    "busybox",
    "conntrack",
    "ip",
    "ip6tables",
    "iptables",
    "ipvsadm",
    "modprobe",
    "mount",
    "nsenter",
    "prometheus",
    "prometheus-node-exporter",
    "tc",
    "umount",
    "unshare",
];
/// Folder of iptables' extensions.
const EXTENSIONS: &str = "/usr/lib/x86_64-linux-gnu/xtables";
/// Seconds after which a machine that hangs is ended.
const LIMIT: &str = "900";
/// Exit code of `timeout` after that.
pub(super) const TIMED_OUT: i32 = 124;

pub(super) struct Guest<'a> {
    kernel: &'a Unpacked,
    dir: TempDir,
}

impl<'a> Guest<'a> {
    pub(super) fn new(kernel: &'a Unpacked) -> Result<Self> {
        ensure!(
            cfg!(target_arch = "x86_64"),
            "the kernels are x86-64's, and this machine's programs are not"
        );
        let guest = Self { kernel, dir: tempfile::tempdir().context("a folder for the initramfs")? };
        for folder in
            ["usr/bin", "usr/sbin", "usr/lib/modules", "usr/lib64", "proc", "sys", "dev", "tmp", "run"]
        {
            create(&guest.root().join(folder))?;
        }
        for folder in ["etc", "root", "var", "postern"] {
            create(&guest.root().join(folder))?;
        }
        for name in ["bin", "sbin", "lib", "lib64"] {
            let link = guest.root().join(name);
            symlink(format!("usr/{name}"), &link).with_context(|| format!("linking {}", link.display()))?;
        }
        write(&guest.root().join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
        write(&guest.root().join("etc/group"), "root:x:0:\n")?;
        for tool in TOOLS {
            guest.add_tool(&which(tool)?)?;
        }
        for extension in paths_in(Path::new(EXTENSIONS))? {
            guest.add_tool(&extension)?;
        }
        let modules = guest.root().join("usr/lib/modules");
        run(program("cp").arg("--recursive").arg(&kernel.modules).arg(&modules))?;
        run(program("depmod").arg("--basedir").arg(guest.root()).arg(&kernel.version))?;
        Ok(guest)
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// Adds a program of ours, without its debug information, as `/postern/NAME`.
    pub(super) fn add_program(&self, name: &str, path: &Path) -> Result<()> {
        let to = self.root().join("postern").join(name);
        run(program("strip").arg("--strip-debug").arg("-o").arg(&to).arg(path))?;
        self.add_libraries(path)
    }

    /// Adds a file of this machine, at its own path, and the libraries that it needs.
    pub(super) fn add_tool(&self, path: &Path) -> Result<()> {
        let real = fs::canonicalize(path).with_context(|| format!("finding {}", path.display()))?;
        self.copy(&real, &real)?;
        let link = self.inside(path)?;
        if !link.exists() && link.symlink_metadata().is_err() {
            if let Some(folder) = link.parent() {
                create(folder)?;
            }
            symlink(&real, &link).with_context(|| format!("linking {}", link.display()))?;
        }
        self.add_libraries(&real)
    }

    fn add_libraries(&self, path: &Path) -> Result<()> {
        // ldd fails for a static program, which needs none.
        let listed = program("ldd").arg(path).output().context("starting ldd")?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in libraries(&listed) {
            self.copy(&library, &library)?;
        }
        Ok(())
    }

    /// Adds a file of this machine at its own path, and nothing else.
    pub(super) fn add_file(&self, path: &str) -> Result<()> {
        self.copy(Path::new(path), Path::new(path))
    }

    /// Adds a file with this text.
    pub(super) fn write(&self, path: &str, text: &str) -> Result<()> {
        write(&self.inside(path)?, text)
    }

    /// Adds a script, such as an init.
    pub(super) fn write_script(&self, path: &str, text: &str) -> Result<()> {
        self.write(path, text)?;
        let path = self.inside(path)?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, executable)
            .with_context(|| format!("making {} executable", path.display()))
    }

    pub(super) fn link(&self, path: &str, target: &str) -> Result<()> {
        let path = self.inside(path)?;
        create(path.parent().context("a link has a folder")?)?;
        symlink(target, &path).with_context(|| format!("linking {}", path.display()))
    }

    pub(super) fn add_folder(&self, path: &str) -> Result<()> {
        create(&self.inside(path)?)
    }

    fn copy(&self, from: &Path, to: &Path) -> Result<()> {
        let to = self.inside(to)?;
        if to.symlink_metadata().is_ok() {
            return Ok(());
        }
        create(to.parent().context("a file has a folder")?)?;
        copy(from, &to)
    }

    /// Where the machine's path is on this one.
    pub(super) fn inside(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = path.as_ref();
        let below = path.strip_prefix("/").with_context(|| format!("{} is not absolute", path.display()))?;
        Ok(self.root().join(below))
    }

    /// Packs everything that was added into the initramfs.
    pub(super) fn pack(&self) -> Result<()> {
        let pack = "cd \"$1\" && find . -print0 | cpio --null --create --format=newc --quiet > \"$2\"";
        output(program("sh").args(["-c", pack, "sh"]).arg(self.root()).arg(self.initramfs())).map(drop)
    }

    fn initramfs(&self) -> PathBuf {
        self.dir.path().join("initramfs")
    }

    /// Returns the command of a machine that runs this init, which ends it, and the file with the result of each case.
    pub(super) fn machine(&self, init: &str, emulated: bool) -> Result<(Command, PathBuf)> {
        let results = self.dir.path().join(format!("results-of-{init}"));
        write(&results, "")?;

        let mut machine = program("timeout");
        machine.args(["--kill-after=5", LIMIT, "qemu-system-x86_64"]);
        machine.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "q35"]);
        let accelerator: &[&str] = if emulated {
            &["-accel", "tcg,thread=multi", "-cpu", "max"]
        } else {
            &["-accel", "kvm", "-cpu", "host"]
        };
        machine.args(accelerator).args(["-smp", "2", "-m", "4096", "-serial", "stdio", "-serial"]);
        machine.arg(format!("file:{}", results.display()));
        machine.arg("-kernel").arg(&self.kernel.image).arg("-initrd").arg(self.initramfs());
        // Without its check of the timer, whose interrupts are late where processors are emulated and others need the real ones.
        let line = format!("console=ttyS0 panic=-1 oops=panic quiet no_timer_check rdinit=/{init}");
        machine.args(["-append", &line]);
        Ok((machine, results))
    }
}

/// The init that runs the cases one after the other.
pub(super) fn init_script(cases: &[(&str, String)]) -> String {
    let mut script = "\
#!/bin/sh
export PATH=/usr/sbin:/usr/bin HOME=/root
/bin/busybox --install -s /usr/bin 2>/dev/null
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
modprobe tun
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
ip link set lo up
ulimit -n 65536
cd /postern
uname -a
"
    .to_owned();
    for (name, command) in cases {
        // Writing to a String cannot fail.
        writeln!(script, "echo '=== {name}'\n( {command} )\necho '{name}='$? > /dev/ttyS1").ok();
    }
    script + "poweroff -f\n"
}

/// Files in ldd's output.
fn libraries(listed: &str) -> Vec<PathBuf> {
    let words = listed.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(|word| PathBuf::from(word.trim_end_matches(':'))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd() {
        let listed = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x2)\n\t/lib64/ld-linux-x86-64.so.2 (0x3)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(libraries(listed), expected.map(PathBuf::from));
        assert!(libraries("\tnot a dynamic executable\n").is_empty());
    }

    #[test]
    fn every_case_says_how_it_ended() {
        let script = init_script(&[("a", "./a --skip x".into()), ("b", "./b".into())]);
        assert!(script.contains("( ./a --skip x )\necho 'a='$? > /dev/ttyS1\n"), "{script}");
        assert!(script.ends_with("echo 'b='$? > /dev/ttyS1\npoweroff -f\n"), "{script}");
    }
}

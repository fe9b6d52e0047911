//! Network namespaces, made with `ip netns add` and entered with setns or `nsenter --net`. (`ip netns exec` does not
//! work here: it mounts /sys anew, which hides the cgroup hierarchy.)
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, bail};
use nix::sched::{CloneFlags, setns};

use crate::id::Id;

#[derive(Debug, Clone)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes the namespace `ID-ROLE` with its loopback up.
    pub fn create(id: &Id, role: &str) -> Result<Self> {
        let ns = Self { name: format!("{id}-{role}") };
        run(Command::new("ip").args(["netns", "add", &ns.name]))?;
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// Returns its name below /run/netns.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its file below /run/netns.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }

    /// Runs `ip ARGS` inside the namespace.
    pub fn ip(&self, args: &str) -> Result<()> {
        run(Command::new("ip").args(["-n", &self.name]).args(args.split_whitespace()))
    }

    /// Runs `iptables ARGS` inside the namespace.
    pub fn iptables(&self, args: &str) -> Result<()> {
        run(self.command("iptables").arg("-w").args(args.split_whitespace()))
    }

    /// Runs `ip6tables ARGS` inside the namespace.
    pub fn ip6tables(&self, args: &str) -> Result<()> {
        run(self.command("ip6tables").arg("-w").args(args.split_whitespace()))
    }

    /// Runs a command inside the namespace and returns its standard output.
    pub fn output(&self, program: &str, args: &str) -> Result<String> {
        let mut command = self.command(program);
        command.args(args.split_whitespace());
        let output = command.output().with_context(|| format!("running {command:?}"))?;
        if !output.status.success() {
            bail!("{command:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Writes a file below /proc/sys/net; that path refers to the writer's own namespace.
    pub fn write(&self, path: &str, value: &str) -> Result<()> {
        run(self.command("sh").args(["-c", r#"printf %s "$1" > "$0""#, path, value]))
    }

    /// Moves the calling thread into the namespace.
    pub fn enter(&self) -> Result<()> {
        let file = File::open(self.path()).with_context(|| format!("opening {}", self.path().display()))?;
        setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("entering namespace {}", self.name))
    }

    /// Runs `work` on a new thread inside the namespace. Sockets that it makes may be used from everywhere afterwards:
    /// a socket belongs to the namespace in which it was made.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.enter()?;
                work()
            });
            inside.join().map_err(|_| anyhow!("the thread in namespace {} panicked", self.name))?
        })
    }
}

/// Runs a command to its end; the error contains its standard error.
pub fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    if output.status.success() {
        return Ok(());
    }
    bail!("{command:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
}

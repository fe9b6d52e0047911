//! `service`: the program as a unit of systemd. Packages call it too: an instance of the unit that runs is replaced by another one,
//! which takes over from it.

#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use secrecy::{ExposeSecret, SecretString};

use crate::config::{ConfigError, parse, reason_of};
use crate::files::{FileError, PRIVATE_FILE, PUBLIC_FILE, read_optional, remove_if_present, replace};

/// Folders in which systemd looks for a program without a path, in its order.
const PROGRAMS: [&str; 4] = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin"];
/// Folder of the units that no package brought.
const OWN_UNITS: &str = "etc/systemd/system";
const UNITS: [&str; 3] = [OWN_UNITS, "usr/lib/systemd/system", "lib/systemd/system"];
const TOKEN: &str = "/etc/postern/token";
/// First line of a unit that [`Host::install`] has written, which it also replaces and removes.
const WRITTEN: &str = "# `service install` writes this file again: use `systemctl edit` for changes.\n";
/// Time for which a new instance has to run before another one is no longer started with the machine.
const STAYS: Duration = Duration::from_secs(3);

/// Run this program as a unit of systemd, which starts it with the machine and whenever it fails.
#[derive(Args, Clone, Debug)]
pub struct ServiceCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Clone, Debug)]
enum Action {
    /// Write the flags, a token (with mode 0600) and the unit if there is none; enable and start it. A running one is replaced.
    Install {
        /// The program's flags.
        #[arg(value_name = "FLAGS", trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        flags: Vec<SecretString>,
    },
    /// Have the program that is installed now take over from a running unit. One that was stopped stays so.
    Upgrade,
    /// Stop and disable the unit. Flags and state stay.
    Uninstall,
}

/// A program's files for systemd, from deploy/systemd.
pub struct Service {
    /// `server` or `agent`.
    pub name: &'static str,
    pub unit: &'static str,
    pub environment: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    #[error(
        "systemd does not run on this host (/run/systemd/system is missing): start {0} with its flags by the init system that does"
    )]
    NoSystemd(String),
    #[error("needs root's rights: run it with sudo")]
    NotRoot,
    #[error("systemd would {found}: `install -m 755 {this} /usr/local/bin/` and repeat this, or remove that other program", this = .this.display())]
    Elsewhere { found: String, this: PathBuf },
    #[error("{0} instances of {1} run: stop one with `systemctl stop`")]
    TooMany(usize, String),
    #[error(
        "{unit} ends soon after its start, and was stopped again: see `journalctl --unit {unit}`{before}"
    )]
    Ends { unit: String, before: &'static str },
    #[error("`{command}` failed: {said}")]
    Systemctl { command: String, said: String },
    #[error(transparent)]
    Flag(#[from] ConfigError),
    #[error(transparent)]
    File(#[from] FileError),
}

impl ServiceCommand {
    /// Does it, and prints each step. `check` fails for flags that contradict each other.
    ///
    /// # Errors
    /// Names what is missing and the mend.
    pub fn run<T: clap::Parser>(
        &self,
        service: &Service,
        check: impl FnOnce(T) -> Result<(), ConfigError>,
    ) -> Result<(), ServiceError> {
        let (root, systemctl) = (PathBuf::from("/"), PathBuf::from("systemctl"));
        let host = Host { root, systemctl, service, stays: STAYS };
        if !host.path("run/systemd/system").is_dir() {
            return Err(ServiceError::NoSystemd(service.program()));
        }
        if !nix::unistd::Uid::effective().is_root() {
            return Err(ServiceError::NotRoot);
        }
        match &self.action {
            Action::Install { flags } => {
                let flags: Vec<&str> = flags.iter().map(ExposeSecret::expose_secret).collect();
                let program = service.program();
                let words = [program.as_str()].into_iter().chain(flags.iter().copied());
                let refused = |error| ConfigError::without_value("service install", reason_of(&error));
                let (cli, _) = parse::<T>(words, "").map_err(refused)?;
                check(cli)?;
                host.finds(&this()?)?;
                host.install(&flags)
            }
            Action::Upgrade => {
                host.finds(&this()?)?;
                host.upgrade()
            }
            Action::Uninstall => host.uninstall(),
        }
    }
}

fn this() -> Result<PathBuf, FileError> {
    std::env::current_exe().map_err(|error| FileError::io(Path::new("/proc/self/exe"), error))
}

impl Service {
    fn program(&self) -> String {
        format!("tunnel-{}", self.name)
    }

    /// The name of an instance, or of the template if it is empty.
    fn unit_name(&self, instance: &str) -> String {
        format!("postern-{}@{instance}.service", self.name)
    }

    fn variable(&self) -> String {
        format!("POSTERN_{}_FLAGS=", self.name.to_uppercase())
    }
}

/// The host, or in tests a folder and a program in systemctl's place.
struct Host<'a> {
    root: PathBuf,
    systemctl: PathBuf,
    service: &'a Service,
    /// [`STAYS`]
    stays: Duration,
}

impl Host<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Fails unless systemd finds this program, by its name alone.
    fn finds(&self, this: &Path) -> Result<(), ServiceError> {
        let program = self.service.program();
        let found = PROGRAMS.iter().map(|folder| self.path(folder).join(&program)).find(|path| path.exists());
        let found = match found {
            Some(path) if fs::canonicalize(&path).is_ok_and(|path| path == this) => return Ok(()),
            Some(path) => format!("start {}, not this program", path.display()),
            None => format!("not find {program}"),
        };
        Err(ServiceError::Elsewhere { found, this: this.to_owned() })
    }

    fn install(&self, flags: &[&str]) -> Result<(), ServiceError> {
        let (token, flags) = split(flags)?;
        let folder = self.path("etc/postern");
        fs::create_dir_all(&folder).map_err(|error| FileError::io(&folder, error))?;
        if let Some(token) = token {
            self.write(TOKEN, &format!("{token}\n"), PRIVATE_FILE)?;
        }
        let path = format!("/etc/postern/{}.env", self.service.name);
        let before = read_optional(&self.path(&path))?;
        let text = before.as_deref().unwrap_or(self.service.environment);
        let text = with_flags(text, &self.service.variable(), &flags)?;
        if let Some(before) = before.filter(|before| *before != text) {
            // Not printed: a proxy's password may be there.
            self.write(&format!("{path}.before"), &before, PRIVATE_FILE)?;
        }
        self.write(&path, &text, PRIVATE_FILE)?;
        self.write_unit(true)?;
        let running = self.running()?;
        let started = self.start(&running, true)?;
        println!(
            "{} now starts with the machine\n\nSee it:\n\n  {} status\n  journalctl --unit {started}",
            started.trim_end_matches(".service"),
            self.service.program()
        );
        Ok(())
    }

    fn upgrade(&self) -> Result<(), ServiceError> {
        self.write_unit(false)?;
        let running = self.running()?;
        if running.is_empty() {
            // An operator stopped it, or has not started it yet.
            println!("no {} runs: nothing is started", self.service.unit_name("*"));
            return Ok(());
        }
        let mut enabled = false;
        for unit in &running {
            enabled |= self.systemctl(&["is-enabled", "--quiet", unit]).is_ok();
        }
        self.start(&running, enabled).map(drop)
    }

    fn uninstall(&self) -> Result<(), ServiceError> {
        let (all, template) = (self.service.unit_name("*"), self.service.unit_name(""));
        self.systemctl(&["stop", &all])?;
        if UNITS.iter().any(|folder| self.path(folder).join(&template).exists()) {
            // Every instance of it.
            self.systemctl(&["disable", "--quiet", &template])?;
        }
        // There may be none.
        self.systemctl(&["reset-failed", &all]).ok();
        println!("stopped and disabled {all}");
        let own = self.path(OWN_UNITS).join(&template);
        match read_optional(&own)? {
            Some(text) if text.starts_with(WRITTEN) => {
                remove_if_present(&own)?;
                self.systemctl(&["daemon-reload"])?;
                println!("removed {}", own.display());
            }
            Some(_) => println!("{} was not written by `service install`, and stays", own.display()),
            None => {}
        }
        let name = self.service.name;
        println!("left: /etc/postern and, with keys, /var/lib/postern/{name}");
        Ok(())
    }

    /// Starts an instance that does not run. It takes over from those that do, and is enabled in their place.
    fn start(&self, running: &[String], enable: bool) -> Result<String, ServiceError> {
        let next = ('a'..='z').map(|name| self.service.unit_name(&name.to_string()));
        let next = next.into_iter().find(|unit| !running.contains(unit));
        let next = next.ok_or_else(|| ServiceError::TooMany(running.len(), self.service.unit_name("*")))?;
        self.systemctl(&["daemon-reload"])?;
        // Not `start`: it may have failed before, and be waiting for its next try.
        self.systemctl(&["restart", &next])?;
        if !self.stays(&next)? {
            // Otherwise systemd would start it again and again.
            self.systemctl(&["stop", &next])?;
            let before = if running.is_empty() { "" } else { "; the running instance was not replaced" };
            return Err(ServiceError::Ends { unit: next, before });
        }
        if enable {
            self.systemctl(&["disable", "--quiet", &self.service.unit_name("")])?;
            self.systemctl(&["enable", "--quiet", &next])?;
        }
        match running {
            [] => println!("started {next}"),
            running => println!("started {next}, which takes over from {}", running.join(", ")),
        }
        Ok(next)
    }

    /// True if the unit's program runs all the time.
    fn stays(&self, unit: &str) -> Result<bool, ServiceError> {
        let process = || self.systemctl(&["show", "--property=MainPID", unit]);
        let (since, first) = (Instant::now(), process()?);
        while since.elapsed() < self.stays {
            std::thread::sleep(self.stays / 10);
            if process()? != first {
                return Ok(false);
            }
        }
        Ok(first.trim() != "MainPID=0")
    }

    /// Writes the unit again that this has written, and the first time if `new`, unless another unit is there, such as a package's.
    fn write_unit(&self, new: bool) -> Result<(), ServiceError> {
        let unit = self.service.unit_name("");
        let own = format!("/{OWN_UNITS}/{unit}");
        let text = format!("{WRITTEN}{}", self.service.unit);
        let is_due = match read_optional(&self.path(&own))? {
            Some(present) => present.starts_with(WRITTEN) && present != text,
            None => new && !UNITS.iter().any(|folder| self.path(folder).join(&unit).exists()),
        };
        if is_due { self.write(&own, &text, PUBLIC_FILE) } else { Ok(()) }
    }

    /// Instances that run. Those that serve the last connections of a predecessor do too.
    fn running(&self) -> Result<Vec<String>, ServiceError> {
        let all = self.service.unit_name("*");
        let listed = self.systemctl(&["list-units", "--plain", "--no-legend", "--state=active", &all])?;
        Ok(listed.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
    }

    fn write(&self, path: &str, text: &str, mode: u32) -> Result<(), ServiceError> {
        replace(&self.path(path), text.as_bytes(), mode)?;
        println!("wrote {path} (mode {mode:o})");
        Ok(())
    }

    /// Returns what it prints.
    fn systemctl(&self, args: &[&str]) -> Result<String, ServiceError> {
        let failed =
            |said: String| ServiceError::Systemctl { command: format!("systemctl {}", args.join(" ")), said };
        let output = Command::new(&self.systemctl).args(args).output();
        let output = output.map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            return Err(failed(format!(
                "{}, {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            )));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Separates the token, which must not be in the command line of a process, and names the file with it instead.
fn split(flags: &[&str]) -> Result<(Option<String>, Vec<String>), ConfigError> {
    let (mut token, mut rest) = (None, Vec::new());
    let mut flags = flags.iter().copied();
    while let Some(flag) = flags.next() {
        let given = if flag == "--token" { flags.next() } else { flag.strip_prefix("--token=") };
        match given {
            Some(given) => {
                token = Some(given.trim().to_owned());
                rest.push(format!("--token-file={TOKEN}"));
            }
            // Characters at which systemd would split, expand or unquote.
            None if flag.is_empty() || flag.contains(|c: char| c.is_whitespace() || "'\"\\$".contains(c)) => {
                let reason = "blanks, quotes, \\ and $ mean something in a unit; give this flag in a file, with --config";
                // The value may be a password.
                let name = flag.split('=').next().filter(|name| name.starts_with("--"));
                return Err(ConfigError::without_value(name.unwrap_or("service install"), reason));
            }
            None if has_password(flag) => {
                let reason = "everyone on the host can read the flags of a process; give one with a password in a file, with --config";
                return Err(ConfigError::without_value(flag.split('=').next().unwrap_or_default(), reason));
            }
            None => rest.push(flag.to_owned()),
        }
    }
    Ok((token, rest))
}

/// True for a flag with a URL such as http://user:password@host.
fn has_password(flag: &str) -> bool {
    let authority = flag.split_once("://").and_then(|(_, rest)| rest.split('/').next());
    authority.is_some_and(|authority| authority.contains('@'))
}

/// The text of an environment file with these flags.
fn with_flags(text: &str, variable: &str, flags: &[String]) -> Result<String, ConfigError> {
    if let Some(line) = text.lines().find(|line| line.ends_with('\\')) {
        let reason = "the line ends with \\, which joins it with the next one: write both as one line";
        return Err(ConfigError::without_value(line.split('=').next().unwrap_or(variable), reason));
    }
    let set = format!("{variable}{}", flags.join(" "));
    let others = text.lines().filter(|line| !line.starts_with(variable));
    Ok(others.chain([set.as_str()]).map(|line| format!("{line}\n")).collect())
}

//! `service`: the program as a unit of systemd. Packages call it too: an instance of the unit that runs is replaced by another one,
//! which takes over from it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};
use secrecy::{ExposeSecret, SecretString};

use crate::config::{ConfigError, parse};
use crate::files::{FileError, PRIVATE_FILE, PUBLIC_FILE, read_optional, remove_if_present, replace};

/// Folders in which systemd looks for a program without a path, in its order.
const PROGRAMS: [&str; 4] = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin"];
/// Folder of the units that no package brought.
const OWN_UNITS: &str = "etc/systemd/system";
const UNITS: [&str; 3] = [OWN_UNITS, "usr/lib/systemd/system", "lib/systemd/system"];
const TOKEN: &str = "/etc/postern/token";

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
        "systemd does not run on this host (/run/systemd/system is missing): have what starts programs here start {0} with its flags"
    )]
    NoSystemd(String),
    #[error("needs root's rights: run it with sudo")]
    NotRoot,
    #[error("systemd would {found}: `install -m 755 {this} /usr/local/bin/` and repeat this, or remove what is not wanted", this = .this.display())]
    Elsewhere { found: String, this: PathBuf },
    #[error("{0} instances of {1} run: stop one with `systemctl stop`")]
    TooMany(usize, String),
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
        let host = Host { root: PathBuf::from("/"), systemctl: PathBuf::from("systemctl"), service };
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
                let (cli, _) = parse::<T>(words, "").map_err(|error| refused(&error))?;
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

fn refused(error: &clap::Error) -> ConfigError {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    ConfigError::without_value("service install", line.trim_start_matches("error: "))
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
        let (text, replaced) = with_flags(
            before.as_deref().unwrap_or(self.service.environment),
            &self.service.variable(),
            &flags,
        );
        self.write(&path, &text, PRIVATE_FILE)?;
        if let Some(replaced) = replaced.filter(|_| before.is_some()) {
            println!("the flags there were {replaced}");
        }
        let unit = self.service.unit_name("");
        if !UNITS.iter().any(|folder| self.path(folder).join(&unit).exists()) {
            self.write(&format!("/{OWN_UNITS}/{unit}"), self.service.unit, PUBLIC_FILE)?;
        }
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
            Some(text) if text == self.service.unit => {
                remove_if_present(&own)?;
                self.systemctl(&["daemon-reload"])?;
                println!("removed {}", own.display());
            }
            Some(_) => println!("{} is not this version's unit, and stays", own.display()),
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
            None => rest.push(flag.to_owned()),
        }
    }
    Ok((token, rest))
}

/// The text of an environment file with these flags, and the flags that were there and are not now.
fn with_flags(text: &str, variable: &str, flags: &[String]) -> (String, Option<String>) {
    let set = format!("{variable}{}", flags.join(" "));
    let (others, before): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| !line.starts_with(variable));
    let text: String = others.iter().copied().chain([set.as_str()]).map(|line| format!("{line}\n")).collect();
    let before = before.last().filter(|line| **line != set);
    (text, before.map(|line| line.trim_start_matches(variable).to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const SERVICE: Service = Service {
        name: "agent",
        unit: "[Service]\n",
        environment: "# flags\nHTTPS_PROXY=http://p\nPOSTERN_AGENT_FLAGS=--server cloud.example.org:10262\n",
    };

    /// Calls `test` with a host whose systemctl writes down its arguments, and lists the units that `running` names.
    fn on_host(running: &str, test: impl FnOnce(&Host<'_>, &dyn Fn() -> Vec<String>)) {
        let dir = tempfile::tempdir().unwrap();
        let systemctl = dir.path().join("systemctl");
        let (log, listed) = (dir.path().join("log"), dir.path().join("running"));
        fs::write(&listed, running).unwrap();
        let script = format!(
            "#!/bin/sh\ncase $1 in list-units) cat {};; is-enabled) test $3 = postern-agent@a.service;; *) echo \"$@\" >> {};; esac\n",
            listed.display(),
            log.display()
        );
        fs::write(&systemctl, script).unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir_all(dir.path().join(OWN_UNITS)).unwrap();
        let host = Host { root: dir.path().to_owned(), systemctl, service: &SERVICE };
        let calls = || {
            let text = fs::read_to_string(&log).unwrap_or_default();
            fs::remove_file(&log).ok();
            text.lines().map(str::to_owned).collect()
        };
        test(&host, &calls);
    }

    #[test]
    fn it_is_installed_once_and_again() {
        on_host("", |host, calls| {
            host.install(&["--server", "a:1", "--token", "id.secret", "--node-name=n"]).unwrap();
            let read = |path: &str| {
                let path = host.path(path);
                let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
                (fs::read_to_string(path).unwrap(), mode)
            };
            assert_eq!(read(TOKEN), ("id.secret\n".to_owned(), 0o600));
            let flags = "# flags\nHTTPS_PROXY=http://p\nPOSTERN_AGENT_FLAGS=--server a:1 --token-file=/etc/postern/token --node-name=n\n";
            assert_eq!(read("/etc/postern/agent.env"), (flags.to_owned(), 0o600));
            assert_eq!(read("/etc/systemd/system/postern-agent@.service"), ("[Service]\n".to_owned(), 0o644));
            let started = [
                "daemon-reload",
                "restart postern-agent@a.service",
                "disable --quiet postern-agent@.service",
                "enable --quiet postern-agent@a.service",
            ];
            assert_eq!(calls(), started);

            // With it running, another instance takes over. A unit that is there stays, such as a package's.
            fs::write(host.root.join("running"), "postern-agent@a.service loaded active running x\n")
                .unwrap();
            fs::write(host.path("/etc/systemd/system/postern-agent@.service"), "edited\n").unwrap();
            host.install(&["--server=b:1"]).unwrap();
            assert!(calls().contains(&"restart postern-agent@b.service".to_owned()));
            assert!(read("/etc/postern/agent.env").0.ends_with("FLAGS=--server=b:1\n"));
            host.uninstall().unwrap();
            assert_eq!(read("/etc/systemd/system/postern-agent@.service").0, "edited\n");
        });
    }

    #[test]
    fn an_upgrade_starts_nothing_that_was_stopped_and_enables_nothing_that_was_not() {
        on_host("", |host, calls| {
            host.upgrade().unwrap();
            assert_eq!(calls(), [""; 0]);
        });
        let both = "postern-agent@a.service loaded active running x\npostern-agent@b.service loaded active running x\n";
        on_host(both, |host, calls| {
            host.upgrade().unwrap();
            let calls = calls();
            assert_eq!(calls[1], "restart postern-agent@c.service");
            assert_eq!(calls[3], "enable --quiet postern-agent@c.service");
        });
        on_host("postern-agent@b.service loaded active running x\n", |host, calls| {
            host.upgrade().unwrap();
            assert_eq!(calls(), ["daemon-reload", "restart postern-agent@a.service"]);
        });
    }

    #[test]
    fn what_was_written_is_removed() {
        on_host("", |host, calls| {
            host.install(&["--server=a:1"]).unwrap();
            calls();
            host.uninstall().unwrap();
            assert!(!host.path("/etc/systemd/system/postern-agent@.service").exists());
            assert_eq!(
                calls(),
                [
                    "stop postern-agent@*.service",
                    "disable --quiet postern-agent@.service",
                    "reset-failed postern-agent@*.service",
                    "daemon-reload"
                ]
            );
            // A second time, and where it never was.
            host.uninstall().unwrap();
            assert_eq!(calls().len(), 2);
        });
    }

    #[test]
    fn systemd_has_to_find_this_program() {
        on_host("", |host, _| {
            let (here, folder) = (host.root.join("tunnel-agent"), host.path("usr/local/bin"));
            fs::write(&here, "").unwrap();
            let error = host.finds(&here).unwrap_err().to_string();
            assert!(error.contains("not find tunnel-agent") && error.contains("install -m 755 /"), "{error}");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("tunnel-agent"), "another").unwrap();
            assert!(host.finds(&here).unwrap_err().to_string().contains("not this program"));
            host.finds(&fs::canonicalize(folder.join("tunnel-agent")).unwrap()).unwrap();
        });
    }

    #[test]
    fn flags_that_systemd_would_change_are_refused() {
        for flag in ["--a=b c", "--a=$B", "--a='b'", "--a=\"", "--a=\\", "--a=b\nC=d", ""] {
            let error = split(&[flag]).unwrap_err().to_string();
            let key = if flag.is_empty() { "service install" } else { "--a" };
            assert!(error.starts_with(&format!("{key}: blanks")) && error.contains("--config"), "{error}");
        }
        let (token, rest) = split(&["--token= a.b "]).unwrap();
        assert_eq!((token.as_deref(), rest.len()), (Some("a.b"), 1));
    }

    #[test]
    fn a_systemctl_that_fails_is_named_with_what_it_said() {
        on_host("", |host, _| {
            fs::write(&host.systemctl, "#!/bin/sh\necho masked >&2; exit 1\n").unwrap();
            let error = host.upgrade().unwrap_err().to_string();
            assert!(
                error.starts_with("`systemctl list-units ") && error.ends_with("exit status: 1, masked"),
                "{error}"
            );
        });
    }
}

//! Parts of a bundle that describe the host.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::archive::{MAX_PART, Part, STANDARD};
use crate::tool_output;

/// Bytes kept of a log: one more than a part holds, which shows that the part was cut.
const END: usize = MAX_PART + 1;
/// Number of journal lines.
const LINES: &str = "20000";
const ELSEWHERE: &str = "in a cluster: `kubectl -n kube-system logs POD`, or name a file with --log";

const FILES: [&str; 16] = [
    "/proc/version",
    "/etc/os-release",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/self/limits",
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/proc/net/dev",
    "/proc/net/sockstat",
    "/proc/net/snmp",
    "/proc/net/netstat",
    "/proc/sys/net/ipv4/tcp_rmem",
    "/proc/sys/net/ipv4/tcp_wmem",
    "/proc/sys/net/ipv4/tcp_allowed_congestion_control",
    "/proc/sys/net/ipv4/tcp_mtu_probing",
];

/// Commands for the network part. An image may lack them.
const COMMANDS: [(&str, &[&str]); 7] = [
    ("ip", &["address"]),
    ("ip", &["route", "show", "table", "all"]),
    ("ss", &["-tlnp"]),
    ("iptables-save", &[]),
    ("nft", &["list", "ruleset"]),
    ("bpftool", &["net"]),
    ("timedatectl", &[]),
];

pub(super) fn kernel() -> Part {
    let mut text = String::new();
    for path in FILES {
        // Writing to a String never fails.
        let _ = match fs::read_to_string(path) {
            Ok(content) => writeln!(text, "==> {path}\n{content}"),
            Err(error) => writeln!(text, "==> {path}\n({error})\n"),
        };
    }
    Part::new("kernel.txt", "kernel, limits, mounts, network counters", Ok(text))
}

pub(super) async fn network() -> Part {
    let mut text = String::new();
    for (program, args) in COMMANDS {
        let shown = [&[program][..], args].concat().join(" ");
        let _ = match tool_output(program, args).await {
            Ok(out) => writeln!(text, "==> {shown}\n{out}"),
            Err(error) => writeln!(text, "==> {shown}\n({error})\n"),
        };
    }
    Part::new("network.txt", "addresses, routes, listeners and rules of this host", Ok(text))
}

/// Returns the ends of these log files or, without files, of the journal of these systemd units.
pub(super) async fn logs(files: &[PathBuf], units: &str) -> Vec<Part> {
    let part = |(number, file): (usize, &PathBuf)| {
        let (read, what) = if file.as_os_str() == STANDARD {
            (end_of(io::stdin().lock()), "the log from standard input".to_owned())
        } else {
            (end_of_file(file), format!("the end of {}", file.display()))
        };
        let text = read.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let text = text.map_err(|error| format!("--log={}: {error}", file.display()));
        Part::new(format!("log-{}.txt", number + 1), what, text)
    };
    if !files.is_empty() {
        return files.iter().enumerate().map(part).collect();
    }
    let args = ["--no-pager", "--output=short-iso", "--lines", LINES, "--unit", units];
    let journal = match tool_output("journalctl", &args).await {
        Ok(text) if text.lines().all(|line| line.starts_with("-- ")) => {
            Err(format!("the journal has nothing of {units}; {ELSEWHERE}"))
        }
        Ok(text) => Ok(text),
        Err(error) => Err(format!("journalctl: {error}; {ELSEWHERE}")),
    };
    vec![Part::new("log.txt", format!("the journal of {units}"), journal)]
}

fn end_of_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let skipped = file.metadata()?.len().saturating_sub(END as u64);
    // A pipe has length 0; it cannot seek.
    if skipped > 0 {
        file.seek(SeekFrom::Start(skipped))?;
    }
    end_of(file)
}

/// Reads the last bytes of a log, which may be larger than memory.
fn end_of(mut log: impl Read) -> io::Result<Vec<u8>> {
    let mut end = Vec::new();
    while log.by_ref().take(END as u64).read_to_end(&mut end)? > 0 {
        end.drain(..end.len().saturating_sub(END));
    }
    Ok(end)
}

/// Lists the names, sizes and modes of the files in the state directory; never their content.
pub(super) fn state_directory(dir: &Path) -> Part {
    let mut text = String::new();
    let listed = list(dir, &mut text);
    let listed = listed.map_err(|error| format!("--state-dir={}: {error}", dir.display()));
    let what = "names, modes and sizes of the files in the state directory";
    Part::new("state-directory.txt", what, listed.map(|()| text))
}

fn list(dir: &Path, text: &mut String) -> io::Result<()> {
    let mut entries = fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let metadata = match entry.metadata() {
            // The running program replaces its files.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        let mode = metadata.permissions().mode() & 0o7777;
        let _ = writeln!(text, "{mode:04o} {:>10} {}", metadata.len(), entry.path().display());
        if metadata.is_dir() {
            list(&entry.path(), text)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_log_the_end_is_kept() {
        let mut log = b"a line\n".repeat(3 * MAX_PART / 7);
        log.extend(b"the last\n");
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &log).unwrap();
        for end in [end_of(&log[..]).unwrap(), end_of_file(file.path()).unwrap()] {
            assert!(end.len() == END && end.ends_with(b"a line\nthe last\n"), "{}", end.len());
        }
        fs::write(file.path(), "the last\n").unwrap();
        assert_eq!(end_of_file(file.path()).unwrap(), b"the last\n");
        assert_eq!(end_of(&log[..END]).unwrap(), log[..END]);
    }
}

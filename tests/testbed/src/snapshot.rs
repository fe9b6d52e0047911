//! The state of a run's hosts at the moment at which something is wrong: a failed scenario's folder has it beside the logs.
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::id::Id;
use crate::{maps, sweep};

/// Name of the folder in the run's folder.
pub(crate) const FOLDER: &str = "state";

/// The run of this process.
static RUN: OnceLock<Id> = OnceLock::new();

/// Names the run that this process works for.
pub(crate) fn of_this_process(id: &Id) {
    RUN.get_or_init(|| id.clone());
}

/// Takes one of this process's run, if it has one. A later one replaces it.
pub(crate) fn take_here() {
    if let Some(id) = RUN.get() {
        take(id);
    }
}

/// Writes a file for each host: addresses, routes, sockets, the status of Postern's programs, and the entries of their maps. What
/// cannot be read is named in there: a snapshot must not hide the failure that it is for.
pub fn take(id: &Id) {
    let folder = id.dir().join(FOLDER);
    if fs::create_dir_all(&folder).is_err() {
        return;
    }
    for (name, namespace) in sweep::namespaces(id) {
        fs::write(folder.join(format!("{name}.txt")), of_host(&namespace)).ok();
    }
}

fn of_host(namespace: &Path) -> String {
    let mut text = String::new();
    for line in [
        "ip -brief address",
        "ip route show table all",
        "ss -Htunapio exclude time-wait",
        // Segments that the kernel dropped, and why.
        "cat /proc/net/netstat /proc/net/sockstat /proc/net/softnet_stat",
    ] {
        text.push_str(&run(namespace, line));
    }
    let listeners = run(namespace, "ss -Htlnp");
    for (admin, pid) in listeners.lines().filter_map(admin) {
        text.push_str(&run(namespace, &format!("curl -sS --max-time 2 http://{admin}/status")));
        // Writing to a String cannot fail.
        writeln!(text, "$ BPF maps of process {pid}\n{:?}\n", maps::entries(pid)).ok();
    }
    text
}

/// Admin listeners of servers and agents.
const ADMIN: [&str; 3] = ["127.0.0.1:10265", "127.0.0.1:11265", "127.0.0.1:10266"];

/// Address and process of an admin listener, from its line.
fn admin(line: &str) -> Option<(&str, u32)> {
    let address = line.split_whitespace().nth(3).filter(|address| ADMIN.contains(address))?;
    let (_, rest) = line.split_once("\",pid=")?;
    Some((address, rest.split(',').next()?.parse().ok()?))
}

fn run(namespace: &Path, line: &str) -> String {
    let output =
        Command::new("nsenter").arg(format!("--net={}", namespace.display())).args(line.split(' ')).output();
    match output {
        Ok(output) => {
            let (said, errors) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            format!("$ {line}\n{said}{errors}\n")
        }
        Err(error) => format!("$ {line}\n{error}\n"),
    }
}

/// Files of the last snapshot.
pub(crate) fn files(dir: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(dir.join(FOLDER)).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_admin_pages_are_asked() {
        let line = |address: &str| {
            format!("LISTEN 0 128 {address} 0.0.0.0:* users:((\"tunnel-server\",pid=7,fd=9))")
        };
        assert_eq!(admin(&line("127.0.0.1:10265")), Some(("127.0.0.1:10265", 7)));
        for other in [line("0.0.0.0:10265"), line("127.0.0.1:10264"), "nonsense".to_owned()] {
            assert_eq!(admin(&other), None);
        }
    }
}

//! Gets the rules of this host.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::model::Ruleset;
use super::{iptables, kernel, nft};

const NFT: &str = "nft";
const DEADLINE: Duration = Duration::from_secs(20);
/// Those of both back ends: a host may have rules in each.
const TOOLS: [(&str, &[&str], Parse); 5] = [
    ("iptables-save", &[], iptables::parse),
    ("ip6tables-save", &[], iptables::parse),
    ("iptables-legacy-save", &[], iptables::parse),
    ("ip6tables-legacy-save", &[], iptables::parse),
    (NFT, &["list", "ruleset"], nft::parse),
];

type Parse = fn(&str) -> Ruleset;

/// The rules, and what they were read with.
#[derive(Default)]
pub(crate) struct Rules {
    pub(crate) all: Vec<Ruleset>,
    pub(crate) with: Vec<String>,
    /// Why there may be more, and how to have them judged.
    pub(crate) unread: Option<String>,
}

/// Reads them with the host's tools and from the kernel, or from files with the tools' output. `dir` is one that a pod and its host
/// have in common.
///
/// # Errors
/// Why there are none to judge.
pub(crate) async fn read(files: &[PathBuf], dir: &Path) -> Result<Rules, String> {
    let mut rules = Rules::default();
    if !files.is_empty() {
        for file in files {
            let text =
                std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            rules.add(&file.display().to_string(), &text, parser_of(&text));
        }
        return Ok(rules);
    }
    let mut failed = Vec::new();
    for (tool, args, parse) in TOOLS {
        let mut command = Command::new(tool);
        command.args(args).stdin(Stdio::null()).kill_on_drop(true);
        match tokio::time::timeout(DEADLINE, command.output()).await {
            Ok(Ok(output)) if output.status.success() => {
                rules.add(tool, &String::from_utf8_lossy(&output.stdout), parse);
            }
            Ok(Ok(output)) => {
                let said = String::from_utf8_lossy(&output.stderr);
                failed.push(format!("{tool}: {}", said.lines().next().unwrap_or("failed")));
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Ok(Err(error)) => failed.push(format!("{tool}: {error}")),
            Err(_) => failed.push(format!("{tool}: no end within {} s", DEADLINE.as_secs())),
        }
    }
    let tools = !rules.with.is_empty();
    if !rules.with.iter().any(|with| with == NFT) {
        let read = tokio::task::spawn_blocking(kernel::read).await.map_err(io::Error::other);
        match read.flatten() {
            Ok(found) => rules.add_unseen("the kernel", found),
            Err(error) => failed.push(format!("the kernel: {error}")),
        }
    }
    if rules.with.is_empty() {
        return Err(format!(
            "{}; {}",
            failed.join("; "),
            by_files(["iptables-save", "nft list ruleset"], dir)
        ));
    }
    if !tools {
        let [v4, v6] = [4, 6].map(|version| legacy_tables(version).unwrap_or_default());
        rules.unread = unread(&v4, &v6, dir);
    }
    Ok(rules)
}

/// The tables of the legacy iptables that this network namespace has.
fn legacy_tables(version: u8) -> io::Result<String> {
    std::fs::read_to_string(match version {
        4 => "/proc/net/ip_tables_names",
        _ => "/proc/net/ip6_tables_names",
    })
}

/// `v4` and `v6` have the names of tables, one a line.
fn unread(v4: &str, v6: &str, dir: &Path) -> Option<String> {
    let of = |version, names: &str| {
        let names = names.lines().filter(|name| matches!(*name, "nat" | "filter"));
        names.map(|name| format!("{version} {name}")).collect::<Vec<_>>()
    };
    let tables = [of("ip", v4), of("ip6", v6)].concat();
    let how = by_files(["iptables-legacy-save", "ip6tables-legacy-save"], dir);
    (!tables.is_empty()).then(|| {
        format!(
            "only the legacy iptables can read its tables {}, and it is not here; {how}",
            tables.join(", ")
        )
    })
}

/// The commands with which others read the rules for this program.
fn by_files(tools: [&str; 2], dir: &Path) -> String {
    let file = |number: usize| dir.join(format!("rules-{number}")).display().to_string();
    let (first, second) = (file(1), file(2));
    format!(
        "on the host: `{} > {first}; {} > {second}`, then here `tunnel-server doctor --rules {first} --rules {second}`",
        tools[0], tools[1]
    )
}

fn parser_of(text: &str) -> Parse {
    let nft = text.lines().any(|line| line.starts_with("table "));
    if nft { nft::parse } else { iptables::parse }
}

impl Rules {
    fn add(&mut self, with: &str, text: &str, parse: Parse) {
        self.all.push(parse(text));
        self.with.push(with.to_owned());
    }

    /// Adds the tables that no tool has shown.
    fn add_unseen(&mut self, with: &str, mut found: Ruleset) {
        let seen: BTreeSet<&String> =
            self.all.iter().flat_map(|rules| rules.chains.keys().map(|(table, _)| table)).collect();
        found.chains.retain(|(table, _), _| !seen.contains(table));
        self.all.push(found);
        self.with.push(with.to_owned());
    }

    /// The rules in a file's text.
    #[cfg(test)]
    pub(super) fn of(path: &std::path::Path, text: &str) -> Self {
        let mut rules = Self::default();
        rules.add(&path.display().to_string(), text, parser_of(text));
        rules
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_legacy_iptables_are_left_to_it() {
        let dir = Path::new("/state");
        assert_eq!(unread("", "", dir), None);
        assert_eq!(unread("mangle\nraw\n", "", dir), None, "they neither rewrite nor filter what comes in");
        let text = unread("filter\nnat\n", "filter\n", dir).unwrap();
        assert!(text.contains("its tables ip filter, ip nat, ip6 filter,"), "{text}");
        let command = "`iptables-legacy-save > /state/rules-1; ip6tables-legacy-save > /state/rules-2`";
        assert!(text.contains(command), "{text}");
        assert!(
            text.ends_with("`tunnel-server doctor --rules /state/rules-1 --rules /state/rules-2`"),
            "{text}"
        );
    }

    #[test]
    fn what_a_tool_has_shown_is_not_judged_twice() {
        let mut rules = Rules::default();
        rules.add("iptables-save", "*nat\n:OUTPUT ACCEPT [0:0]\n", iptables::parse);
        let mut found = Ruleset::default();
        found.chain("ip nat", "OUTPUT");
        found.chain("inet mine", "out");
        rules.add_unseen("the kernel", found);
        let tables: Vec<_> = rules.all[1].chains.keys().map(|(table, _)| table.as_str()).collect();
        assert_eq!(tables, ["inet mine"]);
    }
}

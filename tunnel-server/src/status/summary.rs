//! Versions of servers and agents, and the nodes without a tunnel, in lines that `kubectl postern` reads.

use std::collections::BTreeMap;

use tunnel_runtime::text::harmless;

use super::merged::nodes;
use super::model::StatusReport;
use crate::runtime::role::Role;

/// Maximum number of names behind a version.
const MAX_NAMES: usize = 50;

const SERVER: &str = "tunnel-server";

type Names = Vec<String>;

/// Formats the reports as these lines; summary.txt has examples:
///
/// * `PROGRAM VERSION: COUNT` for each version. One that is not the servers' newest also has names, 50 at most.
/// * `skew: …` for each version that is not the servers' newest, with what to update.
/// * `nodes: N of M connected`
/// * `without a tunnel: NAME…`: all these nodes, if there are any.
pub fn summary(reports: &[StatusReport]) -> String {
    let reports: Vec<&StatusReport> = reports.iter().collect();
    let mut programs: BTreeMap<(&str, &str), Names> = BTreeMap::new();
    for report in &reports {
        let program = match report.role {
            Role::Server => SERVER,
            Role::Redirector => "tunnel-redirector",
        };
        programs.entry((program, &report.version)).or_default().push(report.server_id.clone());
    }
    let nodes = nodes(&reports);
    let (mut down, mut count) = (Names::new(), nodes.len());
    for (name, (_, node)) in &nodes {
        match &node.session {
            Some(session) => {
                let same = programs.entry(("tunnel-agent", &session.agent_version)).or_default();
                same.push(name.to_string());
            }
            // Not an edge node, and shown only because its agent was here.
            None if !node.in_inventory => count -= 1,
            None if node.via.is_empty() => down.push(name.to_string()),
            None => {}
        }
    }
    let mut text = String::new();
    let newest = programs.keys().filter(|(program, _)| *program == SERVER).map(|(_, version)| *version);
    let newest = newest.max_by_key(|version| (parts(version), is_release(version))).unwrap_or_default();
    for ((program, version), names) in &programs {
        let who = if *version == newest { String::new() } else { format!(" ({})", first(names)) };
        text += &harmless(&format!("{program} {version}: {}{who}", names.len()));
        text.push('\n');
    }
    for line in skew(&programs, newest) {
        text += &format!("skew: {}\n", harmless(&line));
    }
    text += &format!("nodes: {} of {count} connected\n", count - down.len());
    if !down.is_empty() {
        text += &format!("without a tunnel: {}\n", harmless(&down.join(" ")));
    }
    text
}

fn first(names: &[String]) -> String {
    names[..names.len().min(MAX_NAMES)].join(" ")
}

/// Returns a line for each version that differs from the servers' newest one, if there is any: docs/versions.md has the rule.
fn skew(programs: &BTreeMap<(&str, &str), Names>, newest: &str) -> Vec<String> {
    let servers =
        programs.keys().filter(|(program, _)| *program == SERVER).map(|(_, version)| parts(version));
    let Some(oldest) = servers.min() else { return Vec::new() };
    let line = |((program, version), names): (&(&str, &str), &Names)| {
        let (of_it, of_newest) = (parts(version), parts(newest));
        let next = [oldest[0], oldest[1].saturating_add(1)];
        let fix = if *program != SERVER && of_it[..2] == next {
            "update the servers"
        } else if *program != SERVER && of_it[..2] > oldest[..2] {
            "not supported: update the servers first"
        } else if of_it[0] != of_newest[0] || of_it[1].saturating_add(1) < of_newest[1] {
            "not supported: update them from each minor version to the next"
        } else {
            "update them"
        };
        format!("{} {program} have version {version}, and the servers {newest}: {fix}", names.len())
    };
    programs.iter().filter(|((_, version), _)| *version != newest).map(line).collect()
}

/// Returns major, minor and patch version. Zeros stand for what is no number.
fn parts(version: &str) -> [u64; 3] {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse().unwrap_or(0));
    std::array::from_fn(|_| parts.next().unwrap_or(0))
}

/// Returns whether it is not a pre-release such as 0.2.0-rc1.
fn is_release(version: &str) -> bool {
    !version.split('+').next().is_some_and(|version| version.contains('-'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::merged::tests::{node, report, session};
    use super::*;

    fn servers(agents: &str, versions: [&str; 2]) -> Vec<StatusReport> {
        let (mut held, none) = (session(1), json!(null));
        held["agent_version"] = json!(agents);
        let one = [node("edge-1", &held, &[], None), node("edge-2", &none, &["cloud-2"], None)];
        let gone = json!({"name": "gone", "addresses": [], "in_inventory": false, "connected": false, "session": null, "last_seen_s": 5});
        let two = [
            node("edge-1", &none, &["cloud-1"], None),
            node("edge-2", &held, &[], None),
            node("edge-3", &none, &[], None),
            gone,
        ];
        let mut reports = vec![report("cloud-1", true, &one), report("cloud-2", true, &two)];
        reports.iter_mut().zip(versions).for_each(|(report, version)| report.version = version.to_owned());
        reports
    }

    #[test]
    fn a_node_counts_once_and_its_absence_is_named() {
        // The plugin's tests read the same file.
        let examples = include_str!("summary.txt").split_inclusive("\n\n");
        let texts = ["0.2.0", "0.1.0", "0.3.0"].map(|agents| summary(&servers(agents, ["0.2.0", "0.2.0"])));
        let examples: Vec<_> = examples.map(|example| example.replace("\n\n", "\n")).collect();
        assert_eq!(examples, texts);
        let many: Vec<_> = (0..60).map(|n| node(&format!("e{n}"), &json!(null), &[], None)).collect();
        let text = summary(&[report("cloud-1", true, &many)]);
        assert!(text.contains("nodes: 0 of 60 connected\n"), "{text}");
        let down = text.lines().find_map(|line| line.strip_prefix("without a tunnel: ")).unwrap();
        assert_eq!(down.split(' ').count(), 60);
    }

    #[test]
    fn skew_is_judged_by_the_documented_rule() {
        let of = |agents: &str, servers_have: [&str; 2]| {
            let text = summary(&servers(agents, servers_have));
            text.lines().filter_map(|line| line.strip_prefix("skew: ").map(str::to_owned)).collect::<Vec<_>>()
        };
        assert_eq!(of("0.2.1", ["0.2.1", "0.2.1"]), [""; 0]);
        assert_eq!(
            of("0.2.0", ["0.2.1", "0.2.1"]),
            ["2 tunnel-agent have version 0.2.0, and the servers 0.2.1: update them"]
        );
        assert_eq!(
            of("0.9.0", ["0.10.0", "0.10.0"]),
            ["2 tunnel-agent have version 0.9.0, and the servers 0.10.0: update them"]
        );
        assert!(of("0.8.0", ["0.10.0", "0.10.0"])[0].contains("not supported: update them"));
        assert!(of("0.3.0", ["0.2.0", "0.2.0"])[0].ends_with(": update the servers"));
        for ahead in ["0.4.0", "1.3.0"] {
            assert!(of(ahead, ["0.2.0", "0.2.0"])[0].contains("not supported: update the servers first"));
        }
        // Of patch versions any order is fine.
        assert!(of("0.2.9", ["0.2.0", "0.2.0"])[0].ends_with(": update them"));
        let mixed = summary(&servers("0.2.0", ["0.3.0", "0.2.0"]));
        assert!(mixed.contains("tunnel-server 0.2.0: 1 (cloud-2)\ntunnel-server 0.3.0: 1\n"), "{mixed}");
        assert_eq!(of("0.2.0", ["0.3.0", "0.2.0"]).len(), 2);
        let candidates = of("0.2.0", ["0.2.0-rc2", "0.2.0"]);
        assert_eq!(
            candidates,
            ["1 tunnel-server have version 0.2.0-rc2, and the servers 0.2.0: update them"]
        );
        assert_eq!(of("0.2.0-rc1", ["0.2.0-rc1", "0.2.0-rc1"]), [""; 0]);
        let mut alone = servers("0.2.0", ["0.1.0", "0.1.0"]);
        alone.iter_mut().for_each(|report| report.role = Role::Redirector);
        assert!(!summary(&alone).contains("skew"), "there is no server to compare with");
    }
}

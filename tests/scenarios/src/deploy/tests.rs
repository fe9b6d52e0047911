//! Checks that the documents agree with the manifests.
use std::fs;

use super::{PROGRAMS, deploy};
use crate::rights::unseen;

const DOCUMENT: &str = include_str!("../../../../docs/reference/permissions.md");

/// Manifests with roles, in the document's order.
const ROLES: [&str; 11] = [
    "base/server-rbac.yaml",
    "components/node-condition/rbac.yaml",
    "components/https-callers/rbac.yaml",
    "components/connect/rbac.yaml",
    "components/metrics/rbac.yaml",
    "components/egress-services/rbac.yaml",
    "components/konnectivity-agents/rbac.yaml",
    "base/agent-rbac.yaml",
    "components/edge-pods/rbac.yaml",
    "components/everywhere/redirector-rbac.yaml",
    "components/everywhere-metrics/rbac.yaml",
];

/// Group, resources or the path of a nonResourceURL, names, verbs and reason: the columns of the table.
type Row = [String; 5];

fn columns(text: &str) -> Vec<String> {
    serde_json::from_str::<Vec<String>>(text.trim()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Parses the rules of a manifest, by role, in the only format that ours use.
fn rules(manifest: &str) -> Vec<(String, Vec<Row>)> {
    let mut roles = Vec::new();
    for object in manifest.split("\n---\n").filter(|object| object.contains("\nrules:\n")) {
        let field = |key: &str| object.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim();
        let role = format!("{} `{}`", field("kind:"), field("  name:"));
        let mut rows: Vec<Row> = Vec::new();
        let mut why = Vec::new();
        for line in object.split_once("\nrules:\n").unwrap().1.lines() {
            let (key, value) = line.split_once(": ").unwrap_or((line, ""));
            let list = || columns(value).iter().map(|one| format!("`{one}`")).collect::<Vec<_>>().join(", ");
            match key.trim_start_matches([' ', '-']) {
                _ if line.starts_with("  # ") => why.push(line.trim_start_matches("  # ")),
                first @ ("apiGroups" | "nonResourceURLs") => {
                    assert!(!why.is_empty(), "{role}: a rule without its reason: {line}");
                    let (group, path) = match (first, value) {
                        ("nonResourceURLs", _) => (String::new(), list()),
                        (_, r#"[""]"#) => ("core".to_owned(), String::new()),
                        _ => (list(), String::new()),
                    };
                    let why = std::mem::take(&mut why).join(" ");
                    rows.push([group, path, String::new(), String::new(), why]);
                }
                "resources" => rows.last_mut().unwrap()[1] = list(),
                "resourceNames" => rows.last_mut().unwrap()[2] = list(),
                "verbs" => rows.last_mut().unwrap()[3] = columns(value).join(", "),
                _ => panic!("{role}: what is {line:?}?"),
            }
        }
        roles.push((role, rows));
    }
    roles
}

/// Parses the tables below headings that name a role.
fn tables() -> Vec<(String, Vec<Row>)> {
    let sections = DOCUMENT.split("\n### ").skip(1);
    let table = |section: &str| {
        let section = section.split("\n##").next().unwrap();
        let heading = section.lines().next().unwrap().to_owned();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
        let rows = rows.skip(1).map(|row| {
            let cells: Vec<String> = row.split('|').map(|cell| cell.trim().to_owned()).collect();
            cells.try_into().unwrap_or_else(|cells| panic!("{heading}: {cells:?}"))
        });
        (heading.clone(), rows.collect())
    };
    sections.map(table).collect()
}

#[test]
fn the_document_has_exactly_the_rules_of_the_manifests() {
    let rules = ROLES.map(|name| rules(&fs::read_to_string(deploy().join(name)).unwrap())).concat();
    assert_eq!(rules.len(), 16);
    let rendered = |roles: &[(String, Vec<Row>)]| {
        let row = |row: &Row| format!("| {} |", row.join(" | "));
        let role = |(role, rows): &(String, Vec<Row>)| {
            format!("### {role}\n{}", rows.iter().map(row).collect::<Vec<_>>().join("\n"))
        };
        roles.iter().map(role).collect::<Vec<_>>().join("\n")
    };
    let (manifests, document) = (rendered(&rules), rendered(&tables()));
    assert!(
        manifests == document,
        "docs/reference/permissions.md has\n{document}\nand the manifests\n{manifests}"
    );
}

#[test]
fn the_images_of_the_manifests_are_those_that_xtask_makes() {
    let kustomization = fs::read_to_string(deploy().join("base/kustomization.yaml")).unwrap();
    for (program, _) in PROGRAMS {
        let image =
            format!("- name: localhost/postern/{program}\n    newTag: {}\n", env!("CARGO_PKG_VERSION"));
        assert!(kustomization.contains(&image), "deploy/base/kustomization.yaml lacks {image}");
    }
    let redirector = fs::read_to_string(deploy().join("components/everywhere/kustomization.yaml")).unwrap();
    let image = format!("newTag: {}\n", env!("CARGO_PKG_VERSION"));
    assert!(redirector.contains(&image), "deploy/components/everywhere/kustomization.yaml lacks {image}");
}

#[test]
fn the_chart_installs_the_images_of_its_version() {
    let chart = fs::read_to_string(deploy().join("helm/postern/Chart.yaml")).unwrap();
    for key in ["version", "appVersion"] {
        let line = format!("\n{key}: {}\n", env!("CARGO_PKG_VERSION"));
        assert!(chart.contains(&line), "deploy/helm/postern/Chart.yaml lacks {line}");
    }
}

#[test]
fn the_document_says_which_rights_are_rarely_used() {
    let unseen = unseen();
    assert!(unseen.contains(&("signers".to_owned(), "approve".to_owned())), "{unseen:?}");
}

/// Kustomize fills in a missing namespace, but keeps one that is set.
#[test]
fn no_binding_names_a_namespace() {
    for file in ROLES.into_iter().chain(["components/kubelet-rights/rbac.yaml", "prometheus/rbac.yaml"]) {
        let text = fs::read_to_string(deploy().join(file)).unwrap();
        assert!(text.contains("subjects:") && !text.contains("namespace:"), "{file}");
    }
}

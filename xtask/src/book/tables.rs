//! Tables of metrics, boundaries, exit codes and permissions.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::cells::{cell, code};
use crate::files;

/// From the list that tests compare with the metrics that programs expose, and with those that alerts and panels ask for.
pub(super) fn metrics(json: &str) -> Result<String> {
    let groups: Value = serde_json::from_str(json).context("the list of metrics")?;
    let mut text = String::new();
    for group in groups.as_array().context("no array")? {
        let field = |of: &Value, key: &str| {
            of[key].as_str().map(str::to_owned).with_context(|| format!("{of}: no {key}"))
        };
        write!(text, "\n## {}\n\n| metric | type | unit | |\n|---|---|---|---|\n", field(group, "of")?)?;
        for metric in group["metrics"].as_array().context("no metrics")? {
            let labels: Vec<&str> =
                metric["labels"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let name = format!("{}{labels}", field(metric, "name")?);
            writeln!(
                text,
                "| {} | {} | {} | {} |",
                code(&name),
                field(metric, "type")?,
                field(metric, "unit")?,
                field(metric, "help")?
            )?;
        }
    }
    Ok(text)
}

/// From the list of boundaries with their tests, which lint compares with the sources: `area,boundary,tests,missing in`.
pub(super) fn boundaries(csv: &str) -> Result<String> {
    let (mut text, mut last) = (String::new(), "");
    for row in csv.lines().skip(1) {
        let cells = row.split_once(',').and_then(|(area, rest)| {
            let (boundary, rest) = match rest.strip_prefix('"') {
                Some(quoted) => quoted.split_once("\",")?,
                None => rest.split_once(',')?,
            };
            let (tests, missing) = rest.split_once(',')?;
            Some((area, boundary, tests, missing))
        });
        let (area, boundary, tests, missing) = cells.with_context(|| format!("not four cells: {row}"))?;
        if area != last {
            write!(text, "\n### {area}\n\n| boundary | tests | |\n|---|---|---|\n")?;
            last = area;
        }
        writeln!(
            text,
            "| {} | {} | {missing} |",
            cell(boundary),
            quoted(tests.split(' ').map(str::to_owned))
        )?;
    }
    Ok(text)
}

/// From the constants of `mod exit`.
pub(super) fn exit_codes(source: &str) -> Result<String> {
    let (_, module) = source.split_once("pub mod exit {\n").context("no module of exit codes")?;
    let (module, _) = module.split_once("\n}\n").context("the module has no end")?;
    let mut text = "\n| code | |\n|---|---|\n".to_owned();
    let (mut comment, mut codes) = (Vec::new(), 0);
    for line in module.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("/// ") {
            comment.push(words);
        } else if let Some((_, value)) = line.split_once(": u8 = ") {
            writeln!(
                text,
                "| {} | {} |",
                value.trim_end_matches(';'),
                cell(&std::mem::take(&mut comment).join(" "))
            )?;
            codes += 1;
        }
    }
    ensure!(codes > 2, "only {codes} exit codes were found");
    Ok(text)
}

/// From the roles in deploy/base and its components; a comment above each rule says why it is there.
pub(super) fn permissions(deploy: &Path) -> Result<String> {
    let mut text = String::new();
    for (folder, file) in roles(deploy)? {
        let manifest = files::text(&file)?;
        text += &of_manifest(&manifest, &folder).with_context(|| file.display().to_string())?;
    }
    ensure!(!text.is_empty(), "no roles below {}", deploy.display());
    Ok(text)
}

/// Returns manifests with roles, with their component's name or none: the base first.
fn roles(deploy: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut folders = Vec::new();
    for path in files::paths_in(&deploy.join("components"))? {
        folders.push((files::file_name(&path), path));
    }
    folders.push((String::new(), deploy.join("base")));
    let mut found = Vec::new();
    for (name, folder) in folders {
        for path in files::paths_in(&folder)? {
            let text = files::text(&path)?;
            if text.contains("\nrules:\n")
                && text.lines().any(|line| matches!(line, "kind: ClusterRole" | "kind: Role"))
            {
                found.push((name.clone(), path));
            }
        }
    }
    // The server's roles stand before the agent's, which most readers need less.
    found.sort_by_key(|(name, path)| (name.clone(), !path.ends_with("server-rbac.yaml"), path.clone()));
    Ok(found)
}

/// Reads the only format of rules that the manifests have.
fn of_manifest(manifest: &str, component: &str) -> Result<String> {
    let mut text = String::new();
    for object in manifest.split("\n---\n").filter(|object| object.contains("\nrules:\n")) {
        let field = |key: &str| {
            let value = object.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
            value.with_context(|| format!("a role without {key:?}"))
        };
        write!(text, "\n## {} `{}`\n", field("kind:")?, field("  name:")?)?;
        if !component.is_empty() {
            write!(text, "\nOnly with the component `{component}`.\n")?;
        }
        text += "\n| resources | verbs | why |\n|---|---|---|\n";
        let rules = object.split_once("\nrules:\n").map_or("", |(_, rules)| rules);
        let (mut rows, mut why, mut group) = (Vec::<[String; 3]>::new(), Vec::new(), String::new());
        for line in rules.lines() {
            if let Some(words) = line.strip_prefix("  # ") {
                why.push(words);
                continue;
            }
            let (key, value) = line.split_once(": ").unwrap_or((line, ""));
            let names = list(value)?;
            let key = key.trim_start_matches([' ', '-']);
            if let "apiGroups" | "nonResourceURLs" = key {
                ensure!(!why.is_empty(), "a rule without its reason: {line}");
                rows.push([String::new(), String::new(), cell(&std::mem::take(&mut why).join(" "))]);
            }
            let [resources, verbs, _] =
                rows.last_mut().with_context(|| format!("no rule begins before {line:?}"))?;
            match key {
                "apiGroups" => group = names.concat(),
                "resources" => *resources = quoted(names.iter().map(|name| qualified(name, &group))),
                "nonResourceURLs" => *resources = quoted(names),
                "resourceNames" => *resources += &format!(": {}", quoted(names)),
                "verbs" => *verbs = names.join(", "),
                _ => bail!("what is {line:?}?"),
            }
        }
        for row in rows {
            writeln!(text, "| {} |", row.join(" | "))?;
        }
    }
    Ok(text)
}

fn list(json: &str) -> Result<Vec<String>> {
    serde_json::from_str(json.trim()).with_context(|| format!("no list: {json}"))
}

fn quoted(names: impl IntoIterator<Item = String>) -> String {
    names.into_iter().map(|name| code(&name)).collect::<Vec<_>>().join(", ")
}

/// Returns a resource with its group, as kubectl takes it.
fn qualified(resource: &str, group: &str) -> String {
    match (group, resource.split_once('/')) {
        ("", _) => resource.to_owned(),
        (_, None) => format!("{resource}.{group}"),
        (_, Some((resource, part))) => format!("{resource}.{group}/{part}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::command::root;

    #[test]
    fn rules_become_rows() {
        let manifest = "kind: ServiceAccount\n---\nkind: Role\nmetadata:\n  name: postern:x\nrules:\n  # Reads\n  # them.\n  - apiGroups: [\"\"]\n    resources: [\"nodes\"]\n    verbs: [\"list\", \"watch\"]\n  # One.\n  - apiGroups: [\"a.b\"]\n    resources: [\"c/d\"]\n    resourceNames: [\"e\"]\n    verbs: [\"get\"]\n  # Metrics.\n  - nonResourceURLs: [\"/metrics\"]\n    verbs: [\"get\"]";
        let text = of_manifest(manifest, "one").unwrap();
        assert!(
            text.starts_with("\n## Role `postern:x`\n\nOnly with the component `one`.\n\n| resources"),
            "{text}"
        );
        let rows = "| `nodes` | list, watch | Reads them. |\n| `c.a.b/d`: `e` | get | One. |\n| `/metrics` | get | Metrics. |\n";
        assert!(text.ends_with(rows), "{text}");
        let unexplained = manifest.replace("  # Metrics.\n", "");
        let error = of_manifest(&unexplained, "").unwrap_err().to_string();
        assert_eq!(error, "a rule without its reason:   - nonResourceURLs: [\"/metrics\"]");
    }

    #[test]
    fn every_role_is_listed() {
        let text = permissions(&root().join("deploy")).unwrap();
        let roles: Vec<&str> = text.lines().filter(|line| line.starts_with("## ")).collect();
        assert_eq!(roles.len(), 16, "{roles:?}");
        assert_eq!(roles[0], "## ClusterRole `postern:tunnel-server`");
    }

    #[test]
    fn boundaries_are_tables_by_area() {
        let text = boundaries("head\nA,\"x, y\",a::b c::d,Y S\nB,z,e::f,\n").unwrap();
        let (first, second) = text.split_once("\n### B\n").unwrap();
        assert!(first.ends_with("| x, y | `a::b`, `c::d` | Y S |\n"), "{text}");
        assert!(second.ends_with("| z | `e::f` |  |\n"), "{text}");
        assert!(boundaries("head\nA,b\n").is_err());
    }

    #[test]
    fn exit_codes_have_their_meaning() {
        let source = fs::read_to_string(root().join("tunnel-runtime/src/config/mod.rs")).unwrap();
        let text = exit_codes(&source).unwrap();
        assert!(text.contains("| 1 | Failed while running. |\n"), "{text}");
        assert!(exit_codes("pub mod exit {\n}\n").is_err());
    }
}

//! The shipped roles against the API server's audit log: nothing was forbidden, and every right was used.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::control_plane::audit_log;
use postern_testbed::cluster::manifests::Manifests;
use postern_testbed::report::progress;
use postern_testbed::wait::wait_until;
use serde_json::Value;

use super::{DOCUMENT, NAMESPACE, PATIENCE, PROGRAMS};

/// One verb of one rule, on one resource and object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    account: &'static str,
    group: String,
    resource: String,
    /// Empty: any.
    name: String,
    verb: String,
}

/// Fails if a request of either program was forbidden, or if a right was never used.
pub(super) async fn check(cluster: &Cluster<'_>) -> Result<()> {
    let manifests = Manifests::render(&cluster.kubectl, "base").await?;
    let mut granted = BTreeSet::new();
    for (account, _) in PROGRAMS {
        for kind in ["ClusterRole", "Role"] {
            granted.extend(rights_of(account, manifests.object(kind, &format!("postern:{account}"))?)?);
        }
    }
    let unseen = unseen();
    let used = async || -> Result<BTreeSet<Right>> { used(&audit_log(cluster.testbed)) };
    // Some take a few seconds.
    let missing = wait_until(
        "every right to be used",
        PATIENCE,
        async || {
            let used = used().await?;
            let is_used = |right: &Right| {
                used.iter().any(|one| {
                    let name = right.name.is_empty() || right.name == one.name;
                    name && Right { name: String::new(), ..right.clone() }
                        == Right { name: String::new(), ..one.clone() }
                })
            };
            let listed = |right: &Right| unseen.contains(&(right.resource.clone(), right.verb.clone()));
            let missing = granted.iter().filter(|right| !is_used(right) && !listed(right));
            Ok(missing.cloned().collect::<Vec<_>>())
        },
        Vec::is_empty,
    );
    missing
        .await
        .context("rights that were never used: narrow the role, or list them in docs/kubernetes.md")?;
    progress(&format!("{} rights, all of them used", granted.len()));
    Ok(())
}

fn rights_of(account: &'static str, role: &Value) -> Result<Vec<Right>> {
    let list = |rule: &Value, key: &str| -> Vec<String> {
        let values = rule[key].as_array().map_or(&[][..], Vec::as_slice);
        values.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect()
    };
    let mut rights = Vec::new();
    for rule in role["rules"].as_array().with_context(|| format!("a role without rules: {role}"))? {
        let mut names = list(rule, "resourceNames");
        if names.is_empty() {
            names.push(String::new());
        }
        for group in list(rule, "apiGroups") {
            for resource in list(rule, "resources") {
                for name in &names {
                    rights.extend(list(rule, "verbs").into_iter().map(|verb| Right {
                        account,
                        group: group.clone(),
                        resource: resource.clone(),
                        name: name.clone(),
                        verb,
                    }));
                }
            }
        }
    }
    Ok(rights)
}

/// The requests of the two ServiceAccounts; a forbidden one is an error.
fn used(log: &Path) -> Result<BTreeSet<Right>> {
    let lines = fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
    let mut used = BTreeSet::new();
    // The last line may be incomplete.
    for event in lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let user = event["user"]["username"].as_str().unwrap_or_default();
        let account =
            PROGRAMS.iter().find(|(name, _)| user == format!("system:serviceaccount:{NAMESPACE}:{name}"));
        let Some((account, _)) = account else { continue };
        if event["responseStatus"]["code"] == 403 {
            bail!("{account} was forbidden: {} {}", event["verb"], event["requestURI"]);
        }
        let object = &event["objectRef"];
        let field = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let resource = match field("subresource") {
            none if none.is_empty() => field("resource"),
            subresource => format!("{}/{subresource}", field("resource")),
        };
        used.insert(Right {
            account,
            group: field("apiGroup"),
            resource,
            name: field("name"),
            verb: event["verb"].as_str().unwrap_or_default().to_owned(),
        });
    }
    ensure!(!used.is_empty(), "no request of the programs is in {}", log.display());
    Ok(used)
}

/// The rights that the document lists as unused in tests: resource and verb.
pub(super) fn unseen() -> BTreeSet<(String, String)> {
    let section =
        DOCUMENT.split("\n### ").find(|section| section.starts_with("Rights that no test sees used"));
    let items = section.unwrap_or_default().lines().filter(|line| line.starts_with("* "));
    let quoted = items.map(|line| line.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>());
    quoted.filter_map(|words| Some((words.first()?.clone(), words.get(1)?.clone()))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(verb: &str, object: &Value, code: u16) -> String {
        json!({
            "stage": "ResponseComplete",
            "verb": verb,
            "user": { "username": "system:serviceaccount:kube-system:tunnel-agent" },
            "objectRef": object,
            "requestURI": "/somewhere",
            "responseStatus": { "code": code },
        })
        .to_string()
    }

    #[test]
    fn requests_are_rights_and_a_forbidden_one_is_an_error() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let write = |text: &str| fs::write(log.path(), text).unwrap();
        let node = json!({ "resource": "nodes", "name": "edge-1", "apiVersion": "v1" });
        write(&format!("{}\n{{\"half", event("get", &node, 200)));
        let right = Right {
            account: "tunnel-agent",
            group: String::new(),
            resource: "nodes".into(),
            name: "edge-1".into(),
            verb: "get".into(),
        };
        assert_eq!(used(log.path()).unwrap(), BTreeSet::from([right]));
        write(&[event("get", &node, 200), event("patch", &node, 403)].join("\n"));
        let error = used(log.path()).unwrap_err().to_string();
        assert_eq!(error, "tunnel-agent was forbidden: \"patch\" \"/somewhere\"");
        write("");
        assert!(used(log.path()).is_err());
    }
}

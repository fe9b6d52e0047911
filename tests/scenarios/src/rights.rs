//! Compares the shipped roles with the API server's audit log: nothing was forbidden, and every right was used.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::control_plane::audit_log;
use postern_testbed::cluster::manifests::{Manifests, deploy};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::report::progress;
use postern_testbed::wait::wait_until;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
/// ServiceAccounts whose requests are in the log.
const ACCOUNTS: [&str; 3] = ["tunnel-server", "tunnel-agent", "tunnel-redirector"];
/// Components with roles, each with the scenario that must use the rights given to these accounts.
const COMPONENTS: [(&str, &str); 9] = [
    ("connect", "deploy::callers_are_asked_for"),
    ("edge-pods", "deploy::callers_are_asked_for"),
    ("https-callers", "deploy::callers_are_asked_for"),
    ("metrics", "deploy::prometheus_reads_servers"),
    ("egress-services", "kubernetes::egress_services"),
    ("node-condition", "kubernetes::egress_services"),
    ("konnectivity-agents", "kubernetes::egress_selector"),
    ("everywhere", "kubernetes::redirector"),
    ("everywhere-metrics", "kubernetes::redirector"),
];

/// Rights that no request shows: a resource, and a verb or an object's name.
const UNSEEN: [(&str, &str); 5] = [
    // The API server checks it when an apply creates the object.
    ("configmaps", "create"),
    ("secrets", "create"),
    // The API server checks these when the server approves and signs.
    ("signers", "approve"),
    ("signers", "sign"),
    // For redirectors beside overlays/openyurt-migration.
    ("configmaps", "yurt-tunnel-server-cfg"),
];

/// One verb of one rule, on one resource and object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    account: String,
    group: String,
    resource: String,
    /// Empty: any.
    name: String,
    verb: String,
}

impl Right {
    /// Reports whether the two apply to the same objects, or to some of the same.
    fn overlaps(&self, other: &Self) -> bool {
        let any = |right: &Self| Self { name: String::new(), ..right.clone() };
        let names = self.name.is_empty() || other.name.is_empty() || self.name == other.name;
        names && any(self) == any(other)
    }
}

/// A request to the API server.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Request {
    right: Right,
    /// Empty: all namespaces, or an object outside of namespaces.
    namespace: String,
}

/// Fails if a request of a program was forbidden, or if a right of the base was never used.
pub(crate) async fn of_base(cluster: &Cluster<'_>) -> Result<()> {
    let granted = granted(&Manifests::render(&cluster.kubectl, "base").await?)?;
    all_used(cluster, &granted, &BTreeSet::new()).await?;
    let (_, forbidden) = requests(&audit_log(cluster.testbed))?;
    ensure!(forbidden.is_empty(), "the API server has forbidden {forbidden:?}");
    progress(&format!("{} rights, all of them used", granted.len()));
    Ok(())
}

/// Fails if a right of the components that this scenario covers was never used.
pub(crate) async fn of_components(cluster: &Cluster<'_>, scenario: &str) -> Result<()> {
    let base = granted(&Manifests::render(&cluster.kubectl, "base").await?)?;
    let components = COMPONENTS.iter().filter(|(_, by)| *by == scenario);
    let mut all = 0;
    for (component, _) in components {
        let manifests = Manifests::parse(&cluster.kubectl, &roles(component)?).await?;
        let granted = granted(&manifests).with_context(|| format!("the component {component}"))?;
        all_used(cluster, &granted, &base).await.with_context(|| format!("the component {component}"))?;
        all += granted.len();
    }
    ensure!(all > 0, "no component is listed for {scenario}");
    progress(&format!("{all} rights of components, all of them used"));
    Ok(())
}

/// Returns the files of a component that have roles, as one text.
fn roles(component: &str) -> Result<String> {
    let folder = deploy().join("components").join(component);
    let mut texts = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry.with_context(|| format!("reading {}", folder.display()))?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        if text.lines().any(|line| matches!(line, "kind: ClusterRole" | "kind: Role")) {
            texts.push(text);
        }
    }
    Ok(texts.join("\n---\n"))
}

/// Waits until each of these rights was used. A request in Postern's namespace that `others` permit does not prove the
/// use of a right that holds in all namespaces.
async fn all_used(cluster: &Cluster<'_>, granted: &BTreeSet<Right>, others: &BTreeSet<Right>) -> Result<()> {
    let listed = |right: &Right| {
        let is_listed = |what: &str| UNSEEN.contains(&(right.resource.as_str(), what));
        is_listed(&right.verb) || is_listed(&right.name)
    };
    // Some requests take a few seconds.
    let missing = wait_until(
        "every right to be used",
        PATIENCE,
        async || {
            let (requests, _) = requests(&audit_log(cluster.testbed))?;
            let is_used = |right: &Right| {
                let elsewhere = others.iter().any(|other| other.overlaps(right));
                let matching = |request: &&Request| {
                    let name = right.name.is_empty() || right.name == request.right.name;
                    name && right.overlaps(&request.right)
                };
                requests.iter().filter(matching).any(|request| !elsewhere || request.namespace != NAMESPACE)
            };
            let missing = granted.iter().filter(|right| !is_used(right) && !listed(right));
            Ok(missing.cloned().collect::<Vec<_>>())
        },
        Vec::is_empty,
    );
    let never = "rights that were never used: narrow the role, or list them in UNSEEN";
    missing.await.map(drop).context(never)
}

/// Returns the rights that the bindings give to Postern's accounts by the roles beside them.
fn granted(manifests: &Manifests) -> Result<BTreeSet<Right>> {
    let objects = manifests.objects();
    let mut granted = BTreeSet::new();
    for binding in objects {
        let role = &binding["roleRef"];
        let is_role = |object: &&Value| {
            object["kind"] == role["kind"] && object["metadata"]["name"] == role["name"] && !role.is_null()
        };
        let Some(role) = objects.iter().find(is_role) else { continue };
        for subject in binding["subjects"].as_array().into_iter().flatten() {
            let account = ACCOUNTS.into_iter().find(|account| subject["name"] == *account);
            if let Some(account) = account.filter(|_| subject["kind"] == "ServiceAccount") {
                granted.extend(rights_of(account, role)?);
            }
        }
    }
    ensure!(!granted.is_empty(), "nothing is given to {ACCOUNTS:?}");
    Ok(granted)
}

fn rights_of(account: &str, role: &Value) -> Result<Vec<Right>> {
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
                        account: account.to_owned(),
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

/// Returns the requests of the ServiceAccounts that were permitted, and those that were forbidden.
fn requests(log: &Path) -> Result<(BTreeSet<Request>, Vec<String>)> {
    let lines = fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
    let (mut requests, mut forbidden) = (BTreeSet::new(), Vec::new());
    // The last line may be incomplete, also that of an API server that was killed.
    for event in lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let user = event["user"]["username"].as_str().unwrap_or_default();
        let is_user = |account: &&str| user == format!("system:serviceaccount:{NAMESPACE}:{account}");
        let Some(account) = ACCOUNTS.into_iter().find(is_user) else { continue };
        if event["responseStatus"]["code"] == 403 {
            forbidden.push(format!("{account}: {} {}", event["verb"], event["requestURI"]));
            continue;
        }
        let object = &event["objectRef"];
        let field = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let resource = match field("subresource") {
            none if none.is_empty() => field("resource"),
            subresource => format!("{}/{subresource}", field("resource")),
        };
        let right = Right {
            account: account.to_owned(),
            group: field("apiGroup"),
            resource,
            name: field("name"),
            verb: event["verb"].as_str().unwrap_or_default().to_owned(),
        };
        requests.insert(Request { right, namespace: field("namespace") });
    }
    ensure!(!requests.is_empty(), "no request of the programs is in {}", log.display());
    Ok((requests, forbidden))
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

    fn right(name: &str) -> Right {
        Right {
            account: "tunnel-agent".into(),
            group: String::new(),
            resource: "nodes".into(),
            name: name.into(),
            verb: "get".into(),
        }
    }

    #[test]
    fn requests_are_rights_and_forbidden_ones_are_told() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let write = |text: &str| fs::write(log.path(), text).unwrap();
        let node = json!({ "resource": "nodes", "name": "edge-1", "apiVersion": "v1" });
        write(&format!("{}\n{{\"half", event("get", &node, 200)));
        let asked = || BTreeSet::from([Request { right: right("edge-1"), namespace: String::new() }]);
        assert_eq!(requests(log.path()).unwrap(), (asked(), Vec::new()));
        write(&[event("get", &node, 200), event("patch", &node, 403)].join("\n"));
        let forbidden = vec!["tunnel-agent: \"patch\" \"/somewhere\"".to_owned()];
        assert_eq!(requests(log.path()).unwrap(), (asked(), forbidden));
        write("");
        assert!(requests(log.path()).is_err());
    }

    #[test]
    fn rights_overlap_in_what_both_are_for() {
        assert!(right("").overlaps(&right("edge-1")) && right("edge-1").overlaps(&right("")));
        assert!(!right("edge-2").overlaps(&right("edge-1")));
        assert!(!right("").overlaps(&Right { verb: "list".into(), ..right("") }));
    }

    #[test]
    fn a_scenario_sees_the_rights_of_every_component_used() {
        for entry in fs::read_dir(deploy().join("components")).unwrap() {
            let name = entry.unwrap().file_name().to_string_lossy().into_owned();
            let listed = COMPONENTS.iter().any(|(component, _)| *component == name);
            assert_eq!(listed, !roles(&name).unwrap().is_empty(), "{name}");
        }
        for (component, scenario) in COMPONENTS {
            assert!(crate::all().any(|one| one.name() == scenario), "{component}: {scenario}");
        }
    }
}

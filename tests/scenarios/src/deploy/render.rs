//! The chart compared with the Kustomize folders: rendered output, without a cluster.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::manifests::{deploy, write_overlay};
use postern_testbed::cluster::peers;
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::report::progress;
use serde_json::{Value, json};
use tokio::process::Command;

use super::patches::{argument, of};
use super::{components, text};

/// Values with their effects, and values that are refused.
const VALUES: &str = include_str!("chart-values.txt");
const REFUSED: &str = include_str!("chart-refused.txt");

/// Objects by kind and name.
pub(super) type Objects = BTreeMap<(String, String), Value>;

/// Folders of deploy/ with a whole installation, and the chart's values that render the same objects.
pub(super) const OVERLAYS: [(&str, &[&str]); 5] = [
    ("base", &[]),
    ("overlays/loadbalancer", &["--set=service.type=LoadBalancer"]),
    ("overlays/superedge", &["--values=values-superedge.yaml"]),
    ("overlays/openyurt-migration", &["--values=values-openyurt-migration.yaml"]),
    ("overlays/everywhere", &["--set=redirector.enabled=true"]),
];
/// The same of components, each with all of [`OVERLAYS`].
pub(super) const COMPONENTS: [(&[&str], &[&str]); 20] = [
    (&[], &[]),
    (
        &["kernel-5.10"],
        &["--set=server.securityContext.capabilities.add={BPF,PERFMON,NET_ADMIN,SYS_RESOURCE}"],
    ),
    (&["cri-o"], &["--set=server.securityContext.seccompProfile.type=Unconfined"]),
    (&["ipv6-only"], &["--set=server.bindAddress=::"]),
    (&["node-condition"], &["--set=server.nodeCondition=true"]),
    (&["https-callers"], &["--set=server.httpsCallers.enabled=true"]),
    (&["connect"], &["--set=server.connect.enabled=true"]),
    (&["metrics"], &["--set=server.metrics.enabled=true"]),
    (&["egress-services"], &["--set=server.egressServices=true"]),
    (&["konnectivity-agents"], &["--set=server.konnectivityAgents.enabled=true"]),
    (&["kubelet-credentials"], &["--set=agent.kubeletCredentials.enabled=true"]),
    (&["selinux"], &[SELINUX]),
    (
        &["public-addresses"],
        &["--set=service.type=ClusterIP", "--set=service.externalAddresses={203.0.113.1:10262}"],
    ),
    (&["edge-pods"], &["--set=server.edgePodRoutes={10.244.0.0/16}"]),
    (
        &["metrics", "prometheus-operator"],
        &[
            "--set=monitoring.rules=true,monitoring.podMonitor=true,server.metrics.enabled=true",
            // The component leaves these to the administrator.
            "--set=tunnelledPorts.loopback={10266},server.createConfigMap=false",
        ],
    ),
    (&["everywhere"], &["--set=redirector.enabled=true"]),
    (
        &["everywhere", "metrics", "everywhere-metrics"],
        &["--set=redirector.enabled=true,redirector.metrics.enabled=true,server.metrics.enabled=true"],
    ),
    (
        &["everywhere", "kernel-5.10"],
        &[
            "--set=redirector.enabled=true",
            "--set=server.securityContext.capabilities.add={BPF,PERFMON,NET_ADMIN,SYS_RESOURCE}",
        ],
    ),
    (
        &["everywhere", "cri-o"],
        &["--set=redirector.enabled=true,server.securityContext.seccompProfile.type=Unconfined"],
    ),
    (&["everywhere", "selinux"], &["--set=redirector.enabled=true", SELINUX]),
];
const SELINUX: &str =
    "--set=server.securityContext.seLinuxOptions.type=spc_t,agent.securityContext.seLinuxOptions.type=spc_t";
/// Compared by `deploy::gateways_are_deployed_as_documented`, or for agents that are in no pod.
const NOT_COMPARED: [&str; 3] = ["gateway", "everywhere-gateway", "kubelet-rights"];

pub(super) async fn chart_renders_what_kustomize_does(testbed: &Testbed) -> Result<()> {
    let lint = helm(&["lint", "--strict", "--kube-version=1.34.0", text(&chart())?]).await?;
    ensure!(lint.contains("0 chart(s) failed"), "{lint}");
    let known: BTreeSet<&str> =
        COMPONENTS.iter().flat_map(|(names, _)| *names).chain(&NOT_COMPARED).copied().collect();
    for component in components()? {
        ensure!(known.contains(component.as_str()), "deploy/components/{component} is not compared");
    }
    for (folder, of_folder) in OVERLAYS {
        for (components, of_components) in COMPONENTS {
            let values = [of_folder, of_components].concat();
            combined(testbed, folder, components, &values)
                .await
                .with_context(|| format!("{folder} {components:?} and {values:?}"))?;
        }
    }
    progress(&format!(
        "{} overlays with {} components, and the chart, are the same",
        OVERLAYS.len(),
        COMPONENTS.len()
    ));
    every_value_changes_what_it_should().await?;
    // Kustomize has no such pod.
    let chart = template(&[""; 0]).await?;
    let pod = chart.get(&("Pod".to_owned(), "postern-test".to_owned())).context("no Pod postern-test")?;
    let selected = &pod["spec"]["nodeSelector"];
    ensure!(*selected == json!({ "kubernetes.io/os": "linux" }), "the pod of `helm test` selects {selected}");
    for row in rows(REFUSED) {
        let [settings, expected] = row[..] else { bail!("not two columns: {row:?}") };
        let refused = output(&template_args(&set(settings))?).await?;
        let said = said(&refused);
        ensure!(!refused.status.success(), "helm takes {settings}");
        ensure!(said.contains(expected), "{settings} is refused without {expected:?}: {said}");
    }
    Ok(())
}

/// Compares a folder with components, as an administrator patches them, with the chart.
async fn combined(testbed: &Testbed, folder: &str, components: &[&str], values: &[&str]) -> Result<()> {
    let everywhere = folder.ends_with("everywhere");
    let components: Vec<&str> =
        components.iter().copied().filter(|name| !(everywhere && *name == "everywhere")).collect();
    let patch = match components[..] {
        ["public-addresses"] => json!([{
            "target": { "kind": "Service", "name": "x-tunnel-server-svc" },
            "patch": json!([{
                "op": "replace",
                "path": "/metadata/annotations/x-tunnel-server-external-addr",
                "value": "203.0.113.1:10262",
            }]).to_string(),
        }]),
        ["edge-pods"] => {
            json!([of("tunnel-(server|redirector)", &json!([argument("--edge-pod-routes=10.244.0.0/16")]))])
        }
        _ => json!([]),
    };
    let overlay = testbed.dir().join("same");
    write_overlay(&overlay, folder, &components, &patch)?;
    let (mut expected, mut rendered) = (kustomize(&overlay).await?, template(values).await?);
    if values.iter().any(|value| value.contains("createConfigMap=false")) {
        expected.retain(|(kind, _), _| kind != "ConfigMap");
        rendered.retain(|(kind, _), _| kind != "ConfigMap");
    }
    if values.iter().any(|value| value.starts_with("--values=")) {
        // The component keeps redirectors off the edge nodes of every distribution, the chart off those of edgeNodes.
        for objects in [&mut expected, &mut rendered] {
            if let Some(set) = objects.get_mut(&("DaemonSet".to_owned(), "tunnel-redirector".to_owned())) {
                set["spec"]["template"]["spec"]["affinity"].take();
            }
        }
    }
    same(&expected, &rendered)
}

/// Checks the labels that only the chart's objects have, and removes them.
fn without_labels_of_helm(objects: &mut Objects) -> Result<()> {
    const OF_HELM: [(&str, &str); 4] = [
        ("app.kubernetes.io/instance", "postern"),
        ("app.kubernetes.io/version", env!("CARGO_PKG_VERSION")),
        ("app.kubernetes.io/managed-by", "Helm"),
        ("helm.sh/chart", concat!("postern-", env!("CARGO_PKG_VERSION"))),
    ];
    for ((kind, name), object) in objects {
        // Another version must change neither a selector, which the API server refuses, nor every pod.
        let spec = object["spec"].clone();
        if kind == "DaemonSet" {
            let expected = json!({ "matchLabels": { "app.kubernetes.io/name": name } });
            ensure!(spec["selector"] == expected, "{kind} {name} selects {}", spec["selector"]);
            let of_pods = &spec["template"]["metadata"]["labels"];
            ensure!(
                OF_HELM.iter().all(|(key, _)| of_pods[key].is_null()),
                "the pods of {name} have {of_pods}"
            );
        }
        let labels = object["metadata"]["labels"].as_object_mut();
        let labels = labels.with_context(|| format!("{kind} {name} has no labels"))?;
        for (key, value) in OF_HELM {
            let found = labels.remove(key).unwrap_or_default();
            ensure!(found == value, "{kind} {name} has {key} {found}, not {value}");
        }
        let found = labels.get("app.kubernetes.io/name").cloned().unwrap_or_default();
        ensure!(!found.is_null(), "{kind} {name} has no name: {labels:?}");
        if found == "postern" {
            labels.remove("app.kubernetes.io/name");
        }
    }
    Ok(())
}

async fn every_value_changes_what_it_should() -> Result<()> {
    let defaults = template(&[""; 0]).await?;
    let mut covered = BTreeSet::new();
    for row in rows(VALUES) {
        let [settings, place, expected] = row[..] else { bail!("not three columns: {row:?}") };
        let [kind, name, pointer] = place.split(' ').collect::<Vec<_>>()[..] else {
            bail!("not a place: {place}")
        };
        let pointer = pointer_of(pointer);
        let expected: Value = serde_json::from_str(expected).with_context(|| expected.to_owned())?;
        let at = |objects: &Objects| {
            let object = objects.get(&(kind.to_owned(), name.to_owned()))?;
            object.pointer(&pointer).cloned()
        };
        let found = at(&template(&set(settings)).await?).unwrap_or_default();
        ensure!(found == expected, "{settings}: {place} is {found}, not {expected}");
        ensure!(at(&defaults).unwrap_or_default() != expected, "{settings}: {place} is that by default");
        covered.extend(settings.split("; ").map(|setting| {
            let setting = setting.trim_start_matches("string:");
            setting.split_once('=').map_or(setting, |(key, _)| key).to_owned()
        }));
    }
    let values = fs::read_to_string(chart().join("values.yaml")).context("values.yaml")?;
    let values: Value = serde_saphyr::from_str(&values).context("values.yaml")?;
    let mut all = Vec::new();
    leaves(&values, "", &mut all);
    let is_covered = |leaf: &String| {
        let mut rests = covered.iter().filter_map(|key| key.strip_prefix(leaf.as_str()));
        rests.any(|rest| rest.is_empty() || rest.starts_with(['[', '.']))
    };
    let untested: Vec<_> = all.iter().filter(|leaf| !is_covered(leaf)).collect();
    ensure!(untested.is_empty(), "values whose effect is not tested: {untested:?}");
    progress(&format!("each of {} values changes what it should", all.len()));
    Ok(())
}

/// Returns the columns of each row of a table.
fn rows(table: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split(" | ").collect())
}

/// Returns the arguments of helm.
fn set(settings: &str) -> Vec<String> {
    let flag = |setting: &str| match setting.split_once(':') {
        Some(("string", text)) => format!("--set-string={text}"),
        Some(("version", version)) => format!("--kube-version={version}"),
        _ => format!("--set={setting}"),
    };
    settings.split("; ").map(flag).collect()
}

/// Expands a place to a JSON pointer; `/` alone is the object itself.
fn pointer_of(place: &str) -> String {
    const LONG: [(&str, &str); 3] = [
        ("$container", "/spec/template/spec/containers/0"),
        ("$pod", "/spec/template/spec"),
        ("$template", "/spec/template"),
    ];
    let found = LONG.iter().find_map(|(short, long)| Some(format!("{long}{}", place.strip_prefix(short)?)));
    found.unwrap_or_else(|| place.to_owned()).trim_end_matches('/').to_owned()
}

/// Collects the paths of values that are not maps; an empty map counts as a value.
fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(value, &path, found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

pub(super) fn same(expected: &Objects, rendered: &Objects) -> Result<()> {
    for (key, object) in expected {
        let (kind, name) = key;
        let found = rendered.get(key).with_context(|| format!("the chart has no {kind} {name}"))?;
        if let Some(difference) = difference(&in_order(object), &in_order(found), "") {
            bail!("{kind} {name}{difference}");
        }
    }
    // Only Helm has tests.
    let more = rendered.keys().filter(|key| key.0 != "Pod" && !expected.contains_key(*key));
    let more: Vec<_> = more.collect();
    ensure!(more.is_empty(), "only the chart has {more:?}");
    Ok(())
}

/// Sorts flags and variables: an overlay's are before those of components.
fn in_order(object: &Value) -> Value {
    let mut object = object.clone();
    for list in ["args", "env"] {
        let list = object.pointer_mut(&format!("/spec/template/spec/containers/0/{list}"));
        if let Some(list) = list.and_then(Value::as_array_mut) {
            list.sort_by_key(ToString::to_string);
        }
    }
    object
}

/// Finds the first place where two values differ.
fn difference(expected: &Value, found: &Value, path: &str) -> Option<String> {
    match (expected, found) {
        (Value::Object(one), Value::Object(other)) => {
            let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
            keys.into_iter().find_map(|key| {
                let empty = Value::Null;
                let (one, other) = (one.get(key).unwrap_or(&empty), other.get(key).unwrap_or(&empty));
                difference(one, other, &format!("{path}/{key}"))
            })
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            let pairs = one.iter().zip(other).enumerate();
            pairs.into_iter().find_map(|(at, (one, other))| difference(one, other, &format!("{path}/{at}")))
        }
        _ => (expected != found).then(|| format!("{path}: Kustomize has {expected}, the chart {found}")),
    }
}

pub(super) fn chart() -> PathBuf {
    deploy().join("helm/postern")
}

fn template_args(values: &[impl AsRef<str>]) -> Result<Vec<String>> {
    // A helm built without a certain linker flag assumes an old cluster if it does not ask one.
    let chart = chart();
    let fixed = ["template", "postern", text(&chart)?, "--namespace", NAMESPACE, "--kube-version=1.34.0"];
    let folder = deploy().join("helm");
    let values = values.iter().map(|value| match value.as_ref().strip_prefix("--values=") {
        Some(file) => Ok(format!("--values={}", text(&folder.join(file))?)),
        None => Ok(value.as_ref().to_owned()),
    });
    fixed.into_iter().map(|arg| Ok(arg.to_owned())).chain(values).collect()
}

pub(super) async fn template(values: &[impl AsRef<str>]) -> Result<Objects> {
    let mut objects = objects(&yaml(values).await?)?;
    without_labels_of_helm(&mut objects)?;
    Ok(objects)
}

/// Renders the chart.
pub(super) async fn yaml(values: &[impl AsRef<str>]) -> Result<String> {
    let args = template_args(values)?;
    let rendered = output(&args).await?;
    ensure!(rendered.status.success(), "helm {}: {}", args.join(" "), said(&rendered));
    Ok(String::from_utf8_lossy(&rendered.stdout).into_owned())
}

async fn helm(args: &[&str]) -> Result<String> {
    let output = output(args).await?;
    ensure!(output.status.success(), "helm {}: {}", args.join(" "), said(&output));
    Ok(said(&output))
}

async fn output<A: AsRef<std::ffi::OsStr>>(args: &[A]) -> Result<std::process::Output> {
    let mut command = Command::new(peers::helm()?);
    command.args(args).kill_on_drop(true).output().await.context("running helm")
}

pub(super) async fn kustomize(folder: &Path) -> Result<Objects> {
    let mut command = Command::new(peers::kubernetes("kubectl")?);
    let output = command.arg("kustomize").arg(folder).kill_on_drop(true).output().await;
    let output = output.context("running kubectl kustomize")?;
    ensure!(output.status.success(), "kubectl kustomize {}: {}", folder.display(), said(&output));
    objects(&String::from_utf8_lossy(&output.stdout))
}

fn objects(yaml: &str) -> Result<Objects> {
    let documents: Vec<Option<Value>> = serde_saphyr::from_multiple(yaml).context("what was rendered")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let objects = documents.into_iter().flatten().filter(|object| !object.is_null());
    Ok(objects.map(|object| ((text(&object["kind"]), text(&object["metadata"]["name"])), object)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let one = json!({"spec": {"ports": [{"port": 1}, {"port": 2}], "type": "A"}});
        let mut other = one.clone();
        assert_eq!(difference(&one, &other, ""), None);
        other["spec"]["ports"][1]["port"] = json!(3);
        let found = difference(&one, &other, "").unwrap();
        assert_eq!(found, "/spec/ports/1/port: Kustomize has 2, the chart 3");
        other["spec"]["ports"] = json!([]);
        assert!(difference(&one, &other, "").unwrap().starts_with("/spec/ports: "));
    }

    #[test]
    fn leaves_are_lists_scalars_and_empty_maps() {
        let mut found = Vec::new();
        leaves(&json!({"a": {"b": 1, "c": [1]}, "d": {}, "e": ""}), "", &mut found);
        assert_eq!(found, ["a.b", "a.c", "d", "e"]);
    }
}

//! Checks that manifests, chart and documents agree.
use std::fs;
use std::path::Path;

use postern_testbed::cluster::manifests::deploy;
use serde_json::Value;

use super::PROGRAMS;

/// Manifests with roles.
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

/// Kustomize fills in a missing namespace, but keeps one that is set.
#[test]
fn no_binding_names_a_namespace() {
    for file in ROLES.into_iter().chain(["components/kubelet-rights/rbac.yaml", "prometheus/rbac.yaml"]) {
        let text = fs::read_to_string(deploy().join(file)).unwrap();
        assert!(text.contains("subjects:") && !text.contains("namespace:"), "{file}");
    }
}

fn values() -> Value {
    serde_saphyr::from_str(&fs::read_to_string(deploy().join("helm/postern/values.yaml")).unwrap()).unwrap()
}

/// `--reuse-values` leaves out the defaults of new values. Helm refuses what is missing only where the schema requires it.
#[test]
fn the_schema_requires_every_value_with_a_default() {
    fn check(root: &Value, schema: &Value, defaults: &Value, path: &str, found: &mut u32) {
        let schema = match schema["$ref"].as_str() {
            Some(pointer) => root.pointer(pointer.trim_start_matches('#')).unwrap(),
            None => schema,
        };
        // Maps of Kubernetes, parts of which may be left out.
        let is_free = path.ends_with("/resources") || path.ends_with("/securityContext");
        let Some(defaults) = defaults.as_object().filter(|_| !is_free) else { return };
        for (key, value) in defaults.iter().filter(|_| schema["properties"].is_object()) {
            let path = format!("{path}/{key}");
            let below = &schema["properties"][key];
            if schema["additionalProperties"] == false {
                assert!(!below.is_null(), "values.schema.json does not know {path}");
                let required = schema["required"].as_array().expect(&path);
                assert!(
                    required.contains(&Value::from(key.as_str())),
                    "values.schema.json does not require {path}"
                );
                *found += 1;
            }
            check(root, below, value, &path, found);
        }
    }
    let schema = fs::read_to_string(deploy().join("helm/postern/values.schema.json")).unwrap();
    let (schema, mut found) = (serde_json::from_str(&schema).unwrap(), 0);
    check(&schema, &schema, &values(), "", &mut found);
    assert!(found > 100, "only {found} values were seen");
}

/// In the chart's README and in the documents, which name values after `--set` and in code.
#[test]
fn documents_name_values_that_exist() {
    fn markdown(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                markdown(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    let (values, mut pages, mut found) = (values(), Vec::new(), 0);
    markdown(&deploy().join("helm"), &mut pages);
    markdown(&deploy().join("../docs"), &mut pages);
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for word in text.split(|c: char| c.is_whitespace() || "`'\"=,;()|".contains(c)) {
            let word = word.trim_matches(['.', ':', '{', '}']);
            let Some((first, _)) = word.split_once('.') else { continue };
            let is_file = [".key", ".crt", ".json", ".yaml"].iter().any(|end| word.ends_with(end));
            if !values[first].is_object() || is_file || word.contains(['/', '-']) {
                continue;
            }
            let mut value = &values;
            for key in word.split('.') {
                // Values below an empty map or list are the user's.
                if value.as_object().is_some_and(|map| map.is_empty()) {
                    break;
                }
                value = &value[key];
                assert!(!value.is_null(), "{}: the chart has no value {word}", page.display());
            }
            found += 1;
        }
    }
    assert!(found > 30, "only {found} names of values were found");
}

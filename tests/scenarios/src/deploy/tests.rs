//! Checks that manifests, chart and documents agree.
use std::fs;

use super::{PROGRAMS, deploy};

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

//! Checks the API server: that it answers, that the clocks agree, and the rights that it grants.

use tunnel_doctor::Checkup;
use tunnel_doctor::cluster::{Right, connected, rights};

use super::kubelet_names;
use crate::caller::{ROOTS_CONFIGMAP, ROOTS_NAMESPACE};
use crate::config::Config;
use crate::kube::ObjectNames;
use crate::runtime::role::Role;

pub(super) async fn check(checkup: &mut Checkup, config: &Config) {
    let fix = "name a file with which `kubectl get nodes` works with --kubeconfig, or run it as a pod";
    let made = config.kube.connect().await;
    let Some((client, namespace)) = connected(checkup, made, fix).await else { return };
    let names = &config.kube.names;
    let (account, from, wanted) = match config.role() {
        Role::Server => ("tunnel-server", "deploy/base", of_server(names)),
        Role::Redirector => ("tunnel-redirector", "deploy/components/everywhere", of_redirector(names)),
    };
    let fix = format!(
        "kubectl apply -k OVERLAY, or helm upgrade again ({from} and the chart have the Role and ClusterRole), then `kubectl auth can-i --list --as \
         system:serviceaccount:{namespace}:{account} -n {namespace}`"
    );
    checkup
        .run("API rights", &["API server"], async || rights(&client, &namespace, &wanted, &fix).await)
        .await;
    let named = async || kubelet_names::check(&client, &config.nodes.edge_selector).await;
    checkup.run("kubelet names", &["API server"], named).await;
    // Those that a component of deploy/ gives. Only the metrics listener's depend on a namespace.
    let mut check = async |name: &'static str, wanted: Vec<Right>, component: &str, shown: &str| {
        let fix = format!(
            "add the component {component}, then `kubectl auth can-i {shown} --as system:serviceaccount:{namespace}:{account}`"
        );
        let judged = async || rights(&client, ROOTS_NAMESPACE, &wanted, &fix).await;
        checkup.run(name, &["API server"], judged).await;
    };
    // Without these rights every caller of the metrics listener is refused.
    if config.listeners.common.metrics_port.is_some() {
        let component = match config.role() {
            Role::Server => "metrics to the overlay (in the chart server.metrics.enabled=true)",
            Role::Redirector => "everywhere-metrics to the overlay",
        };
        let wanted = of_metrics(config.listeners.common.client_ca_file.is_none());
        check("metrics rights", wanted, component, "create tokenreviews").await;
    }
    // Without these rights no node gets its condition.
    if config.writes.node_condition {
        let component = "node-condition to the overlay (in the chart server.nodeCondition=true)";
        let shown = "patch nodes --subresource=status";
        check("condition rights", of_node_condition(), component, shown).await;
    }
    // Without these rights no Service address can be reached.
    if config.listeners.egress.follows_services() {
        let component = "egress-services to the overlay (in the chart server.egressServices=true)";
        check("egress rights", of_egress_services(), component, "list services -A").await;
    }
    // Without these rights only konnectivity agents with a certificate are accepted.
    if config.listeners.konnectivity.port.is_some() {
        let component =
            "konnectivity-agents to the overlay (in the chart server.konnectivityAgents.enabled=true)";
        check("konnectivity rights", of_konnectivity(), component, "create tokenreviews").await;
    }
}

/// The rights of deploy/base/server-rbac.yaml; compared by a test.
fn of_server(names: &ObjectNames) -> Vec<Right> {
    let all = |group, resource, verbs| Right::everywhere(group, resource, verbs);
    let here = |group, resource, verbs| Right::here(group, resource, verbs);
    vec![
        all("", "nodes", &["list", "watch"]),
        all("networking.k8s.io", "servicecidrs", &["list", "watch"]),
        all("events.k8s.io", "events", &["create", "patch"]),
        all("certificates.k8s.io", "certificatesigningrequests", &["list", "watch"]),
        all("certificates.k8s.io", "certificatesigningrequests/approval", &["update"]),
        all("certificates.k8s.io", "certificatesigningrequests/status", &["update"]),
        all("certificates.k8s.io", "signers", &["approve", "sign"]).named(tunnel_kube::SIGNER),
        here("", "configmaps", &["list", "watch"]).named(&names.configmap),
        here("", "configmaps", &["list", "watch", "patch", "create"]).named(&names.dns_configmap),
        here("", "configmaps", &["get", "list", "watch", "patch", "create"]).named(&names.revocations),
        here("", "services", &["list", "watch"]).named(&names.service),
        here("", "services", &["list", "watch", "patch"]).named(&names.internal_service),
        here("discovery.k8s.io", "endpointslices", &["list", "watch"]),
        here("", "secrets", &["get", "list", "watch", "update", "patch", "create"]).named(&names.ca_secret),
        here("coordination.k8s.io", "leases", &["get", "patch"]).named(&names.lease),
        here("coordination.k8s.io", "leases", &["create"]),
    ]
}

/// The rights of deploy/components/everywhere/redirector-rbac.yaml.
fn of_redirector(names: &ObjectNames) -> Vec<Right> {
    vec![
        Right::everywhere("", "nodes", &["list", "watch"]),
        Right::everywhere("certificates.k8s.io", "certificatesigningrequests", &["create", "get"]),
        Right::here("", "configmaps", &["list", "watch"]).named(&names.configmap),
        Right::here("discovery.k8s.io", "endpointslices", &["list", "watch"]),
    ]
}

/// The rights of deploy/components/metrics/rbac.yaml and everywhere-metrics/rbac.yaml. `published_roots` is true if
/// callers' certificates are of the CA that kube-apiserver accepts.
fn of_metrics(published_roots: bool) -> Vec<Right> {
    let mut wanted = vec![
        Right::everywhere("authentication.k8s.io", "tokenreviews", &["create"]),
        Right::everywhere("authorization.k8s.io", "subjectaccessreviews", &["create"]),
    ];
    if published_roots {
        wanted.push(Right::here("", "configmaps", &["get"]).named(ROOTS_CONFIGMAP));
    }
    wanted
}

/// The rights of deploy/components/node-condition/rbac.yaml.
fn of_node_condition() -> Vec<Right> {
    vec![Right::everywhere("", "nodes/status", &["patch"])]
}

/// The rights of deploy/components/egress-services/rbac.yaml.
fn of_egress_services() -> Vec<Right> {
    vec![
        Right::everywhere("", "services", &["list", "watch"]),
        Right::everywhere("discovery.k8s.io", "endpointslices", &["list"]),
    ]
}

/// The rights of deploy/components/konnectivity-agents/rbac.yaml.
fn of_konnectivity() -> Vec<Right> {
    vec![Right::everywhere("authentication.k8s.io", "tokenreviews", &["create"])]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    /// Tuples of group, resource, name and verb.
    type Flat = BTreeSet<(String, String, String, String)>;

    fn of_manifest(text: &str) -> Flat {
        let mut flat = Flat::new();
        for document in text.split("\n---\n") {
            let document: Value = serde_saphyr::from_str(document).unwrap();
            for rule in document["rules"].as_array().into_iter().flatten() {
                let list = |key: &str| -> Vec<String> {
                    let values = rule[key].as_array().into_iter().flatten();
                    values.map(|value| value.as_str().unwrap().to_owned()).collect()
                };
                let names = list("resourceNames");
                let names = if names.is_empty() { vec![String::new()] } else { names };
                for group in list("apiGroups") {
                    for resource in list("resources") {
                        for name in &names {
                            for verb in list("verbs") {
                                flat.insert((group.clone(), resource.clone(), name.clone(), verb));
                            }
                        }
                    }
                }
            }
        }
        flat
    }

    fn flat(rights: &[Right]) -> Flat {
        let of = |right: &Right| -> Vec<_> {
            let name = right.name.clone().unwrap_or_default();
            let verbs = right.verbs.iter();
            verbs
                .map(|verb| (right.group.into(), right.resource.into(), name.clone(), (*verb).into()))
                .collect()
        };
        rights.iter().flat_map(of).collect()
    }

    #[test]
    fn what_is_asked_for_is_what_the_manifests_give() {
        let names = ObjectNames::default();
        let server = include_str!("../../../deploy/base/server-rbac.yaml");
        assert_eq!(flat(&of_server(&names)), of_manifest(server));
        let redirector =
            of_manifest(include_str!("../../../deploy/components/everywhere/redirector-rbac.yaml"));
        for right in flat(&of_redirector(&names)) {
            assert!(redirector.contains(&right), "{right:?} is not in {redirector:?}");
        }
        for metrics in [
            include_str!("../../../deploy/components/metrics/rbac.yaml"),
            include_str!("../../../deploy/components/everywhere-metrics/rbac.yaml"),
        ] {
            assert_eq!(flat(&of_metrics(true)), of_manifest(metrics));
        }
        let condition = include_str!("../../../deploy/components/node-condition/rbac.yaml");
        assert_eq!(flat(&of_node_condition()), of_manifest(condition));
        let services = include_str!("../../../deploy/components/egress-services/rbac.yaml");
        assert_eq!(flat(&of_egress_services()), of_manifest(services));
        let konnectivity = include_str!("../../../deploy/components/konnectivity-agents/rbac.yaml");
        assert_eq!(flat(&of_konnectivity()), of_manifest(konnectivity));
        assert_eq!(of_metrics(false).len(), 2, "--client-ca-file takes the place of the ConfigMap");
    }
}

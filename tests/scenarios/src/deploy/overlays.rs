//! Kustomize's output for combinations of folders and components, without a cluster.
use std::fs;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::manifests::write_overlay;
use serde_json::{Value, json};

use super::guide::link_deploy;
use super::render::{COMPONENTS, Objects, kustomize};
use super::{DOCUMENT, components, extended, follow, text};

/// Renders `deploy/FOLDER` with these components.
async fn rendered(testbed: &Testbed, folder: &str, components: &[&str]) -> Result<Objects> {
    let overlay = testbed.dir().join("rendered");
    write_overlay(&overlay, folder, components, &json!([]))?;
    kustomize(&overlay).await.with_context(|| format!("{folder} with {components:?}"))
}

fn object<'a>(objects: &'a Objects, kind: &str, name: &str) -> Result<&'a Value> {
    let object = objects.get(&(kind.to_owned(), name.to_owned()));
    object.with_context(|| format!("there is no {kind} {name}"))
}

/// AppArmor's profile for containers matches the path in the container, and denies writes below /sys. The rest of the file
/// system has the programs of others.
pub(super) async fn programs_can_be_pinned(testbed: &Testbed) -> Result<()> {
    let objects = rendered(testbed, "base", &["everywhere"]).await?;
    for name in ["tunnel-server", "tunnel-redirector"] {
        let pod = &object(&objects, "DaemonSet", name)?["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let volume = list(&pod["volumes"]).into_iter().find(|one| one["name"] == "bpf");
        let volume = volume.with_context(|| format!("{name} has no BPF file system"))?;
        let expected = json!({ "path": "/sys/fs/bpf/postern", "type": "DirectoryOrCreate" });
        ensure!(volume["hostPath"] == expected, "{name} has {volume}");
        let mounts = list(&container["volumeMounts"]).into_iter();
        let mounts: Vec<Value> = mounts.filter(|mount| mount["name"] == volume["name"]).collect();
        ensure!(mounts.len() == 1, "{name} mounts it {} times", mounts.len());
        let path = mounts[0]["mountPath"].as_str().context("no mountPath")?;
        ensure!(
            !path.starts_with("/sys/") && mounts[0]["readOnly"] != true,
            "{name} mounts it so: {mounts:?}"
        );
        let variable = list(&container["env"]).into_iter().find(|one| one["name"] == "POSTERN_BPFFS");
        let told = variable.with_context(|| format!("{name} is not told where it is"))?;
        let told = told["value"].as_str().map(|bpffs| format!("{bpffs}/postern"));
        ensure!(told.as_deref() == Some(path), "{name} is told {told:?}, and it is at {path}");
    }
    Ok(())
}

/// A volume of the device itself would keep the pod from starting where there is none, and one without a type would make a folder
/// of its name.
pub(super) async fn a_host_without_a_tun_device_can_have_a_server(testbed: &Testbed) -> Result<()> {
    let objects = rendered(testbed, "base", &["everywhere"]).await?;
    for name in ["tunnel-server", "tunnel-redirector"] {
        let pod = &object(&objects, "DaemonSet", name)?["spec"]["template"]["spec"];
        let find = |list: &Value| {
            let found = list.as_array().into_iter().flatten().find(|one| one["name"] == "tun").cloned();
            found.with_context(|| format!("{name} has no volume for /dev/net/tun"))
        };
        let (volume, mount) = (find(&pod["volumes"])?, find(&pod["containers"][0]["volumeMounts"])?);
        let expected = json!({ "path": "/dev/net", "type": "DirectoryOrCreate" });
        ensure!(volume["hostPath"] == expected, "{name} has {volume}");
        ensure!(mount["mountPath"] == "/dev/net" && mount["readOnly"] == true, "{name} mounts {mount}");
    }
    Ok(())
}

/// Distributions label their masters differently. Each master gets a server and no redirector, a worker the opposite.
pub(super) async fn masters_of_every_distribution_get_a_server(testbed: &Testbed) -> Result<()> {
    const MASTERS: [(&str, &[(&str, &str)]); 7] = [
        ("kubeadm, kOps, Talos", &[("node-role.kubernetes.io/control-plane", "")]),
        ("k3s, RKE2, k0s", &[("node-role.kubernetes.io/control-plane", "true")]),
        ("k3s before 1.20", &[("node-role.kubernetes.io/master", "true")]),
        ("kubeadm before 1.24", &[("node-role.kubernetes.io/master", "")]),
        (
            "OpenShift",
            &[("node-role.kubernetes.io/master", ""), ("node-role.kubernetes.io/control-plane", "")],
        ),
        ("RKE1", &[("node-role.kubernetes.io/controlplane", "true")]),
        ("MicroK8s", &[("node.kubernetes.io/microk8s-controlplane", "microk8s-controlplane")]),
    ];
    const WORKERS: [(&str, &[(&str, &str)]); 3] = [
        ("without a role", &[("kubernetes.io/os", "linux")]),
        ("RKE1", &[("node-role.kubernetes.io/worker", "true")]),
        ("MicroK8s", &[("node.kubernetes.io/microk8s-worker", "microk8s-worker")]),
    ];
    let objects = rendered(testbed, "base", &["everywhere"]).await?;
    let terms = |name: &str| -> Result<Value> {
        let pod = &object(&objects, "DaemonSet", name)?["spec"]["template"]["spec"];
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        Ok(pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"].clone())
    };
    let (servers, redirectors) = (terms("tunnel-server")?, terms("tunnel-redirector")?);
    for (distribution, labels) in MASTERS {
        ensure!(selects(&servers, labels)?, "no server on a master of {distribution}");
        ensure!(!selects(&redirectors, labels)?, "a redirector on a master of {distribution}");
    }
    for (distribution, labels) in WORKERS {
        ensure!(!selects(&servers, labels)?, "a server on a worker of {distribution}");
        ensure!(selects(&redirectors, labels)?, "no redirector on a worker of {distribution}");
    }
    Ok(())
}

/// True if a node with these labels matches all expressions of any term, as the scheduler decides.
fn selects(terms: &Value, labels: &[(&str, &str)]) -> Result<bool> {
    let list = |value: &Value| value.as_array().cloned().context("no list");
    for term in list(terms)? {
        let mut all = true;
        for expression in list(&term["matchExpressions"])? {
            let value = labels.iter().find(|(key, _)| expression["key"] == *key).map(|(_, value)| *value);
            all &= match expression["operator"].as_str() {
                Some("Exists") => value.is_some(),
                Some("DoesNotExist") => value.is_none(),
                Some("NotIn") => !list(&expression["values"])?.iter().any(|one| one.as_str() == value),
                other => anyhow::bail!("operator {other:?}"),
            };
        }
        if all {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Every pod tolerates every taint, so that no taint keeps it from a Windows node.
pub(super) async fn no_windows_node_gets_a_pod(testbed: &Testbed) -> Result<()> {
    let linux = json!({ "kubernetes.io/os": "linux" });
    let objects = rendered(testbed, "base", &["everywhere"]).await?;
    for name in ["tunnel-server", "tunnel-agent", "tunnel-redirector"] {
        let selected = &object(&objects, "DaemonSet", name)?["spec"]["template"]["spec"]["nodeSelector"];
        ensure!(*selected == linux, "{name} selects {selected}");
    }
    Ok(())
}

/// Redirectors have the same requirements of their hosts as servers.
pub(super) async fn redirectors_get_what_servers_get(testbed: &Testbed) -> Result<()> {
    let security = |objects: &Objects, name: &str| -> Result<Value> {
        let pod = &object(objects, "DaemonSet", name)?["spec"]["template"]["spec"];
        Ok(pod["containers"][0]["securityContext"].clone())
    };
    let plain = security(&rendered(testbed, "base", &["everywhere"]).await?, "tunnel-redirector")?;
    for component in ["selinux", "cri-o", "kernel-5.10"] {
        let objects = rendered(testbed, "base", &["everywhere", component]).await?;
        let (server, redirector) =
            (security(&objects, "tunnel-server")?, security(&objects, "tunnel-redirector")?);
        ensure!(server != plain, "{component} changes nothing");
        ensure!(
            server == redirector,
            "with {component} the server has {server}, the redirector {redirector}"
        );
    }
    for folder in ["base", "overlays/openyurt-migration", "overlays/superedge"] {
        let objects = rendered(testbed, folder, &["everywhere"]).await?;
        let variables = |name: &str| -> Result<Vec<Value>> {
            let pod = &object(&objects, "DaemonSet", name)?["spec"]["template"]["spec"];
            let mut all = pod["containers"][0]["env"].as_array().cloned().unwrap_or_default();
            all.sort_by_key(ToString::to_string);
            let shared = ["POSTERN_CONFIGMAP", "POSTERN_EDGE_SELECTOR"].map(Value::from);
            Ok(all.into_iter().filter(|one| shared.contains(&one["name"])).collect())
        };
        let (server, redirector) = (variables("tunnel-server")?, variables("tunnel-redirector")?);
        ensure!(
            server.len() == 2 && server == redirector,
            "{folder}: the server has {server:?}, the redirector {redirector:?}"
        );
        let ports = |role: &str| -> Result<Vec<Value>> {
            let rule = &object(&objects, "Role", role)?["rules"][0];
            ensure!(rule["resources"] == json!(["configmaps"]), "the first rule of {role} is {rule}");
            Ok(rule["resourceNames"].as_array().cloned().unwrap_or_default())
        };
        let (server, redirector) = (ports("postern:tunnel-server")?, ports("postern:tunnel-redirector")?);
        ensure!(server.len() == 1, "{folder}: the server's port lists are in {server:?}");
        ensure!(redirector.contains(&server[0]), "{folder}: redirectors read {redirector:?}, not {server:?}");
    }
    Ok(())
}

/// A binding to a role that does not exist gives nothing, and no tool warns.
pub(super) async fn every_binding_has_its_role(testbed: &Testbed) -> Result<()> {
    // Redirectors may be scraped where servers are not.
    let redirectors = &["everywhere", "everywhere-metrics", "prometheus-operator"][..];
    let alone = &["prometheus-operator"][..];
    for components in COMPONENTS.iter().map(|(components, _)| *components).chain([redirectors, alone]) {
        let objects = rendered(testbed, "base", components).await?;
        let mut bindings = 0;
        for ((kind, name), binding) in objects.iter().filter(|((kind, _), _)| kind.ends_with("Binding")) {
            let role = |key: &str| binding["roleRef"][key].as_str().unwrap_or_default();
            object(&objects, role("kind"), role("name"))
                .with_context(|| format!("{components:?}: {kind} {name} is for that"))?;
            bindings += 1;
        }
        ensure!(bindings > 0, "{components:?}: there are no bindings");
    }
    Ok(())
}

/// The API server rejects a Service of type ClusterIP with node ports.
pub(super) async fn public_addresses_leave_no_node_port(testbed: &Testbed) -> Result<()> {
    let folders = ["base", "overlays/loadbalancer", "overlays/openyurt-migration", "overlays/superedge"];
    let annotate = json!([{ "op": "add", "path": "/metadata/annotations", "value": { "a": "b" } }]);
    let target = json!({ "kind": "Service", "name": "x-tunnel-server-svc" });
    let patches = json!([{ "target": target, "patch": annotate.to_string() }]);
    for folder in folders {
        let lower = testbed.dir().join("lower");
        write_overlay(&lower, folder, &[], &patches)?;
        let lower = fs::canonicalize(&lower).context("the overlay's folder")?;
        let objects = rendered(testbed, text(&lower)?, &["public-addresses"]).await?;
        let service = object(&objects, "Service", "x-tunnel-server-svc")?;
        // No addresses of anybody's: an agent names the annotation in its error.
        let expected = json!({ "a": "b", "x-tunnel-server-external-addr": "addresses are missing" });
        let found = &service["metadata"]["annotations"];
        ensure!(*found == expected, "{folder}: the Service has the annotations {found}");
        let service = &service["spec"];
        ensure!(service["type"] == "ClusterIP", "{folder}: it is of type {}", service["type"]);
        ensure!(service["externalTrafficPolicy"].is_null(), "{folder}: it has a policy: {service}");
        let expected = json!([{ "name": "tcp", "port": 10262, "targetPort": 10262, "protocol": "TCP" }]);
        ensure!(service["ports"] == expected, "{folder}: it has {}", service["ports"]);
    }
    Ok(())
}

/// Renders the guide's overlays for each way in which agents reach the servers.
pub(super) async fn addresses_are_as_documented(testbed: &Testbed) -> Result<()> {
    let dir = link_deploy(testbed)?.join("my-postern");
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    let variants = follow::blocks(DOCUMENT).into_iter().filter(|block| block.section == "Three variants");
    let variants: Vec<&str> = variants.map(|block| block.text).collect();
    let expected = [("NodePort", json!(31008)), ("ClusterIP", Value::Null), ("LoadBalancer", json!(31008))];
    ensure!(variants.len() == expected.len(), "the variants are {variants:?}");
    for (variant, (kind, port)) in variants.into_iter().zip(expected) {
        fs::write(dir.join("kustomization.yaml"), variant).context("writing the overlay")?;
        let objects = kustomize(&dir).await.context(variant.to_owned())?;
        let service = object(&objects, "Service", "x-tunnel-server-svc")?;
        let spec = &service["spec"];
        ensure!(spec["type"] == kind && spec["ports"][0]["nodePort"] == port, "{variant}: it has {spec}");
        if kind == "ClusterIP" {
            let addresses = &service["metadata"]["annotations"]["x-tunnel-server-external-addr"];
            let addresses = addresses.as_str().with_context(|| format!("no addresses: {service}"))?;
            ensure!(variant.contains(&format!("value: {addresses}")), "{variant}: it has {addresses}");
        }
    }
    Ok(())
}

/// Renders an overlay that sets the namespace, and one on top that adds a component: every object must be in that
/// namespace.
pub(super) async fn components_go_where_the_servers_are(testbed: &Testbed) -> Result<()> {
    const PLACE: &str = "somewhere";
    for component in components()? {
        let lower = testbed.dir().join("lower");
        write_overlay(&lower, "base", extended(&component), &json!([]))?;
        let file = lower.join("kustomization.yaml");
        let mut kustomization: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        kustomization["namespace"] = json!(PLACE);
        fs::write(&file, kustomization.to_string()).context("writing the overlay")?;
        let lower = fs::canonicalize(&lower).context("the overlay's folder")?;
        let objects = rendered(testbed, text(&lower)?, &[component.as_str()]).await?;
        for ((kind, name), object) in &objects {
            let expected = if kind.starts_with("ClusterRole") { Value::Null } else { json!(PLACE) };
            let found = &object["metadata"]["namespace"];
            ensure!(*found == expected, "{component}: {kind} {name} is in {found}, not in {expected}");
            for subject in object["subjects"].as_array().into_iter().flatten() {
                let found = &subject["namespace"];
                let is_account = subject["kind"] == "ServiceAccount";
                ensure!(!is_account || found == PLACE, "{component}: {kind} {name} is for {subject}");
            }
        }
    }
    Ok(())
}

//! The listeners that ask the API server to authenticate a caller, with the shipped components, rights and images.
use anyhow::{Result, ensure};
use postern_testbed::cluster::pki::Pair;
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{Cluster, EDGE_NODE};
use postern_testbed::report::progress;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use serde_json::json;

use super::guide::CALLERS;
use super::{DOCUMENT, PATIENCE, by_name, connect, follow, on_cluster, overlay_with, ready, text};
use crate::rights;
use crate::web::{Answer, Authority, Web, curl};

/// Resources of kubelets that the reader account may access.
const READER: &str = "nodes/proxy,nodes/metrics,nodes/log";
/// Subresources of nodes, each with a kubelet's path that requires it and a part of its answer.
const SUBRESOURCES: [(&str, &str, &str); 4] = [
    ("proxy", "/containerLogs/default/talker/main?tailLines=1", "line "),
    ("metrics", "/metrics/resource", "node_cpu_usage_seconds_total"),
    ("stats", "/stats/summary", EDGE_NODE),
    ("log", "/logs/", "href=\"pods/\""),
];

pub(super) async fn callers_are_asked_for(testbed: &Testbed) -> Result<()> {
    on_cluster(testbed, asked_for).await
}

async fn asked_for(cluster: &Cluster<'_>) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    let metrics = Web::start(testbed, 1, 9100)?;
    install(cluster).await?;
    // The guide's commands: Postern's CA in postern-ca.crt, and the servers' certificate for kubelets.
    follow::section(cluster, DOCUMENT, CALLERS, &[]).await?;
    for account in ["scraper", "reader"] {
        kubectl.run(&["create", "serviceaccount", account]).await?;
    }
    let resource = format!("--resource={READER}");
    kubectl.run(&["create", "clusterrole", "reader", "--verb=get", &resource]).await?;
    let subject = "--serviceaccount=default:reader";
    kubectl.run(&["create", "clusterrolebinding", "reader", "--clusterrole=reader", subject]).await?;
    let scraper = kubectl.run(&["create", "token", "scraper"]).await?;
    let reader = kubectl.run(&["create", "token", "reader"]).await?;

    kubelets(cluster, &reader, &scraper).await?;
    by_certificate(cluster).await?;
    progress("the https listener asks the API server who may reach kubelets");
    connect::check(cluster, &scraper, &reader).await?;
    progress("the connect listeners ask the API server whose a token is, and where a Service leads");
    by_name::check(cluster, &reader, &scraper).await?;
    progress("a pod reaches a node by its name through the plain listener");
    ensure!(metrics.connections() > 0, "the exporter was not reached");
    rights::of_components(cluster, "deploy::callers_are_asked_for").await
}

async fn install(cluster: &Cluster<'_>) -> Result<()> {
    let components = ["https-callers", "connect", "edge-pods"];
    let mut patches = connect::patches();
    patches.push(by_name::patch());
    let overlay = overlay_with(cluster.testbed, "base", &components, patches)?;
    cluster.kubectl.run(&["apply", "-k", text(&overlay)?]).await?;
    ready(&cluster.kubectl, "tunnel-server", 1).await?;
    ready(&cluster.kubectl, "tunnel-agent", 1).await
}

/// Returns the URL of a path at the https listener.
fn https(path: &str) -> String {
    format!("https://{CLOUD}:10263{path}")
}

/// Through the https listener: kubelets' paths, for accounts with the cluster's rights on nodes.
async fn kubelets(cluster: &Cluster<'_>, reader: &str, scraper: &str) -> Result<()> {
    let testbed = cluster.testbed;
    let ask = async |path: &str, host: Option<&str>, token: &str| {
        let (url, token) = (https(path), format!("Authorization: Bearer {}", token.trim()));
        let ca = testbed.dir().join("postern-ca.crt");
        let host = host.map(|host| format!("Host: {host}"));
        let host = host.iter().flat_map(|host| ["-H", host]);
        let args: Vec<&str> = ["--cacert", text(&ca)?, "-H", &token, &url].into_iter().chain(host).collect();
        curl(testbed, &args).await
    };
    // The Secret reaches the pod within a minute.
    let edge = format!("{EDGE_NODE}:10250");
    let logs = "/containerLogs/default/talker/main?tailLines=1";
    let answered = async || ask(logs, None, reader).await;
    wait_until("a pod's log by the pod's name", 2 * PATIENCE, answered, |answer: &Answer| {
        answer.status == 200 && answer.body.starts_with("line ")
    })
    .await?;
    ask("/metrics/resource", Some(&edge), reader).await?.expect(200, "node_cpu_usage_seconds_total")?;
    ask("/metrics/resource", Some(&edge), scraper)
        .await?
        .expect(403, "system:serviceaccount:default:scraper")?;
    ask("/metrics/resource", Some(&edge), "nonsense").await?.expect(401, "")?;
    // The names and places of pods are shown only to accounts with this right on all nodes.
    let refused = ask(logs, None, scraper).await?;
    refused.expect(403, "system:serviceaccount:default:scraper cannot get nodes/proxy of")?;
    let of_servers = "--selector=app.kubernetes.io/name=tunnel-server";
    let name = "--output=jsonpath={.items[0].metadata.name}";
    let on_cloud = cluster.kubectl.run(&["get", "pods", "--namespace", NAMESPACE, of_servers, name]).await?;
    for (pod, status, reason) in [
        (format!("{NAMESPACE}/{}", on_cloud.trim()), 400, "which is not an edge node"),
        ("default/missing".to_owned(), 404, "does not exist"),
    ] {
        let path = format!("/containerLogs/{pod}/main");
        ask(&path, None, reader).await?.expect(status, reason)?;
        let answer = ask(&path, None, scraper).await?;
        ensure!(
            (answer.status, &answer.body) == (refused.status, &refused.body),
            "{pod} is told apart from a pod at the edge: {answer:?} and {refused:?}"
        );
    }
    Ok(())
}

/// The same with certificates of the cluster's CA, for four callers with the right to one subresource each.
async fn by_certificate(cluster: &Cluster<'_>) -> Result<()> {
    let testbed = cluster.testbed;
    let (mut rights, mut callers) = (Vec::new(), Vec::new());
    for (subresource, ..) in SUBRESOURCES {
        let (name, user) = (format!("only-{subresource}"), format!("caller-of-{subresource}"));
        callers.push(cluster.pki.client(&name, &user, &[name.as_str()])?);
        // Half of them have the right by their common name, half by their organisation.
        let by_name = matches!(subresource, "proxy" | "stats");
        let (kind, subject) = if by_name { ("User", &user) } else { ("Group", &name) };
        rights.push(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": name },
            "rules": [{ "apiGroups": [""], "resources": [format!("nodes/{subresource}")], "verbs": ["get"] }],
        }));
        rights.push(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": name },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": subject }],
        }));
    }
    let rights = json!({ "apiVersion": "v1", "kind": "List", "items": rights });
    cluster.kubectl.run_with_input(&["apply", "--filename=-"], rights.to_string().as_bytes()).await?;

    let (ca, host) = (testbed.dir().join("postern-ca.crt"), format!("Host: {EDGE_NODE}:10250"));
    let ask = async |caller: &Pair, path: &str, more: &[&str]| {
        let url = https(path);
        let (certificate, key) = (text(&caller.certificate)?, text(&caller.key)?);
        let args = ["--cacert", text(&ca)?, "--cert", certificate, "--key", key, "-H", &host, &url];
        curl(testbed, &[&args[..], more].concat()).await
    };
    for ((subresource, path, part), caller) in SUBRESOURCES.into_iter().zip(&callers) {
        // The API server applies a new right a moment later.
        let answered = async || ask(caller, path, &[]).await;
        wait_until(&format!("nodes/{subresource} by certificate"), PATIENCE, answered, |answer: &Answer| {
            answer.status == 200 && answer.body.contains(part)
        })
        .await?;
    }
    for ((own, ..), caller) in SUBRESOURCES.into_iter().zip(&callers) {
        for (other, path, _) in SUBRESOURCES {
            if other != own {
                let refused = format!("caller-of-{own} cannot get nodes/{other} of {EDGE_NODE}");
                ask(caller, path, &[]).await?.expect(403, &refused)?;
            }
        }
    }
    let run = "/run/default/talker/main?cmd=true";
    let refused = format!("caller-of-proxy cannot create nodes/proxy of {EDGE_NODE}");
    ask(&callers[0], run, &["--request", "POST"]).await?.expect(403, &refused)?;
    // The same name, signed by another CA.
    let (certificate, key) = Authority::new(testbed, "another-ca")?.client("caller-of-metrics")?;
    let answer = ask(&Pair { certificate, key }, "/metrics/resource", &[]).await?;
    ensure!(!answer.ok && answer.status == 0, "another CA's certificate was taken: {answer:?}");
    Ok(())
}

//! `http://NODE:PORT` from a pod of the cloud, by the objects of an installation: the DNS record, the internal
//! Service's port, the plain listener. The test cluster has no DNS server: the record goes into the pod's hosts file,
//! which has the same format.
use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::pods::{self, IDLE, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::wait::wait_for;
use postern_testbed::{CLOUD, POD_CIDR};
use serde_json::{Value, json};

use super::{PATIENCE, patches, text};
use crate::web::curl;

const LISTENER: u16 = 10268;
const PORT: u16 = 9100;
const KUBELET: u16 = 10250;
const POD: &str = "by-name";

/// Returns the patch of the servers for this.
pub(super) fn patch() -> Value {
    let flags = [format!("--plain-port={LISTENER}"), format!("--plain-clients={POD_CIDR}")];
    patches::of("tunnel-server", &json!(flags.map(|flag| patches::argument(&flag))))
}

/// Checks by-name access. `reader` is the token of an account that may read nodes' metrics, `scraper` that of one
/// without rights on nodes.
pub(super) async fn check(cluster: &Cluster<'_>, reader: &str, scraper: &str) -> Result<()> {
    let lists = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-server-cfg");
    let change = json!({ "data": { "http-proxy-ports": PORT.to_string() } });
    cluster.api.patch(&lists, &change).await?;
    let (address, service) = (record(cluster).await?, service(cluster).await?);
    ensure!(address == service, "the record leads to {address}, the Service is {service}");
    over_tls(cluster, &address).await?;
    from_a_pod(cluster, &address).await?;
    from_the_host(cluster, reader, scraper).await
}

/// Returns the address of the node's name in the servers' DNS record.
async fn record(cluster: &Cluster<'_>) -> Result<String> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-nodes");
    let ending = format!("\t{EDGE_NODE}");
    let of_node = |records: &Value| -> Option<String> {
        let lines = records["data"]["tunnel-nodes"].as_str()?;
        lines.lines().find_map(|line| line.strip_suffix(ending.as_str())).map(str::to_owned)
    };
    let has_it = |records: &Value| of_node(records).is_some();
    let records = cluster.api.wait("the node's DNS record", &path, PATIENCE, has_it).await?;
    of_node(&records).context("the record is gone")
}

/// Returns the internal Service's address, once one of its ports leads to the listener.
async fn service(cluster: &Cluster<'_>) -> Result<String> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-internal-svc");
    let leads = |service: &Value| {
        let ports = service["spec"]["ports"].as_array().map_or(&[][..], Vec::as_slice);
        ports.iter().any(|port| port["port"] == PORT && port["targetPort"] == LISTENER)
    };
    let service =
        cluster.api.wait("the Service's port for the plain listener", &path, PATIENCE, leads).await?;
    Ok(service["spec"]["clusterIP"].as_str().context("the Service has no address")?.to_owned())
}

/// The kubelet's own port and certificate, as a Prometheus on a host without the redirect finds them.
async fn over_tls(cluster: &Cluster<'_>, address: &str) -> Result<()> {
    let ca = cluster.pki.file("ca.crt");
    let through = format!("{EDGE_NODE}:{KUBELET}:{address}:{KUBELET}");
    let url = format!("https://{EDGE_NODE}:{KUBELET}/metrics");
    let asked = ["--cacert", text(&ca)?, "--connect-to", &through, &url];
    // It knows nobody here, and has been verified.
    curl(cluster.testbed, &asked).await?.expect(401, "Unauthorized")
}

async fn from_a_pod(cluster: &Cluster<'_>, address: &str) -> Result<()> {
    let mut pod = shell(POD, CLOUD_NODE, IDLE);
    pod["spec"]["hostAliases"] = json!([{ "ip": address, "hostnames": [EDGE_NODE] }]);
    pods::run(&cluster.api, &[pod]).await?;
    let url = format!("http://{EDGE_NODE}:{PORT}/metrics");
    // kube-proxy follows the Service a moment later; until then the address does not answer.
    let ask = ["exec", POD, "--", "timeout", "5", "wget", "-q", "-O-", &url];
    let page = wait_for("the page by the node's name", PATIENCE, async || {
        let output = cluster.kubectl.output(&ask).await?;
        Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
    })
    .await?;
    let host = format!("\nhost: {EDGE_NODE}:{PORT}\n");
    ensure!(page.starts_with("GET /metrics HTTP/1.1 ") && page.contains(&host), "the page is {page:?}");
    Ok(())
}

/// The host itself is outside of the pods' range: it needs the token of an account that may read the node's metrics, and
/// may show it on its loopback only.
async fn from_the_host(cluster: &Cluster<'_>, reader: &str, scraper: &str) -> Result<()> {
    let url = format!("http://{CLOUD}:{LISTENER}/metrics");
    let host = format!("Host: {EDGE_NODE}:{PORT}");
    let local = format!("http://127.0.0.1:{LISTENER}/metrics");
    let ask_at = async |url: &str, more: &[&str]| {
        curl(cluster.testbed, &[&[url, "-H", host.as_str()][..], more].concat()).await
    };
    let ask = async |more: &[&str]| ask_at(&local, more).await;
    ask(&[]).await?.expect(401, "is not in --plain-clients, and the request has no bearer token")?;
    let bearer = |token: &str| format!("Authorization: Bearer {}", token.trim());
    ask_at(&url, &["-H", &bearer(reader)]).await?.expect(403, "--plain-tokens=on")?;
    ask(&["-H", &bearer(reader)]).await?.expect(200, "GET /metrics")?;
    let refused = format!("system:serviceaccount:default:scraper cannot get nodes/metrics of {EDGE_NODE}");
    ask(&["-H", &bearer(scraper)]).await?.expect(403, &refused)
}

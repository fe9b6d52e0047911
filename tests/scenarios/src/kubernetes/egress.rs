//! kube-apiserver reaches nodes and pods through the egress listener by its EgressSelector, with nothing redirected.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use postern_testbed::cluster::pods::{IDLE, TALK, shell};
use postern_testbed::cluster::webhook::{FORBIDDEN, Webhook};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, pods, postern};
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, POD_CIDR, Testbed};
use serde_json::{Value, json};

use super::checks::Checks;
use super::{commands, forward, konnectivity, redirect, views};
use crate::rights;

const PORT: u16 = 8131;

/// The connection types of kube-apiserver's EgressSelector.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    GrpcOverUnix,
    ConnectOverUnix,
    ConnectOverTls,
}

impl Kind {
    fn connection(self, testbed: &Testbed, cluster: &Cluster<'_>) -> Result<Value> {
        let unix = json!({ "uds": { "udsName": socket(testbed) } });
        Ok(match self {
            Self::GrpcOverUnix => json!({ "proxyProtocol": "GRPC", "transport": unix }),
            Self::ConnectOverUnix => json!({ "proxyProtocol": "HTTPConnect", "transport": unix }),
            Self::ConnectOverTls => {
                let pair = cluster.pki.client("egress", "kube-apiserver-egress", &[])?;
                let tls = json!({
                    "caBundle": testbed.dir().join("server/ca/ca.crt"),
                    "clientKey": pair.key,
                    "clientCert": pair.certificate,
                });
                let url = format!("https://{CLOUD}:{PORT}");
                json!({ "proxyProtocol": "HTTPConnect", "transport": { "tcp": { "url": url, "tlsConfig": tls } } })
            }
        })
    }
}

pub(super) fn socket(testbed: &Testbed) -> PathBuf {
    testbed.dir().join("egress.sock")
}

pub(super) async fn egress_selector(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    let mut all = [commands::pods(EDGE_NODE), forward::pods(EDGE_NODE), views::pods(EDGE_NODE)].concat();
    all.extend([shell("cloud-talker", CLOUD_NODE, TALK), shell("cloud-idle", CLOUD_NODE, IDLE)]);
    pods::run(&cluster.api, &all).await?;
    let mut checks = Checks::new();
    checks.run("without Postern, logs of an edge pod fail", redirect::nothing_works_yet(&cluster)).await;
    let manifests = postern::install_with(&cluster, "base", &["konnectivity-agents"]).await?;
    let server = postern::server(&cluster, &manifests)
        .await?
        .flag("--redirect=off")
        .flag("--edge-pod-routes=10.72.0.0/16")
        .flag(format!("--egress-socket={}", socket(testbed).display()))
        .flag(format!("--egress-port={PORT}"))
        .flag(format!("--egress-client-ca={}", cluster.pki.file("ca.crt").display()))
        .flag("--egress-client-names=kube-apiserver-egress")
        .flag(format!("--egress-direct={CLOUD}/32,{POD_CIDR}"))
        .flag(format!("--konnectivity-service-account={}", konnectivity::ACCOUNT))
        .start()
        .await?;
    let agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    let mut webhook = None;
    for kind in [Kind::GrpcOverUnix, Kind::ConnectOverUnix, Kind::ConnectOverTls] {
        // Services resolve to their endpoints, as some of those are on edge nodes.
        select(testbed, &mut cluster, kind, &["--enable-aggregator-routing=true"]).await?;
        let name = |what: &str| format!("{kind:?}: {what}");
        checks
            .run(&name("an edge's logs go through the listener"), through_the_listener(&cluster, &server))
            .await;
        checks.run(&name("the cloud's node is dialled directly"), cloud(&cluster, &server)).await;
        let webhook = match &webhook {
            Some(webhook) => webhook,
            None => webhook.insert(Webhook::start(&cluster).await?),
        };
        checks.run(&name("an admission webhook on an edge node"), admission(&cluster, webhook)).await;
        // The copies take most of the suite's time.
        let megabytes = if matches!(kind, Kind::GrpcOverUnix) { commands::MEGABYTES } else { 50 };
        commands::run(&mut checks, &cluster, megabytes).await;
        forward::run(&mut checks, &cluster).await;
        views::run(&mut checks, &cluster).await;
    }
    let name = "konnectivity's agent by its pod's token: not beside a tunnel-agent";
    konnectivity::prepare(&cluster).await?;
    checks.run(name, konnectivity::refused_beside_a_tunnel_agent(testbed, &cluster)).await;
    drop(agent);
    let socket = socket(testbed);
    let attaches = konnectivity::attaches_by_its_token(testbed, &cluster, &server, &socket);
    checks.run("konnectivity's agent by its pod's token", attaches).await;
    let relays = konnectivity::its_own_program_relays(testbed, &cluster, &server);
    checks.run("konnectivity's own program with its pod's token: logs and exec", relays).await;
    let used = rights::of_components(&cluster, "kubernetes::egress_selector");
    checks.run("each right of the component is used", used).await;
    checks.finish()
}

/// Restarts the API server with this connection type for nodes, pods and Services, and additional flags.
pub(super) async fn select(
    testbed: &Testbed,
    cluster: &mut Cluster<'_>,
    kind: Kind,
    more: &[&str],
) -> Result<()> {
    let connection = kind.connection(testbed, cluster)?;
    cluster.select_egress(&connection, more).await
}

async fn through_the_listener(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    let before = connections(server, EDGE_NODE)?;
    commands::logs(&cluster.kubectl).await?;
    commands::exec(&cluster.kubectl).await?;
    wait_more(server, EDGE_NODE, before).await
}

pub(super) async fn admission(cluster: &Cluster<'_>, webhook: &Webhook) -> Result<()> {
    let before = webhook.asked();
    let object = |name: &str| json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name, "labels": { "webhook": "" } } });
    let path = "/api/v1/namespaces/default/configmaps";
    // The API server learns of the webhook a moment after its creation, and of its Service and endpoint by other
    // watches, perhaps a moment later.
    let refused = async || match cluster.api.create(path, &object(FORBIDDEN)).await {
        Ok(_) => {
            cluster.api.delete(&format!("{path}/{FORBIDDEN}")).await.map(|()| "it was not asked".to_owned())
        }
        Err(error) => Ok(format!("{error:#}")),
    };
    wait_until("the webhook to refuse an object", Duration::from_secs(30), refused, |said| {
        said.contains("an edge node does not want it")
    })
    .await?;
    cluster.api.create(path, &object("welcome")).await?;
    cluster.api.delete(&format!("{path}/welcome")).await?;
    ensure!(webhook.asked() >= before + 2, "it was asked {} times", webhook.asked() - before);
    Ok(())
}

async fn cloud(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    let before = connections(server, "")?;
    let printed = cluster.kubectl.run(&["exec", "cloud-idle", "--", "hostname"]).await?;
    ensure!(printed == "cloud-idle\n", "hostname printed {printed:?}");
    wait_more(server, "", before).await
}

/// Waits until more [`connections`] have ended than before.
async fn wait_more(server: &Server<'_>, node: &str, before: usize) -> Result<()> {
    let what = format!("more than {before} connections of the egress listener to {node:?}");
    let count = async || connections(server, node);
    wait_until(&what, Duration::from_secs(10), count, |now| *now > before).await.map(drop)
}

/// Counts the egress listener's ended connections to this node; connections that the server dialled itself have none.
fn connections(server: &Server<'_>, node: &str) -> Result<usize> {
    let lines = server.access_log()?;
    Ok(lines.iter().filter(|line| line.text("listener") == "egress" && line.text("node") == node).count())
}

//! A konnectivity agent that presents the token of its pod: the real API server determines its node.
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::START;
use postern_testbed::client::PATIENCE;
use postern_testbed::cluster::pods::{IDLE, shell};
use postern_testbed::cluster::{Cluster, EDGE_NODE, peers, pods};
use postern_testbed::process::Process;
use postern_testbed::server::Server;
use postern_testbed::{CLOUD, Testbed, tls};
use serde_json::json;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};
use tunnel_link::konnectivity::Packet;
use tunnel_link::konnectivity::agent_service_client::AgentServiceClient;
use tunnel_link::konnectivity::packet::Payload;

use super::commands;
use crate::egress::client::{ask, over};

/// The component's port.
const PORT: u16 = 8132;
pub(super) const ACCOUNT: &str = "default/konnectivity-agent";
const NAME: &str = "konnectivity-agent";
const AUDIENCE: &str = "system:konnectivity-server";

/// An accepted stream.
struct Attached {
    packets: mpsc::Sender<Packet>,
    answers: Streaming<Packet>,
}

/// Creates the ServiceAccount, and a pod with it on the edge.
pub(super) async fn prepare(cluster: &Cluster<'_>) -> Result<()> {
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": NAME } });
    cluster.api.create("/api/v1/namespaces/default/serviceaccounts", &account).await?;
    let mut pod = shell(NAME, EDGE_NODE, IDLE);
    pod["spec"]["serviceAccountName"] = json!(NAME);
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    pods::run(&cluster.api, &[pod]).await
}

async fn token(cluster: &Cluster<'_>, audience: &str, bound: bool) -> Result<String> {
    let mut spec = json!({ "audiences": [audience], "expirationSeconds": 600 });
    if bound {
        spec["boundObjectRef"] = json!({ "kind": "Pod", "apiVersion": "v1", "name": NAME });
    }
    let request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec });
    let path = format!("/api/v1/namespaces/default/serviceaccounts/{NAME}/token");
    let made = cluster.api.create(&path, &request).await?;
    Ok(made["status"]["token"].as_str().context("no token was made")?.to_owned())
}

async fn call(testbed: &Testbed, token: Option<&str>) -> Result<Result<Attached, Status>> {
    let roots = tls::roots(&testbed.dir().join("server/ca/ca.crt"))?;
    let socket = TcpStream::connect((CLOUD, PORT)).await?;
    let stream = tls::handshake(socket, &CLOUD.to_string(), roots, None, Some(b"h2")).await?;
    let (packets, requests) = mpsc::channel(4);
    let mut request = Request::new(ReceiverStream::new(requests));
    request.metadata_mut().insert("agentid", "an-agent".parse()?);
    request.metadata_mut().insert("agentidentifiers", "host=another-node".parse()?);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse()?);
    }
    let mut client = AgentServiceClient::new(over(stream).await?);
    let response =
        match timeout(PATIENCE, client.connect(request)).await.context("the call was not answered")? {
            Ok(response) => response,
            Err(status) => return Ok(Err(status)),
        };
    for key in ["serverid", "servercount"] {
        ensure!(response.metadata().get(key).is_some(), "the answer has no {key}");
    }
    Ok(Ok(Attached { packets, answers: response.into_inner() }))
}

/// The call is refused while the node has a tunnel-agent.
pub(super) async fn refused_beside_a_tunnel_agent(testbed: &Testbed, cluster: &Cluster<'_>) -> Result<()> {
    let token = token(cluster, AUDIENCE, true).await?;
    let status = call(testbed, Some(&token)).await?.err().context("it was let in")?;
    ensure!(
        status.code() == Code::FailedPrecondition && status.message().contains(EDGE_NODE),
        "it was answered {status}"
    );
    Ok(())
}

/// The call is accepted once the node has no tunnel-agent.
pub(super) async fn attaches_by_its_token(
    testbed: &Testbed,
    cluster: &Cluster<'_>,
    server: &Server<'_>,
    socket: &Path,
) -> Result<()> {
    server.wait_connected(EDGE_NODE, false, Duration::from_secs(30)).await?;
    let (good, unbound) = (token(cluster, AUDIENCE, true).await?, token(cluster, AUDIENCE, false).await?);
    let elsewhere = token(cluster, "elsewhere", true).await?;
    for (what, token, code) in [
        ("no token", None, Code::Unauthenticated),
        ("rubbish", Some("rubbish"), Code::Unauthenticated),
        ("another audience's", Some(elsewhere.as_str()), Code::Unauthenticated),
        ("a token without a pod", Some(unbound.as_str()), Code::PermissionDenied),
    ] {
        let status = call(testbed, token).await?.err().with_context(|| format!("{what} was let in"))?;
        ensure!(status.code() == code, "{what} was answered {status}");
    }
    let mut attached = call(testbed, Some(&good)).await?.context("the pod's token is refused")?;
    server.wait_connected(EDGE_NODE, true, START).await?;
    let target = format!("{EDGE_NODE}:10250");
    let asked = ask(UnixStream::connect(socket).await?, &target);
    let answering = async {
        let packet = timeout(PATIENCE, attached.answers.message()).await.context("no dial")??;
        let Some(Payload::DialRequest(dial)) = packet.and_then(|packet| packet.payload) else {
            anyhow::bail!("instead of a dial came something else")
        };
        ensure!(dial.address.ends_with(":10250"), "it is to dial {:?}", dial.address);
        let refused = Packet::dial_response(dial.random, Err("connect: connection refused".to_owned()));
        attached.packets.send(refused).await.context("the stream has ended")
    };
    let ((_, answer), ()) = tokio::try_join!(asked, answering)?;
    ensure!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("connection refused"), "{answer:?}");
    drop(attached);
    server.wait_connected(EDGE_NODE, false, PATIENCE).await
}

/// Runs konnectivity's own program with that token, which alone determines its node: kube-apiserver reaches the node
/// through it.
pub(super) async fn its_own_program_relays(
    testbed: &Testbed,
    cluster: &Cluster<'_>,
    server: &Server<'_>,
) -> Result<()> {
    let file = testbed.dir().join("konnectivity-agent-token");
    fs::write(&file, token(cluster, AUDIENCE, true).await?).context("writing the token")?;
    let mut command = testbed.on_edge(1).command(&peers::konnectivity("proxy-agent")?);
    command
        .args(["--logtostderr=true", "--v=2", "--sync-interval=200ms", "--sync-interval-cap=1s"])
        .args([format!("--proxy-server-host={CLOUD}"), format!("--proxy-server-port={PORT}")])
        .args(["--agent-id=an-agent", "--agent-identifiers=host=another-node"])
        .arg(format!("--ca-cert={}", testbed.dir().join("server/ca/ca.crt").display()))
        .arg(format!("--service-account-token-path={}", file.display()));
    let _agent = Process::spawn(testbed.dir(), "proxy-agent", command)?;
    server.wait_connected(EDGE_NODE, true, START).await?;
    commands::logs(&cluster.kubectl).await?;
    commands::exec(&cluster.kubectl).await
}

//! The API server, and how each server reaches it.

use std::io;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use futures_util::stream;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use postern_fake_kube::Api;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::NodeName;
use tunnel_server::pki::Revocation;

use crate::agent;

pub(crate) const NAMESPACE: &str = "kube-system";
const NODES: &str = "/api/v1/nodes";
/// Time that the API server takes for an answer.
const ANSWERS: Duration = Duration::from_millis(2);

/// The path from a server to the API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Path {
    #[default]
    Open,
    /// Requests and answers arrive once the path is open again.
    Silent,
    /// Connections are reset.
    Refused,
}

/// The API server. Its objects outlive its outages.
pub(crate) struct Cluster {
    api: Api,
    /// By server, with the number of reasons to be silent and to be refused.
    paths: Vec<(watch::Sender<Path>, [usize; 2])>,
    /// The same for all nodes, which do not reach it while no server does.
    nodes: (watch::Sender<Path>, [usize; 2]),
}

impl Cluster {
    /// Has a Node for each agent.
    pub(crate) fn new(servers: usize, nodes: &[NodeName]) -> Self {
        let paths = (0..servers).map(|_| (watch::Sender::default(), [0, 0])).collect();
        let cluster = Self { api: Api::default(), paths, nodes: Default::default() };
        nodes.iter().enumerate().for_each(|(index, node)| cluster.set_node(index, node, None));
        cluster
    }

    /// A process of a server has the client until it is `killed`. A request that it has sent before may still arrive.
    pub(crate) fn client(&self, server: usize, killed: CancellationToken) -> Client {
        self.client_on(self.paths[server].0.subscribe(), None, killed)
    }

    /// The same of an agent, which the API server takes for its node.
    pub(crate) fn client_of_node(&self, node: &NodeName, killed: CancellationToken) -> Client {
        self.client_on(self.nodes.0.subscribe(), Some(node.clone()), killed)
    }

    fn client_on(
        &self,
        path: watch::Receiver<Path>,
        node: Option<NodeName>,
        killed: CancellationToken,
    ) -> Client {
        let api = self.api.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (api, mut path, node, killed) = (api.clone(), path.clone(), node.clone(), killed.clone());
            async move {
                let answer = async {
                    let request = match &node {
                        Some(node) if request.method() == Method::POST => of_node(request, node).await?,
                        _ => request,
                    };
                    passes(&mut path).await?;
                    sleep(ANSWERS).await;
                    let answer = api.answer(request).await;
                    passes(&mut path).await?;
                    let (head, body) = answer.into_parts();
                    let frames = stream::try_unfold((body, path), |(mut body, mut path)| async move {
                        let frame = tokio::select! {
                            biased;
                            () = resets(&mut path) => return Err(refused()),
                            frame = body.frame() => frame,
                        };
                        passes(&mut path).await?;
                        Ok(frame.transpose()?.map(|frame| (frame, (body, path))))
                    });
                    Ok::<_, io::Error>(Response::from_parts(head, StreamBody::new(frames).boxed_unsync()))
                };
                killed.run_until_cancelled(answer).await.unwrap_or_else(|| Err(refused()))
            }
        });
        Client::new(service, NAMESPACE)
    }

    /// A server cannot reach the API server, for one more reason; or all cannot.
    pub(crate) fn cut(&mut self, server: Option<usize>, silent: bool) {
        self.change(server, |reasons| reasons[usize::from(!silent)] += 1);
    }

    /// Ends one of the reasons.
    pub(crate) fn mend(&mut self, server: Option<usize>, silent: bool) {
        self.change(server, |reasons| reasons[usize::from(!silent)] -= 1);
    }

    fn change(&mut self, server: Option<usize>, change: impl Fn(&mut [usize; 2])) {
        let paths = self.paths.iter_mut().enumerate().map(|(index, path)| (Some(index), path));
        for (index, (path, reasons)) in paths.chain([(None, &mut self.nodes)]) {
            if server.is_none() || server == index {
                change(reasons);
                let now = match reasons {
                    [0, 0] => Path::Open,
                    [_, 0] => Path::Silent,
                    _ => Path::Refused,
                };
                path.send_if_modified(|path| std::mem::replace(path, now) != now);
            }
        }
    }

    /// Makes a Node, at this time unless it is older than all certificates.
    pub(crate) fn set_node(&self, index: usize, node: &NodeName, created: Option<SystemTime>) {
        let address = json!({"type": "InternalIP", "address": agent::host(index)});
        let labels = json!({"node-role.kubernetes.io/edge": ""});
        let created = created.and_then(|at| Timestamp::try_from(at).ok()).map(|at| at.to_string());
        let metadata = json!({"name": node, "labels": labels, "creationTimestamp": created});
        self.api.put(NODES, json!({"metadata": metadata, "status": {"addresses": [address]}}));
    }

    pub(crate) fn delete_node(&self, node: &NodeName) {
        self.api.remove(NODES, node.as_str());
    }

    pub(crate) fn is_reached_by(&self, server: usize) -> bool {
        *self.paths[server].0.borrow() == Path::Open
    }

    pub(crate) fn is_reached_by_nodes(&self) -> bool {
        *self.nodes.0.borrow() == Path::Open
    }

    /// The status of the node's condition; None if it has none.
    pub(crate) fn condition(&self, node: &NodeName) -> Option<String> {
        let node = self.api.get(NODES, node.as_str())?;
        let conditions = node["status"]["conditions"].as_array()?;
        let ours = conditions.iter().find(|condition| condition["type"] == "PosternTunnel")?;
        ours["status"].as_str().map(str::to_owned)
    }

    /// Writes what an operator says of a node: revokes it, or readmits it.
    pub(crate) fn set_revocation(&self, record: &Revocation) -> Result<()> {
        let (maps, name) = ("/api/v1/namespaces/kube-system/configmaps", "tunnel-revoked-agents");
        let data = self.api.get(maps, name).map_or_else(|| json!({}), |map| map["data"].clone());
        let mut map = json!({"metadata": {"name": name, "namespace": NAMESPACE}, "data": data});
        map["data"][record.subject.to_string()] = json!(serde_json::to_string(record)?);
        self.api.put(maps, map);
        Ok(())
    }

    /// The server that holds the Lease.
    pub(crate) fn holder(&self) -> Option<String> {
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
        let lease: Value = self.api.get(leases, "tunnel-server")?;
        lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }
}

/// Adds the requester to a CertificateSigningRequest, as the API server does.
async fn of_node(request: Request<Body>, node: &NodeName) -> io::Result<Request<Body>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let mut object: Value = serde_json::from_slice(&body)?;
    object["spec"]["username"] = json!(format!("system:node:{node}"));
    object["spec"]["groups"] = json!(["system:nodes"]);
    Ok(Request::from_parts(head, Body::from(serde_json::to_vec(&object)?)))
}

async fn passes(path: &mut watch::Receiver<Path>) -> io::Result<()> {
    match path.wait_for(|path| *path != Path::Silent).await.as_deref() {
        Ok(Path::Refused) | Err(_) => Err(refused()),
        Ok(_) => Ok(()),
    }
}

async fn resets(path: &mut watch::Receiver<Path>) {
    // The sender lives as long as the fleet.
    let _ = path.wait_for(|path| *path == Path::Refused).await;
}

fn refused() -> io::Error {
    io::ErrorKind::ConnectionRefused.into()
}

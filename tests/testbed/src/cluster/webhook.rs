//! A validating admission webhook on an edge host that allows every object except those named `forbidden`.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use k8s_openapi::ByteString;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;

use super::{Cluster, endpoints};

/// Its port on the edge node.
pub const PORT: u16 = 9443;
/// Name of the object that is refused.
pub const FORBIDDEN: &str = "forbidden";
const DEFAULT: &str = "/api/v1/namespaces/default";

/// A running webhook. Dropping it stops it.
#[derive(Debug)]
pub struct Webhook {
    asked: Arc<AtomicU64>,
    task: AbortHandle,
}

impl Webhook {
    /// Starts it on edge 1, with a Service whose endpoint is the node, and registers it for every new ConfigMap with
    /// the label `webhook`.
    pub async fn start(cluster: &Cluster<'_>) -> Result<Self> {
        let edge = cluster.testbed.edge(1);
        let address = SocketAddr::from((edge.address, PORT));
        let pair = cluster.pki.server("webhook", "webhook", &["webhook.default.svc".to_owned()])?;
        let chain = CertificateDer::pem_file_iter(&pair.certificate)?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(&pair.key)?;
        let config =
            ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()?
                .with_no_client_auth()
                .with_single_cert(chain, key)?;
        let listener = edge.ns.run(|| {
            std::net::TcpListener::bind(address).with_context(|| format!("listening on {address}"))
        })?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let asked = Arc::new(AtomicU64::new(0));
        let serving = serve(listener, TlsAcceptor::from(Arc::new(config)), asked.clone());
        let task = tokio::spawn(serving).abort_handle();
        configure(cluster, &address).await?;
        Ok(Self { asked, task })
    }

    /// Returns the number of reviews that it was asked for.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn configure(cluster: &Cluster<'_>, address: &SocketAddr) -> Result<()> {
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "webhook" },
        "spec": { "ports": [{ "port": 443, "targetPort": PORT }] },
    });
    cluster.api.create(&format!("{DEFAULT}/services"), &service).await?;
    let slice = endpoints::slice("webhook", "", address.ip(), PORT);
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    cluster.api.create(slices, &slice).await?;
    let ca = std::fs::read(cluster.pki.file("ca.crt")).context("reading the CA")?;
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": "webhook" },
        "webhooks": [{
            "name": "webhook.postern.test", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "failurePolicy": "Fail", "timeoutSeconds": 10,
            "objectSelector": { "matchExpressions": [{ "key": "webhook", "operator": "Exists" }] },
            "rules": [{ "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["CREATE"] }],
            "clientConfig": {
                "caBundle": ByteString(ca),
                "service": { "namespace": "default", "name": "webhook", "path": "/review" },
            },
        }],
    });
    let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    cluster.api.create(path, &webhook).await.map(drop)
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, asked: Arc<AtomicU64>) {
    while let Ok((socket, _)) = listener.accept().await {
        let (acceptor, asked) = (acceptor.clone(), asked.clone());
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(socket).await else { return };
            let answer = service_fn(|request| review(request, &asked));
            if let Err(error) = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await {
                eprintln!("webhook: {error}");
            }
        });
    }
}

async fn review(request: Request<Incoming>, asked: &AtomicU64) -> Result<Response<Full<Bytes>>> {
    asked.fetch_add(1, Ordering::SeqCst);
    let body = request.into_body().collect().await?.to_bytes();
    let review: Value = serde_json::from_slice(&body)?;
    let asked_for = &review["request"];
    let allowed = asked_for["name"] != FORBIDDEN;
    let answer = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "response": {
            "uid": asked_for["uid"], "allowed": allowed, "status": { "message": "an edge node does not want it" },
        },
    });
    // Each call is to be a connection of its own.
    let response =
        Response::builder().header("content-type", "application/json").header("connection", "close");
    Ok(response.body(Full::new(Bytes::from(answer.to_string())))?)
}

//! An agent in a cluster: its certificate and its servers through the API server, its sessions with real servers.

mod enrolment;
mod forwarded;
mod judged;
mod links;
mod load;
mod servers;

pub(crate) use servers::Port;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use postern_fake_kube::{ApiServer, eventually};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tunnel_agent::cli::Cli;
use tunnel_agent::metrics::Metrics;
use tunnel_agent::places::Places;
use tunnel_agent::runtime::Runtime;
use tunnel_agent::session::{LinkSet, Shared};
use tunnel_doctor::parse_flags;
use tunnel_kube::{ClientSettings, Health, connect_lasting};
use tunnel_pki::enrol::{Announced, CsrEnrolment, Pace};
use tunnel_pki::{AgentIdentity, Holder};
use tunnel_server::kube::write::csr;
use tunnel_server::kube::{KubeContext, ObjectNames};
use tunnel_server::pki::{CaState, PkiMetrics, Standing};

use crate::harness::node;

const CSRS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// An agent's client of the API server.
async fn agent_api(api: &ApiServer) -> kube::Client {
    connect_lasting(Some(api.kubeconfig()), None, ClientSettings::AGENT).await.unwrap().0
}

async fn kube_client(api: &ApiServer) -> kube::Client {
    tunnel_kube::connect(Some(&api.kubeconfig()), None, &ClientSettings::SERVER).await.unwrap().0
}

/// Short enough for a test.
const PACE: Pace = Pace {
    refused: Duration::from_millis(200),
    patience: Duration::from_millis(500),
    spread: Duration::from_millis(100),
    again: Duration::from_secs(2),
};

async fn enrolment(api: &ApiServer, name: &str, state: &str) -> (Arc<CsrEnrolment>, PathBuf) {
    let state_dir = api.dir().join(state);
    let enrolment =
        CsrEnrolment::new(agent_api(api).await, (Holder::Agent, node(name)), state_dir.clone(), PACE);
    (Arc::new(enrolment), state_dir)
}

/// An agent's links, and what keeps their bundles' receiver.
pub(crate) type Links = (Arc<LinkSet>, Runtime, mpsc::Receiver<Announced>);

/// The links of the identity's node.
pub(crate) fn links(state_dir: &Path, identity: watch::Receiver<Arc<AgentIdentity>>) -> Links {
    links_to(state_dir, "all", identity)
}

fn links_to(state_dir: &Path, max_servers: &str, identity: watch::Receiver<Arc<AgentIdentity>>) -> Links {
    let flags = [
        format!("--node-name={}", identity.borrow().node),
        "--server=given.by.the.test:1".to_owned(),
        "--proxy=none".to_owned(),
        "--congestion-control=system".to_owned(),
        "--max-links=1".to_owned(),
        "--loopback-ports=*".to_owned(),
        "--keepalive=10s".to_owned(),
        format!("--max-servers={max_servers}"),
        format!("--state-dir={}", state_dir.display()),
    ];
    let config = parse_flags::<Cli>(&flags).unwrap().run.config(Vec::new()).unwrap();
    let metrics = Metrics::new(&mut Registry::default());
    let runtime = Runtime::new(config, Places::new(1024, 1 << 30), metrics);
    let (bundles, announced) = mpsc::channel(16);
    (LinkSet::new(Shared::new(runtime.clone(), identity, bundles)), runtime, announced)
}

/// The server's signer. It leads only in the second half of [`Signer::answer`]: in the first, the test sets the
/// requester, which a real API server does itself.
struct Signer {
    lead: watch::Sender<bool>,
    context: KubeContext,
}

impl Drop for Signer {
    fn drop(&mut self) {
        self.context.stop.cancel();
    }
}

impl Signer {
    async fn start(api: &ApiServer, ca: watch::Receiver<Arc<CaState>>) -> Self {
        Self::with(api, ca, Standing::default()).await
    }

    async fn with(api: &ApiServer, ca: watch::Receiver<Arc<CaState>>, standing: Standing) -> Self {
        let (lead, leader) = watch::channel(false);
        let context = KubeContext {
            client: kube_client(api).await,
            namespace: "kube-system".into(),
            names: Arc::new(ObjectNames::default()),
            identity: "server-1".into(),
            leader,
            inventory: watch::channel(Arc::default()).1,
            settings: watch::channel(Arc::default()).1,
            health: Health::default(),
            stop: CancellationToken::new(),
        };
        tokio::spawn(csr::run(context.clone(), ca, standing, PkiMetrics::default()));
        Self { lead, context }
    }

    /// Waits for a request that is not answered, notes that this user made it, and lets the signer answer. Returns the
    /// request as it was.
    async fn answer(&self, api: &ApiServer, user: &str) -> Value {
        let of_node = |csr: &mut Value| {
            csr["spec"]["username"] = json!(user);
            csr["spec"]["groups"] = json!(["system:nodes"]);
        };
        self.answer_as(api, of_node).await
    }

    /// The same; `note` sets the requester.
    async fn answer_as(&self, api: &ApiServer, note: impl FnOnce(&mut Value)) -> Value {
        let request = eventually("a request", || open(api)).await;
        let name = request["metadata"]["name"].as_str().unwrap();
        api.edit(CSRS, name, note);
        self.lead.send_replace(true);
        eventually("an answer", || is_answered(&api.get(CSRS, name)?).then_some(())).await;
        self.lead.send_replace(false);
        request
    }
}

fn is_answered(csr: &Value) -> bool {
    let conditions = csr["status"]["conditions"].as_array();
    let denied = conditions.is_some_and(|known| known.iter().any(|known| known["type"] == "Denied"));
    denied || csr["status"]["certificate"].is_string()
}

/// A request that is not answered yet.
fn open(api: &ApiServer) -> Option<Value> {
    api.list(CSRS).into_iter().find(|csr| !is_answered(csr))
}

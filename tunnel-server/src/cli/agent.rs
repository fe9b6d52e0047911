//! `tunnel-server agent`: revokes identities of agents, redirectors and servers, and readmits them.

use std::io::Write;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};
use tunnel_runtime::NodeName;
use tunnel_runtime::progress::Progress;

use super::cluster_args::ClusterArgs;
use super::output::{Common, fail_if_any, table};
use crate::kube::ObjectNames;
use crate::kube::read::revocations::RevocationMap;
use crate::pki::{Ca, IssuedLedger, Lifetimes, PkiError, Revocation, RevocationStore, Subject, cluster_of};

/// Revoke identities of agents, redirectors and servers, readmit them, and list both.
///
/// A revoked node's sessions end within seconds, and its agent gets no session, no certificate and no enrolment until the
/// node is readmitted. Then it must enrol again: earlier certificates and tokens, and copies of them, stay refused.
///
/// A revoked server loses its links with the others, and ends its agents' sessions once it learns of it. It has the CA's key:
/// rotate the CA as well if that may be in other hands.
///
/// Standalone, this works on --state-dir, which a running server follows and tells the servers that it is linked with. In a
/// cluster, all servers follow a ConfigMap: give --kubeconfig FILE, or --in-cluster in a server's pod.
#[derive(Args, Clone, Debug)]
pub struct AgentCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Name of the ConfigMap [default: tunnel-revoked-agents].
    // With an id of its own: otherwise clap would pass the default of the server's flag of this name down to it.
    #[arg(id = "revocations", long = "revocations-configmap", value_name = "NAME", global = true)]
    configmap: Option<String>,
    #[command(subcommand)]
    action: AgentAction,
}

#[derive(Subcommand, Clone, Debug)]
enum AgentAction {
    /// Revoke a node's agent, and any copy of its key.
    Revoke(Named),
    /// Let a revoked node enrol again, or a server link again.
    Readmit(Named),
    /// List the nodes and servers that were revoked.
    List,
}

#[derive(Args, Clone, Debug)]
struct Named {
    /// NAME is a server, by the name of its host.
    #[arg(long)]
    server: bool,
    /// The node.
    name: NodeName,
}

impl Named {
    fn subject(&self) -> Subject {
        if self.server { Subject::Server(self.name.clone()) } else { Subject::Node(self.name.clone()) }
    }
}

enum Store {
    Files(RevocationStore),
    ConfigMap(Box<RevocationMap>),
}

impl AgentCommand {
    /// Runs the command and prints to standard output.
    ///
    /// # Errors
    /// If the records cannot be read or written, or the node to readmit is not revoked.
    pub async fn run(&self) -> anyhow::Result<()> {
        self.run_to(&mut Progress::start("agent", "reading or writing the records")).await
    }

    pub(crate) async fn run_to(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let (store, now) = (self.store().await?, Timestamp::now());
        let (record, text) = match &self.action {
            AgentAction::List => return self.list(&store, out).await,
            AgentAction::Revoke(named) => {
                let subject = named.subject();
                let record = match &store {
                    Store::Files(files) => files.revoke(&subject, now)?,
                    Store::ConfigMap(map) => map.revoke(&subject, now).await?,
                };
                let text = match &subject {
                    Subject::Node(_) => {
                        "its sessions end within seconds; its certificates and tokens are refused. Next, once the node is \
                         in order: agent readmit"
                    }
                    Subject::Server(_) => {
                        "the other servers end their links with it within seconds, and it ends its agents' sessions. It \
                         has the CA's key: if that may be in other hands, rotate the CA (ca introduce)"
                    }
                };
                let doubt = match (&store, &subject) {
                    (Store::Files(_), Subject::Node(node)) if self.is_unknown(node) => {
                        ". This server has issued no certificate for it: is the name right?"
                    }
                    _ => "",
                };
                (record, format!("{} revoked: {text}{doubt}\n", subject.named()))
            }
            AgentAction::Readmit(named) => {
                let subject = named.subject();
                let record = match &store {
                    Store::Files(files) => files.readmit(&subject, now)?,
                    Store::ConfigMap(map) => map.readmit(&subject, now).await?,
                };
                let text = match &store {
                    _ if named.server => "the other servers link with it again",
                    Store::Files(_) => {
                        "its earlier certificates stay refused. On the node, remove the agent's state directory, which \
                         also makes a new key, and start the agent with a new token (token create)"
                    }
                    Store::ConfigMap(_) => {
                        "its earlier certificates stay refused; its agent enrols again by itself within minutes, with a \
                         new key"
                    }
                };
                (record, format!("{} readmitted: {text}\n", subject.named()))
            }
        };
        Ok(self.common.show(out, &text, &json!(record))?)
    }

    /// True if this server has signed no certificate of the node. Another one may have.
    fn is_unknown(&self, node: &NodeName) -> bool {
        let issued = IssuedLedger::new(&self.common.state_dir).entries();
        issued.is_ok_and(|issued| issued.iter().all(|issued| issued.node != *node))
    }

    async fn store(&self) -> anyhow::Result<Store> {
        if !self.cluster.is_given() {
            let why = "--state-dir belongs to no cluster";
            self.cluster.refuse("--revocations-configmap", self.configmap.as_ref(), why)?;
            let state_dir = &self.common.state_dir;
            if let Some(secret) = cluster_of(state_dir)? {
                anyhow::bail!(
                    "--state-dir={}: this server belongs to a cluster (its CA is in Secret {secret}), where all servers \
                     follow one ConfigMap: give --kubeconfig FILE, or --in-cluster within a pod",
                    state_dir.display()
                );
            }
            // In a mistyped directory it would have no effect.
            Ca::open(state_dir, Lifetimes::default())?;
            return Ok(Store::Files(RevocationStore::new(state_dir)));
        }
        let name = self.configmap.clone().unwrap_or_else(|| ObjectNames::default().revocations);
        let (client, namespace) = self.cluster.connect().await?;
        let map = RevocationMap::new(client, &namespace, &name);
        Ok(Store::ConfigMap(Box::new(map)))
    }

    async fn list(&self, store: &Store, out: &mut dyn Write) -> anyhow::Result<()> {
        let (records, broken): (Vec<Revocation>, Vec<anyhow::Error>) = match store {
            Store::Files(files) => {
                let (known, broken) = files.load()?;
                (
                    known.records.into_values().collect(),
                    broken.into_iter().map(|(_, error)| error.into()).collect(),
                )
            }
            Store::ConfigMap(map) => {
                let (records, broken) = map.list().await?;
                (records, broken.into_iter().map(Into::into).collect())
            }
        };
        self.print_list(&records, out)?;
        fail_if_any(broken)
    }

    fn print_list(&self, records: &[Revocation], out: &mut dyn Write) -> Result<(), PkiError> {
        let state = |record: &Revocation| if record.readmitted.is_some() { "readmitted" } else { "revoked" };
        let document = |record: &Revocation| -> Value {
            json!({
                "node": record.subject, "state": state(record),
                "revoked": record.revoked, "readmitted": record.readmitted,
            })
        };
        let row = |record: &Revocation| {
            let readmitted = record.readmitted.map(|at| format!("{at:.0}")).unwrap_or_default();
            let name = match &record.subject {
                Subject::Node(node) => node.to_string(),
                server @ Subject::Server(_) => server.named(),
            };
            vec![name, state(record).to_owned(), format!("{:.0}", record.revoked), readmitted]
        };
        let columns = ["NODE", "STATE", "REVOKED", "READMITTED"];
        let text = table(&columns, records.iter().map(row), "no node or server was revoked");
        self.common.show(out, &text, &records.iter().map(document).collect())
    }
}

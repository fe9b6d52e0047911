//! `tunnel-server ca`: works on the state directory or on the Secret of a cluster.

use std::io::Write;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};
use tunnel_runtime::NodeName;
use tunnel_runtime::progress::Progress;

use super::cluster_args::ClusterArgs;
use super::output::Common;
use crate::kube::ObjectNames;
use crate::kube::read::authority::CaSecret;
use crate::pki::{Ca, CaState, IssuedLedger, Lifetimes, PkiError, Role, Root};

/// Show and rotate the CA. To rotate: introduce, wait until the agents are connected, activate, wait until they have
/// renewed, retire.
///
/// Standalone, the CA is in --state-dir, and `ca status` counts the nodes that still use the old root, by the certificates
/// that this server has issued. Where several servers share the CA, run it on each, and retire only once none shows a node
/// on the old root.
///
/// In a cluster, the CA is in a Secret that all servers follow: give --kubeconfig FILE, or --in-cluster in a server's
/// pod. Several servers issue certificates there and none knows them all, so `ca retire` goes by time: it refuses until
/// the lifetime of a certificate plus a tenth has passed since the activation, which an annotation of the Secret records.
/// With --force it does not wait; an agent that still uses the old root then enrols again within minutes, through the
/// API server.
#[derive(Args, Clone, Debug)]
pub struct CaCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Name of the Secret [default: tunnel-server-ca].
    // With an id of its own: otherwise clap would pass the default of the server's flag of this name down to it.
    #[arg(id = "secret", long = "ca-secret", value_name = "NAME", global = true)]
    ca_secret: Option<String>,
    #[command(subcommand)]
    action: CaAction,
}

#[derive(Subcommand, Clone, Copy, Debug)]
enum CaAction {
    /// Show the roots, the role of each, and what still uses the old one.
    Status,
    /// Create a second trusted root, which does not sign yet. Running servers announce it to their agents.
    Introduce,
    /// Let the introduced root sign from now on. Agents then renew early.
    Activate,
    /// Stop trusting the old root, once none of its certificates is in use.
    Retire {
        /// Even if one is in use: its node must enrol again, standalone with a new token, in a cluster by itself.
        #[arg(long)]
        force: bool,
    },
}

enum Store {
    Files(Ca),
    Secret(Box<CaSecret>),
}

impl CaCommand {
    /// Runs the command and prints to standard output.
    ///
    /// # Errors
    /// If the CA cannot be read or changed, or the step is not possible in its state.
    pub async fn run(&self) -> anyhow::Result<()> {
        self.run_to(&mut Progress::start("ca", "reading or writing the CA")).await
    }

    pub(crate) async fn run_to(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let lifetimes = Lifetimes::from_environment()?;
        let store = self.store(lifetimes).await?;
        let (key, hash) = match (self.action, &store) {
            (CaAction::Status, Store::Files(ca)) => return Ok(self.status_of_files(ca, out)?),
            (CaAction::Status, Store::Secret(secret)) => {
                return self.status_of_secret(secret, lifetimes, out).await;
            }
            (CaAction::Introduce, Store::Files(ca)) => ("introduced", ca.introduce()?),
            (CaAction::Introduce, Store::Secret(secret)) => ("introduced", secret.introduce().await?),
            (CaAction::Activate, Store::Files(ca)) => ("activated", ca.activate()?),
            (CaAction::Activate, Store::Secret(secret)) => ("activated", secret.activate().await?),
            (CaAction::Retire { force }, Store::Files(ca)) => ("retired", ca.retire(force)?),
            (CaAction::Retire { force }, Store::Secret(secret)) => {
                ("retired", secret.retire(force, lifetimes).await?)
            }
        };
        let next = match (self.action, &store) {
            (CaAction::Introduce, _) => {
                "trusted in addition to the old root; running servers announce it to their agents within seconds. Next: ca activate"
            }
            (CaAction::Activate, Store::Files(_)) => {
                "it signs from now on, and connected agents renew within minutes. Unused tokens stay valid until the old \
                 root is retired. Next: ca status, and ca retire once no node uses the old root"
            }
            (CaAction::Activate, Store::Secret(_)) => {
                "it signs from now on, and connected agents renew within minutes. Next: ca status, which says when \
                 ca retire is safe"
            }
            (CaAction::Retire { .. }, Store::Files(_)) => {
                "no longer trusted. Tokens created before the activation have its hash: create new ones"
            }
            _ => "no longer trusted",
        };
        Ok(self.common.show(out, &format!("root {hash} {key}: {next}\n"), &json!({ key: hash }))?)
    }

    async fn store(&self, lifetimes: Lifetimes) -> anyhow::Result<Store> {
        if !self.cluster.is_given() {
            let why = "the CA in --state-dir does not belong to a cluster";
            self.cluster.refuse("--ca-secret", self.ca_secret.as_ref(), why)?;
            return Ok(Store::Files(Ca::open(&self.common.state_dir, lifetimes)?));
        }
        let name = self.ca_secret.clone().unwrap_or_else(|| ObjectNames::default().ca_secret);
        let (client, namespace) = self.cluster.connect().await?;
        Ok(Store::Secret(Box::new(CaSecret::new(client, &namespace, &name))))
    }

    fn status_of_files(&self, ca: &Ca, out: &mut dyn Write) -> Result<(), PkiError> {
        let ledger = IssuedLedger::new(ca.state_dir());
        self.print_status(out, String::new(), json!({}), &ca.state()?, |root, role, row| {
            let nodes: Vec<_> =
                ledger.live_of_root(&root.hash)?.into_iter().map(|issued| issued.node).collect();
            let mut text = format!(", {} node(s)", nodes.len());
            if role == Role::Retiring && !nodes.is_empty() {
                let names: Vec<_> = nodes.iter().take(20).map(NodeName::as_str).collect();
                text += &format!(": {}{}", names.join(", "), if nodes.len() > 20 { ", …" } else { "" });
            }
            row["nodes"] = json!(nodes);
            Ok(text)
        })
    }

    async fn status_of_secret(
        &self,
        secret: &CaSecret,
        lifetimes: Lifetimes,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let stored = secret.read().await?;
        let json = json!({ "secret": secret.to_string(), "activated": stored.activated });
        let heading = format!("Secret {secret}\n");
        self.print_status(out, heading, json, &stored.state(lifetimes)?, |_, role, row| {
            if role != Role::Retiring {
                return Ok(String::new());
            }
            let at = stored.retirable(lifetimes);
            row["retirable"] = json!(at);
            Ok(match at {
                Some(at) if at <= Timestamp::now() => ", none of its certificates is in use".to_owned(),
                Some(at) => format!(", its certificates may be in use until {at:.0}"),
                None => ", unknown since when it has not signed".to_owned(),
            })
        })?;
        Ok(())
    }

    /// Prints the roots. `usage` returns the text about a root's use, and adds it to the root's JSON.
    fn print_status(
        &self,
        out: &mut dyn Write,
        mut text: String,
        mut json: Value,
        state: &CaState,
        usage: impl Fn(&Root, Role, &mut Value) -> Result<String, PkiError>,
    ) -> Result<(), PkiError> {
        let mut rows = Vec::new();
        for root in state.roots() {
            let (mut row, line) = describe(state, root)?;
            text += &format!("{line}{}\n", usage(root, state.role(root), &mut row)?);
            rows.push(row);
        }
        json["roots"] = rows.into();
        self.common.show(out, &text, &json)
    }
}

/// Describes a root as JSON, and as text without a line end.
fn describe(state: &CaState, root: &Root) -> Result<(Value, String), PkiError> {
    let role = state.role(root);
    let not_after = Timestamp::try_from(root.validity()?.not_after)
        .map_err(|error| PkiError::Sign(format!("a root's end is out of range: {error}")))?;
    let does = match role {
        Role::Issuing => "signs",
        Role::Introduced => "introduced: trusted, does not sign yet (next: ca activate)",
        Role::Retiring => "old: trusted, no longer signs (next: ca retire)",
    };
    let key = if root.has_key() { "" } else { ", key not here" };
    let row = json!({
        "hash": root.hash,
        "role": role,
        "generation": root.generation,
        "has_key": root.has_key(),
        "expires": not_after,
    });
    Ok((row, format!("{}\n  {does}{key}\n  ends {not_after:.0}", root.hash)))
}

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};
use tunnel_core::identity::NodeName;
use tunnel_kube::KubeError;

use super::super::{Ca, CaState, IssuedLedger, Lifetimes, PkiError, Role, Root};
use super::{Common, Output, print, print_json};
use crate::kube::read::authority::{AuthorityError, CaSecret};
use crate::kube::{KubeOptions, ObjectNames};

/// Show and rotate the CA. A rotation is: introduce, wait until the agents are connected, activate, wait until they have
/// renewed, retire.
///
/// Standalone the CA is in --state-dir, and `ca status` counts the nodes that are left on the old root.
///
/// In a cluster it is in a Secret that all servers follow: give --kubeconfig FILE, or --in-cluster within a server's pod.
/// Several servers issue certificates there and none knows them all, so `ca retire` goes by time: it refuses until a
/// certificate's whole life, and a tenth of it, has passed since the activation, which an annotation of the Secret
/// records. With --force it does not wait; an agent that is left on the old root then enrols again by itself, through
/// the API server, within minutes.
#[derive(Args, Clone, Debug)]
pub struct CaCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(subcommand)]
    action: CaAction,
}

#[derive(Args, Clone, Debug)]
struct ClusterArgs {
    /// Work on the Secret of the cluster that this file leads to, not on --state-dir.
    #[arg(long, value_name = "FILE", alias = "kube-config", global = true)]
    kubeconfig: Option<PathBuf>,
    /// The same from within a pod of the cluster.
    #[arg(long, global = true, conflicts_with = "kubeconfig")]
    in_cluster: bool,
    /// Where the Secret is [default: the pod's namespace, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAME", global = true)]
    namespace: Option<String>,
    /// The Secret [default: tunnel-server-ca].
    // An id of its own: the server's flag of this name has a default, which clap would hand down to a global one.
    #[arg(id = "secret", long = "ca-secret", value_name = "NAME", global = true)]
    ca_secret: Option<String>,
}

#[derive(Subcommand, Clone, Copy, Debug)]
enum CaAction {
    /// Show the roots and what each does, and what is left on the old one.
    Status,
    /// Make a new root that is trusted besides the one that signs. Running servers tell their agents.
    Introduce,
    /// Let the introduced root sign from now on. Agents renew early.
    Activate,
    /// Trust the old root no longer, once no certificate of it is in use.
    Retire {
        /// Even if one is: standalone such a node must enrol again with a token, in a cluster it does so by itself.
        #[arg(long)]
        force: bool,
    },
}

/// Why a `ca` command failed.
#[derive(Debug, thiserror::Error)]
pub enum CaCommandError {
    /// The files, or a step that does not fit.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The Secret.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The way to the API server.
    #[error("{}", of_flag(.0))]
    Kube(#[from] KubeError),
    /// A flag that has a meaning only with another one.
    #[error("{0}: only with --kubeconfig or --in-cluster; the CA of --state-dir is in no cluster")]
    NoCluster(&'static str),
}

fn of_flag(error: &KubeError) -> String {
    match error {
        KubeError::NotInCluster { reason, .. } => {
            format!("--in-cluster: this is not a pod with a service account: {reason}; use --kubeconfig FILE")
        }
        other => other.to_string(),
    }
}

/// Who keeps the CA.
enum Keeper {
    Files(Ca),
    Secret(Box<CaSecret>),
}

impl CaCommand {
    /// Carries it out, printing to standard output.
    pub async fn run(&self) -> Result<(), CaCommandError> {
        self.run_to(&mut io::stdout()).await
    }

    pub(crate) async fn run_to(&self, out: &mut dyn Write) -> Result<(), CaCommandError> {
        let lifetimes = Lifetimes::from_environment()?;
        let keeper = self.keeper(lifetimes).await?;
        let (key, hash) = match (self.action, &keeper) {
            (CaAction::Status, Keeper::Files(ca)) => return Ok(self.status_of_files(ca, out)?),
            (CaAction::Status, Keeper::Secret(secret)) => {
                return self.status_of_secret(secret, lifetimes, out).await;
            }
            (CaAction::Introduce, Keeper::Files(ca)) => ("introduced", ca.introduce()?),
            (CaAction::Introduce, Keeper::Secret(secret)) => ("introduced", secret.introduce().await?),
            (CaAction::Activate, Keeper::Files(ca)) => ("activated", ca.activate()?),
            (CaAction::Activate, Keeper::Secret(secret)) => ("activated", secret.activate().await?),
            (CaAction::Retire { force }, Keeper::Files(ca)) => ("retired", ca.retire(force)?),
            (CaAction::Retire { force }, Keeper::Secret(secret)) => {
                ("retired", secret.retire(force, lifetimes).await?)
            }
        };
        let next = match (self.action, &keeper) {
            (CaAction::Introduce, _) => {
                "trusted besides the old root; running servers tell their agents within seconds. Next: ca activate"
            }
            (CaAction::Activate, Keeper::Files(_)) => {
                "it signs from now on, and connected agents renew within minutes. Tokens that are not used yet stay \
                 good until the old root is retired. Next: ca status, and ca retire once no node is left on the old root"
            }
            (CaAction::Activate, Keeper::Secret(_)) => {
                "it signs from now on, and connected agents renew within minutes. Next: ca status, which says from when \
                 on ca retire is safe"
            }
            (CaAction::Retire { .. }, Keeper::Files(_)) => {
                "trusted no longer. Tokens that were made before the activation carry its hash: make new ones"
            }
            _ => "trusted no longer",
        };
        match self.common.output {
            Output::Text => print(out, &format!("root {hash} {key}: {next}\n"))?,
            Output::Json => print_json(out, &json!({ key: hash }))?,
        }
        Ok(())
    }

    async fn keeper(&self, lifetimes: Lifetimes) -> Result<Keeper, CaCommandError> {
        let ClusterArgs { kubeconfig, in_cluster, namespace, ca_secret } = self.cluster.clone();
        if kubeconfig.is_none() && !in_cluster {
            let given = [("--namespace", namespace.is_some()), ("--ca-secret", ca_secret.is_some())];
            if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
                return Err(CaCommandError::NoCluster(flag));
            }
            return Ok(Keeper::Files(Ca::open(&self.common.state_dir, lifetimes)?));
        }
        let mut names = ObjectNames::default();
        if let Some(secret) = ca_secret {
            names.ca_secret = secret;
        }
        let options = KubeOptions { kubeconfig, namespace, names };
        let (client, namespace) = options.connect().await?;
        Ok(Keeper::Secret(Box::new(CaSecret::new(client, &namespace, &options.names.ca_secret))))
    }

    fn status_of_files(&self, ca: &Ca, out: &mut dyn Write) -> Result<(), PkiError> {
        let state = ca.state()?;
        let ledger = IssuedLedger::new(ca.state_dir());
        let mut rows = Vec::new();
        let mut text = String::new();
        for root in state.roots() {
            let nodes: Vec<_> =
                ledger.live_of_root(&root.hash)?.into_iter().map(|issued| issued.node).collect();
            let (mut row, line) = describe(&state, root)?;
            text += &format!("{line}, {} node(s)", nodes.len());
            if state.role(root) == Role::Retiring && !nodes.is_empty() {
                let names: Vec<_> = nodes.iter().take(20).map(NodeName::as_str).collect();
                text += &format!(": {}{}", names.join(", "), if nodes.len() > 20 { ", …" } else { "" });
            }
            text.push('\n');
            row["nodes"] = json!(nodes);
            rows.push(row);
        }
        match self.common.output {
            Output::Text => print(out, &text),
            Output::Json => print_json(out, &json!({ "roots": rows })),
        }
    }

    async fn status_of_secret(
        &self,
        secret: &CaSecret,
        lifetimes: Lifetimes,
        out: &mut dyn Write,
    ) -> Result<(), CaCommandError> {
        let held = secret.read().await?;
        let state = held.state(lifetimes)?;
        let mut rows = Vec::new();
        let mut text = format!("Secret {secret}\n");
        for root in state.roots() {
            let (mut row, line) = describe(&state, root)?;
            text += &line;
            if state.role(root) == Role::Retiring {
                let at = held.retirable(lifetimes);
                text += &match at {
                    Some(at) if at <= Timestamp::now() => ", no certificate of it is in use".to_owned(),
                    Some(at) => format!(", certificates of it may be in use until {at:.0}"),
                    None => ", it is not known since when it does not sign".to_owned(),
                };
                row["retirable"] = json!(at);
            }
            text.push('\n');
            rows.push(row);
        }
        match self.common.output {
            Output::Text => print(out, &text)?,
            Output::Json => {
                print_json(
                    out,
                    &json!({ "secret": secret.to_string(), "activated": held.activated, "roots": rows }),
                )?;
            }
        }
        Ok(())
    }
}

/// A root for programs, and for people without the end of the line.
fn describe(state: &CaState, root: &Root) -> Result<(Value, String), PkiError> {
    let role = state.role(root);
    let not_after = Timestamp::try_from(root.validity()?.not_after)
        .map_err(|error| PkiError::Sign(format!("a root's end is out of range: {error}")))?;
    let does = match role {
        Role::Issuing => "signs",
        Role::Introduced => "introduced: trusted, does not sign yet (next: ca activate)",
        Role::Retiring => "old: trusted, signs no more (next: ca retire)",
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

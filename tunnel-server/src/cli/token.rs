//! `tunnel-server token`: works on the state directory, whether the server is running or not.

use std::io::{self, Write};

use clap::{ArgGroup, Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};
use tunnel_pki::Holder;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::HostPort;

use super::output::{Common, fail_if_any, note, table};
use crate::pki::{Ca, Lifetimes, PkiError, ServerFile, TokenRecord, TokenStore, parse_ttl};

/// Create, list and revoke the tokens with which agents and redirectors enrol.
#[derive(Args, Clone, Debug)]
pub struct TokenCommand {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    action: TokenAction,
}

#[derive(Subcommand, Clone, Debug)]
enum TokenAction {
    /// Create a token for one node, and print it with the command line for it. Creates the CA if there is none yet.
    #[command(group(ArgGroup::new("holder").required(true).args(["node", "redirector"])))]
    Create {
        /// The node whose agent may enrol with the token.
        #[arg(long, value_name = "NAME")]
        node: Option<NodeName>,
        /// The host whose redirector (tunnel-server redirector) may enrol with it.
        #[arg(long, value_name = "NAME")]
        redirector: Option<NodeName>,
        /// How long the token can be used, such as 24h, 90m or 2d; at most 366d.
        #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = parse_ttl)]
        ttl: std::time::Duration,
        /// Where the agent reaches the server, HOST:PORT[,…] [default: as recorded by the running server].
        #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
        server_address: Vec<HostPort>,
    },
    /// List the tokens, without their secrets.
    List,
    /// Revoke a token. Certificates that were issued for it stay valid; see `agent revoke`.
    Revoke {
        /// The token's id: the six characters before the dot.
        id: String,
    },
}

impl TokenCommand {
    /// Runs the command and prints to standard output.
    ///
    /// # Errors
    /// If the state directory cannot be used, or there is no such token.
    pub fn run(&self) -> Result<(), PkiError> {
        self.run_to(&mut io::stdout().lock())
    }

    pub(crate) fn run_to(&self, out: &mut dyn Write) -> Result<(), PkiError> {
        let store = TokenStore::new(&self.common.state_dir);
        if !matches!(self.action, TokenAction::Create { .. }) {
            // A mistyped directory would have no tokens.
            Ca::open(&self.common.state_dir, Lifetimes::default())?;
        }
        match &self.action {
            TokenAction::Create { node, redirector, ttl, server_address } => match (node, redirector) {
                (_, Some(host)) => self.create(&store, (Holder::Redirector, host), *ttl, server_address, out),
                (Some(node), None) => self.create(&store, (Holder::Agent, node), *ttl, server_address, out),
                // clap requires one of them.
                (None, None) => Ok(()),
            },
            TokenAction::List => self.list(&store, out),
            TokenAction::Revoke { id } => {
                let id = store.revoke(id)?;
                self.common.show(out, &format!("token {id} revoked\n"), &json!({ "revoked": id }))
            }
        }
    }

    fn create(
        &self,
        store: &TokenStore,
        (holder, node): (Holder, &NodeName),
        ttl: std::time::Duration,
        given: &[HostPort],
        out: &mut dyn Write,
    ) -> Result<(), PkiError> {
        let state_dir = &self.common.state_dir;
        let ca = Ca::load_or_create(state_dir, Lifetimes::default())?.state()?;
        let mut addresses: Vec<_> = given.iter().map(ToString::to_string).collect();
        if addresses.is_empty() {
            addresses = ServerFile::read(state_dir)?.unwrap_or_default().agent_addresses;
        }
        let known = !addresses.is_empty();
        if !known {
            note(
                "note: the server's address is unknown: none has run with this state directory yet, or its host has \
                 only loopback. Replace SERVER:10262 in the command, or give --server-address HOST:PORT",
            );
            addresses.push("SERVER:10262".into());
        }
        let (token, record) = store.create((holder, node), ttl, Timestamp::now())?;
        let servers = addresses.join(",");
        let program = match holder {
            Holder::Agent => format!("tunnel-agent --server {servers}"),
            Holder::Redirector => {
                format!("tunnel-server redirector --inventory nodes.yaml --peers {servers}")
            }
        };
        let command =
            format!("{program} --node-name {node} --token {} --ca-hash {}", token.expose(), ca.hash());
        let (what, or) = match holder {
            Holder::Agent => {
                let service = command.replacen("tunnel-agent", "tunnel-agent service install", 1);
                (
                    "node:    ",
                    format!("\nor, as root, to have systemd start it from now on:\n\n  {service}\n"),
                )
            }
            Holder::Redirector => ("redirector:", String::new()),
        };
        let (token, expires, ca_hash) = (token.expose(), record.expires, ca.hash());
        let text = format!(
            "token:    {token}\n{what} {node}\nexpires:  {expires:.0}\nca hash:  {ca_hash}\n\nOn the node run, once:\n\n  {command}\n{or}"
        );
        let json = json!({
            "id": record.id,
            "token": token,
            "node": node,
            "holder": holder,
            "expires": expires,
            "ca_hash": ca_hash,
            "server_addresses": addresses,
            "server_addresses_known": known,
            "command": command,
        });
        self.common.show(out, &text, &json)
    }

    fn list(&self, store: &TokenStore, out: &mut dyn Write) -> Result<(), PkiError> {
        let (records, broken) = store.list()?;
        let now = Timestamp::now();
        let row = |record: &TokenRecord| {
            vec![
                record.id.clone(),
                record.holder.to_string(),
                record.node.to_string(),
                format!("{:?}", record.state(now)).to_lowercase(),
                format!("{:.0}", record.expires),
                record.used_at.map(|at| format!("{at:.0}")).unwrap_or_default(),
            ]
        };
        let columns = ["ID", "FOR", "NODE", "STATE", "EXPIRES", "USED"];
        let text = table(&columns, records.iter().map(row), "no tokens");
        self.common.show(out, &text, &records.iter().map(|record| token_json(record, now)).collect())?;
        fail_if_any(broken)
    }
}

fn token_json(record: &TokenRecord, now: Timestamp) -> Value {
    json!({
        "id": record.id,
        "holder": record.holder,
        "node": record.node,
        "state": record.state(now),
        "created": record.created,
        "expires": record.expires,
        "used_at": record.used_at,
        "used_by": record.used_by,
    })
}

//! The real tunnel-server on the cloud host.

mod builder;

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::os::unix::fs::symlink;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::access_log::{self, AccessLine};
use crate::admin::Admin;
use crate::client;
use crate::inventory::Inventory;
use crate::netns::Namespace;
use crate::process::{self, Process, Version};
use crate::topology::{CloudHost, NEIGHBOUR, Testbed};
use crate::wait::{wait_for, wait_until};

use builder::Host;
pub use builder::{Builder, PORTS};

/// Time limit until /readyz of a server answers 200. It only bounds a failure, and a busy machine may need ten times as long
/// as others.
pub const START: Duration = Duration::from_secs(60);
/// Time limit for a line that a server writes to its log.
const LOGGED: Duration = Duration::from_secs(60);

/// Output of `tunnel-server token create -o json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Token {
    /// ID and secret, `ID.SECRET`.
    pub token: String,
    /// Hash of the CA, `sha256:HEX`.
    pub ca_hash: String,
    pub node: String,
    /// Expiry time (RFC 3339).
    pub expires: String,
    /// The agent's whole command line.
    pub command: String,
}

impl<'a> Builder<'a> {
    /// Makes a builder for another server with the same CA on [`Testbed::add_neighbour`], without a redirect.
    pub fn on_neighbour(first: &Server<'a>, neighbour: &'a Namespace) -> Result<Self> {
        Self::on_host(first, neighbour, NEIGHBOUR, "neighbour")
    }

    /// Makes a builder for another server with the same CA on [`Testbed::add_to_cloud_lan`], without a redirect.
    /// `state` names its state folder and its log.
    pub fn on_host(
        first: &Server<'a>,
        ns: &'a Namespace,
        address: Ipv4Addr,
        state: &'static str,
    ) -> Result<Self> {
        let testbed = first.testbed();
        copy_ca(testbed, state)?;
        Ok(Self::alone_on(testbed, Host::new(ns, &testbed.cloud_cgroup, address, state)))
    }

    /// As [`Builder::on_host`], with a redirect for the processes of that host.
    pub fn with_redirect_on(first: &Server<'a>, host: &'a CloudHost, state: &'static str) -> Result<Self> {
        copy_ca(first.testbed(), state)?;
        Ok(Self::redirector_on(first.testbed(), host, state))
    }

    /// As [`Builder::on_host`], but shares the first server's CA folder, so that a rotation applies to both.
    pub fn sharing_ca(
        first: &Server<'a>,
        ns: &'a Namespace,
        address: Ipv4Addr,
        state: &'static str,
    ) -> Result<Self> {
        let testbed = first.testbed();
        let dir = testbed.dir().join(state);
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        symlink(testbed.dir().join("server/ca"), dir.join("ca")).context("sharing the CA")?;
        Ok(Self::alone_on(testbed, Host::new(ns, &testbed.cloud_cgroup, address, state)))
    }

    /// Writes the inventory if there is none, starts the server and waits until it is ready.
    pub async fn start(self) -> Result<Server<'a>> {
        if self.kubeconfig.is_none() && !self.testbed.dir().join(self.host.inventory).exists() {
            Inventory::of(self.testbed)?;
        }
        let process = self.spawn()?;
        let mut server = Server::new(self, process);
        server.wait_ready().await?;
        Ok(server)
    }
}

/// Copies the first server's CA to the server with this state folder.
fn copy_ca(testbed: &Testbed, state: &str) -> Result<()> {
    let (from, to) = (testbed.dir().join("server/ca"), testbed.dir().join(state).join("ca"));
    fs::create_dir_all(&to).with_context(|| format!("creating {}", to.display()))?;
    for entry in fs::read_dir(&from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name())).context("copying the CA")?;
    }
    Ok(())
}

#[derive(Debug)]
pub struct Server<'a> {
    builder: Builder<'a>,
    admin: Admin<'a>,
    pub process: Process,
}

impl<'a> Deref for Server<'a> {
    type Target = Admin<'a>;

    fn deref(&self) -> &Admin<'a> {
        &self.admin
    }
}

impl<'a> Server<'a> {
    /// Starts the server again after it has exited.
    pub async fn start_again(&mut self) -> Result<()> {
        self.spawn_again()?;
        self.wait_ready().await
    }

    /// Starts the program again after it has exited, without waiting until it is ready.
    pub fn spawn_again(&mut self) -> Result<()> {
        ensure!(self.process.ended()?.is_some(), "the server still runs");
        self.process = self.builder.spawn()?;
        Ok(())
    }

    /// As [`Self::start_again`], with the program of another version.
    pub async fn start_again_as(&mut self, version: Version) -> Result<()> {
        self.builder.version = version;
        self.start_again().await
    }

    /// As [`Self::start_again`], with a flag `--NAME=VALUE` instead of the one with its name.
    pub async fn start_again_with(&mut self, flag: &str) -> Result<()> {
        process::replace_flag(&mut self.builder.flags, flag);
        self.start_again().await
    }

    /// Starts one more server with the same flags, and waits until it has taken over from this one.
    pub async fn take_over(&self) -> Result<Self> {
        self.successor()?.taken_over().await
    }

    /// As [`Self::take_over`], with a flag `--NAME=VALUE` instead of the one with its name.
    pub async fn take_over_with(&self, flag: &str) -> Result<Self> {
        let mut builder = self.builder.clone();
        process::replace_flag(&mut builder.flags, flag);
        Self::start_beside(builder)?.taken_over().await
    }

    /// Waits until it has taken over.
    async fn taken_over(mut self) -> Result<Self> {
        self.wait_log("took over from the previous server").await?;
        self.wait_ready().await?;
        Ok(self)
    }

    /// Starts one more server with the same flags.
    pub fn successor(&self) -> Result<Self> {
        self.successor_as(self.builder.version)
    }

    /// As [`Self::successor`], with the program of another version.
    pub fn successor_as(&self, version: Version) -> Result<Self> {
        Self::start_beside(self.builder.clone().version(version))
    }

    fn start_beside(mut builder: Builder<'a>) -> Result<Self> {
        builder.name.push('+');
        let process = builder.spawn()?;
        Ok(Self::new(builder, process))
    }

    const fn new(builder: Builder<'a>, process: Process) -> Self {
        let Host { ns, admin_port, .. } = builder.host;
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), admin_port);
        Self { builder, admin: Admin::new(ns, address), process }
    }

    async fn wait_ready(&mut self) -> Result<()> {
        wait_for("/readyz of the server to answer 200", START, async || {
            if let Some(status) = self.process.ended()? {
                bail!("tunnel-server ended with {status} instead of becoming ready");
            }
            Ok(matches!(self.get("/readyz").await, Ok((200, _))).then_some(()))
        })
        .await
    }

    /// Reports whether /status shows a live tunnel to `node`; an error if it does not list the node.
    pub async fn is_connected(&self, node: &str) -> Result<bool> {
        let status = self.status().await?;
        let nodes =
            status["nodes"].as_array().with_context(|| format!("no list `nodes` in /status: {status}"))?;
        let entry = nodes.iter().find(|entry| entry["name"] == node);
        let entry = entry.with_context(|| format!("/status does not know {node}: {status}"))?;
        entry["connected"].as_bool().with_context(|| format!("no flag `connected` in {entry}"))
    }

    /// Returns its ID.
    pub async fn id(&self) -> Result<String> {
        let status = self.status().await?;
        Ok(status["server_id"].as_str().with_context(|| format!("no server_id in {status}"))?.to_owned())
    }

    /// Returns the IDs of the other servers that have the first node, as this one knows them.
    pub async fn holders(&self) -> Result<Vec<String>> {
        let status = self.status().await?;
        let via =
            status["nodes"][0]["via"].as_array().with_context(|| format!("no list `via` in {status}"))?;
        Ok(via.iter().filter_map(Value::as_str).map(str::to_owned).collect())
    }

    /// Returns the other servers with which this one is linked, as its status shows them.
    pub async fn peers(&self) -> Result<Vec<Value>> {
        let status = self.status().await?;
        let peers = status["peers"].as_array().with_context(|| format!("no list `peers` in {status}"))?;
        Ok(peers.clone())
    }

    /// Waits until `node` has a live tunnel, or has none.
    pub async fn wait_connected(&self, node: &str, connected: bool, limit: Duration) -> Result<()> {
        let what = format!("{node} to be {}", if connected { "connected" } else { "disconnected" });
        wait_until(&what, limit, async || self.is_connected(node).await, |seen| *seen == connected).await?;
        if connected { self.session_began(node).await } else { Ok(()) }
    }

    /// Notes that a session of this node has begun, here or at another server: for a second, connects to its addresses
    /// may find no route.
    pub async fn session_began(&self, node: &str) -> Result<()> {
        let status = self.status().await?;
        let nodes = status["nodes"].as_array().into_iter().flatten();
        let addresses =
            nodes.filter(|entry| entry["name"] == node).filter_map(|entry| entry["addresses"].as_array());
        let addresses: Vec<IpAddr> =
            addresses.flatten().filter_map(|address| address.as_str()?.parse().ok()).collect();
        client::session_began(&addresses);
        Ok(())
    }

    /// Fails unless there are access lines, of this server or of those before it, and all of them fit.
    pub async fn expect_every_access(&self, fits: impl Fn(&AccessLine) -> bool) -> Result<()> {
        let lines = self.settled_access_log().await?;
        ensure!(!lines.is_empty(), "{} relayed nothing", self.process.name());
        let other = lines.iter().find(|line| !fits(line));
        ensure!(other.is_none(), "at {}: {other:?}", self.process.name());
        Ok(())
    }

    /// As [`Self::access_log`], with the lines of connections whose ends have reached this server, which may have ended.
    pub async fn settled_access_log(&self) -> Result<Vec<AccessLine>> {
        if !self.process.has_ended() {
            self.settled().await?;
        }
        self.access_log()
    }

    /// Returns the log of the current process once it has settled: for what must not be in there.
    pub async fn settled_log(&self) -> Result<String> {
        self.settled().await?;
        self.process.output()
    }

    /// Returns the access lines of this server and of those before it, as they are in the log now: to wait for others.
    pub fn access_log(&self) -> Result<Vec<AccessLine>> {
        Ok(access_log::parse(&self.process.output_of_all()?))
    }

    /// Waits for an access line of this process for which `accept` returns true; the error shows the last lines.
    pub async fn wait_access(&self, what: &str, accept: impl Fn(&AccessLine) -> bool) -> Result<AccessLine> {
        let lines = wait_until(
            &format!("an access line: {what}"),
            LOGGED,
            async || {
                let mut lines = access_log::parse(&self.process.output()?);
                let fits = lines.iter().position(&accept);
                let shown = lines.len().saturating_sub(5);
                Ok(match fits {
                    Some(at) => (Some(lines.swap_remove(at)), Vec::new()),
                    None => (None, lines.split_off(shown)),
                })
            },
            |(found, _)| found.is_some(),
        )
        .await?;
        lines.0.context("an accepted line")
    }

    /// Waits for a text in the log of the current process; earlier processes' lines do not count.
    pub async fn wait_log(&self, text: &str) -> Result<()> {
        wait_for(&format!("the server's log to contain {text:?}"), LOGGED, async || {
            Ok(self.process.output()?.contains(text).then_some(()))
        })
        .await
    }

    /// Creates an enrolment token for a node by `tunnel-server token create`.
    pub fn token(&self, node: &str) -> Result<Token> {
        self.token_with(node, &[])
    }

    /// As [`Server::token`], with further flags.
    pub fn token_with(&self, node: &str, flags: &[&str]) -> Result<Token> {
        let mut args = vec!["token", "create", "--node", node, "-o", "json"];
        args.extend(flags);
        let text = self.run(&args)?;
        serde_json::from_str(&text).with_context(|| format!("`token create -o json` printed {text:?}"))
    }

    /// Runs `tunnel-server ARGS --state-dir …`; an exit code other than 0 is an error.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        let state = self.builder.testbed.dir().join(self.builder.host.state);
        let state = format!("--state-dir={}", state.display());
        let output = run_as(self.builder.version, self.builder.testbed, &[args, &[state.as_str()]].concat())?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("tunnel-server {args:?} ended with {}: {stdout}{stderr}", output.status);
        }
        Ok(stdout)
    }

    /// Returns the address that agents dial.
    pub fn agent_address(&self) -> String {
        format!("{}:{}", self.builder.host.address, self.builder.host.agent_port)
    }

    pub fn testbed(&self) -> &'a Testbed {
        self.builder.testbed
    }
}

/// Runs `tunnel-server ARGS` on the cloud host to its end.
pub fn run(testbed: &Testbed, args: &[&str]) -> Result<Output> {
    run_as(Version::This, testbed, args)
}

/// As [`run`], with the program of another version.
fn run_as(version: Version, testbed: &Testbed, args: &[&str]) -> Result<Output> {
    let mut command = testbed.on_cloud().command(&version.program("tunnel-server")?);
    command.args(args).output().with_context(|| format!("running tunnel-server {args:?}"))
}

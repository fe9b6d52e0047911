//! The real tunnel-agent on an edge host.
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::admin::Admin;
use crate::cgroup::MemoryLimit;
use crate::client;
use crate::process::{self, Process, Version};
use crate::server::{Server, Token};
use crate::topology::Testbed;
use crate::wait::wait_until;

/// Time limit for an agent to enrol and attach. It only bounds a failure: a busy machine needs much longer than others.
pub const START: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct Builder<'a> {
    testbed: &'a Testbed,
    edge: usize,
    node: String,
    name: String,
    /// Name of its state folder.
    state: String,
    server: Option<String>,
    kubeconfig: Option<PathBuf>,
    token: Option<Token>,
    flags: Vec<String>,
    environment: Vec<(&'static str, String)>,
    stderr: Option<Arc<OwnedFd>>,
    /// ID of the process whose mount namespace the agent enters.
    mounts_of: Option<u32>,
    memory: Option<MemoryLimit>,
    /// Command line up to the program, if it is not the build for this machine.
    program: Option<Vec<PathBuf>>,
    version: Version,
}

impl<'a> Builder<'a> {
    /// Makes a builder for an agent on edge `n`, named as the edge.
    pub fn new(server: &Server<'a>, edge: usize) -> Self {
        Self { server: Some(server.agent_address()), ..Self::on_edge(server.testbed(), edge) }
    }

    /// Makes a builder for an agent on edge `n` that finds its servers through the API server.
    pub fn in_cluster(testbed: &'a Testbed, edge: usize, kubeconfig: PathBuf) -> Self {
        Self { kubeconfig: Some(kubeconfig), ..Self::on_edge(testbed, edge) }
    }

    /// Makes a builder for an agent without a server of the testbed: flags give its servers.
    pub fn alone(testbed: &'a Testbed, edge: usize) -> Self {
        Self::on_edge(testbed, edge)
    }

    fn on_edge(testbed: &'a Testbed, edge: usize) -> Self {
        let node = testbed.edge(edge).name.clone();
        let name = format!("tunnel-agent-{edge}");
        Self {
            testbed,
            edge,
            node,
            state: name.clone(),
            name,
            server: None,
            kubeconfig: None,
            token: None,
            flags: Vec::new(),
            environment: Vec::new(),
            stderr: None,
            mounts_of: None,
            memory: None,
            program: None,
            version: Version::This,
        }
    }

    /// Sets the node's name, which defaults to the edge's.
    #[must_use]
    pub fn node(mut self, node: &str) -> Self {
        node.clone_into(&mut self.node);
        self
    }

    /// Sets the name of its log and state folder.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        name.clone_into(&mut self.state);
        self
    }

    /// Sets the token to enrol with; without one the agent must have its certificate already.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    #[must_use]
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    #[must_use]
    pub fn env(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.to_owned()));
        self
    }

    #[must_use]
    pub fn envs(mut self, variables: impl IntoIterator<Item = (&'static str, impl Into<String>)>) -> Self {
        self.environment.extend(variables.into_iter().map(|(name, value)| (name, value.into())));
        self
    }

    /// Sends its log there instead of to the run's folder.
    #[must_use]
    pub fn stderr(mut self, stderr: impl Into<OwnedFd>) -> Self {
        self.stderr = Some(Arc::new(stderr.into()));
        self
    }

    /// Starts the agent in the mount namespace of the process `pid`.
    #[must_use]
    pub fn mounts_of(mut self, pid: u32) -> Self {
        self.mounts_of = Some(pid);
        self
    }

    #[must_use]
    pub fn memory(mut self, limit: &MemoryLimit) -> Self {
        self.memory = Some(limit.clone());
        self
    }

    /// Sets another program that runs the agent: its command line, to which the agent's is added.
    pub fn below(mut self, line: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self> {
        let program = process::program("tunnel-agent")?;
        self.program = Some(line.into_iter().map(Into::into).chain([program]).collect());
        Ok(self)
    }

    /// Sets the hard limit of open files.
    pub fn open_files(self, limit: u32) -> Result<Self> {
        self.below(["prlimit".to_owned(), format!("--nofile={limit}:{limit}")])
    }

    /// Runs the program of this version.
    #[must_use]
    pub fn version(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    /// Runs the arm64 build of the agent.
    pub fn arm64(mut self) -> Result<Self> {
        self.program = Some(process::arm64_program("tunnel-agent")?);
        Ok(self)
    }

    pub fn state_dir(&self) -> PathBuf {
        self.testbed.dir().join(&self.state)
    }

    /// Creates a token for its node, starts the program and waits for its tunnel.
    pub async fn enrol(self, server: &Server<'a>) -> Result<Agent<'a>> {
        let token = server.token(&self.node)?;
        let node = self.node.clone();
        let agent = self.token(token).spawn()?;
        server.wait_connected(&node, true, START).await?;
        Ok(agent)
    }

    /// Starts the program, without waiting for its tunnel.
    pub fn spawn(self) -> Result<Agent<'a>> {
        let process = self.process()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 10266));
        let admin = Admin::new(&self.testbed.edge(self.edge).ns, address);
        Ok(Agent { builder: self, admin, process })
    }

    fn process(&self) -> Result<Process> {
        let host = self.testbed.on_edge(self.edge);
        let program = match &self.program {
            Some(program) => program.clone(),
            None => vec![self.version.program("tunnel-agent")?],
        };
        let mut command = match self.mounts_of {
            Some(pid) => {
                let mut command = host.command("nsenter".as_ref());
                command.arg(format!("--mount=/proc/{pid}/ns/mnt")).arg("--").args(program);
                command
            }
            None => {
                let (first, rest) = program.split_first().context("an empty command line")?;
                let mut command = host.command_below(self.memory.as_ref(), first);
                command.args(rest);
                command
            }
        };
        if let Some(server) = &self.server {
            command.arg(format!("--server={server}"));
        }
        if let Some(kubeconfig) = &self.kubeconfig {
            command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        }
        command
            .arg(format!("--node-name={}", self.node))
            .arg(format!("--state-dir={}", self.state_dir().display()));
        if let Some(token) = &self.token {
            command.arg(format!("--token={}", token.token)).arg(format!("--ca-hash={}", token.ca_hash));
        }
        command.args(&self.flags);
        // The machine's own proxy settings are not for the testbed.
        for name in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"] {
            command.env_remove(name);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        match &self.stderr {
            Some(stderr) => Process::spawn_with_stderr(&self.name, command, stderr),
            None => Process::spawn(self.testbed.dir(), &self.name, command),
        }
    }
}

#[derive(Debug)]
pub struct Agent<'a> {
    builder: Builder<'a>,
    admin: Admin<'a>,
    pub process: Process,
}

impl<'a> Deref for Agent<'a> {
    type Target = Admin<'a>;

    fn deref(&self) -> &Admin<'a> {
        &self.admin
    }
}

impl<'a> Agent<'a> {
    /// Creates a token, enrols an agent on edge `n` and waits for its tunnel.
    pub async fn enrol(server: &Server<'a>, n: usize) -> Result<Self> {
        Self::enrol_with(server, n, &[]).await
    }

    /// As [`Agent::enrol`], with further flags.
    pub async fn enrol_with(server: &Server<'a>, n: usize, flags: &[&str]) -> Result<Self> {
        let builder = Builder::new(server, n);
        let builder = flags.iter().fold(builder, |builder, flag| builder.flag(*flag));
        builder.enrol(server).await
    }

    /// As [`Agent::start_again`], with another address of the servers.
    pub fn start_again_at(&mut self, server: SocketAddr) -> Result<()> {
        self.builder.server = Some(server.to_string());
        self.start_again()
    }

    /// The name of its node.
    pub fn node(&self) -> &str {
        &self.builder.node
    }

    /// Starts the agent again after it has exited; it has its certificate, so it gets no token.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.process.ended()?.is_some(), "the agent still runs");
        self.builder.token = None;
        self.process = self.builder.process()?;
        Ok(())
    }

    /// As [`Self::start_again`], with the program of another version.
    pub fn start_again_as(&mut self, version: Version) -> Result<()> {
        self.builder.version = version;
        self.start_again()
    }

    /// Starts one more agent with the same flags, and waits until it has taken over from this one.
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
    async fn taken_over(self) -> Result<Self> {
        self.wait_log("took over from the agent before").await?;
        Ok(self)
    }

    /// Starts one more agent with the same flags.
    pub fn successor(&self) -> Result<Self> {
        self.successor_as(self.builder.version)
    }

    /// As [`Self::successor`], with the program of another version.
    pub fn successor_as(&self, version: Version) -> Result<Self> {
        Self::start_beside(Builder { version, ..self.builder.clone() })
    }

    fn start_beside(mut builder: Builder<'a>) -> Result<Self> {
        builder.name.push('+');
        builder.spawn()
    }

    /// Kills the agent, and waits until the server has noticed.
    pub async fn crash(&mut self, server: &Server<'_>) -> Result<()> {
        self.process.crash().await?;
        server.wait_connected(&self.builder.node, false, client::PATIENCE).await
    }

    /// Starts the agent again and waits for its tunnel.
    pub async fn return_to(&mut self, server: &Server<'_>) -> Result<()> {
        self.start_again()?;
        server.wait_connected(&self.builder.node, true, START).await
    }

    /// Waits for a text in the log of the current process; earlier processes' lines do not count.
    pub async fn wait_log(&self, text: &str) -> Result<()> {
        let what = format!("the agent's log to contain {text:?}");
        wait_until(&what, START, async || self.process.output(), |log| log.contains(text)).await?;
        Ok(())
    }

    /// Returns the log of the current process once it has settled: for what must not be in there.
    pub async fn settled_log(&self) -> Result<String> {
        self.settled().await?;
        self.process.output()
    }

    pub fn state_dir(&self) -> PathBuf {
        self.builder.state_dir()
    }
}

//! The real kubectl, run on the cloud host.
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Default time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);

/// The protocol that kubectl uses for exec, attach and port-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Default of kubectl 1.34.
    WebSocket,
    /// Default of older versions.
    Spdy,
}

/// Runs kubectl with the administrator's kubeconfig.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    home: PathBuf,
    transport: Transport,
    limit: Duration,
}

impl Kubectl {
    pub(super) fn new(program: PathBuf, kubeconfig: PathBuf, home: PathBuf) -> Self {
        Self { program, kubeconfig, home, transport: Transport::WebSocket, limit: LIMIT }
    }

    #[must_use]
    pub fn over(&self, transport: Transport) -> Self {
        Self { transport, ..self.clone() }
    }

    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { limit, ..self.clone() }
    }

    pub fn files(&self) -> (&Path, &Path) {
        (&self.program, &self.kubeconfig)
    }

    /// Returns the command, not started. It dies with its handle.
    pub fn command(&self, args: &[&str]) -> Command {
        self.prepare(Command::new(&self.program), args)
    }

    /// Returns the command for a terminal of its own: `stdin` and so on must be the terminal.
    pub fn command_at_terminal(&self, args: &[&str]) -> Command {
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(&self.program);
        self.prepare(command, args)
    }

    fn prepare(&self, mut command: Command, args: &[&str]) -> Command {
        let websockets = if self.transport == Transport::WebSocket { "true" } else { "false" };
        command
            .args(args)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", &self.home)
            .env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets)
            .env("KUBECTL_PORT_FORWARD_WEBSOCKETS", websockets)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// Runs to the end, successful or not.
    pub async fn output(&self, args: &[&str]) -> Result<Output> {
        self.output_with_input(args, b"").await
    }

    /// Runs to the end with `input` on standard input (/dev/null if it is empty).
    pub async fn output_with_input(&self, args: &[&str], input: &[u8]) -> Result<Output> {
        let mut command = self.command(args);
        if !input.is_empty() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().with_context(|| format!("starting kubectl {args:?}"))?;
        let stdin = child.stdin.take();
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A command may end without reading all of it; its output says why.
                stdin.write_all(input).await.ok();
            }
        };
        let both = async { tokio::join!(feed, child.wait_with_output()).1 };
        let output = timeout(self.limit, both)
            .await
            .with_context(|| format!("kubectl {} took more than {:?}", args.join(" "), self.limit))?;
        output.with_context(|| format!("waiting for kubectl {args:?}"))
    }

    /// Runs to a successful end; returns standard output.
    pub async fn run(&self, args: &[&str]) -> Result<String> {
        self.run_with_input(args, b"").await
    }

    /// As [`Kubectl::run`], with standard input.
    pub async fn run_with_input(&self, args: &[&str], input: &[u8]) -> Result<String> {
        let output = self.output_with_input(args, input).await?;
        if !output.status.success() {
            bail!("kubectl {} ended with {}: {}", args.join(" "), output.status, said(&output));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs to an unsuccessful end; returns both outputs.
    pub async fn fails(&self, args: &[&str]) -> Result<String> {
        let output = self.output(args).await?;
        ensure!(!output.status.success(), "kubectl {} succeeded: {}", args.join(" "), said(&output));
        Ok(said(&output))
    }

    /// Starts it and leaves it running.
    pub fn start(&self, args: &[&str]) -> Result<Child> {
        let mut command = self.command(args);
        command.stdin(Stdio::piped());
        command.spawn().with_context(|| format!("starting kubectl {args:?}"))
    }
}

/// Returns both outputs of a command.
pub fn said(output: &Output) -> String {
    let both = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).trim().to_owned());
    both.join("\n").trim().to_owned()
}

//! The side of the first server: passes on what it has, step by step, and takes it back should its successor die.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_core::admin::Accepting;

use super::message::{Answer, Ask, Hello, receive, send, send_sockets};
use super::{Gates, socket_path};
use crate::agent_port::Handover;
use crate::redirect::Redirect;
use crate::session::Sessions;

/// How far a successor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// There is none.
    #[default]
    Alone,
    /// One is taking over.
    Passing,
    /// One has taken over.
    Passed,
}

/// Passes this server's agents and doors on to a successor.
pub(crate) struct Succession {
    pub(crate) server_id: String,
    /// Those that a successor gets; dropped when this server stops, so that nothing waits in them.
    pub(crate) sockets: Mutex<Vec<(String, SocketAddr, OwnedFd)>>,
    pub(crate) gates: Gates,
    /// The admin port's.
    pub(crate) admin: Option<Accepting>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) redirect: Option<Arc<Redirect>>,
    pub(crate) handover: watch::Sender<Handover>,
    pub(crate) phase: watch::Sender<Phase>,
    /// Ends what a cluster must have from one server only.
    pub(crate) passed: CancellationToken,
}

impl Succession {
    /// Waits for successors until `stop`. A socket that cannot be made is logged: then a successor cannot bind its ports.
    pub(crate) async fn run(self: Arc<Self>, state_dir: PathBuf, stop: CancellationToken) {
        // Not before it has something to pass on.
        if stop.run_until_cancelled(self.gates.doors.opened()).await.is_none() {
            return;
        }
        let path = socket_path(&state_dir);
        let listener = match listen(&path) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "no other server can take over from this one");
                return;
            }
        };
        let serve = async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => self.serve(stream).await,
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a successor");
                        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                    }
                }
            }
        };
        tokio::select! {
            () = serve => {}
            () = stop.cancelled() => {}
        }
        if *self.phase.borrow() == Phase::Alone {
            // A successor has its own there.
            let _ = std::fs::remove_file(&path);
        }
    }

    async fn serve(&self, mut stream: UnixStream) {
        self.phase.send_replace(Phase::Passing);
        let ended = self.pass(&mut stream).await;
        let passed = *self.phase.borrow() == Phase::Passed;
        match ended {
            Ok(()) if passed => tracing::warn!("the successor has ended: this server goes on"),
            Ok(()) => tracing::warn!("the successor ended before it had taken over: this server goes on"),
            Err(error) => tracing::warn!(%error, "the successor is not understood: this server goes on"),
        }
        self.take_back().await;
        self.phase.send_replace(Phase::Alone);
    }

    /// Ends when the successor does.
    async fn pass(&self, stream: &mut UnixStream) -> io::Result<()> {
        let peer = stream.peer_cred()?;
        if peer.uid() != 0 && peer.uid() != nix::unistd::geteuid().as_raw() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("user {}", peer.uid())));
        }
        let hello = self.hello(stream).await?;
        send(stream, &hello).await?;
        if let Some(admin) = &self.admin {
            admin.set(false);
        }
        tracing::info!(pid = peer.pid(), "another server takes over from this one");
        loop {
            match receive(stream).await? {
                None => return Ok(()),
                Some(Ask::Agents) => {
                    self.gates.agents.set(false);
                    let nodes = self.sessions.live().iter().map(ToString::to_string).collect();
                    self.handover.send_replace(Handover::Agents);
                    send(stream, &Answer::Told(nodes)).await?;
                }
                Some(Ask::Doors) => {
                    self.gates.doors.set(false);
                    if let Some(redirect) = self.redirect.clone() {
                        let released = tokio::task::spawn_blocking(move || redirect.release()).await;
                        released.map_err(io::Error::other)?;
                    }
                    self.handover.send_replace(Handover::All);
                    send(stream, &Answer::Released).await?;
                    self.passed.cancel();
                    self.phase.send_replace(Phase::Passed);
                    tracing::info!("the other server has taken over: this one finishes what it carries");
                }
            }
        }
    }

    async fn hello(&self, stream: &UnixStream) -> io::Result<Hello> {
        let (listeners, copies) = {
            let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            let listeners: Vec<_> = sockets.iter().map(|(door, at, _)| (door.clone(), *at)).collect();
            let copies =
                sockets.iter().map(|(_, _, socket)| socket.try_clone()).collect::<io::Result<Vec<_>>>()?;
            (listeners, copies)
        };
        let borrowed: Vec<_> = copies.iter().map(|socket| socket.as_fd()).collect();
        send_sockets(stream, &borrowed).await?;
        let redirect = self.redirect.as_ref();
        Ok(Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            server_id: self.server_id.clone(),
            pid: std::process::id(),
            listeners,
            pins: redirect.and_then(|redirect| redirect.pinned_in()),
            tokens: redirect.map(|redirect| redirect.tokens()).unwrap_or_default(),
        })
    }

    async fn take_back(&self) {
        if let Some(redirect) = self.redirect.clone() {
            match tokio::task::spawn_blocking(move || redirect.resume()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "the redirect does not come back"),
                Err(error) => tracing::error!(%error, "the redirect does not come back"),
            }
        }
        if let Some(admin) = &self.admin {
            admin.set(true);
        }
        self.handover.send_replace(Handover::Nothing);
        self.gates.agents.set(true);
        self.gates.doors.set(true);
    }

    /// Closes the copies of the listening sockets, so that nothing waits in them once this server accepts no more.
    pub(crate) fn close(&self) {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Waits until the successor has taken over; for ever if there is never one.
    pub(crate) async fn passed(&self) {
        if self.phase.subscribe().wait_for(|phase| *phase == Phase::Passed).await.is_err() {
            pending::<()>().await;
        }
    }

    /// Waits until no successor is half-way.
    pub(crate) async fn settled(&self) {
        let _ = self.phase.subscribe().wait_for(|phase| *phase != Phase::Passing).await;
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    // Nobody listens there any more, or the server from which this one has taken over.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

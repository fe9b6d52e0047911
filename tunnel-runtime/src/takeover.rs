//! Takeover from a program of the same kind that runs on the same host with the same state directory.
//!
//! The first program listens on a Unix socket in the state directory. The second connects there and receives the
//! listening sockets, including the connections that wait in them. The further messages depend on the program: JSON
//! after a length of four bytes. A simulation has another [`Stream`], which passes no sockets.

#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::accept::reset_all;
use crate::files::identity;
use crate::log_once::LogOnce;

/// Name of the socket in the state directory.
const SOCKET: &str = "takeover";
/// Maximum time for the first program to greet.
const ANSWER: Duration = Duration::from_secs(5);
/// Maximum time for it to do what it is asked. It may have to wait for the kernel or for a CPU. A successor that
/// continues without it, while it lives, serves beside it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Retry interval for creating the socket on a full or read-only disk.
const RETRY: Duration = Duration::from_secs(10);
/// Maximum length of a message, in bytes: a hundred thousand nodes need a twentieth.
const LONGEST: usize = 128 << 20;
/// Maximum number of sockets that one program hands over. The kernel sends at most 253 (SCM_MAX_FD).
pub const MOST_SOCKETS: usize = 200;
/// Sent with the sockets, because they cannot be sent without data.
const MAGIC: [u8; 8] = *b"postern1";

/// Returns the path of the socket on which a program with this state directory waits for its successor.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join(SOCKET)
}

/// Connection between a program and its successor.
pub trait Stream: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin {
    /// Returns the socket, if there is one.
    fn socket(&self) -> Option<&UnixStream> {
        None
    }
}

impl Stream for UnixStream {
    fn socket(&self) -> Option<&UnixStream> {
        Some(self)
    }
}

/// Where a program waits for its successors.
pub trait Successors: Send + Sync {
    /// Waits for the next successor.
    ///
    /// # Errors
    /// Fails if too many files are open.
    fn accept(&self) -> impl Future<Output = io::Result<Box<dyn Stream>>> + Send;

    /// True if successors still come here. A successor that took over waits for its own in this place, even after it
    /// died.
    fn is_found(&self) -> bool;

    /// Removes what successors find, unless that is another program's.
    fn remove(&self);
}

/// Returns where successors come, as soon as `bind` can.
pub async fn listen<S>(bind: impl Fn() -> io::Result<S>) -> S {
    let mut failing = LogOnce::default();
    loop {
        match bind() {
            Ok(successors) => return successors,
            Err(error) if failing.is_new(&error) => {
                tracing::warn!(%error, "failed to listen for successors, retrying");
            }
            Err(_) => {}
        }
        sleep(RETRY).await;
    }
}

/// Socket on which a program waits for its successor.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl Listener {
    /// Listens for successors at `path`, replacing an earlier listener.
    ///
    /// # Errors
    /// Fails if the directory cannot be written, or is on a file system without sockets.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::replace(path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    }

    fn replace(path: &Path) -> io::Result<Self> {
        // Nobody listens there any more, or only the program that this one has taken over from.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, path: path.to_owned(), file: identity(path)? })
    }
}

impl Successors for Listener {
    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.listener.accept().await?.0))
    }

    fn is_found(&self) -> bool {
        identity(&self.path).is_ok_and(|now| now == self.file)
    }

    fn remove(&self) {
        if self.is_found() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Returns the process id of a successor; `None` if it has none.
///
/// # Errors
/// Fails if it runs as a user that may not take over.
pub fn successor(stream: &dyn Stream) -> io::Result<Option<i32>> {
    let Some(stream) = stream.socket() else { return Ok(None) };
    let peer = stream.peer_cred()?;
    if peer.uid() != 0 && peer.uid() != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("user {}", peer.uid())));
    }
    Ok(peer.pid())
}

/// Description of the first program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Greeting<H> {
    version: String,
    pid: u32,
    /// Listening sockets that come with this message, in order: name and address.
    listeners: Vec<(String, SocketAddr)>,
    own: H,
}

/// Listening sockets for a successor, with name and address.
#[derive(Debug, Default)]
pub struct Copies {
    sockets: Mutex<Vec<(String, SocketAddr, OwnedFd)>>,
    sent: AtomicBool,
}

impl Copies {
    pub fn new(copies: Vec<(String, SocketAddr, OwnedFd)>) -> Self {
        Self { sockets: Mutex::new(copies), sent: AtomicBool::new(false) }
    }

    /// Greets a successor: sends it the sockets, and `own`, which depends on the kind of program.
    ///
    /// # Errors
    /// Fails if too many files are open, or if the successor is gone.
    pub async fn greet<H: Serialize>(
        &self,
        stream: &mut dyn Stream,
        version: &str,
        own: H,
    ) -> io::Result<()> {
        let (listeners, copies) = {
            let sockets = self.sockets.lock();
            // A socket that is added from now on is not among them.
            self.sent.store(true, Ordering::Relaxed);
            let listeners: Vec<_> = sockets.iter().map(|(name, at, _)| (name.clone(), *at)).collect();
            let copies = sockets.iter().map(|(_, _, socket)| socket.try_clone());
            (listeners, copies.collect::<io::Result<Vec<_>>>()?)
        };
        if let Some(socket) = stream.socket() {
            let borrowed: Vec<_> = copies.iter().map(|socket| socket.as_fd()).collect();
            send_sockets(socket, &borrowed).await?;
        }
        let greeting = Greeting { version: version.to_owned(), pid: std::process::id(), listeners, own };
        send(stream, &greeting).await
    }

    /// Reports whether a successor has them, which has not ended.
    pub fn are_sent(&self) -> bool {
        self.sent.load(Ordering::Relaxed)
    }

    /// To be called when the successor has ended.
    pub fn taken_back(&self) {
        self.sent.store(false, Ordering::Relaxed);
    }

    /// Returns a copy of one socket, for this program itself.
    pub fn get(&self, name: &str, at: SocketAddr) -> Option<OwnedFd> {
        let sockets = self.sockets.lock();
        let (_, _, socket) = sockets.iter().find(|(other, address, _)| other == name && *address == at)?;
        socket.try_clone().ok()
    }

    /// Removes a socket and returns it. No successor gets it any more.
    pub fn take(&self, name: &str, at: impl Fn(SocketAddr) -> bool) -> Option<OwnedFd> {
        let mut sockets = self.sockets.lock();
        let index = sockets.iter().position(|(other, address, _)| other == name && at(*address))?;
        let (_, _, socket) = sockets.swap_remove(index);
        Some(socket)
    }

    /// Adds a socket.
    pub fn add(&self, name: &str, at: SocketAddr, socket: OwnedFd) {
        self.sockets.lock().push((name.to_owned(), at, socket));
    }

    /// Closes a socket that is no longer used.
    pub fn remove(&self, name: &str, at: SocketAddr) {
        self.sockets.lock().retain(|(other, address, _)| other != name || *address != at);
    }

    /// Closes all sockets, so that no connection waits in them once this program stops accepting.
    pub fn close(&self) {
        self.sockets.lock().clear();
    }
}

/// The program that runs on this host with the same state directory, and describes itself with `H`.
#[derive(Debug)]
pub struct Predecessor<H> {
    stream: Box<dyn Stream>,
    greeting: Greeting<H>,
    /// Those that were not taken.
    sockets: Vec<Option<OwnedFd>>,
    /// See [`Self::refuse_rest`].
    refusing: JoinSet<()>,
}

impl<H: DeserializeOwned> Predecessor<H> {
    /// Finds the predecessor. `None` if there is none, or if it does not answer; then it keeps the ports, and binding
    /// them fails.
    pub async fn find(state_dir: &Path) -> Option<Self> {
        let path = socket_path(state_dir);
        let stream = UnixStream::connect(&path).await.ok()?;
        Self::at(&path, Box::new(stream)).await
    }

    /// Like [`Self::find`], for a connection to the predecessor. `path` is for the log.
    pub async fn at(path: &Path, stream: Box<dyn Stream>) -> Option<Self> {
        match timeout(ANSWER, Self::greeted(stream)).await {
            Ok(Ok(found)) => {
                let Greeting { version, pid, .. } = &found.greeting;
                tracing::info!(version, pid, "taking over from the running process");
                Some(found)
            }
            Ok(Err(error)) => {
                tracing::warn!(path = %path.display(), %error, "failed to take over from the running process");
                None
            }
            Err(_) => {
                let error = "no answer within 5 s";
                tracing::warn!(path = %path.display(), error, "failed to take over from the running process");
                None
            }
        }
    }

    async fn greeted(mut stream: Box<dyn Stream>) -> io::Result<Self> {
        let sockets = match stream.socket() {
            Some(socket) => receive_sockets(socket).await?,
            None => Vec::new(),
        };
        let greeting: Greeting<H> = receive(&mut *stream).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if greeting.listeners.len() != sockets.len() {
            let reason =
                format!("received {} sockets for {} listeners", sockets.len(), greeting.listeners.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let sockets = sockets.into_iter().map(Some).collect();
        Ok(Self { stream, greeting, sockets, refusing: JoinSet::new() })
    }

    pub fn own(&self) -> &H {
        &self.greeting.own
    }

    pub fn pid(&self) -> u32 {
        self.greeting.pid
    }

    /// Takes its listening socket of this name at an address that `fits`.
    pub fn listener(&mut self, name: &str, fits: impl Fn(SocketAddr) -> bool) -> Option<TcpListener> {
        let listener = TcpListener::from(self.socket(name, fits)?);
        listener.set_nonblocking(true).ok()?;
        Some(listener)
    }

    /// Like [`Self::listener`], for any kind of socket.
    pub fn socket(&mut self, name: &str, fits: impl Fn(SocketAddr) -> bool) -> Option<OwnedFd> {
        let index = self.greeting.listeners.iter().position(|(other, at)| other == name && fits(*at))?;
        self.sockets.get_mut(index)?.take()
    }

    /// Resets connections to the listeners that were not taken, because this program is configured without them. Call it
    /// once the predecessor accepts no more: that one keeps them until it drains, in case this program ends, and clients
    /// would wait in their queues.
    pub fn refuse_rest(&mut self) {
        for socket in self.sockets.drain(..).flatten() {
            self.refusing.spawn(reset_all(socket, "not taken over"));
        }
    }

    /// Ends [`Self::refuse_rest`], before the predecessor accepts again.
    pub async fn refuse_nothing(&mut self) {
        self.refusing.shutdown().await;
    }

    /// Sends it a request.
    ///
    /// # Errors
    /// Fails if it has ended, does not answer in time, or sends an unexpected answer.
    pub async fn ask<Q: Serialize, A: DeserializeOwned>(&mut self, ask: &Q) -> io::Result<A> {
        self.ask_within(PATIENCE, ask).await
    }

    /// Like [`Self::ask`], with another time limit, for requests that it fulfils only when it can.
    ///
    /// # Errors
    /// Same as [`Self::ask`].
    pub async fn ask_within<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        patience: Duration,
        ask: &Q,
    ) -> io::Result<A> {
        let answered = async {
            send(&mut *self.stream, ask).await?;
            receive(&mut *self.stream).await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
        };
        timeout(patience, answered).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Waits for its end. Until `self` is dropped, it knows that its successor is alive.
    pub async fn ended(&mut self) {
        // Skip an answer that came too late: it is not the predecessor's end, and taking it for that would leave both
        // serving.
        while self.stream.read_u8().await.is_ok() {}
    }
}

/// Sends one message.
///
/// # Errors
/// Fails if the other end is gone.
pub async fn send<T: Serialize>(stream: &mut dyn Stream, message: &T) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(&text).await
}

/// Receives the next message; `None` if the other end has closed the connection.
///
/// # Errors
/// Fails if it is not a valid message.
pub async fn receive<T: DeserializeOwned>(stream: &mut dyn Stream) -> io::Result<Option<T>> {
    let length = match stream.read_u32().await {
        Ok(length) => length as usize,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text).await?;
    serde_json::from_slice(&text).map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

async fn send_sockets(stream: &UnixStream, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
    if sockets.len() > MOST_SOCKETS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many listening sockets"));
    }
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SOCKETS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !sockets.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(sockets));
        }
        Ok(sendmsg(stream.as_fd(), &[IoSlice::new(&MAGIC)], &mut control, SendFlags::NOSIGNAL)?)
    };
    // Eight bytes are sent whole, because the buffer is empty.
    let sent = stream.async_io(Interest::WRITABLE, send).await?;
    if sent == MAGIC.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

async fn receive_sockets(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut magic = [0; MAGIC.len()];
    let mut sockets = Vec::new();
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SOCKETS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut magic)];
        let received = recvmsg(stream.as_fd(), slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                sockets.extend(passed);
            }
        }
        Ok(received.bytes)
    };
    let received = stream.async_io(Interest::READABLE, receive).await?;
    if received != MAGIC.len() || magic != MAGIC {
        let reason = "it is not one of ours, or one of another kind";
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(sockets)
}

//! Servers on an edge host that the agent dials.
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use crate::client::{self, Pattern};
use crate::netns::Namespace;

/// Behaviour of a target on each connection.
#[derive(Clone, Copy, Debug)]
pub enum Behaviour {
    /// Sends back all bytes that it reads, and ends after the client.
    Echo,
    /// Reads to the end, then sends `COUNT SHA256`.
    Sink,
    /// Sends a [`Pattern`] of this seed and length, then ends.
    Source(u64, u64),
    /// Sends a greeting first, then echoes.
    HelloFirst(&'static str),
    /// Sends a greeting and shuts down its sending side, then reads to the client's end.
    EndsFirst(&'static str),
    /// Reads the head of an HTTP request, sends this answer, and ends.
    Answers(&'static str),
    NeverReads,
    /// Waits, then echoes.
    Slow(Duration),
    /// Reads one byte, then resets the connection.
    Resets,
}

#[derive(Debug, Default)]
struct Seen {
    connections: AtomicU64,
    open: AtomicU64,
    resets: AtomicU64,
    digest: std::sync::Mutex<Option<(u64, String)>>,
}

/// A running target; dropping it closes its connections and frees its port.
#[derive(Debug)]
pub struct Target {
    pub address: SocketAddr,
    listener: std::net::TcpListener,
    seen: Arc<Seen>,
    task: AbortHandle,
}

impl Target {
    /// Listens on `address:port` in a namespace.
    pub fn start(
        ns: &Namespace,
        address: impl Into<IpAddr>,
        port: u16,
        behaviour: Behaviour,
    ) -> Result<Self> {
        let address = SocketAddr::new(address.into(), port);
        let listener = ns.run(|| {
            std::net::TcpListener::bind(address).with_context(|| format!("listening on {address}"))
        })?;
        listener.set_nonblocking(true).context("non-blocking listener")?;
        let accepting = listener.try_clone().and_then(TcpListener::from_std).context("listener for tokio")?;
        let address = listener.local_addr().context("the target's address")?;
        let seen = Arc::new(Seen::default());
        let task = tokio::spawn(accept_all(accepting, behaviour, Arc::clone(&seen))).abort_handle();
        Ok(Self { address, listener, seen, task })
    }

    /// Returns the number of connections accepted so far.
    pub fn connections(&self) -> u64 {
        self.seen.connections.load(Ordering::SeqCst)
    }

    pub fn open(&self) -> u64 {
        self.seen.open.load(Ordering::SeqCst)
    }

    /// Returns the number of connections that the client reset.
    pub fn resets(&self) -> u64 {
        self.seen.resets.load(Ordering::SeqCst)
    }

    /// Returns count and SHA-256 of the bytes that the last [`Behaviour::EndsFirst`] or [`Behaviour::Sink`] connection
    /// read.
    pub fn digest(&self) -> Option<(u64, String)> {
        self.seen.digest.lock().ok()?.clone()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.task.abort();
        // The runtime drops the task, and with it the task's copy of the listener, some time later.
        let _ = SockRef::from(&self.listener).shutdown(Shutdown::Both);
    }
}

async fn accept_all(listener: TcpListener, behaviour: Behaviour, seen: Arc<Seen>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                seen.connections.fetch_add(1, Ordering::SeqCst);
                seen.open.fetch_add(1, Ordering::SeqCst);
                let seen = Arc::clone(&seen);
                connections.spawn(async move {
                    if let Err(error) = serve(stream, behaviour, &seen).await {
                        let reset = error.downcast_ref::<std::io::Error>();
                        if reset.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset) {
                            seen.resets.fetch_add(1, Ordering::SeqCst);
                        } else {
                            eprintln!("target: {error:#}");
                        }
                    }
                    seen.open.fetch_sub(1, Ordering::SeqCst);
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(mut stream: TcpStream, behaviour: Behaviour, seen: &Seen) -> Result<()> {
    stream.set_nodelay(true)?;
    match behaviour {
        Behaviour::Echo => echo(stream).await,
        Behaviour::Sink => {
            let (count, sum) = client::digest(&mut stream).await?;
            if let Ok(mut digest) = seen.digest.lock() {
                *digest = Some((count, sum.clone()));
            }
            stream.write_all(format!("{count} {sum}").as_bytes()).await?;
            stream.shutdown().await?;
            Ok(())
        }
        Behaviour::Source(seed, length) => {
            Pattern::new(seed, length).write_to(&mut stream).await?;
            stream.shutdown().await?;
            client::digest(&mut stream).await?;
            Ok(())
        }
        Behaviour::HelloFirst(greeting) => {
            stream.write_all(greeting.as_bytes()).await?;
            echo(stream).await
        }
        Behaviour::EndsFirst(greeting) => {
            stream.write_all(greeting.as_bytes()).await?;
            stream.shutdown().await?;
            let result = client::digest(&mut stream).await?;
            if let Ok(mut digest) = seen.digest.lock() {
                *digest = Some(result);
            }
            Ok(())
        }
        Behaviour::Answers(page) => {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await?);
            }
            stream.write_all(page.as_bytes()).await?;
            stream.shutdown().await?;
            client::digest(&mut stream).await?;
            Ok(())
        }
        Behaviour::NeverReads => {
            // Ends when the target is dropped.
            std::future::pending::<()>().await;
            drop(stream);
            Ok(())
        }
        Behaviour::Slow(delay) => {
            // The delay is the behaviour itself.
            tokio::time::sleep(delay).await;
            echo(stream).await
        }
        Behaviour::Resets => {
            stream.read_u8().await?;
            socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
            Ok(())
        }
    }
}

async fn echo(mut stream: TcpStream) -> Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let n = stream.read(&mut buffer).await?;
        if n == 0 {
            stream.shutdown().await?;
            return Ok(());
        }
        stream.write_all(&buffer[..n]).await?;
    }
}

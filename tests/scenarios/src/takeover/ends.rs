//! The end of a program that a successor has replaced.
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, echo, end_at_once, end_of, visit};
use postern_testbed::process::Process;
use postern_testbed::target::Target;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::common::skip;

/// Time limit for a program to end once it has no connections.
pub(super) const ENDS: Duration = Duration::from_secs(60);
/// Bytes of a download during which a program is replaced.
pub(crate) const LENGTH: u64 = 30_000_000;

/// A connection that is used before and after a replacement, and a download of which a part is read before.
pub(crate) struct Open {
    held: TcpStream,
    download: TcpStream,
}

impl Open {
    /// `source` sends [`LENGTH`] bytes.
    pub(crate) async fn new(held: TcpStream, source: &Target) -> Result<Self> {
        let mut download = client::connect(source.address).await?;
        skip(&mut download, 1_000_000).await?;
        Ok(Self { held, download })
    }

    /// Uses both to their ends, while the program that is replaced runs, and waits for its end.
    pub(crate) async fn finish(mut self, before: &mut Process) -> Result<()> {
        echo(&mut self.held, b"after").await.context("on the connection held")?;
        let (got, _) = client::digest(&mut self.download).await?;
        ensure!(got + 1_000_000 == LENGTH, "a download of {got} bytes");
        self.download.shutdown().await.context("closing the download")?;
        ensure!(before.ended()?.is_none(), "the one before ended with a connection open");
        echo(&mut self.held, b"still").await.context("on the connection held")?;
        self.held.shutdown().await.context("closing")?;
        let end = end_of(&mut self.held, client::PATIENCE).await?;
        ensure!(end == client::End::Eof(0), "the connection held ended with {end:?}");
        let status = before.wait_exit(ENDS).await?;
        ensure!(status.code() == Some(0), "the one before ended with {status}");
        Ok(())
    }
}

/// Waits until the first program has ended along with its last connection; the third one goes on.
pub(super) async fn finishes(first: &mut Process, mut held: TcpStream, on_edge: SocketAddr) -> Result<()> {
    ensure!(first.ended()?.is_none(), "the first one ended with a connection open");
    echo(&mut held, b"after").await.context("on the connection held")?;
    drop(held);
    let status = first.wait_exit(ENDS).await?;
    ensure!(status.code() == Some(0), "the first one ended with {status}");
    visit(on_edge).await.context("after the first one's end").map(drop)
}

/// Checks a connect to the address of a former listener: true if it was refused, false if the connection was reset. Fails if
/// the connection waits.
pub(super) async fn is_refused(connected: io::Result<TcpStream>) -> Result<bool> {
    if connected.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
        return Ok(true);
    }
    let end = end_at_once(connected).await?;
    ensure!(end == client::End::Reset, "it ended with {end:?}");
    Ok(false)
}

//! The end of a program that was taken over from.
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{echo, visit};
use postern_testbed::process::Process;
use tokio::net::TcpStream;

/// How long a program may take to end once it has nothing to carry.
pub(super) const ENDS: Duration = Duration::from_secs(20);

/// The first one has carried what it had, and ends with it; the third one goes on.
pub(super) async fn finishes(first: &mut Process, mut held: TcpStream, on_edge: SocketAddr) -> Result<()> {
    ensure!(first.ended()?.is_none(), "the first one ended with a connection open");
    echo(&mut held, b"after").await.context("on the connection held")?;
    drop(held);
    let status = first.wait_exit(ENDS).await?;
    ensure!(status.code() == Some(0), "the first one ended with {status}");
    visit(on_edge).await.context("after the first one's end").map(drop)
}

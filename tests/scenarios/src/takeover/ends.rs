//! The end of a program that a successor has replaced.
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{echo, visit};
use postern_testbed::process::Process;
use tokio::net::TcpStream;

/// Time limit for a program to end once it has no connections.
pub(super) const ENDS: Duration = Duration::from_secs(20);

/// Waits until the first program has ended along with its last connection; the third one goes on.
pub(super) async fn finishes(first: &mut Process, mut held: TcpStream, on_edge: SocketAddr) -> Result<()> {
    ensure!(first.ended()?.is_none(), "the first one ended with a connection open");
    echo(&mut held, b"after").await.context("on the connection held")?;
    drop(held);
    let status = first.wait_exit(ENDS).await?;
    ensure!(status.code() == Some(0), "the first one ended with {status}");
    visit(on_edge).await.context("after the first one's end").map(drop)
}

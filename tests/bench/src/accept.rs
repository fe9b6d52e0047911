//! The cloud side's listener of a peer that the bench itself implements.
use std::time::Duration;

use anyhow::Result;
use tokio::net::{TcpListener, TcpStream};

/// Accepts connections, and relays each in a task of its own.
pub(crate) async fn each<F>(listener: TcpListener, mut relay: impl FnMut(TcpStream) -> F)
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            // Out of descriptors: wait for some to be closed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let relayed = relay(socket);
        tokio::spawn(async move {
            // The client sees how the connection ended.
            relayed.await.ok();
        });
    }
}

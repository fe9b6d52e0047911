//! Relays one connection as a bidirectional stream.
use anyhow::{Context as _, Result};
use bytes::BytesMut;
use quinn::{RecvStream, SendStream, VarInt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tunnel_link::link;
use tunnel_link::relay::{SMALL_READ, end_on_drop, next_size};

const BROKEN: VarInt = VarInt::from_u32(1);

/// Copies both ways, until both have ended or one has failed, which then resets both sides.
pub(super) async fn relay(socket: TcpStream, mut send: SendStream, mut receive: RecvStream) -> Result<()> {
    let (mut read, mut write) = socket.into_split();
    let relayed = tokio::try_join!(outward(&mut read, &mut send), inward(&mut receive, &mut write));
    if relayed.is_err() {
        // Either may have ended already.
        send.reset(BROKEN).ok();
        receive.stop(BROKEN).ok();
        // Dropping it would send an end of file before the reset.
        write.forget();
    }
    relayed.map(drop)
}

async fn outward(socket: &mut OwnedReadHalf, stream: &mut SendStream) -> Result<()> {
    let mut size = SMALL_READ;
    loop {
        socket.readable().await.context("the socket")?;
        let mut data = BytesMut::with_capacity(size);
        let read = socket.read_buf(&mut data).await.context("reading")?;
        if read == 0 {
            return stream.finish().context("ending the stream");
        }
        size = next_size(size, read, link::LARGEST_PIECE);
        stream.write_chunk(data.freeze()).await.context("sending")?;
    }
}

async fn inward(stream: &mut RecvStream, socket: &mut OwnedWriteHalf) -> Result<()> {
    while let Some(chunk) = stream.read_chunk(link::LARGEST_PIECE, true).await.context("receiving")? {
        socket.write_all(&chunk.bytes).await.context("writing")?;
    }
    socket.shutdown().await.context("ending the connection")?;
    end_on_drop(socket.as_ref());
    Ok(())
}

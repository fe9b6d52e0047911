//! What the two servers say to each other: JSON behind a length of four bytes; sockets travel with the first message.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use ipnet::IpNet;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::UnixStream;

/// The longest message, in bytes: a hundred thousand nodes need a twentieth.
const LONGEST: usize = 128 << 20;
/// Sockets that one server may pass on.
const MOST_SOCKETS: usize = 16;
/// Sent with the sockets, so that there is something to send them with.
const MAGIC: [u8; 8] = *b"postern1";

/// What the first server is, and what it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: String,
    pub(super) server_id: String,
    pub(super) pid: u32,
    /// The listening sockets that come with this message, in their order: the door, and where it listens.
    pub(super) listeners: Vec<(String, SocketAddr)>,
    /// The folder of its pins.
    pub(super) pins: Option<PathBuf>,
    /// What it redirects, and the first token of each.
    pub(super) tokens: Vec<(IpNet, IpAddr)>,
}

/// What the second server asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    Agents,
    Doors,
}

/// What the first one answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// The nodes whose agents were told.
    Told(Vec<String>),
    Released,
}

pub(super) async fn send<T: Serialize>(stream: &mut UnixStream, message: &T) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(&text).await
}

/// None: the other one has closed the connection.
pub(super) async fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<Option<T>> {
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

pub(super) async fn send_sockets(stream: &UnixStream, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
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
    // Eight bytes are sent as a whole: the buffer is empty.
    let sent = stream.async_io(Interest::WRITABLE, send).await?;
    if sent == MAGIC.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

pub(super) async fn receive_sockets(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
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
        let reason = "it is not a tunnel-server, or one of another kind";
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(sockets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sockets_and_messages_arrive() {
        let (mut first, mut second) = UnixStream::pair().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        send_sockets(&first, &[listener.as_fd(), listener.as_fd()]).await.unwrap();
        let hello = Hello {
            server_id: "a".into(),
            listeners: vec![("agents".into(), address); 2],
            tokens: vec![("10.0.0.0/24".parse().unwrap(), "198.18.0.0".parse().unwrap())],
            ..Hello::default()
        };
        send(&mut first, &hello).await.unwrap();
        let sockets = receive_sockets(&second).await.unwrap();
        assert_eq!(sockets.len(), 2);
        for socket in sockets {
            assert_eq!(std::net::TcpListener::from(socket).local_addr().unwrap(), address);
        }
        assert_eq!(receive::<Hello>(&mut second).await.unwrap(), Some(hello));
        send(&mut second, &Ask::Agents).await.unwrap();
        assert_eq!(receive::<Ask>(&mut first).await.unwrap(), Some(Ask::Agents));
        drop(second);
        assert_eq!(receive::<Ask>(&mut first).await.unwrap(), None);
    }

    #[tokio::test]
    async fn what_is_not_ours_is_refused() {
        let (mut first, mut second) = UnixStream::pair().unwrap();
        first.write_all(b"GET / HTTP/1.1").await.unwrap();
        assert!(receive_sockets(&second).await.is_err());
        first.write_all(&[0xff; 8]).await.unwrap();
        assert!(receive::<Ask>(&mut second).await.is_err());
    }
}

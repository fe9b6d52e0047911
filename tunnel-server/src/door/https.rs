//! The https door: passthrough by SNI. The ClientHello names the node; every byte goes to the kubelet as it came.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::hello::{HelloError, MAX_HELLO, Parsed, parse_client_hello};
use super::{Door, Opening, Refusal};
use crate::route::{ByAddress, NodeAddress, Router};

/// How long a caller may take to send its ClientHello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a refused caller may take to read its alert.
const ALERT_TIMEOUT: Duration = Duration::from_secs(1);
/// TLS alerts (RFC 8446 §6): record header, fatal, then the description.
const ALERT: [u8; 6] = [21, 3, 3, 0, 2, 2];
const UNRECOGNIZED_NAME: u8 = 112;

/// TLS passthrough by server name.
pub struct Https;

impl Door for Https {
    const NAME: &'static str = "https";

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<Opening, Refusal> {
        let mut read = BytesMut::new();
        let hello = tokio::time::timeout(HELLO_TIMEOUT, read_hello(socket, &mut read)).await;
        let name = match hello {
            Err(_) => {
                return Err(Refusal::Caller(format!("no ClientHello within {} s", HELLO_TIMEOUT.as_secs())));
            }
            Ok(Err(refused)) => {
                if let Wrong::Hello(error) = refused {
                    alert(socket, error.alert()).await;
                }
                return Err(refused.into());
            }
            Ok(Ok(name)) => name,
        };
        match destination(name.as_deref(), router) {
            Ok(destination) => Ok(Opening {
                target: SocketAddr::new(destination.address, destination.kubelet_port),
                node: destination.node,
                prefix: read.freeze(),
            }),
            Err(reason) => {
                alert(socket, UNRECOGNIZED_NAME).await;
                Err(Refusal::Caller(reason))
            }
        }
    }
}

enum Wrong {
    Hello(HelloError),
    Socket(std::io::Error),
    Closed,
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        match wrong {
            Wrong::Hello(error) => Self::Caller(error.to_string()),
            Wrong::Socket(error) => Self::Socket(error),
            Wrong::Closed => Self::Caller("closed before a whole ClientHello".to_owned()),
        }
    }
}

async fn read_hello(socket: &mut TcpStream, read: &mut BytesMut) -> Result<Option<String>, Wrong> {
    loop {
        if let Parsed::Hello(name) = parse_client_hello(read).map_err(Wrong::Hello)? {
            return Ok(name);
        }
        read.reserve(2048);
        if socket.read_buf(read).await.map_err(Wrong::Socket)? == 0 {
            return Err(Wrong::Closed);
        }
        if read.len() > 2 * MAX_HELLO {
            return Err(Wrong::Hello(HelloError::TooLong));
        }
    }
}

/// The node that a server name means: a node's name, or its address if only one node has it.
fn destination(name: Option<&str>, router: &Router) -> Result<NodeAddress, String> {
    let name = name.ok_or("the ClientHello names no server: send the node's name as SNI")?;
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let snapshot = router.snapshot();
    if let Some(destination) = snapshot.by_name(&name) {
        return Ok(destination);
    }
    let Ok(address) = name.trim_matches(['[', ']']).parse::<IpAddr>() else {
        return Err(format!("{name} is no edge node's name"));
    };
    match snapshot.by_address(address) {
        ByAddress::Unique(destination) => Ok(destination),
        ByAddress::Ambiguous(nodes) => {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            Err(format!("{address} is the address of {}: name the node instead", nodes.join(", ")))
        }
        ByAddress::Unknown => Err(format!("{address} is no edge node's address")),
    }
}

/// Sends a fatal alert, and gives the caller time to read it before the socket is reset.
async fn alert(socket: &mut TcpStream, description: u8) {
    let mut message = ALERT.to_vec();
    message.push(description);
    let told = async {
        socket.write_all(&message).await?;
        socket.shutdown().await?;
        // Unread bytes would turn the close into a reset, and the reset may overtake the alert.
        let mut rest = [0; 4096];
        while socket.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    if !matches!(tokio::time::timeout(ALERT_TIMEOUT, told).await, Ok(Ok(()))) {
        tracing::debug!("a refused caller did not read its alert");
    }
}

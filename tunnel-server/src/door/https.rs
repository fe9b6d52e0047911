//! The https door: TLS passthrough by SNI. The ClientHello names the node; every byte goes to the kubelet as it came.

use std::net::SocketAddr;

use bytes::BytesMut;
use tokio::net::TcpStream;

use super::client_hello::{HelloError, Parsed, parse_client_hello};
use super::context::{Door, OpenError, OpenRequest};
use super::preface::{PrefaceError, answer, read_preface, timed_out};
use super::resolve::resolve;
use crate::route::Router;

/// A TLS alert (RFC 8446 §6) without its description: record header, fatal.
const ALERT: [u8; 6] = [21, 3, 3, 0, 2, 2];
const UNRECOGNIZED_NAME: u8 = 112;

pub struct Https;

impl Door for Https {
    const NAME: &'static str = "https";

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<OpenRequest, OpenError> {
        const HELLO: &str = "ClientHello";
        let mut read = BytesMut::new();
        let parse = |bytes: &[u8]| {
            Ok::<_, HelloError>(match parse_client_hello(bytes)? {
                Parsed::Incomplete => None,
                Parsed::Hello(name) => Some(name),
            })
        };
        let name = match read_preface(socket, &mut read, HELLO, parse).await {
            Ok(name) => name,
            Err(PrefaceError::Lost(error)) => return Err(error),
            Err(PrefaceError::TimedOut) => return Err(OpenError::Client(timed_out(HELLO))),
            Err(PrefaceError::Invalid(error)) => {
                alert(socket, error.alert()).await;
                return Err(OpenError::Client(error.to_string()));
            }
        };
        let node = match name {
            Some(name) => resolve(&name, router),
            None => Err("the ClientHello names no server: send the node's name as SNI".to_owned()),
        };
        match node {
            Ok(node) => Ok(OpenRequest {
                target: SocketAddr::new(node.address, node.kubelet_port),
                node: node.node,
                prefix: read.freeze(),
            }),
            Err(reason) => {
                alert(socket, UNRECOGNIZED_NAME).await;
                Err(OpenError::Client(reason))
            }
        }
    }
}

async fn alert(socket: &mut TcpStream, description: u8) {
    answer(socket, &[&ALERT[..], &[description]].concat()).await;
}

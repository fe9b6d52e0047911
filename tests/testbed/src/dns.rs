//! A name server that answers per address family as a test tells it to.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use tokio::net::UdpSocket;
use tokio::task::AbortHandle;

use crate::netns::Namespace;

const HEADER: usize = 12;
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;

/// The answer to every question for one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Address(IpAddr),
    /// A response code of RFC 1035 and no record; 0 is NODATA.
    Code(u8),
    /// No answer.
    Dropped,
}

#[derive(Clone, Copy, Debug)]
pub struct Answers {
    pub a: Answer,
    pub aaaa: Answer,
}

impl Answers {
    pub fn v4(address: Ipv4Addr, aaaa: Answer) -> Self {
        Self { a: Answer::Address(address.into()), aaaa }
    }

    pub fn v6(address: Ipv6Addr, a: Answer) -> Self {
        Self { a, aaaa: Answer::Address(address.into()) }
    }
}

/// A running name server. Dropping it stops it.
#[derive(Debug)]
pub struct NameServer {
    answers: Arc<Mutex<Answers>>,
    task: AbortHandle,
}

impl NameServer {
    /// Starts it at 127.0.0.1 of the namespace, for `nameserver 127.0.0.1` in its resolv.conf.
    pub fn start(ns: &Namespace, answers: Answers) -> Result<Self> {
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 53));
        let socket =
            ns.run(|| std::net::UdpSocket::bind(at).with_context(|| format!("a name server at {at}")))?;
        socket.set_nonblocking(true).context("non-blocking name server")?;
        let socket = UdpSocket::from_std(socket).context("name server for tokio")?;
        let answers = Arc::new(Mutex::new(answers));
        let task = tokio::spawn(serve(socket, answers.clone())).abort_handle();
        Ok(Self { answers, task })
    }

    pub fn set(&self, answers: Answers) {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner) = answers;
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(socket: UdpSocket, answers: Arc<Mutex<Answers>>) {
    let mut query = [0; 512];
    while let Ok((length, client)) = socket.recv_from(&mut query).await {
        let answers = *answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(response) = response(&query[..length], answers) {
            // If sending fails, the client has gone or asks again.
            let _ = socket.send_to(&response, client).await;
        }
    }
}

/// Makes a response (RFC 1035 section 4.1); None: no answer.
fn response(query: &[u8], answers: Answers) -> Option<Vec<u8>> {
    let mut end = HEADER;
    while *query.get(end)? != 0 {
        end += 1 + usize::from(query[end]);
    }
    let question = query.get(HEADER..end + 5)?;
    let kind = u16::from_be_bytes([*query.get(end + 1)?, *query.get(end + 2)?]);
    let answer = match kind {
        TYPE_A => answers.a,
        TYPE_AAAA => answers.aaaa,
        _ => Answer::Code(0),
    };
    let (code, address) = match answer {
        Answer::Dropped => return None,
        Answer::Code(code) => (code, None),
        Answer::Address(address) => (0, Some(address)),
    };
    let mut response = query[..2].to_vec();
    // Header: a response with recursion, one question, and at most one answer.
    response.extend([0x81, 0x80 | code, 0, 1, 0, u8::from(address.is_some()), 0, 0, 0, 0]);
    response.extend(question);
    if let Some(address) = address {
        // Answer: the question's name and type, class IN, TTL 0.
        response.extend([0xc0, HEADER as u8]);
        response.extend(kind.to_be_bytes());
        response.extend([0, 1, 0, 0, 0, 0]);
        let bytes = match address {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        response.extend([0, bytes.len() as u8]);
        response.extend(bytes);
    }
    Some(response)
}

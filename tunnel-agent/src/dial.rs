//! Dials a target for a server: the request, the policy's verdict, and a TCP connection within a deadline.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tonic::Code;
use tunnel_link::link::Wire;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{OF_NODE_HEADER, TARGET_HEADER, connect_target};
use tunnel_runtime::admin::TUNNELLED;
use tunnel_runtime::fair::FairShare;

use crate::places::{Place, Places};
use crate::policy::Policy;
use crate::reach::Network;
use crate::runtime::Runtime;

/// Deadline of a dial if the server names none.
pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum deadline that a server may name.
const LONGEST_DEADLINE: Duration = Duration::from_secs(60);
/// Maximum pending dials for one server. Targets that never answer must not hold unbounded state.
const MAX_PENDING: usize = 1024;
/// Maximum dials that wait for their turn, half of them for one target. Each holds its client's connection and a
/// stream.
const MAX_WAITING: usize = 8192;

/// Reasons why a target was not connected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("{TARGET_HEADER} is not an IP address and port: {0:?}")]
    NotAnAddress(String),
    #[error("{target} may not be dialled here: {reason}")]
    Denied { target: SocketAddr, reason: String },
    #[error("too many dials wait for their turn already")]
    Busy,
    #[error("all {limit} connections that this agent has open files and memory for are open")]
    Full { limit: u32 },
    #[error("the dial of {target} had no turn within {} s: too many are pending", after.as_secs_f32())]
    NoTurn { target: SocketAddr, after: Duration },
    #[error("{target} timed out after {} s", after.as_secs_f32())]
    TimedOut { target: SocketAddr, after: Duration },
    #[error("connection refused by {0}")]
    Refused(SocketAddr),
    #[error("{target} is unreachable from the node: {error}")]
    Unreachable { target: SocketAddr, error: io::Error },
}

impl DialError {
    /// gRPC status for the server.
    pub(crate) const fn code(&self) -> Code {
        match self {
            Self::NotAnAddress(_) => Code::InvalidArgument,
            Self::Denied { .. } => Outcome::Denied.code(),
            Self::Busy | Self::Full { .. } | Self::NoTurn { .. } => Outcome::Busy.code(),
            Self::TimedOut { .. } => Outcome::TimedOut.code(),
            Self::Refused(_) => Outcome::Refused.code(),
            Self::Unreachable { .. } => Outcome::Unreachable.code(),
        }
    }

    /// Value of the metric's label `outcome`.
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::NotAnAddress(_) => Outcome::Protocol.as_str(),
            _ => Outcome::from_code(self.code()).as_str(),
        }
    }

    fn from_io(target: SocketAddr, deadline: Duration, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => Self::Refused(target),
            io::ErrorKind::TimedOut => Self::TimedOut { target, after: deadline },
            _ => Self::Unreachable { target, error },
        }
    }
}

/// Parsed headers of a Relay stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DialRequest {
    pub(crate) target: SocketAddr,
    /// True if the server says that the Node names the target's address.
    of_node: bool,
    deadline: Duration,
}

impl DialRequest {
    /// A request to connect to `target` within this time.
    pub(crate) const fn within(deadline: Duration, target: SocketAddr) -> Self {
        Self { target, of_node: false, deadline }
    }

    /// Parses the headers.
    ///
    /// # Errors
    /// The target is missing or not `IP:port`.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Result<Self, DialError> {
        let named = headers.get(TARGET_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
        let target = std::str::from_utf8(named).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
            DialError::NotAnAddress(String::from_utf8_lossy(&named[..named.len().min(64)]).into_owned())
        })?;
        let deadline = headers
            .get("grpc-timeout")
            .and_then(|value| parse_timeout(value.as_bytes()))
            .unwrap_or(DEFAULT_DEADLINE)
            .min(LONGEST_DEADLINE);
        Ok(Self { target, of_node: headers.contains_key(OF_NODE_HEADER), deadline })
    }
}

/// This end of a connection to a target.
pub(crate) enum Socket {
    Kernel(TcpStream),
    /// Of a simulated network, which has the targets too.
    Simulated(Wire),
}

/// A connection to a target.
pub(crate) struct Dialled {
    pub(crate) socket: Socket,
    /// May differ from the target's: see [`Policy::place`].
    pub(crate) address: IpAddr,
    /// Its place among all of this agent's.
    pub(crate) place: Place,
}

/// Dials targets for one server.
pub(crate) struct Dialler {
    policy: Arc<Policy>,
    places: Places,
    turns: FairShare<SocketAddr>,
    /// None: the kernel's.
    network: Option<Arc<dyn Network>>,
}

impl Dialler {
    pub(crate) fn new(runtime: &Runtime) -> Self {
        let (policy, places) = (runtime.policy.clone(), runtime.places.clone());
        let network = runtime.config.reach.network.clone();
        Self { policy, places, turns: FairShare::new(MAX_PENDING, MAX_WAITING), network }
    }

    /// Returns the connection. `loopback_ports` are those that the server has named.
    pub(crate) async fn dial(
        &self,
        request: DialRequest,
        loopback_ports: &BTreeSet<u16>,
    ) -> Result<Dialled, DialError> {
        let DialRequest { target, of_node, deadline } = request;
        let target = self
            .policy
            .place(target, of_node, loopback_ports)
            .map_err(|denied| DialError::Denied { target, reason: denied.to_string() })?;
        // Taken before the turn, because waiting dials need memory too.
        let place = self.places.take().ok_or(DialError::Full { limit: self.places.limit() })?;
        let deadline_at = Instant::now() + deadline;
        let _turn = tokio::time::timeout_at(deadline_at, self.turns.take(target))
            .await
            .map_err(|_| DialError::NoTurn { target, after: deadline })?
            .ok_or(DialError::Busy)?;
        let socket = tokio::time::timeout_at(deadline_at, self.connect(target))
            .await
            .map_err(|_| DialError::TimedOut { target, after: deadline })?
            .map_err(|error| DialError::from_io(target, deadline, error))?;
        Ok(Dialled { socket, address: target.ip().to_canonical(), place })
    }

    async fn connect(&self, target: SocketAddr) -> io::Result<Socket> {
        if let Some(network) = &self.network {
            return network.connect(target).await.map(Socket::Simulated);
        }
        let socket = if self.policy.is_admin(target) {
            // The agent recognizes connections of servers by their source address, which is IPv4.
            let admin = SocketAddr::new(target.ip().to_canonical(), target.port());
            connect_target(admin, Some(TUNNELLED.into())).await?
        } else {
            connect_target(target, None).await?
        };
        Ok(Socket::Kernel(socket))
    }
}

/// Parses `grpc-timeout`: up to eight digits and a unit (gRPC over HTTP/2, "Requests").
fn parse_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let amount: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(amount * 3600),
        b'M' => Duration::from_secs(amount * 60),
        b'S' => Duration::from_secs(amount),
        b'm' => Duration::from_millis(amount),
        b'u' => Duration::from_micros(amount),
        b'n' => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::runtime::of_flags;

    fn asked(headers: &[(&'static str, &[u8])]) -> Result<DialRequest, DialError> {
        let headers = headers.iter().map(|(name, value)| {
            (http::HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap())
        });
        DialRequest::from_headers(&headers.collect())
    }

    #[test]
    fn a_target_is_an_address_and_a_port() {
        for good in ["192.168.50.2:10250", "[fd00::2]:1"] {
            let request = asked(&[(TARGET_HEADER, good.as_bytes())]).unwrap();
            assert_eq!((request.target.to_string().as_str(), request.deadline), (good, DEFAULT_DEADLINE));
        }
        let long = "1".repeat(100);
        for bad in [
            "",
            "edge-1:80",
            "192.168.50.2",
            "fd00::2:80",
            "1.2.3.4:65536",
            " 1.2.3.4:5",
            "1.2.3.4:5\t",
            "\u{ff}",
            &*long,
        ] {
            let error = asked(&[(TARGET_HEADER, bad.as_bytes())]).unwrap_err();
            assert!(
                matches!(&error, DialError::NotAnAddress(shown) if shown.len() <= 64),
                "{bad:?}: {error}"
            );
            assert_eq!(error.label(), "protocol");
        }
        assert!(matches!(asked(&[]), Err(DialError::NotAnAddress(shown)) if shown.is_empty()));
    }

    proptest! {
        #[test]
        fn no_deadline_is_longer_than_the_longest(value in "[0-9]{0,9}[HMSmunx]?") {
            let headers = [(TARGET_HEADER, &b"10.0.0.1:80"[..]), ("grpc-timeout", value.as_bytes())];
            let expected = parse_timeout(value.as_bytes()).unwrap_or(DEFAULT_DEADLINE).min(LONGEST_DEADLINE);
            prop_assert_eq!(asked(&headers).unwrap().deadline, expected);
            prop_assert!(expected <= LONGEST_DEADLINE);
        }

        #[test]
        fn any_header_is_a_target_or_an_error(value in "[ -~]{0,80}") {
            let request = asked(&[(TARGET_HEADER, value.as_bytes())]);
            prop_assert_eq!(request.ok().map(|request| request.target), value.parse().ok());
        }
    }

    #[tokio::test]
    async fn the_own_admin_port_is_dialled_from_an_address_that_tells() {
        use tokio::net::TcpListener;

        let (admin, other) = (
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
        );
        let own = format!("--admin-address={}", admin.local_addr().unwrap());
        let dialler = Dialler::new(&of_flags(&["--server=a:1", "--allow-target=127.0.0.0/8:*", &own]));
        let source = async |listener: &TcpListener, host: &str| {
            let target = format!("{host}:{}", listener.local_addr().unwrap().port()).parse().unwrap();
            let request = DialRequest::within(DEFAULT_DEADLINE, target);
            let Socket::Kernel(dialled) = dialler.dial(request, &BTreeSet::new()).await.unwrap().socket
            else {
                panic!("there is no other network");
            };
            let (_, source) = listener.accept().await.unwrap();
            assert_eq!(source, dialled.local_addr().unwrap());
            source.ip()
        };
        assert_eq!(source(&admin, "127.0.0.1").await, TUNNELLED);
        assert_eq!(source(&admin, "[::ffff:127.0.0.1]").await, TUNNELLED);
        assert_ne!(source(&other, "127.0.0.1").await, TUNNELLED);
    }

    #[test]
    fn timeouts_follow_grpcs_format() {
        assert_eq!(parse_timeout(b"5000m"), Some(Duration::from_secs(5)));
        assert_eq!(parse_timeout(b"1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parse_timeout(b"99999999n"), Some(Duration::from_nanos(99_999_999)));
        for bad in [&b""[..], b"m", b"5", b"-5S", b"123456789S", b"5x", "5µ".as_bytes()] {
            assert_eq!(parse_timeout(bad), None, "{bad:?}");
        }
    }
}

//! Congestion control of links.

use std::fmt;
use std::io;
use std::str::FromStr;

use socket2::{Domain, SockRef, Socket, Type};
use tunnel_runtime::net::refine;

use super::wire::Wire;

/// Follows the measured rate and delay, so that a loss on a radio link does not halve the rate.
const PREFERRED: &str = "bbr";
/// The kernel's TCP_CA_NAME_MAX, minus the terminating byte.
const LONGEST: usize = 15;

/// Congestion control of the links' sockets. Each end chooses for the data that it sends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// BBR if this host has it and permits it, otherwise the system's default.
    #[default]
    Auto,
    /// The system's default.
    System,
    /// An algorithm, by its name in the kernel.
    Named(String),
}

impl Congestion {
    /// Parses a flag's value.
    ///
    /// # Errors
    /// Fails if it is not a name, or if the algorithm is not available on this host.
    pub fn parse(value: &str) -> Result<Self, String> {
        let congestion: Self = value.parse()?;
        congestion.check()?;
        Ok(congestion)
    }

    /// Sets it on a socket. A named algorithm was available when this program started.
    pub fn set(&self, wire: &Wire) {
        if let Some(socket) = wire.socket() {
            refine("TCP_CONGESTION", self.set_on(&SockRef::from(socket)));
        }
    }

    fn set_on(&self, socket: &Socket) -> io::Result<()> {
        match self {
            // If BBR is not available, the system's default stays.
            Self::Auto => socket.set_tcp_congestion(PREFERRED.as_bytes()).or(Ok(())),
            Self::System => Ok(()),
            Self::Named(name) => socket.set_tcp_congestion(name.as_bytes()),
        }
    }

    /// True if this end sends with BBR.
    pub fn is_bbr(&self) -> bool {
        let name = self.tried().and_then(|socket| socket.tcp_congestion());
        name.is_ok_and(|name| name.starts_with(PREFERRED.as_bytes()))
    }

    /// Returns a new socket with this congestion control.
    fn tried(&self) -> io::Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        self.set_on(&socket)?;
        Ok(socket)
    }

    /// Checks that this process may use it. The error lists the permitted ones.
    fn check(&self) -> Result<(), String> {
        self.tried().map(drop).map_err(|error| {
            let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
            let allowed = allowed.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(", ");
            let reason = match error.kind() {
                io::ErrorKind::NotFound => "the kernel does not know it".to_owned(),
                _ => error.to_string(),
            };
            format!(
                "{reason}; permitted here: {allowed} (more by `modprobe tcp_{self}` and \
                 net.ipv4.tcp_allowed_congestion_control, which is the host's)"
            )
        })
    }
}

impl FromStr for Congestion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte);
        match text {
            "auto" => Ok(Self::Auto),
            "system" => Ok(Self::System),
            _ if (1..=LONGEST).contains(&text.len()) && text.bytes().all(is_name) => {
                Ok(Self::Named(text.to_owned()))
            }
            _ => {
                Err("not auto, system, or the kernel's name of an algorithm, such as bbr or cubic".to_owned())
            }
        }
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::System => "system",
            Self::Named(name) => name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        for text in ["auto", "system", "bbr", "cubic", "nv"] {
            assert_eq!(text.parse::<Congestion>().unwrap().to_string(), text);
        }
        for text in ["", "BBR", "a name", "name-of-16-bytes"] {
            assert!(text.parse::<Congestion>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_missing_algorithm_is_an_error_only_when_it_is_asked_for() {
        assert_eq!(Congestion::Auto.check(), Ok(()));
        assert_eq!(Congestion::System.check(), Ok(()));
        // Every kernel has it, and permits it.
        assert_eq!(Congestion::Named("reno".to_owned()).check(), Ok(()));
        let error = Congestion::Named("no-such".to_owned()).check().unwrap_err();
        assert!(error.contains("permitted here: ") && error.contains("reno"), "{error}");
    }

    #[test]
    fn only_bbr_is_bbr() {
        assert!(!Congestion::Named("reno".to_owned()).is_bbr());
        assert!(!Congestion::Named("no-such".to_owned()).is_bbr());
        let has_bbr = Congestion::Named(PREFERRED.to_owned()).check().is_ok();
        assert_eq!(Congestion::Auto.is_bbr(), has_bbr);
    }

    #[tokio::test]
    async fn a_socket_has_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let wire = Wire::from(socket);
        Congestion::Named("reno".to_owned()).set(&wire);
        let name = SockRef::from(wire.socket().unwrap()).tcp_congestion().unwrap();
        assert!(name.starts_with(b"reno"), "{name:?}");
    }
}

//! Claims the redirect ranges of a network namespace.
//!
//! Two installations with the same ranges would misroute each other's connects: a program of one rewrites to a virtual
//! address that the listener of the other takes for its own. So a process that redirects listens on an abstract Unix
//! socket named after its ranges. Everybody in the network namespace can list such names without privileges, and the
//! kernel removes them when the process ends for any reason. Servers with the same state directory replace each other
//! and share their ranges.
//!
//! Any process may listen on such a name. If the kernel reports a listener without the privileges to redirect, it is
//! not a server and its name is ignored.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, UnixCredentials, connect, getsockopt, socket, sockopt,
};

use tunnel_runtime::log_once::LogRarely;

use super::config::RedirectConfig;
use super::error::RedirectError;
use super::preflight::may_redirect;

/// Maximum number of attempts at ranges that are taken. Two servers that start together may see each other and both
/// back off.
const ATTEMPTS: u32 = 5;
/// Maximum pause between attempts, in milliseconds; the minimum is a tenth of it.
const PAUSE: u64 = 200;
/// Maximum wait for processes whose backlog is full. A server empties its own each second.
const ANSWER: Duration = Duration::from_millis(2500);
/// Any process can pose as a server, and a server without its ranges looks each second.
static IMPOSTORS: LazyLock<LogRarely> = LazyLock::new(LogRarely::default);
/// Prefix of the names. A name has room for 107 bytes.
const PREFIX: &str = "postern";

/// Holds the ranges until released or dropped.
#[derive(Debug)]
pub(super) struct Claim {
    name: Name,
    socket: Option<UnixListener>,
}

/// A socket name, `postern,RANGE,RANGE-V6,STATE-DIRECTORY,NUMBER`; the second range is `-` without IPv6.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    v4: Ipv4Net,
    v6: Option<Ipv6Net>,
    /// Device and inode of the state directory.
    state: String,
    /// Random, as several processes may have the same ranges.
    number: String,
}

impl Claim {
    /// Claims the ranges.
    ///
    /// # Errors
    /// [`RedirectError::RangeTaken`]: a process with another state directory has claimed one that overlaps.
    pub(super) fn take(config: &RedirectConfig, ipv6: bool) -> Result<Self, RedirectError> {
        let mut attempt = 1;
        loop {
            let claim = Self::hold(Name::new(config, ipv6)?)?;
            // Checked after its own socket exists, so that of two servers at least one sees the other.
            let Some(taken) = claim.taken()? else { return Ok(claim) };
            if attempt == ATTEMPTS {
                return Err(taken);
            }
            drop(claim);
            attempt += 1;
            thread::sleep(Duration::from_millis(rand::random_range(PAUSE / 10..PAUSE)));
        }
    }

    /// Claims the ranges again after a release, in one attempt; does nothing if this process has them.
    ///
    /// # Errors
    /// As [`Claim::take`].
    pub(super) fn retake(&mut self) -> Result<(), RedirectError> {
        if self.is_held() {
            return Ok(());
        }
        let claim = Self::hold(self.name.clone())?;
        if let Some(taken) = claim.taken()? {
            return Err(taken);
        }
        *self = claim;
        Ok(())
    }

    pub(super) fn is_held(&self) -> bool {
        self.socket.is_some()
    }

    fn hold(name: Name) -> Result<Self, RedirectError> {
        let address = SocketAddr::from_abstract_name(name.to_string());
        let socket = address.and_then(|address| UnixListener::bind_addr(&address));
        let socket = socket.and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
        let socket = socket
            .map_err(|source| RedirectError::Io { what: format!("cannot listen at @{name}"), source })?;
        Ok(Self { name, socket: Some(socket) })
    }

    fn taken(&self) -> Result<Option<RedirectError>, RedirectError> {
        conflict_of(&self.name, |other| other.state != self.name.state, ANSWER)
    }

    /// Reports whether another process with the same state directory has the ranges too. Also valid after a release.
    /// Waits for none: it is asked on threads that relay.
    pub(super) fn is_shared(&self) -> Result<bool, RedirectError> {
        let same = |other: &Name| other.state == self.name.state && other.number != self.name.number;
        Ok(conflict_of(&self.name, same, Duration::ZERO)?.is_some())
    }

    pub(super) fn release(&mut self) {
        self.socket = None;
    }

    /// Frees the backlog for further processes that connect to identify this one; the kernel completes their connects
    /// itself.
    pub(super) fn answer(&self) {
        while self.socket.as_ref().is_some_and(|socket| socket.accept().is_ok()) {}
    }
}

/// The process with an overlapping range, as an error.
pub(super) fn holder(config: &RedirectConfig, ipv6: bool) -> Result<Option<RedirectError>, RedirectError> {
    conflict_of(&Name::new(config, ipv6)?, |_| true, ANSWER)
}

/// The conflict with a server among `others` that has an overlapping range. A process whose backlog stays full for
/// `patience` is ignored.
fn conflict_of(
    own: &Name,
    others: impl Fn(&Name) -> bool,
    patience: Duration,
) -> Result<Option<RedirectError>, RedirectError> {
    let began = Instant::now();
    let mut asked: Vec<Name> = names()?;
    asked.retain(|other| others(other) && own.overlap(other).is_some());
    loop {
        let mut full = Vec::new();
        for other in asked {
            match (listener_at(&other), own.overlap(&other)) {
                (Err(Errno::EAGAIN), _) => full.push(other),
                (Ok(listener), Some((key, own, range))) => {
                    if let Some(holder) = server(listener, &other) {
                        return Ok(Some(RedirectError::RangeTaken { key, own, range, holder }));
                    }
                }
                // It is gone.
                (Err(_), _) | (Ok(_), None) => {}
            }
        }
        let Some(silent) = full.first() else { return Ok(None) };
        if began.elapsed() >= patience {
            if IMPOSTORS.due(Instant::now()).is_some() {
                tracing::warn!(path = %silent, "ignoring a process that poses as a server but accepts nothing");
            }
            return Ok(None);
        }
        asked = full;
        thread::sleep(ANSWER / 50);
    }
}

/// Describes the process that listens on the name, if it may be a server.
fn server(listener: UnixCredentials, name: &Name) -> Option<String> {
    let (pid, uid) = (listener.pid(), listener.uid());
    if !may_redirect(pid, uid) {
        if IMPOSTORS.due(Instant::now()).is_some() {
            tracing::warn!(pid, uid, path = %name, "ignoring an unprivileged process that poses as a server");
        }
        return None;
    }
    // pid 0: the process is in a PID namespace that is not visible here.
    if pid == 0 {
        return Some("a process of another PID namespace, as in a pod".to_owned());
    }
    let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("{}, pid {pid}", program.trim()))
}

/// Credentials of the process that listens on the name; [`Errno::EAGAIN`] if its backlog is full.
fn listener_at(name: &Name) -> nix::Result<UnixCredentials> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let asking = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(asking.as_raw_fd(), &UnixAddr::new_abstract(name.to_string().as_bytes())?)?;
    getsockopt(&asking, sockopt::PeerCredentials)
}

impl Name {
    fn new(config: &RedirectConfig, ipv6: bool) -> Result<Self, RedirectError> {
        let state = match &config.state_dir {
            None => "-".to_owned(),
            Some(dir) => {
                let found = fs::metadata(dir).map_err(|source| RedirectError::Io {
                    what: format!("cannot read --state-dir={}", dir.display()),
                    source,
                })?;
                // The kernel's device numbers have 32 bits.
                format!("{:x}-{:x}", found.dev() & u64::from(u32::MAX), found.ino())
            }
        };
        Ok(Self {
            v4: config.redirect_range.trunc(),
            v6: ipv6.then(|| config.redirect_range_v6.trunc()),
            state,
            number: format!("{:08x}", rand::random::<u32>()),
        })
    }

    fn parse(name: &str) -> Option<Self> {
        let mut fields = name.strip_prefix(PREFIX)?.strip_prefix(',')?.split(',');
        let mut next = || fields.next();
        let (v4, v6, state, number) = (next()?, next()?, next()?, next()?);
        let v6 = if v6 == "-" { None } else { Some(v6.parse().ok()?) };
        Some(Self { v4: v4.parse().ok()?, v6, state: state.to_owned(), number: number.to_owned() })
    }

    /// The first ranges that overlap: their flag, its own range and the other's.
    fn overlap(&self, other: &Self) -> Option<(&'static str, IpNet, IpNet)> {
        let taken = |key, own: IpNet, range: IpNet| {
            (own.contains(&range) || range.contains(&own)).then_some((key, own, range))
        };
        let v6 = || {
            self.v6
                .zip(other.v6)
                .and_then(|(own, other)| taken("--redirect-range-v6", own.into(), other.into()))
        };
        taken("--redirect-range", self.v4.into(), other.v4.into()).or_else(v6)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { v4, v6, state, number } = self;
        let v6 = v6.map_or_else(|| "-".to_owned(), |v6| v6.to_string());
        write!(f, "{PREFIX},{v4},{v6},{state},{number}")
    }
}

/// Names in this network namespace.
fn names() -> Result<Vec<Name>, RedirectError> {
    let path = "/proc/thread-self/net/unix";
    // Other programs' socket names may not be UTF-8.
    let read = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let text =
        read.map_err(|source: io::Error| RedirectError::Io { what: format!("cannot read {path}"), source })?;
    Ok(listed(&text))
}

/// Parses the names at the line ends; abstract ones are shown with a leading `@`. Connections to a listener that it has
/// not accepted yet have its name too, without the flag of one that listens.
fn listed(text: &str) -> Vec<Name> {
    const LISTENS: &str = "00010000";
    let listeners = text.lines().filter(|line| line.split(' ').nth(3) == Some(LISTENS));
    listeners.filter_map(|line| Name::parse(line.rsplit(' ').next()?.strip_prefix('@')?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(v4: &str, v6: Option<&str>, state: &str) -> Name {
        let v6 = v6.map(|v6| v6.parse().unwrap());
        Name { v4: v4.parse().unwrap(), v6, state: state.into(), number: "0".into() }
    }

    fn key(one: &Name, other: &Name) -> Option<&'static str> {
        one.overlap(other).map(|(key, ..)| key)
    }

    #[test]
    fn ranges_that_overlap_are_refused_in_either_family() {
        let v6 = Some("fd9e:706f:7374:6572::/64");
        let all = name("198.18.0.0/15", v6, "1-2");
        assert_eq!(key(&all, &name("198.18.0.0/15", None, "1-3")), Some("--redirect-range"));
        assert_eq!(key(&name("198.19.0.0/16", None, "1-3"), &all), Some("--redirect-range"));
        assert_eq!(key(&all, &name("198.19.0.0/24", None, "1-3")), Some("--redirect-range"));
        assert_eq!(key(&all, &name("10.0.0.0/24", v6, "1-3")), Some("--redirect-range-v6"));
        assert_eq!(key(&all, &name("10.0.0.0/24", None, "1-3")), None);
        assert_eq!(key(&all, &name("10.0.0.0/24", Some("fd9e::/64"), "1-3")), None);
    }

    #[test]
    fn only_privileged_processes_are_servers() {
        let named = name("198.18.0.0/15", None, "1-2");
        let found = |pid, uid| server(nix::libc::ucred { pid, uid, gid: uid }.into(), &named);
        assert_eq!(found(i32::MAX, 65534), None);
        assert_eq!(found(0, 65534), None);
        assert!(found(0, 0).is_some_and(|holder| holder.contains("PID namespace")));
        assert!(found(i32::MAX, 0).is_some());
    }

    #[test]
    fn the_names_are_found_among_those_of_other_programs() {
        let long = name(
            "255.255.255.0/24",
            Some("ffff:ffff:ffff:ffff:ffff:ffff:ffff:0/112"),
            "ffffffff-ffffffffffffffff",
        );
        let long = Name { number: "ffffffff".into(), ..long };
        assert!(long.to_string().len() <= 107, "{long}");
        let without = name("10.0.0.0/24", None, "-");
        let text = format!(
            "Num       RefCount Protocol Flags    Type St Inode Path\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 21 /run/postern,x\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 22 @postern,none,-,1,2\n\
             0000000000000000: 00000002 00000000 00000000 0002 01 23\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 24 @{long}\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 25 @{without}\n\
             0000000000000000: 00000003 00000000 00000000 0001 02 26 @{without}\n"
        );
        assert_eq!(listed(&text), [long, without]);
    }
}

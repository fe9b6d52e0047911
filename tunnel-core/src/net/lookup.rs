//! The addresses of a name, as this host's resolver says.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dns_lookup::{AddrFamily, AddrInfoHints, LookupError, LookupErrorKind, SockType, getaddrinfo};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::address::source_address;

/// How long the second answer may come after the first one, at least. A resolver sends both at once, and waits seconds for one
/// that was dropped on the way.
const GRACE: Duration = Duration::from_millis(250);

/// The addresses of one family, or why there are none.
type Answer = io::Result<Vec<SocketAddr>>;

/// The addresses of a name, or the address that `host` is, with `port`. A and AAAA are asked for apart, because some name servers
/// refuse one kind or never answer it, and musl's getaddrinfo(3) fails for both then. The first is the one to try first.
///
/// # Errors
/// [`io::ErrorKind::NotFound`]: the resolver says that there is none. [`io::ErrorKind::HostUnreachable`]: no name server gives an
/// answer, which is so while the line is out.
pub async fn lookup(host: &str, port: u16) -> Answer {
    lookup_holding(host, port, &()).await
}

/// The same, and keeps `held` until the resolver has answered both: this may return long before that, and two threads wait.
///
/// # Errors
/// As those of [`lookup`].
pub async fn lookup_holding<T: Clone + Send + 'static>(host: &str, port: u16, held: &T) -> Answer {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let begin = Instant::now();
    let mut answers = JoinSet::new();
    for family in [AddrFamily::Inet, AddrFamily::Inet6] {
        let (host, held) = (host.to_owned(), held.clone());
        answers.spawn_blocking(move || {
            let answer = ask(&host, port, family);
            drop(held);
            answer
        });
    }
    let first = next(&mut answers).await;
    let second = match &first {
        Ok(_) => timeout(begin.elapsed().max(GRACE), next(&mut answers)).await.ok(),
        Err(_) => Some(next(&mut answers).await),
    };
    let mut found = join(first, second)?;
    // RFC 6724 section 6, as far as it matters: what this host cannot send to is last, and local addresses of IPv6 before that.
    found.sort_by_key(|address| match address.ip() {
        _ if source_address(*address).is_none() => 3,
        IpAddr::V6(v6) if v6.is_unique_local() => 2,
        IpAddr::V4(_) => 1,
        IpAddr::V6(_) => 0,
    });
    Ok(found)
}

async fn next(answers: &mut JoinSet<Answer>) -> Answer {
    let unasked = || Err(io::Error::other("the name was not looked up"));
    answers.join_next().await.map_or_else(unasked, |ended| ended.map_err(io::Error::other).flatten())
}

/// Of one family. Blocks.
fn ask(host: &str, port: u16, family: AddrFamily) -> Answer {
    let hints = AddrInfoHints {
        address: family.into(),
        socktype: SockType::Stream.into(),
        ..AddrInfoHints::default()
    };
    let listed = getaddrinfo(Some(host), None, Some(hints)).map_err(explained)?;
    listed
        .map(|info| {
            info.map(|info| {
                let mut address = info.sockaddr;
                address.set_port(port);
                address
            })
        })
        .collect()
}

fn explained(error: LookupError) -> io::Error {
    let kind = match error.kind() {
        LookupErrorKind::Again => io::ErrorKind::HostUnreachable,
        // Of this host: no descriptors or no memory.
        LookupErrorKind::System | LookupErrorKind::Memory => return error.into(),
        _ => io::ErrorKind::NotFound,
    };
    io::Error::new(kind, io::Error::from(error))
}

/// What was found, by whichever answer. Of two errors a "no" counts more than silence: a name server has answered. `second` is
/// None if it was not waited for.
fn join(first: Answer, second: Option<Answer>) -> Answer {
    match (first, second) {
        (Ok(first), Some(Ok(second))) => Ok([first, second].concat()),
        (Ok(found), _) | (Err(_), Some(Ok(found))) => Ok(found),
        (Err(_), Some(Err(no))) if no.kind() == io::ErrorKind::NotFound => Err(no),
        (Err(error), _) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_answer_has_counts_whatever_the_other_one_is() {
        use io::ErrorKind::{HostUnreachable, NotFound, OutOfMemory};
        let found = |address: &str| Ok(vec![address.parse().unwrap()]);
        let failed = |kind: io::ErrorKind| Err(kind.into());
        let (v4, v6) = (|| found("10.70.0.1:1"), || found("[fd70::1]:1"));
        let joined = |first, second| join(first, second).map(|found| found.len()).map_err(|e| e.kind());
        for kind in [HostUnreachable, NotFound, OutOfMemory] {
            assert_eq!(joined(v4(), Some(failed(kind))), Ok(1));
            assert_eq!(joined(failed(kind), Some(v6())), Ok(1));
            assert_eq!(joined(failed(kind), Some(failed(kind))), Err(kind));
        }
        assert_eq!(joined(v4(), Some(v6())), Ok(2));
        assert_eq!(joined(v6(), None), Ok(1));
        assert_eq!(joined(failed(HostUnreachable), Some(failed(NotFound))), Err(NotFound));
        assert_eq!(joined(failed(NotFound), Some(failed(HostUnreachable))), Err(NotFound));
    }

    #[tokio::test]
    async fn addresses_and_this_hosts_names_are_found_and_others_are_not() {
        for (host, expected) in [("192.0.2.1", "192.0.2.1:7"), ("2001:db8::1", "[2001:db8::1]:7")] {
            assert_eq!(lookup(host, 7).await.unwrap(), [expected.parse().unwrap()]);
        }
        let local = lookup("localhost", 7).await.unwrap();
        assert!(local.contains(&"127.0.0.1:7".parse().unwrap()), "{local:?}");
        // Too long for any resolver to ask another one.
        let error = lookup(&"a".repeat(300), 7).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
        // No name in C.
        assert!(lookup("a\0b", 7).await.is_err());
    }
}

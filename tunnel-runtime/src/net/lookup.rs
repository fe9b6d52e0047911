//! Looks up the addresses of a name with this host's resolver.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dns_lookup::{AddrFamily, AddrInfoHints, LookupError, LookupErrorKind, SockType, getaddrinfo};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::address::source_address;

/// Minimum time to wait for the second answer after the first one. A resolver sends both queries at once, and waits
/// seconds for an answer that was dropped on the way.
const GRACE: Duration = Duration::from_millis(250);

/// Addresses, or the reason for having none.
type LookupResult = io::Result<Vec<SocketAddr>>;

/// Returns the addresses of a name, or `host` itself if it is an address, with `port`. A and AAAA are queried
/// separately, because some name servers refuse one kind or never answer it, and then musl's getaddrinfo(3) fails for
/// both. Try the first address first.
///
/// # Errors
/// [`io::ErrorKind::NotFound`]: the resolver says that there is no address. [`io::ErrorKind::HostUnreachable`]: no
/// name server answers, as while the line is down.
pub async fn lookup(host: &str, port: u16) -> LookupResult {
    lookup_holding(host, port, &()).await
}

/// Like [`lookup`], and keeps `held` until the resolver has answered both queries. This function may return long
/// before that, while two threads wait.
///
/// # Errors
/// Same as [`lookup`].
pub async fn lookup_holding<T: Clone + Send + 'static>(host: &str, port: u16, held: &T) -> LookupResult {
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
    // RFC 6724 section 6, as far as it matters: addresses that this host cannot send to come last, and unique local
    // IPv6 addresses before those.
    found.sort_by_key(|address| match address.ip() {
        _ if source_address(*address).is_none() => 3,
        IpAddr::V6(v6) if v6.is_unique_local() => 2,
        IpAddr::V4(_) => 1,
        IpAddr::V6(_) => 0,
    });
    Ok(found)
}

async fn next(answers: &mut JoinSet<LookupResult>) -> LookupResult {
    let unasked = || Err(io::Error::other("the name was not looked up"));
    answers.join_next().await.map_or_else(unasked, |ended| ended.map_err(io::Error::other).flatten())
}

/// Queries addresses of one family. Blocks.
fn ask(host: &str, port: u16, family: AddrFamily) -> LookupResult {
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
        // Errors of this host: no file descriptors or no memory.
        LookupErrorKind::System | LookupErrorKind::Memory => return error.into(),
        _ => io::ErrorKind::NotFound,
    };
    io::Error::new(kind, io::Error::from(error))
}

/// Joins the addresses of both answers. Of two errors, NotFound is preferred to silence, because a name server has
/// answered. `second` is `None` if it was not waited for.
fn join(first: LookupResult, second: Option<LookupResult>) -> LookupResult {
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
        // Too long for any resolver to send a query.
        let error = lookup(&"a".repeat(300), 7).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
        // Not a valid C string.
        assert!(lookup("a\0b", 7).await.is_err());
    }
}

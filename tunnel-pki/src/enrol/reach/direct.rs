//! Direct TCP connections. Resolves the name each time and tries all its addresses (RFC 8305).

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::net::lookup;

use super::server::Server;

/// Delay before the next address is tried, beside those that have not answered.
const NEXT_ADDRESS: Duration = Duration::from_millis(250);
/// Delay before all addresses are tried once more. The kernel retransmits SYNs ever more rarely: after an outage it
/// would do so seconds late.
const NEXT_ROUND: Duration = Duration::from_millis(1500);

/// Connects to the first address that answers. Never gives up while one may still answer: the caller sets a limit.
///
/// # Errors
/// The name does not resolve, as [`lookup`] says, or every address fails: with a refusal if any of them refuses. This host may
/// have no route to the others.
pub(super) async fn connect(server: &Server) -> io::Result<TcpStream> {
    connect_by(server, TcpStream::connect::<SocketAddr>).await
}

/// The same by another way to connect to one address.
pub(super) async fn connect_by<T, F>(server: &Server, connect: impl Fn(SocketAddr) -> F) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let name = match server {
        Server::At(address) => return first_to_answer(&[*address], connect).await,
        Server::Named(name) => name,
    };
    let invalid = |reason| io::Error::new(io::ErrorKind::InvalidInput, format!("{name}: {reason}"));
    let HostPort { host, port } = name.parse().map_err(invalid)?;
    first_to_answer(&interleaved(lookup(&host, port).await?), connect).await
}

async fn first_to_answer<T, F>(addresses: &[SocketAddr], connect: impl Fn(SocketAddr) -> F) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "no address for this name"));
    }
    let mut attempts = JoinSet::new();
    let mut next = addresses.iter();
    let mut pause = Duration::ZERO;
    let mut told: Option<io::Error> = None;
    loop {
        tokio::select! {
            biased;
            Some(ended) = attempts.join_next() => match ended.map_err(io::Error::other).flatten() {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    // A refusal says that the network is up, whatever this host has no route to.
                    let error = told.take().filter(is_refusal).unwrap_or(error);
                    if attempts.is_empty() && next.len() == 0 {
                        return Err(error);
                    }
                    told = Some(error);
                    // Try the next address at once.
                    if next.len() > 0 {
                        pause = Duration::ZERO;
                    }
                }
            },
            () = tokio::time::sleep(pause) => {
                if next.len() == 0 {
                    next = addresses.iter();
                }
                if let Some(address) = next.next() {
                    attempts.spawn(connect(*address));
                }
                pause = if next.len() == 0 { NEXT_ROUND } else { NEXT_ADDRESS };
            }
        }
    }
}

fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// Alternates the two address families. Otherwise keeps the resolver's order, which knows what works best here.
fn interleaved(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(first) = addresses.first() else { return addresses };
    let ipv6 = first.is_ipv6();
    let (one, other): (Vec<_>, Vec<_>) =
        addresses.iter().copied().partition(|address| address.is_ipv6() == ipv6);
    let mut other = other.into_iter();
    let mut mixed: Vec<_> =
        one.into_iter().flat_map(|address| std::iter::once(address).chain(other.next())).collect();
    mixed.extend(other);
    mixed
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};
    use tokio::time::timeout;

    use super::*;

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn families_take_turns() {
        let (a, b, c, x, y) = ("[fd00::1]:1", "[fd00::2]:1", "[fd00::3]:1", "10.0.0.1:1", "10.0.0.2:1");
        let mixed = |list: &[&str]| interleaved(addresses(list));
        assert_eq!(mixed(&[a, b, c, x]), addresses(&[a, x, b, c]));
        assert_eq!(mixed(&[x, y, a]), addresses(&[x, a, y]));
        assert_eq!(mixed(&[x, a, b, c]), addresses(&[x, a, b, c]));
        assert_eq!(mixed(&[]), addresses(&[]));
    }

    #[tokio::test]
    async fn a_refusal_ends_it_and_a_listener_is_reached() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let named = Server::Named(address.to_string());
        for server in [&named, &Server::At(address)] {
            let stream = connect(server).await.unwrap();
            assert_eq!(stream.peer_addr().unwrap(), address);
        }
        drop(listener);
        let error = connect(&named).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    fn bound() -> (TcpSocket, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    /// A listener whose queue is full, so the kernel drops further SYNs.
    async fn without_an_answer() -> (TcpListener, Vec<TcpStream>) {
        let (socket, address) = bound();
        let listener = socket.listen(1).unwrap();
        let mut queued = Vec::new();
        while let Ok(stream) = timeout(Duration::from_millis(500), TcpStream::connect(address)).await {
            queued.push(stream.unwrap());
        }
        (listener, queued)
    }

    #[tokio::test]
    async fn addresses_that_do_not_answer_or_refuse_are_passed_by() {
        let (listener, _queued) = without_an_answer().await;
        let silent = listener.local_addr().unwrap();
        // Bound, but not listening.
        let (_socket, refuses) = bound();
        let answers = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let answering = answers.local_addr().unwrap();
        for others in [&[silent][..], &[refuses], &[silent, refuses], &[refuses, silent, silent]] {
            let all = [others, &[answering]].concat();
            let connected =
                timeout(Duration::from_secs(20), first_to_answer(&all, TcpStream::connect::<SocketAddr>))
                    .await;
            let stream = connected.unwrap_or_else(|_| panic!("not connected with {all:?}")).unwrap();
            assert_eq!(stream.peer_addr().unwrap(), answering, "{all:?}");
        }
        let error = first_to_answer(&[refuses, refuses], TcpStream::connect::<SocketAddr>).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        // Whichever fails last, as on a host without IPv6.
        let refuses_or_has_no_route = |address: SocketAddr| async move {
            let kind = match address.port() {
                1 => io::ErrorKind::ConnectionRefused,
                _ => io::ErrorKind::NetworkUnreachable,
            };
            Err::<TcpStream, _>(io::Error::from(kind))
        };
        for order in [["10.0.0.1:1", "[fd00::1]:2"], ["[fd00::1]:2", "10.0.0.1:1"]] {
            let error = first_to_answer(&addresses(&order), refuses_or_has_no_route).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{order:?}");
        }
        // One refusal is not the end while another address may still answer.
        let ended = timeout(
            Duration::from_secs(1),
            first_to_answer(&[silent, refuses], TcpStream::connect::<SocketAddr>),
        )
        .await;
        assert!(ended.is_err(), "{ended:?}");
    }
}

//! Static maps: each listener leads to one target on one node, for the clients that it permits.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tunnel_link::relay::{self, prepare_socket};
use tunnel_routing::{Resolved, Router};
use tunnel_runtime::accept::Gate;
use tunnel_runtime::config::BindError;
use tunnel_runtime::net::refine;
use tunnel_runtime::takeover::Copies;

use super::context::{ListenerContext, OpenError, OpenRequest};
use super::serve::{Client, Listener, Opened};
use crate::admission::Shares;
use crate::maps::{Map, Target, check, overlap};
use crate::metrics::{Judgement, Permit};

/// The name of all maps' listeners in logs and metrics.
pub(crate) const MAP: &str = "map";

struct Mapped {
    map: Arc<ArcSwap<Map>>,
    in_effect: Arc<ArcSwap<Vec<Map>>>,
}

/// A client that a map has led to its target.
struct Led {
    map: Arc<Map>,
    client: IpAddr,
    in_effect: Arc<ArcSwap<Vec<Map>>>,
}

#[tonic::async_trait]
impl Permit for Led {
    async fn judge(&self) -> Judgement {
        let Map { node, target, .. } = &*self.map;
        let leads = |map: &Map| map.node == *node && map.target == *target && map.permits(self.client);
        if self.in_effect.load().iter().any(leads) {
            return Judgement::Holds;
        }
        let client = self.client.to_canonical();
        Judgement::Withdrawn(format!("no map leads {client} to {target} of {node} any more"))
    }
}

impl Listener for Mapped {
    const READS: bool = false;

    fn name(&self) -> &'static str {
        MAP
    }

    async fn open(
        &self,
        _: &mut TcpStream,
        client: &mut Client,
        router: &Router,
    ) -> Result<Opened, OpenError> {
        let map = self.map.load_full();
        let client = client.address.ip();
        if !map.permits(client) {
            return Err(OpenError::Client(format!("{} is not for {}", map.listen, client.to_canonical())));
        }
        let request = request(&map, router).map_err(OpenError::Client)?;
        let permit = Arc::new(Led { map, client, in_effect: self.in_effect.clone() });
        Ok(Opened::Relayed(request, Some(permit)))
    }
}

/// Resolves the node of a map.
///
/// # Errors
/// The map leads nowhere at present.
pub(super) fn request(map: &Map, router: &Router) -> Result<OpenRequest, String> {
    match (map.target, router.resolve(map.node.as_str())) {
        // A node without an address can have a tunnel too.
        (
            Target::Address(target),
            Resolved::WithoutAddress(_) | Resolved::Service { .. } | Resolved::Unknown(_),
        ) => Ok(OpenRequest::new(map.node.clone(), target)),
        (target, resolved) => {
            let found = resolved.on_edge().map_err(|_| {
                let (listen, node) = (map.listen, &map.node);
                format!("{listen} leads to {node}, which is no edge node with an address")
            })?;
            Ok(match target {
                Target::Address(target) => OpenRequest::new(found.node, target),
                Target::Port(port) => OpenRequest::to_port(found, port, router),
            })
        }
    }
}

/// A map whose listener is open.
struct Open {
    map: Arc<ArcSwap<Map>>,
    /// Ends the accepting.
    closed: CancellationToken,
}

/// The maps in effect.
pub(crate) struct Maps {
    /// Maps from flags.
    fixed: Vec<Map>,
    /// Those of flags and file, also while this server opens none.
    in_effect: Arc<ArcSwap<Vec<Map>>>,
    open: Mutex<HashMap<SocketAddr, Open>>,
    gate: Gate,
    context: ListenerContext,
    shares: Shares,
    /// The listeners, for a successor.
    sockets: Arc<Copies>,
}

impl Maps {
    pub(crate) fn new(
        fixed: Vec<Map>,
        gate: Gate,
        context: ListenerContext,
        shares: Shares,
        sockets: Arc<Copies>,
    ) -> Self {
        Self { fixed, in_effect: Arc::default(), open: Mutex::default(), gate, context, shares, sockets }
    }

    /// Serves maps whose listeners are bound; a successor can get them already.
    pub(crate) fn start(&self, bound: impl IntoIterator<Item = (Map, TcpListener)>) {
        let (maps, listeners): (Vec<_>, Vec<_>) = bound.into_iter().unzip();
        self.in_effect.store(Arc::new(maps.clone()));
        for (map, listener) in maps.into_iter().zip(listeners) {
            self.serve(map, listener);
        }
    }

    /// Replaces the maps from the file. Connections through a map that is gone, or leads elsewhere, end when they are
    /// judged again.
    ///
    /// # Errors
    /// One map cannot be listened on; the error names it, its address and the reason. Nothing has changed then, except
    /// on a server that has handed its listeners over, or drains: it opens none, and applies the rest.
    pub(crate) async fn replace(&self, of_file: Vec<Map>) -> Result<(), String> {
        let wanted = [self.fixed.as_slice(), &of_file].concat();
        check(&wanted)?;
        let known: Vec<SocketAddr> = self.open.lock().keys().copied().collect();
        let (stays, gone): (Vec<_>, Vec<_>) =
            known.into_iter().partition(|listen| wanted.iter().any(|map| map.listen == *listen));
        let takes_a_place = |map: &Map| gone.iter().any(|old| overlap(*old, map.listen));
        // Maps from flags are open from the start.
        let new = of_file.iter().enumerate().filter(|(_, map)| !stays.contains(&map.listen));
        // A listener that replaces another one gets connections as soon as it is bound, so these come last, when
        // nothing else can fail.
        let (last, first): (Vec<_>, Vec<_>) = new.partition(|(_, map)| takes_a_place(map));
        let mut new: Vec<_> = first.into_iter().chain(last).collect();
        // Nothing would be accepted there, or not for long, and another server of this host could not listen there.
        let passing = self.sockets.are_sent() || !self.gate.is_open();
        let accepts = !passing && !self.context.drain.shutdown().is_draining();
        let left_out = new.first().filter(|_| !accepts).map(|(index, map)| {
            let listen = map.listen;
            format!("maps[{index}].listen: not listening on {listen}: this server stops, or another of this host serves")
        });
        if left_out.is_some() {
            new.clear();
        }
        let mut bound = Vec::new();
        for (index, map) in new {
            let (listener, copy) = self
                .bind(map.listen, &gone)
                .await
                .map_err(|error| format!("maps[{index}].{}", BindError::new("listen", map.listen, error)))?;
            bound.push((map.clone(), listener, copy));
        }
        self.in_effect.store(Arc::new(wanted.clone()));
        let mut open = self.open.lock();
        for listen in gone {
            if let Some(map) = open.remove(&listen) {
                map.closed.cancel();
                self.sockets.remove(MAP, listen);
            }
        }
        for map in wanted {
            if let Some(open) = open.get(&map.listen) {
                open.map.store(Arc::new(map));
            }
        }
        drop(open);
        for (map, listener, copy) in bound {
            self.sockets.add(MAP, map.listen, copy);
            self.serve(map, listener);
        }
        left_out.map_or(Ok(()), Err)
    }

    /// Listens, and returns the listener and a copy for a successor. `gone`: the listeners that close if everything
    /// succeeds.
    async fn bind(&self, listen: SocketAddr, gone: &[SocketAddr]) -> io::Result<(TcpListener, OwnedFd)> {
        let listener = match relay::listen(listen, prepare_socket) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let in_the_way = gone.iter().filter(|old| overlap(**old, listen));
                let in_the_way: Vec<_> = in_the_way.filter_map(|old| self.sockets.get(MAP, *old)).collect();
                if in_the_way.is_empty() { Err(error) } else { bind_beside(listen, &in_the_way) }
            }
            bound => bound,
        }?;
        let copy = listener.as_fd().try_clone_to_owned()?;
        Ok((listener, copy))
    }

    fn serve(&self, map: Map, listener: TcpListener) {
        let (listen, closed) = (map.listen, CancellationToken::new());
        let map = Arc::new(ArcSwap::from_pointee(map));
        let accepting = super::serve(
            Mapped { map: map.clone(), in_effect: self.in_effect.clone() },
            self.gate.guard(listener),
            self.context.clone(),
            self.shares.clone(),
        );
        let until = closed.clone();
        // Accepting ends with the drain, as for every listener.
        self.context.drain.spawn(until.run_until_cancelled_owned(accepting));
        self.open.lock().insert(listen, Open { map, closed });
    }
}

/// Listens while `others`, listeners on overlapping addresses, are still open, so that none has to be closed first. The
/// kernel permits it if all of them set SO_REUSEPORT, which they do only for this moment.
fn bind_beside(listen: SocketAddr, others: &[OwnedFd]) -> io::Result<TcpListener> {
    let agree = |agree| others.iter().try_for_each(|other| SockRef::from(other).set_reuse_port(agree));
    let listener = agree(true).and_then(|()| {
        relay::listen(listen, |socket| {
            prepare_socket(socket);
            refine("SO_REUSEPORT", socket.set_reuseport(true));
        })
    });
    let ended = agree(false);
    let listener = listener?;
    ended?;
    SockRef::from(&listener).set_reuse_port(false)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn map(listen: SocketAddr) -> Map {
        Map {
            listen,
            node: "edge-1".parse().unwrap(),
            target: Target::Port(22),
            clients: vec!["127.0.0.0/8".parse().unwrap()],
        }
    }

    #[tokio::test]
    async fn a_client_is_led_as_long_as_a_map_does_so() {
        let listen = SocketAddr::from(([127, 0, 0, 1], 2222));
        let in_effect = Arc::new(ArcSwap::from_pointee(vec![map(listen)]));
        let (client, known) = ([127, 0, 0, 1].into(), in_effect.clone());
        let led = Led { map: Arc::new(map(listen)), client, in_effect: known };
        assert_eq!(led.judge().await, Judgement::Holds);
        let moved = SocketAddr::from(([0, 0, 0, 0], 2222));
        for (maps, holds) in [
            (vec![map(moved)], true),
            (vec![Map { clients: vec!["10.0.0.0/8".parse().unwrap()], ..map(listen) }], false),
            (vec![Map { node: "edge-2".parse().unwrap(), ..map(listen) }], false),
            (vec![Map { target: Target::Port(23), ..map(listen) }], false),
            (vec![Map { target: Target::Port(23), ..map(listen) }, map(moved)], true),
            (vec![], false),
        ] {
            in_effect.store(Arc::new(maps.clone()));
            let judgement = led.judge().await;
            assert_eq!(judgement == Judgement::Holds, holds, "{maps:?}: {judgement:?}");
        }
        let gone = "no map leads 127.0.0.1 to 22 of edge-1 any more".to_owned();
        assert_eq!(led.judge().await, Judgement::Withdrawn(gone));
    }

    /// True if something listens there. An accepted connection is reset, maybe before connect() has returned.
    async fn listens(at: SocketAddr) -> bool {
        let connected = TcpStream::connect(at).await;
        !connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    }

    async fn closed(at: SocketAddr) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while listens(at).await {
            assert!(Instant::now() < deadline, "something listens on {at}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_listener_moves_to_an_address_that_overlaps_and_back() {
        let first = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let everywhere = first.local_addr().unwrap();
        let [here, elsewhere] = [1u8, 2].map(|host| SocketAddr::from(([127, 0, 0, host], everywhere.port())));
        let copy = first.as_fd().try_clone_to_owned().unwrap();
        let sockets = Arc::new(Copies::new(vec![(MAP.to_owned(), everywhere, copy)]));
        let (gate, context) = (Gate::new(true), ListenerContext::without_nodes());
        let maps = Maps::new(Vec::new(), gate.clone(), context, Shares::new(100), sockets.clone());
        maps.start(vec![(map(everywhere), first)]);

        maps.replace(vec![map(here)]).await.unwrap();
        assert!(listens(here).await);
        assert!(sockets.get(MAP, everywhere).is_none());
        closed(elsewhere).await;

        // A foreign listener is in the way too: nothing changes.
        let foreign = TcpListener::bind(elsewhere).await.unwrap();
        let refused = maps.replace(vec![map(everywhere)]).await.unwrap_err();
        let says = format!("maps[0].listen: cannot listen on {everywhere}: address in use: ");
        assert!(refused.starts_with(&says), "{refused}");
        assert!(listens(here).await);
        let kept = sockets.get(MAP, here).unwrap();
        assert!(!SockRef::from(&kept).reuse_port().unwrap(), "nobody else may listen there");
        drop((foreign, kept));

        maps.replace(vec![map(everywhere)]).await.unwrap();
        assert!(listens(elsewhere).await);
        let kept = sockets.get(MAP, everywhere).unwrap();
        assert!(!SockRef::from(&kept).reuse_port().unwrap());
        assert!(sockets.get(MAP, here).is_none());
    }

    #[tokio::test]
    async fn a_server_that_does_not_accept_opens_no_map() {
        let (gate, context) = (Gate::new(true), ListenerContext::without_nodes());
        let sockets = Arc::new(Copies::new(Vec::new()));
        let maps = Maps::new(Vec::new(), gate.clone(), context.clone(), Shares::new(100), sockets.clone());
        let [kept, removed, new] = [2, 3, 4].map(|host| SocketAddr::from(([127, 0, 0, host], 0)));
        // A port that is free on all three.
        let port = TcpListener::bind(kept).await.unwrap().local_addr().unwrap().port();
        let [kept, removed, new] = [kept, removed, new].map(|at| SocketAddr::new(at.ip(), port));
        maps.replace(vec![map(kept), map(removed)]).await.unwrap();

        let elsewhere = Map { node: "edge-2".parse().unwrap(), ..map(kept) };
        let wanted = vec![elsewhere.clone(), map(new)];
        let refused = async || {
            let refused = maps.replace(wanted.clone()).await.unwrap_err();
            assert!(refused.starts_with(&format!("maps[1].listen: not listening on {new}: ")), "{refused}");
            closed(new).await;
            assert!(sockets.get(MAP, new).is_none() && sockets.get(MAP, removed).is_none());
            let open = maps.open.lock()[&kept].map.load_full();
            assert_eq!(open.node, elsewhere.node, "what is open follows the file");
            let (map, client) = (Arc::new(map(removed)), [127, 0, 0, 1].into());
            let led = Led { map, client, in_effect: maps.in_effect.clone() };
            assert_eq!(led.judge().await, Judgement::Holds, "its map has moved");
        };
        let (successor, mut greeted) = tokio::net::UnixStream::pair().unwrap();
        sockets.greet(&mut greeted, "test", ()).await.unwrap();
        refused().await;
        gate.set(false);
        sockets.taken_back();
        refused().await;
        drop((successor, greeted));
        // The other server did not get that far.
        gate.set(true);
        maps.replace(wanted.clone()).await.unwrap();
        assert!(listens(new).await);

        maps.replace(vec![elsewhere.clone(), map(removed)]).await.unwrap();
        context.drain.shutdown().begin();
        refused().await;
    }
}

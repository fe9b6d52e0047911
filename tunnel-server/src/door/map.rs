//! Static maps: each listener leads to one target on one node, for the clients that it names.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use bytes::Bytes;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tunnel_core::takeover::Copies;

use super::context::{DoorContext, OpenError, OpenRequest};
use super::open::{Door, Opened};
use crate::accept::Gate;
use crate::admission::Shares;
use crate::maps::{Map, Target, check};
use crate::route::Router;

/// The door's name.
pub(crate) const MAP: &str = "map";

struct Mapped(Arc<ArcSwap<Map>>);

impl Door for Mapped {
    const NAME: &'static str = MAP;
    const READS: bool = false;

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<Opened, OpenError> {
        let map = self.0.load_full();
        let client = socket.peer_addr()?.ip();
        if !map.permits(client) {
            return Err(OpenError::Client(format!("{} is not for {}", map.listen, client.to_canonical())));
        }
        let target = match map.target {
            Target::Address(target) => target,
            Target::Port(port) => {
                let node = router.snapshot().by_name(map.node.as_str()).ok_or_else(|| {
                    let (listen, node) = (map.listen, &map.node);
                    OpenError::Client(format!(
                        "{listen} leads to {node}, which is no edge node with an address"
                    ))
                })?;
                router.target(node.address, port)
            }
        };
        Ok(Opened::Carried(OpenRequest::new(map.node.clone(), target, Bytes::new())))
    }
}

/// A map whose listener is open.
struct Open {
    map: Arc<ArcSwap<Map>>,
    /// Ends the accepting; what is carried goes on.
    closed: CancellationToken,
}

/// The maps in effect.
pub(crate) struct Maps {
    /// Those of the flags.
    fixed: Vec<Map>,
    open: Mutex<HashMap<SocketAddr, Open>>,
    gate: Gate,
    context: DoorContext,
    shares: Shares,
    /// The listeners, for a successor.
    sockets: Arc<Copies>,
}

impl Maps {
    pub(crate) fn new(
        fixed: Vec<Map>,
        gate: Gate,
        context: DoorContext,
        shares: Shares,
        sockets: Arc<Copies>,
    ) -> Self {
        Self { fixed, open: Mutex::default(), gate, context, shares, sockets }
    }

    /// Serves maps whose listeners are bound; a successor can have them already.
    pub(crate) fn start(&self, bound: Vec<(Map, TcpListener)>) {
        for (map, listener) in bound {
            self.serve(map, listener);
        }
    }

    /// Replaces the maps of the file. Connections through one that goes are carried to their end.
    ///
    /// # Errors
    /// One cannot be listened on; nothing has changed then.
    pub(crate) async fn replace(&self, of_file: Vec<Map>) -> Result<(), String> {
        let wanted = [self.fixed.as_slice(), &of_file].concat();
        check(&wanted)?;
        let known: Vec<SocketAddr> = self.lock().keys().copied().collect();
        let mut bound = Vec::new();
        for map in wanted.iter().filter(|map| !known.contains(&map.listen)) {
            let listen = map.listen;
            let listener = TcpListener::bind(listen).await;
            let listener = listener.map_err(|error| format!("cannot listen on {listen}: {error}"))?;
            let copy = listener.as_fd().try_clone_to_owned();
            let copy = copy.map_err(|error| format!("cannot listen on {listen}: {error}"))?;
            bound.push((map.clone(), listener, copy));
        }
        let mut open = self.lock();
        let gone: Vec<_> =
            known.into_iter().filter(|listen| wanted.iter().all(|map| map.listen != *listen)).collect();
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
        Ok(())
    }

    fn serve(&self, map: Map, listener: TcpListener) {
        let (listen, closed) = (map.listen, CancellationToken::new());
        let map = Arc::new(ArcSwap::from_pointee(map));
        let accepting = super::serve(
            Mapped(map.clone()),
            self.gate.guard(listener),
            self.context.clone(),
            self.shares.clone(),
        );
        let until = closed.clone();
        // It ends with the drain, like every door.
        self.context.drain.spawn(until.run_until_cancelled_owned(accepting));
        self.lock().insert(listen, Open { map, closed });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SocketAddr, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

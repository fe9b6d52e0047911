//! State of a connection while it is relayed: for its access log line, and for the status.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Relaying, Traffic};
use tunnel_runtime::NodeName;

use super::permit::HeldPermit;

/// Time in which a client that reads gets to the end of a connection whose right is gone.
const ENDING: Duration = Duration::from_secs(3);

/// A connection from the moment its node is known.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) listener: &'static str,
    pub(crate) client: SocketAddr,
    /// `None` if this server dials the target itself.
    pub(crate) node: Option<NodeName>,
    pub(crate) target: SocketAddr,
    /// The address of the node, or of a pod on it, that the client meant; `None` if it meant this node whatever its
    /// addresses.
    pub(crate) found_by: Option<IpAddr>,
    pub(crate) started: Instant,
    /// Ends it from outside, also while its target is still being dialled.
    pub(crate) abort: Arc<Abort>,
    /// The other server, for a connection that one server forwards to another.
    pub(crate) via: OnceLock<Box<str>>,
    /// The caller, at a listener that authenticates.
    pub(crate) caller: OnceLock<Box<str>>,
    /// Not set where nobody's right is judged.
    pub(crate) permit: OnceLock<Box<HeldPermit>>,
    /// Cancelled if it does not end by itself when its right is gone.
    pub(crate) cut: OnceLock<CancellationToken>,
    /// Set once bytes may pass; the target may still be being dialled.
    pub(crate) relayed: OnceLock<Relayed>,
    answered: AtomicBool,
}

/// The bytes, and the link that relays them.
#[derive(Debug)]
pub(crate) struct Relayed {
    pub(crate) traffic: Arc<Traffic>,
    /// The link's number, and its network path; `None` if this server has dialled the target itself.
    pub(crate) link: Option<(u32, Arc<Flow>)>,
}

impl Connection {
    pub(crate) fn new(
        listener: &'static str,
        client: SocketAddr,
        node: Option<NodeName>,
        target: SocketAddr,
    ) -> Self {
        Self {
            listener,
            client,
            node,
            target,
            found_by: None,
            started: Instant::now(),
            abort: Arc::default(),
            via: OnceLock::new(),
            caller: OnceLock::new(),
            permit: OnceLock::new(),
            cut: OnceLock::new(),
            relayed: OnceLock::new(),
            answered: AtomicBool::new(false),
        }
    }

    /// Sets the address that the client meant.
    pub(crate) fn with_found_by(self, found_by: Option<IpAddr>) -> Self {
        Self { found_by, ..self }
    }

    /// Ends it because the right to it is gone.
    pub(crate) fn withdraw(self: &Arc<Self>, reason: String) {
        let Some(held) = self.permit.get() else { return };
        if held.withdrawn().is_some() {
            return;
        }
        held.withdraw(reason);
        self.abort.trigger_for(Outcome::Denied, "the right to this connection is gone");
        if let Some(cut) = self.cut.get().cloned() {
            let open = Arc::downgrade(self);
            tokio::spawn(async move {
                tokio::time::sleep(ENDING).await;
                if open.strong_count() > 0 {
                    cut.cancel();
                }
            });
        }
    }

    /// Called when the agent has answered the dial.
    pub(crate) fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// True while the target is being dialled.
    pub(crate) fn is_dialling(&self) -> bool {
        match self.node {
            Some(_) => !self.answered.load(Ordering::Relaxed),
            None => self.relayed.get().is_none(),
        }
    }

    /// Returns `None` before bytes may pass.
    pub(crate) fn relaying(&self) -> Option<Relaying<'_>> {
        let Relayed { traffic, link } = self.relayed.get()?;
        let rtt = link.as_ref().and_then(|(_, flow)| flow.rtt.last());
        Some(Relaying { traffic, abort: &self.abort, rtt })
    }

    /// True if one of these links relays it.
    pub(crate) fn is_on(&self, links: &[Arc<Flow>]) -> bool {
        let link = self.relayed.get().and_then(|relayed| relayed.link.as_ref());
        link.is_some_and(|(_, flow)| links.iter().any(|link| Arc::ptr_eq(link, flow)))
    }

    /// Returns the number of bytes to the node, and from it.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let traffic = self.relayed.get().map(|relayed| &relayed.traffic);
        traffic.map_or((0, 0), |traffic| (traffic.from_socket(), traffic.to_socket()))
    }
}

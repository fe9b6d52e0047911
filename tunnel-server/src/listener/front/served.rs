//! A connection, as its requests see it.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use tokio_util::sync::CancellationToken;
use tunnel_link::outcome::Outcome;

use super::kinds::{Front, Peer};
use super::tunnel::Tunnel;
use super::upgrade::Upgraded;
use crate::admission::{Full, Shares};
use crate::listener::access_log::{over_limit, turned_away};
use crate::listener::answer::Failure;
use crate::listener::context::ListenerContext;
use crate::listener::socket::Faults;

/// State that the requests of a connection share.
pub(super) struct Served {
    pub(super) front: Arc<Front>,
    pub(super) peer: Peer,
    /// `None` for HTTP/2.
    pub(super) faults: Option<Faults>,
    pub(super) context: ListenerContext,
    pub(super) shares: Shares,
    /// The connection's, after a CONNECT.
    pub(super) tunnel: parking_lot::Mutex<Option<Tunnel>>,
    /// The connection's, after an upgrade.
    pub(super) upgraded: parking_lot::Mutex<Option<Upgraded>>,
    /// Cancelled if the connection has to end although its client does not read.
    pub(super) cut: CancellationToken,
    /// Yields the connection after a request whose upgrade was refused: hyper leaves its end to its owner.
    pub(super) refused: parking_lot::Mutex<Option<OnUpgrade>>,
}

impl Served {
    pub(super) fn new(
        front: Arc<Front>,
        peer: Peer,
        faults: Option<Faults>,
        context: ListenerContext,
        shares: Shares,
    ) -> Self {
        let (tunnel, upgraded, cut, refused) = Default::default();
        Self { front, peer, faults, context, shares, tunnel, upgraded, cut, refused }
    }

    pub(super) fn turned_away(&self, failure: &Failure) {
        let (listener, client) = (self.front.listener, self.peer.client);
        turned_away(&self.context.metrics, listener, client, None, &failure.reason);
    }

    pub(super) fn over_limit(&self, full: &Full) -> Failure {
        over_limit(&self.context.metrics, self.front.listener, self.peer.client, full);
        Failure::of_outcome(Outcome::Busy, full.to_string())
    }
}

//! What the calls of konnectivity's agents work with.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tunnel_core::config::HostPort;

use crate::agent_port::gate::Gate;
use crate::agent_port::link::LinkContext;
use crate::caller::Reviewer;

/// How agents without a certificate are known.
pub(crate) struct Tokens {
    /// None: there is no API server to ask.
    pub(crate) reviewer: Option<Reviewer>,
    /// The user whose tokens are taken.
    pub(crate) user: String,
}

/// What all of them share.
pub(super) struct Context {
    pub(super) link: Arc<LinkContext>,
    pub(super) gate: Arc<Gate>,
    pub(super) links: TaskTracker,
    pub(super) tokens: Tokens,
    /// The other servers: agents look for as many as there are.
    pub(super) peers: watch::Receiver<Arc<BTreeSet<HostPort>>>,
}

//! State of the calls of konnectivity's agents.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tunnel_runtime::config::HostPort;

use crate::agent_port::gate::Gate;
use crate::agent_port::link::LinkContext;
use crate::caller::Reviewer;

/// Authentication of agents without a certificate, by service account tokens.
pub(crate) struct Tokens {
    /// None without an API server to ask.
    pub(crate) reviewer: Option<Reviewer>,
    /// The user whose tokens are accepted.
    pub(crate) user: String,
}

/// State shared by all calls.
pub(super) struct Context {
    pub(super) link: Arc<LinkContext>,
    pub(super) gate: Arc<Gate>,
    pub(super) links: TaskTracker,
    pub(super) tokens: Arc<Tokens>,
    /// The other servers: agents connect to as many servers as there are.
    pub(super) peers: watch::Receiver<Arc<BTreeSet<HostPort>>>,
}

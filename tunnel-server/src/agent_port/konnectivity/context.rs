//! State of the calls of konnectivity's agents.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;
use tunnel_runtime::config::HostPort;

use crate::agent_port::limits::ConnectionLimits;
use crate::agent_port::link::LinkContext;
use crate::caller::Reviewer;

/// Number of tokens that are judged again at a time: the API server has other questions to answer.
const JUDGED_AT_A_TIME: usize = 8;

/// Authentication of agents without a certificate, by service account tokens.
pub(crate) struct AgentTokens {
    /// None without an API server to ask.
    pub(super) reviewer: Option<Reviewer>,
    /// The user whose tokens are accepted.
    pub(super) user: String,
    /// Taken while a token is judged that an agent was let in by.
    pub(super) judging: Semaphore,
}

impl AgentTokens {
    pub(crate) fn new(reviewer: Option<Reviewer>, user: String) -> Self {
        Self { reviewer, user, judging: Semaphore::new(JUDGED_AT_A_TIME) }
    }
}

/// State shared by all calls.
pub(super) struct Context {
    pub(super) link: Arc<LinkContext>,
    pub(super) limits: Arc<ConnectionLimits>,
    pub(super) links: TaskTracker,
    pub(super) tokens: Arc<AgentTokens>,
    /// The other servers: agents connect to as many servers as there are.
    pub(super) peers: watch::Receiver<Arc<BTreeSet<HostPort>>>,
}

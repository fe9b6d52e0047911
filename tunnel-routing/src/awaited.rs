//! Nodes whose agents were just lost and are expected back.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tunnel_runtime::NodeName;

/// Time for which an agent is expected back. An agent whose link was reset redials within 250 ms.
pub const RETURN: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Awaited(HashMap<NodeName, Absence>);

#[derive(Debug)]
struct Absence {
    until: Instant,
    /// Cancelled when the node has a tunnel again, or after `until`.
    over: CancellationToken,
}

impl Drop for Absence {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

impl Awaited {
    /// Records that the node's tunnel was lost at `now`.
    pub(super) fn add(&mut self, node: &NodeName, now: Instant) {
        self.0.insert(node.clone(), Absence { until: now + RETURN, over: CancellationToken::new() });
    }

    pub(super) fn remove(&mut self, node: &NodeName) {
        self.0.remove(node);
    }

    pub(super) fn contains(&self, node: &NodeName) -> bool {
        self.0.contains_key(node)
    }

    /// A [`CancellationToken`] cancelled once the node is no longer awaited; None if it is not awaited.
    pub(super) fn over(&self, node: &NodeName) -> Option<CancellationToken> {
        self.0.get(node).map(|absence| absence.over.clone())
    }

    /// Removes and returns the nodes that have not come back in time.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<NodeName> {
        self.0.extract_if(|_, absence| absence.until <= now).map(|(node, _)| node).collect()
    }

    /// Time at which the next node expires.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|absence| absence.until).min()
    }
}

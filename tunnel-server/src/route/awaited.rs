//! Nodes whose agents were lost a moment ago and are expected back.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tunnel_core::identity::NodeName;

/// How long an agent is expected back. One whose link was reset dials again within 250 ms.
pub(crate) const RETURN: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Awaited(HashMap<NodeName, Absence>);

#[derive(Debug)]
struct Absence {
    until: Instant,
    /// Cancelled when somebody has a tunnel to the node again, or nobody within the time.
    over: CancellationToken,
}

impl Drop for Absence {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

impl Awaited {
    /// The node's tunnel was lost now.
    pub(super) fn add(&mut self, node: &NodeName, now: Instant) {
        self.0.insert(node.clone(), Absence { until: now + RETURN, over: CancellationToken::new() });
    }

    pub(super) fn remove(&mut self, node: &NodeName) {
        self.0.remove(node);
    }

    pub(super) fn contains(&self, node: &NodeName) -> bool {
        self.0.contains_key(node)
    }

    /// What is cancelled once the node is not awaited any more; None: it is not.
    pub(super) fn over(&self, node: &NodeName) -> Option<CancellationToken> {
        self.0.get(node).map(|absence| absence.over.clone())
    }

    /// Removes those that have not come back in time.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<NodeName> {
        self.0.extract_if(|_, absence| absence.until <= now).map(|(node, _)| node).collect()
    }

    /// When the next one expires.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|absence| absence.until).min()
    }
}

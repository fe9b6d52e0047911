//! Events in the cluster.

/// Publishes Events.
#[derive(Clone, Debug)]
pub struct Events;

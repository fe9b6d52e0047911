//! Kubernetes for real: what kubectl, the API server and Prometheus do with a node behind NAT. A scenario is one
//! cluster and a list of checks.
mod checks;
mod commands;
mod forward;
mod standalone;
mod views;

use super::Scenario;

pub(super) const ALL: &[Scenario] =
    &[Scenario::new("kubernetes::standalone", 1, |t| Box::pin(standalone::run(t))).limit(240)];

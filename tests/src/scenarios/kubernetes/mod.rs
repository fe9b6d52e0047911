//! Kubernetes for real: what kubectl, the API server and Prometheus do with a node behind NAT. A scenario is one
//! cluster and a list of checks.
mod checks;
mod commands;
mod failures;
mod forward;
mod in_cluster;
mod outages;
mod prometheus;
mod redirect;
mod standalone;
mod two_sites;
mod views;

use super::Scenario;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new("kubernetes::in_cluster", 1, |t| Box::pin(in_cluster::run(t))).limit(300),
    Scenario::new("kubernetes::failures", 1, |t| Box::pin(failures::run(t))).limit(360),
    Scenario::new("kubernetes::outages", 1, |t| Box::pin(outages::run(t))).limit(300),
    Scenario::new("kubernetes::two_sites_with_one_address", 1, |t| Box::pin(two_sites::run(t)))
        .twin()
        .limit(240),
    Scenario::new("kubernetes::standalone", 1, |t| Box::pin(standalone::run(t))).limit(240),
];

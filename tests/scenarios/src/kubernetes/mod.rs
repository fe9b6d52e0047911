//! kubectl, the API server and Prometheus with a real node behind NAT. A scenario is one cluster and a list of checks.
mod checks;
mod commands;
mod failures;
mod following;
mod forward;
mod in_cluster;
mod outages;
mod prometheus;
mod redirect;
mod standalone;
mod two_sites;
mod views;

use failures::failures;
use in_cluster::in_cluster;
use outages::outages;
use standalone::standalone;
use two_sites::two_sites_with_one_address;

scenarios! {
    in_cluster(cluster, limit = 300),
    failures(cluster, limit = 360),
    outages(cluster, limit = 300),
    two_sites_with_one_address(cluster, twin, limit = 240),
    standalone(cluster, limit = 240),
}

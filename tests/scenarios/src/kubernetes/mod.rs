//! kubectl, the API server and Prometheus with a real node behind NAT. A scenario is one cluster and a list of checks.
mod by_route;
mod checks;
mod commands;
mod egress;
mod failures;
pub(crate) mod following;
mod forward;
mod in_cluster;
mod konnectivity;
mod outages;
mod prometheus;
mod redirect;
pub(crate) mod redirector;
mod services;
mod standalone;
mod top;
mod two_masters;
mod two_sites;
mod views;

use egress::egress_selector;
use failures::failures;
use in_cluster::in_cluster;
use outages::outages;
use redirector::redirector;
use services::{aggregated_at_the_edge, egress_services};
use standalone::standalone;
use top::top;
use two_masters::two_masters;
use two_sites::two_sites_with_one_address;

scenarios! {
    in_cluster(cluster, limit = 300, quick),
    failures(cluster, limit = 360),
    outages(cluster, limit = 300),
    two_sites_with_one_address(cluster, twin, limit = 240),
    standalone(cluster, limit = 240),
    two_masters(cluster, limit = 600),
    redirector(cluster, limit = 240),
    top(metrics_server, limit = 300),
    egress_selector(cluster_and_konnectivity, limit = 900),
    egress_services(cluster, limit = 300),
    aggregated_at_the_edge(metrics_server, limit = 360),
}

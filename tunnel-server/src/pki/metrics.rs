//! Metrics of the CA and of enrolment.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tunnel_runtime::gauges::registered;

/// Metrics of the CA and of enrolment. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct PkiMetrics {
    enrollments: Family<[(&'static str, &'static str); 2], Counter>,
    pub(super) server_not_after: Gauge,
    pub(super) roots: Gauge,
}

impl PkiMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let enrollments = "Enrolments and renewals of agents by call (enroll, renew, csr) and outcome";
        let roots = "Trusted roots; more than one while the CA is rotated";
        Self {
            enrollments: registered(registry, "postern_enrollments", enrollments),
            server_not_after: registered(
                registry,
                "postern_server_certificate_expiry_timestamp_seconds",
                "End of the server's own certificate, Unix time",
            ),
            roots: registered(registry, "postern_ca_roots", roots),
        }
    }

    pub(crate) fn count(&self, call: &'static str, outcome: &'static str) {
        self.enrollments.get_or_create(&[("call", call), ("outcome", outcome)]).inc();
    }

    /// Number of calls (`enroll`, `renew`, `csr`) with an outcome (`issued`, `unknown_token`, …).
    pub fn enrollments(&self, call: &'static str, outcome: &'static str) -> u64 {
        self.enrollments.get_or_create(&[("call", call), ("outcome", outcome)]).get()
    }
}

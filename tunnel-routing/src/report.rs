//! Reports conflicts in the log and in the metrics.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::conflict::{Conflict, ConflictKind};
use super::desired::MAX_ROUTES;
use crate::inventory::LogBudget;

/// Maximum number of conflicts logged per reload; the rest is counted in one line. `status` lists them all.
pub(super) const MAX_LOGGED: usize = 20;

/// Number of routes and virtual addresses that did not fit, IPv4 first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shortage {
    /// Routes without room in the kernel's table.
    pub(super) routes: [usize; 2],
    /// Addresses, and pod ranges, for which the range has no virtual address.
    pub(super) virtual_addresses: [[usize; 2]; 2],
}

/// Reports changes of conflicts and shortages.
#[derive(Debug)]
pub(super) struct Reports {
    counts: Family<[(&'static str, &'static str); 1], Gauge>,
    reported: Arc<BTreeSet<Conflict>>,
    shortage: Shortage,
    lines: LogBudget,
}

impl Reports {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let counts = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        for kind in ConflictKind::ALL {
            counts.get_or_create(&[("kind", kind.as_str())]).set(0);
        }
        let help = "Contradictions in the inventory, by kind (see status)";
        registry.register("inventory_conflicts", help, counts.clone());
        Self {
            counts,
            reported: Arc::default(),
            shortage: Shortage::default(),
            lines: LogBudget::new("conflicts that came and went"),
        }
    }

    pub(super) fn report(&mut self, conflicts: &Arc<BTreeSet<Conflict>>, now: Instant) {
        let before = std::mem::replace(&mut self.reported, conflicts.clone());
        let mut new = 0;
        for conflict in conflicts.difference(&before) {
            self.counts.get_or_create(&[("kind", conflict.kind.as_str())]).inc();
            // Reported in one line by `shortage`.
            let counted = conflict.kind != ConflictKind::NoRoom;
            new += usize::from(counted);
            if counted && new <= MAX_LOGGED && self.lines.may_log(now) {
                tracing::warn!(kind = conflict.kind.as_str(), reason = %conflict, "inventory conflict");
            }
        }
        let mut gone = 0;
        for conflict in before.difference(conflicts) {
            self.counts.get_or_create(&[("kind", conflict.kind.as_str())]).dec();
            gone += 1;
        }
        let more = new.saturating_sub(MAX_LOGGED);
        if more > 0 && self.lines.may_log(now) {
            tracing::warn!(
                conflicts = more,
                "more inventory conflicts, `tunnel-server status -o json` lists them"
            );
        }
        if gone > 0 && self.lines.may_log(now) {
            tracing::info!(gone, remaining = conflicts.len(), "inventory conflicts resolved");
        }
    }

    /// Logs a shortage when it begins, when it has more than doubled, and when it is over.
    pub(super) fn shortage(&mut self, shortage: Shortage, ranges: &[IpNet; 2]) {
        let mut told = self.shortage;
        for (family, name) in ["IPv4", "IPv6"].into_iter().enumerate() {
            if worth_telling(&mut told.routes[family], shortage.routes[family]) {
                match shortage.routes[family] {
                    0 => tracing::info!(family = name, "routes fit into the kernel's table again"),
                    left_out => tracing::warn!(
                        family = name,
                        left_out,
                        capacity = MAX_ROUTES,
                        fix =
                            "list fewer addresses with --edge-addresses, or fewer nodes with --edge-selector",
                        "kernel's route table is full, the addresses left out are not redirected"
                    ),
                }
            }
            let (range, flag) =
                (ranges[family], if family == 0 { "--redirect-range" } else { "--redirect-range-v6" });
            for (pods, kind) in ["addresses", "ranges of pods"].into_iter().enumerate() {
                let now = shortage.virtual_addresses[family][pods];
                if worth_telling(&mut told.virtual_addresses[family][pods], now) {
                    match now {
                        0 => {
                            tracing::info!(%range, kind, "redirect range has virtual addresses for all again");
                        }
                        left_out => tracing::warn!(
                            %range,
                            kind,
                            left_out,
                            fix = format!("widen {flag}"),
                            "redirect range is used up, connections to what is left out fail"
                        ),
                    }
                }
            }
        }
        self.shortage = told;
    }
}

/// `told` is the number last logged.
fn worth_telling(told: &mut usize, now: usize) -> bool {
    let tell = (now == 0) != (*told == 0) || now > told.saturating_mul(2);
    if tell {
        *told = now;
    }
    tell
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_told_when_it_begins_doubles_and_ends() {
        let mut told = 0;
        let seen: Vec<_> =
            [0, 3, 4, 6, 7, 14, 1, 0, 0].into_iter().filter(|now| worth_telling(&mut told, *now)).collect();
        assert_eq!(seen, [3, 7, 0]);
    }
}

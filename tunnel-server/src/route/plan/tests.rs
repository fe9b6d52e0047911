//! Nodes with too many addresses. The rest is compared with [`scratch`], by the router's tests.

use std::collections::HashSet;

use super::*;

#[test]
fn a_node_with_too_many_addresses_is_a_conflict() {
    let inventory = Inventory::from(vec![
        InventoryNode::without_addresses("cloud-1"),
        InventoryNode { left_out: 2, ..InventoryNode::without_addresses("cloud-2") },
    ]);
    let host = HashSet::new();
    let rules =
        Rules { edge_addresses: &[], exclude: &[], token_ranges: &[], foreign: &[], pods: &[], host: &host };
    let mut plan = Plan::default();
    let changes = Inventory::default();
    plan.update(&inventory, &inventory.changes_since(&changes), &rules, false, Instant::now());
    let nodes = vec!["cloud-2".parse().unwrap()];
    let conflict = Conflict { kind: ConflictKind::TooMany, address: None, nodes, holder: None };
    assert!(plan.conflicts.all().iter().eq([&conflict]));
}

//! Every change is announced, and nothing else.

use std::time::Duration;

use super::tests::{inventory, name, node, route, router};
use super::*;
use crate::{CLOUD_CLAIM_DELAY, RETURN};

#[test]
fn every_kind_of_change_is_announced() {
    let (router, _) = router();
    let (mut changed, mut now) = (router.changed(), Instant::now());
    let (one, two) = (node("edge-1", true, &["10.8.0.7"]), node("edge-2", true, &["10.8.0.8"]));
    let cloud = node("cloud-1", false, &["10.0.0.2"]);
    for (what, nodes) in [
        ("routes are added", vec![one.clone(), two.clone()]),
        ("a route is removed", vec![one]),
        ("another one is routed", vec![two.clone()]),
        ("an address is excluded", vec![two.clone(), cloud]),
        ("another is excluded", vec![two, node("cloud-1", false, &["10.0.0.3"])]),
    ] {
        let version = *changed.borrow_and_update();
        router.set_inventory_at(inventory(nodes.clone()), now);
        // A cloud node's new address is excluded after a delay.
        now += CLOUD_CLAIM_DELAY;
        router.refresh_at(now);
        assert!(*changed.borrow_and_update() > version, "{what}");
        router.set_inventory_at(inventory(nodes), now);
        assert!(!changed.has_changed().unwrap(), "{what}, and then nothing");
    }
}

#[test]
fn a_copy_stays_as_it_was() {
    let (router, _) = router();
    let addresses: Vec<_> = (0..1025).map(|n| format!("10.9.{}.{}", n / 256, n % 256)).collect();
    let nodes = |last: &str| {
        let mut nodes: Vec<_> =
            addresses.iter().zip(0..).map(|(a, n)| node(&format!("edge-{n}"), true, &[a])).collect();
        nodes.extend([node(last, true, &["10.9.99.99"])]);
        inventory(nodes)
    };
    router.set_inventory(nodes("edge-a"));
    let desired = router.desired();
    assert_eq!(desired.routes().count(), 1026);
    let mut changed = router.changed();
    changed.mark_unchanged();
    router.set_inventory(nodes("edge-a"));
    assert!(!changed.has_changed().unwrap());
    assert_eq!(router.desired(), desired);
    // The last route leads to another node, so it has another virtual address.
    router.set_inventory(nodes("edge-b"));
    assert!(changed.has_changed().unwrap());
    let now = router.desired();
    assert_ne!(route(&now, "10.9.99.99"), route(&desired, "10.9.99.99"));
    assert_eq!(now.routes().zip(desired.routes()).filter(|(now, before)| now != before).count(), 1);
}

#[test]
fn what_is_remembered_is_announced_when_it_changes() {
    let (router, _) = router();
    let (mut claims, mut due) = (router.claims_changed(), router.due());
    let edge = node("edge-1", true, &["10.8.0.7"]);
    let seen = *claims.borrow_and_update();
    router.set_inventory(inventory(vec![edge.clone()]));
    assert!(*claims.borrow_and_update() > seen);
    router.set_inventory(inventory(vec![edge.clone()]));
    assert!(!claims.has_changed().unwrap() && !due.has_changed().unwrap());
    let now = Instant::now();
    let nodes = || inventory(vec![edge.clone(), node("cloud-1", false, &["10.0.0.2"])]);
    router.set_inventory_at(nodes(), now);
    assert!(claims.has_changed().unwrap() && due.has_changed().unwrap());
    assert_eq!(*due.borrow_and_update(), Some(now + CLOUD_CLAIM_DELAY));
    router.set_inventory_at(nodes(), now);
    assert!(!due.has_changed().unwrap(), "it is due at the same time");
    let almost = now + CLOUD_CLAIM_DELAY - Duration::from_millis(500);
    router.set_inventory_at(nodes(), almost);
    assert_eq!(*due.borrow_and_update(), Some(almost + Duration::from_secs(1)), "with what follows soon");
}

#[test]
fn a_route_stays_up_while_its_nodes_agent_is_expected_back() {
    let (router, _) = router();
    router.set_inventory(inventory(vec![node("edge-1", true, &["10.8.0.7"])]));
    let up = || route(&router.desired(), "10.8.0.7").unwrap().up;
    let (edge, mut changed) = (name("edge-1"), router.changed());
    router.set_live(&edge, TunnelHolder::This, true);
    changed.mark_unchanged();

    // It comes back in time, to any server.
    router.lose(&edge, TunnelHolder::This);
    let awaited = router.awaited(&edge).unwrap();
    router.give_up(Instant::now());
    assert!(up() && !awaited.is_cancelled() && !changed.has_changed().unwrap());
    assert!(router.gives_up().borrow().is_some_and(|at| at <= Instant::now() + RETURN));
    router.set_live(&edge, TunnelHolder::Peers, true);
    assert!(awaited.is_cancelled() && router.awaited(&edge).is_none());
    router.give_up(Instant::now() + RETURN);
    assert!(up() && !changed.has_changed().unwrap() && router.gives_up().borrow().is_none());

    // The nodes are recomputed meanwhile, and it does not come back.
    router.lose(&edge, TunnelHolder::Peers);
    let awaited = router.awaited(&edge).unwrap();
    router.set_inventory(inventory(vec![node("edge-1", true, &["10.8.0.7", "10.8.0.8"])]));
    assert!(up() && route(&router.desired(), "10.8.0.8").unwrap().up);
    router.give_up(Instant::now() + RETURN);
    assert!(!up() && awaited.is_cancelled() && router.awaited(&edge).is_none());

    // It is away for good.
    router.set_live(&edge, TunnelHolder::This, true);
    assert!(up());
    router.set_live(&edge, TunnelHolder::This, false);
    assert!(!up() && router.awaited(&edge).is_none());

    // It has another tunnel, and only the end of that one counts.
    router.set_live(&edge, TunnelHolder::This, true);
    router.set_live(&edge, TunnelHolder::Peers, true);
    router.lose(&edge, TunnelHolder::This);
    router.give_up(Instant::now() + RETURN);
    assert!(up());

    // The other tunnel has ended too, unseen, and the agent comes back to a third server.
    router.set_live(&edge, TunnelHolder::This, true);
    router.lose(&edge, TunnelHolder::This);
    let awaited = router.awaited(&edge).unwrap();
    router.set_live(&edge, TunnelHolder::Peers, true);
    assert!(up() && awaited.is_cancelled() && router.awaited(&edge).is_none());
}

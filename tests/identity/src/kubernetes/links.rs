//! An agent that is attached to some of its servers only.

use std::sync::Arc;

use postern_fake_kube::eventually;
use tokio::sync::watch;
use tunnel_runtime::config::HostPort;

use super::links_to;
use super::servers::Port;
use crate::harness::TestServer;

/// Index of the server that has the agent's session; None unless exactly one has it.
fn holder(ports: &[Option<Port>]) -> Option<usize> {
    let mut holders = (0..ports.len()).filter(|n| ports[*n].as_ref().is_some_and(Port::has_edge_1));
    holders.next().filter(|_| holders.next().is_none())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_three_servers_has_the_session_and_another_takes_its_place() {
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let mut ports = Vec::new();
    for id in ["server-a", "server-b", "server-c"] {
        ports.push(Some(Port::of(&server, id).await));
    }
    let mut known: Vec<HostPort> = ports.iter().flatten().map(|port| port.address.parse().unwrap()).collect();
    let (_identity, identity) = watch::channel(Arc::new(identity));
    let start = |state: &str| links_to(&config.state_dir.join(state), "1", identity.clone());
    let (links, runtime, _announced) = start("");
    let (servers, following) = watch::channel(Arc::new(known.clone()));
    tokio::spawn(links.clone().follow(following));
    let first = eventually("a session", || holder(&ports)).await;
    assert_eq!((links.status().len(), runtime.tasks.len()), (1, 1), "the others are not dialled");

    // A restart leads to the same server.
    runtime.shutdown.force();
    eventually("it is gone", || (runtime.tasks.is_empty() && holder(&ports).is_none()).then_some(())).await;
    let (links, runtime, _announced) = start("");
    tokio::spawn(links.clone().follow(servers.subscribe()));
    assert_eq!(eventually("a session again", || holder(&ports)).await, first);

    // Its server dies.
    let dead = ports[first].take().unwrap().address.clone();
    let second = eventually("another takes its place", || holder(&ports)).await;
    let state = links.status().into_iter().map(|link| link.address);
    assert!(
        state.clone().any(|address| address == dead),
        "it is still dialled: {:?}",
        state.collect::<Vec<_>>()
    );

    // It is removed for good, and so is the second: the agent moves on, and nothing is left behind.
    known.retain(|server| server.to_string() != dead);
    servers.send_replace(Arc::new(known.clone()));
    eventually("the dead one is left", || {
        (links.status().len() == 1 && runtime.tasks.len() == 1).then_some(())
    })
    .await;
    assert_eq!(holder(&ports), Some(second));
    let removed = ports[second].as_ref().unwrap().address.clone();
    known.retain(|server| server.to_string() != removed);
    servers.send_replace(Arc::new(known));
    let third = eventually("the last one has it", || holder(&ports).filter(|holder| *holder != second)).await;
    eventually("the link with the one before has ended", || (runtime.tasks.len() == 1).then_some(())).await;
    assert_eq!(holder(&ports), Some(third));
    runtime.shutdown.force();
}

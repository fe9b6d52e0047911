//! Tests of a takeover that fails at its greeting.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tunnel_runtime::accept::Gate;
use tunnel_runtime::takeover::{Copies, Listener, MOST_SOCKETS, send, socket_path};

use super::{Gates, Hello, Phase, Predecessor, Succession};
use crate::runtime::Runtime;
use crate::session::Workers;

/// As if too many files were open.
#[tokio::test]
async fn a_server_that_cannot_hand_its_sockets_over_serves_on_and_the_next_successor_gets_them() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let sockets = Arc::<Copies>::default();
    for _ in 0..=MOST_SOCKETS {
        sockets.add("metrics", address, listener.try_clone().unwrap().into());
    }
    let mut registry = Registry::default();
    let router = crate::runtime::without_nodes(&mut registry);
    let admin = Gate::new(true);
    let first = Arc::new(Succession {
        runtime: Runtime::new(router, Workers::here(), &mut registry),
        sockets: sockets.clone(),
        gates: Gates::new(true),
        admin: Some(admin.clone()),
        handover: watch::Sender::default(),
        phase: watch::Sender::default(),
        closed: CancellationToken::new(),
        eligible: watch::Sender::new(true),
    });
    let state = tempfile::tempdir().unwrap();
    let path = socket_path(state.path());
    let at = path.clone();
    let serving = first.clone().run(move || Listener::bind(&at), CancellationToken::new());
    let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
    let mut second = loop {
        match UnixStream::connect(&path).await {
            Ok(second) => break second,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    assert!(second.read_u8().await.is_err(), "it is not told that there is nothing to come");
    let Gates { agents, listeners } = &first.gates;
    assert_eq!([agents, listeners, &admin].map(Gate::is_open), [true; 3]);
    assert!(*first.eligible.borrow() && !first.has_successor());
    assert_eq!(*first.phase.borrow(), Phase::Alone);
    assert!(!sockets.are_sent(), "its last clients would get no reset when it stops");

    sockets.remove("metrics", address);
    let third = Predecessor::find(state.path()).await.unwrap();
    assert_eq!(third.own().server_id, first.runtime.server_id);
}

/// The kernel drops sockets for which the second server may open no more files.
#[tokio::test]
async fn a_successor_that_has_not_got_all_sockets_does_not_take_over() {
    for (listeners, taken_over) in [(json!([]), true), (json!([["metrics", "127.0.0.1:1"]]), false)] {
        let (mut first, second) = UnixStream::pair().unwrap();
        first.write_all(b"postern1").await.unwrap();
        let own = Hello::default();
        let greeting = json!({ "version": "1.2.3", "pid": 1, "listeners": listeners, "own": own });
        send(&mut first, &greeting).await.unwrap();
        let found = Predecessor::at(Path::new("takeover"), Box::new(second)).await;
        assert_eq!(found.is_some(), taken_over);
    }
}

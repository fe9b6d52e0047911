//! Test of a takeover that fails at its greeting.

use std::net::TcpListener;
use std::sync::Arc;

use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio_util::task::AbortOnDropHandle;
use tunnel_runtime::accept::Gate;
use tunnel_runtime::lifecycle::Shutdown;
use tunnel_runtime::takeover::{Copies, Listener, MOST_SOCKETS, socket_path};

use super::message::{Answer, Ask};
use super::{Predecessor, Succession};
use crate::runtime::of_flags;

/// As if too many files were open.
#[tokio::test]
async fn an_agent_that_cannot_hand_its_sockets_over_keeps_its_place_and_the_next_successor_gets_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let copies = Arc::<Copies>::default();
    for _ in 0..=MOST_SOCKETS {
        copies.add("admin", address, listener.try_clone().unwrap().into());
    }
    let state = tempfile::tempdir().unwrap();
    let state_dir = format!("--state-dir={}", state.path().display());
    let runtime = of_flags(&["--server=a:1", "--when-replaced=wait", &state_dir]);
    let (handover, admin) = (runtime.handover.clone(), Gate::new(true));
    let first =
        Succession::new(runtime, copies.clone(), Some(admin.clone()), Arc::default(), Shutdown::default());
    first.open();
    let path = socket_path(state.path());
    let at = path.clone();
    let serving = Arc::new(first).run(move || Listener::bind(&at));
    let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
    let mut second = loop {
        match UnixStream::connect(&path).await {
            Ok(second) => break second,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    assert!(second.read_u8().await.is_err(), "it is not told that there is nothing to come");
    assert!(handover.is_alone() && admin.is_open());

    copies.remove("admin", address);
    let mut third = Predecessor::find(state.path()).await.unwrap();
    let Answer::Done = third.ask(&Ask::Finish).await.unwrap();
    assert!(handover.has_passed());
}

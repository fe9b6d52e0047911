//! The server's own certificate, kept while it runs.

use std::fs;
use std::time::Duration;

use tunnel_pki::{SERVER_NAME, server_names_of_certificate};
use tunnel_server::pki::{Lifetimes, ServerNames};

use crate::harness::{Session, TestServer, eventually, log};

#[tokio::test(flavor = "multi_thread")]
async fn it_is_renewed_while_sessions_go_on() {
    let lifetimes = Lifetimes { server: Duration::from_secs(20), ..Lifetimes::default() };
    let server = TestServer::with(lifetimes).await;
    let (_, identity) = server.enrolled("edge-1").await;
    let mut session = Session::open(&server.address, &identity).await.unwrap();
    let first = session.server_chain[0].clone();
    eventually("a new certificate is served", async || {
        let now =
            Session::open(&server.address, &identity).await.expect("there is a valid one at every moment");
        (now.server_chain[0] != first).then_some(())
    })
    .await;
    session.echo().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn its_names_follow_the_configuration() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let names = async || {
        let session = Session::open(&server.address, &identity).await.unwrap();
        server_names_of_certificate(&session.server_chain[0]).unwrap()
    };
    assert_eq!(names().await, [SERVER_NAME]);
    let wanted = ServerNames {
        dns: vec!["cloud.example".into()],
        addresses: vec!["192.0.2.7".parse().unwrap()],
        local_addresses: true,
    };
    server.certificate.set_names(wanted).unwrap();
    let found =
        eventually("the new names", async || Some(names().await).filter(|names| names.len() > 1)).await;
    for name in [SERVER_NAME, "cloud.example", "192.0.2.7", "127.0.0.1"] {
        assert!(found.iter().any(|found| found == name), "{name} is not in {found:?}");
    }
    // An invalid name: the current certificate stays.
    let bad = ServerNames { dns: vec!["not a name".into()], ..ServerNames::default() };
    assert!(server.certificate.set_names(bad).unwrap_err().to_string().contains("not a name"));
    assert_eq!(names().await, found);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_ca_file_changes_nothing_until_it_is_repaired() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let path = server.state_dir().join("ca/ca.crt");
    let good = fs::read(&path).unwrap();
    fs::write(&path, "broken").unwrap();
    let named = path.to_str().unwrap().to_owned();
    eventually("it is logged", async || {
        log().lines().any(|line| line.contains(&named) && line.contains("keeping")).then_some(())
    })
    .await;
    Session::open(&server.address, &identity).await.unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"broken", "never overwritten");
    fs::write(&path, good).unwrap();
    let new = server.ca.introduce().unwrap();
    let mut ca = server.certificate.ca.clone();
    let state = tokio::time::timeout(crate::harness::DEADLINE, ca.wait_for(|state| state.roots().len() == 2));
    assert_eq!(state.await.expect("it follows again").unwrap().roots()[1].hash, new);
}

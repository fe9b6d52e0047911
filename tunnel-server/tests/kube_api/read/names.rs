//! The names in the server's certificate.

use std::sync::Arc;

use postern_fake_kube::eventually;
use rustls_pki_types::ServerName;
use serde_json::json;
use tokio_rustls::TlsConnector;
use tunnel_pki::{SERVER_NAME, pinned_tls, server_name, server_names_of_certificate};
use tunnel_server::kube::read::names;
use tunnel_server::pki::{Ca, Lifetimes, PkiMetrics, ServerCertificate, ServerNames};

use crate::fixture::{Fixture, SERVICES};

const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices";

/// The names in the certificate that a client gets.
async fn served(certificate: &ServerCertificate) -> Vec<String> {
    let tls = pinned_tls(certificate.ca.borrow().hash()).unwrap();
    let connector = TlsConnector::from(tls);
    let (client, server) = tokio::io::duplex(1 << 16);
    let name: ServerName<'static> = server_name();
    let acceptor = certificate.tls.acceptor();
    let (client, _server) = tokio::join!(connector.connect(name, client), acceptor.accept(server));
    let client = client.unwrap();
    server_names_of_certificate(&client.get_ref().1.peer_certificates().unwrap()[0]).unwrap()
}

async fn names_exactly(certificate: &ServerCertificate, mut expected: Vec<&str>) {
    expected.extend([
        "x-tunnel-server-svc",
        "x-tunnel-server-svc.kube-system",
        "x-tunnel-server-svc.kube-system.svc",
        "x-tunnel-server-svc.kube-system.svc.cluster.local",
        "x-tunnel-server-internal-svc",
        "x-tunnel-server-internal-svc.kube-system",
        "x-tunnel-server-internal-svc.kube-system.svc",
        "x-tunnel-server-internal-svc.kube-system.svc.cluster.local",
        SERVER_NAME,
        "given.example.com",
    ]);
    expected.sort_unstable();
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let mut names = served(certificate).await;
        names.sort_unstable();
        if names == expected {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "the names are {names:?}, not {expected:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn the_certificate_names_every_way_to_the_services() {
    // Not the leader: every server has a certificate.
    let fixture = Fixture::new(false).await;
    let ca = Ca::load_or_create(&fixture.api.dir().join("state"), Lifetimes::default()).unwrap();
    let base = ServerNames { dns: vec!["given.example.com".into()], ..ServerNames::default() };
    let certificate =
        Arc::new(ServerCertificate::start(ca, base.clone(), "server-1", PkiMetrics::default()).unwrap());
    tokio::spawn(names::run(fixture.context.clone(), certificate.clone(), base));
    names_exactly(&certificate, vec![]).await;

    fixture.internal_service("10.96.0.9", &json!([]));
    fixture.api.put(
        SERVICES,
        json!({
            "metadata": {
                "name": "x-tunnel-server-svc",
                "annotations": {"x-tunnel-server-external-addr": "not a name:1"},
            },
            "spec": {"clusterIP": "10.96.0.8", "clusterIPs": ["10.96.0.8", "fd00:96::8"]},
            "status": {"loadBalancer": {"ingress": [{"hostname": "lb.example.com"}]}},
        }),
    );
    let slice = |name: &str, service: &str, address: &str| {
        json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": false}}],
        })
    };
    fixture.api.put(SLICES, slice("a", "x-tunnel-server-svc", "10.70.0.1"));
    fixture.api.put(SLICES, slice("b", "another", "10.70.0.2"));
    names_exactly(&certificate, vec!["10.96.0.9", "10.96.0.8", "fd00:96::8", "lb.example.com", "10.70.0.1"])
        .await;

    // Names that are gone are removed; an API server that is away changes nothing.
    fixture.api.remove(SLICES, "a");
    fixture.api.edit(SERVICES, "x-tunnel-server-svc", |service| {
        service["metadata"]["annotations"] =
            json!({"x-tunnel-server-external-addr": "tunnel.example.com:31008"});
    });
    let now = vec!["10.96.0.9", "10.96.0.8", "fd00:96::8", "lb.example.com", "tunnel.example.com"];
    names_exactly(&certificate, now.clone()).await;
    fixture.api.down();
    eventually("the outage is noticed", || {
        fixture.context.health.report().iter().any(|watch| watch.last_error.is_some()).then_some(())
    })
    .await;
    names_exactly(&certificate, now).await;
}

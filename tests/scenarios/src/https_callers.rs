//! The https listener for callers that address the server itself, without a cluster: callers authenticate by
//! certificate.
use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::server::{Builder, Server};
use postern_testbed::{CLOUD, Testbed, client, tls};
use rcgen::SanType;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::front;
use crate::web::{Answer, Authority, Web, curl, shown};

scenarios! {
    callers_reach_nodes_with_the_servers_certificate(edges = 2, quick),
    http_2_reaches_nodes,
    its_own_names_come_before_those_of_nodes,
    nobody_without_a_certificate,
    a_target_with_anothers_certificate_is_refused,
    certificates_are_reloaded,
    upgrades_are_relayed_by_both_listeners,
    an_expected_upload_arrives,
    a_slow_upload_arrives_by_both_listeners,
    a_callers_end_reaches_the_target,
    an_ended_half_is_answered_at_every_listener,
}

const KUBELET: u16 = 10250;
const LISTENER: &str = "https://10.70.0.1:10263";
const HTTP: ([u8; 4], u16) = ([127, 0, 0, 1], 10264);
/// Host headers of the two targets of [`started`].
const HOSTS: [&str; 2] = ["edge-1:10250", "edge-1:9100"];

/// The CAs of a run: the callers' and the nodes'.
struct Cas {
    callers: Authority,
    nodes: Authority,
}

impl Cas {
    fn new(testbed: &Testbed) -> Result<Self> {
        Ok(Self { callers: Authority::new(testbed, "callers")?, nodes: Authority::new(testbed, "nodes")? })
    }

    fn server<'a>(&self, testbed: &'a Testbed) -> Result<Builder<'a>> {
        let (certificate, key) = self.nodes.client("postern-kubelet-client")?;
        Ok(Builder::new(testbed)
            .flag(format!("--client-ca-file={}", shown(&self.callers.file())))
            .flag(format!("--kubelet-certificate-authority={}", shown(&self.nodes.file())))
            .flag(format!("--kubelet-client-certificate={}", shown(&certificate)))
            .flag(format!("--kubelet-client-key={}", shown(&key)))
            .flag("--http-ports=9100"))
    }
}

/// Runs curl with a caller's certificate; the server's certificate is verified.
async fn call(testbed: &Testbed, cas: &Cas, args: &[&str]) -> Result<Answer> {
    let (certificate, key) = cas.callers.client("prometheus")?;
    let own = testbed.dir().join("server/ca/ca.crt");
    let (certificate, key, own) = (shown(&certificate), shown(&key), shown(&own));
    curl(testbed, &[&["--cacert", &own, "--cert", &certificate, "--key", &key][..], args].concat()).await
}

/// Connects with a caller's certificate; the server's certificate is verified.
async fn connect(testbed: &Testbed, cas: &Cas) -> Result<TlsStream<TcpStream>> {
    connect_to(10263, testbed, cas).await
}

async fn connect_to(port: u16, testbed: &Testbed, cas: &Cas) -> Result<TlsStream<TcpStream>> {
    let (certificate, key) = cas.callers.client("prometheus")?;
    let identity = tls::Identity::read(&certificate, &key)?;
    let roots = tls::roots(&testbed.dir().join("server/ca/ca.crt"))?;
    let stream = client::connect((CLOUD, port)).await?;
    tls::handshake(stream, &CLOUD.to_string(), roots, Some(&identity), None).await
}

/// Starts a server, and an agent on edge 1.
async fn without_targets(testbed: &Testbed) -> Result<(Cas, Server<'_>, Agent<'_>)> {
    let cas = Cas::new(testbed)?;
    let server = cas.server(testbed)?.start().await?;
    let agent = Agent::enrol(&server, 1).await?;
    Ok((cas, server, agent))
}

/// As [`without_targets`], with the targets of [`HOSTS`]: one with TLS, and one without.
async fn started(testbed: &Testbed) -> Result<(Cas, Server<'_>, Agent<'_>, [Web; 2])> {
    let (cas, server, agent) = without_targets(testbed).await?;
    let names = [SanType::DnsName("edge-1".try_into()?)];
    let targets = [Web::with_tls(testbed, 1, KUBELET, &cas.nodes, &names)?, Web::start(testbed, 1, 9100)?];
    Ok((cas, server, agent, targets))
}

async fn callers_reach_nodes_with_the_servers_certificate(testbed: &Testbed) -> Result<()> {
    ensure!(LISTENER.contains(&CLOUD.to_string()), "the cloud has another address");
    let (cas, server, _agent) = without_targets(testbed).await?;
    let edge = testbed.edge(1).address;
    // A kubelet's certificate has its node's address or name.
    let names = [SanType::IpAddress(edge.into())];
    let kubelet = Web::with_tls(testbed, 1, KUBELET, &cas.nodes, &names)?;
    let metrics = Web::start(testbed, 1, 9100)?;
    let by_address = format!("Host: {edge}:10250");
    for host in ["Host: edge-1:10250", &by_address] {
        let answer = call(testbed, &cas, &["--http1.1", &format!("{LISTENER}/pods"), "-H", host]).await?;
        answer.expect(200, "GET /pods HTTP/1.1 client=certificate")?;
    }
    let named = ["-H", "X-Tunnel-Proxy-Host: edge-1", "-H", "Host: x:10250"];
    call(testbed, &cas, &[&[LISTENER][..], &named].concat()).await?.expect(200, "client=certificate")?;
    // A port without TLS is dialled without TLS.
    call(testbed, &cas, &[LISTENER, "-H", "Host: edge-1:9100"]).await?.expect(200, "HTTP/1.1 client=")?;
    ensure!(kubelet.connections() == 3 && metrics.connections() == 1, "connections at the edge");
    let line = server.wait_access("of a caller", |line| line.text("listener") == "https").await?;
    ensure!(line.text("caller") == "prometheus" && line.text("node") == "edge-1", "access line {line:?}");
    // With a node's name as the server name, the client's TLS ends at the kubelet.
    let to = "edge-1:10250:10.70.0.1:10263";
    let answer = curl(testbed, &["--connect-to", to, "--insecure", "https://edge-1:10250/pods"]).await?;
    answer.expect(200, "client=none").context("passed through by SNI")?;
    Ok(())
}

/// Whoever registers a Node may name it like a server.
async fn its_own_names_come_before_those_of_nodes(testbed: &Testbed) -> Result<()> {
    let cas = Cas::new(testbed)?;
    let server = cas.server(testbed)?.flag("--cert-dns-names=edge-1").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let metrics = Web::start(testbed, 1, 9100)?;
    let to =
        ["--connect-to", "edge-1:10263:10.70.0.1:10263", "https://edge-1:10263/", "-H", "Host: edge-1:9100"];
    call(testbed, &cas, &to).await?.expect(200, "HTTP/1.1 client=")?;
    ensure!(metrics.connections() == 1, "connections at the edge");
    Ok(())
}

async fn http_2_reaches_nodes(testbed: &Testbed) -> Result<()> {
    let (cas, _server, _agent, _targets) = started(testbed).await?;
    let answer = call(testbed, &cas, &["--http2", LISTENER, "-H", "Host: edge-1:10250"]).await?;
    answer.expect(200, "HTTP/2.0 client=certificate")?;
    let answer = call(testbed, &cas, &["--http2", LISTENER, "-H", "Host: edge-1:9100"]).await?;
    answer.expect(200, "HTTP/1.1 client=").context("to a target that speaks HTTP/1.1 only")?;
    // A body without a length, which an HTTP/1.1 target can only get in chunks.
    let unsized_get = ["--http2", "-X", "GET", "--data-binary", "seven b", "-H", "Content-Length:"];
    let answer =
        call(testbed, &cas, &[&unsized_get[..], &[LISTENER, "-H", "Host: edge-1:9100"]].concat()).await?;
    answer.expect(200, "GET / HTTP/1.1 client=")?;
    answer.expect(200, "\nbody=7\n").context("a GET's body to a target that speaks HTTP/1.1 only")?;
    let url = format!("{LISTENER}/trailers");
    let answer = call(testbed, &cas, &["--http2", "--include", &url, "-H", "Host: edge-1:10250"]).await?;
    answer.expect(200, "x-sum: 42").context("trailers")?;
    let url = format!("{LISTENER}/large");
    let answer = call(testbed, &cas, &["--http2", &url, "-H", "Host: edge-1:10250"]).await?;
    ensure!(answer.body.len() == 32 << 20, "{} bytes of 32 MiB", answer.body.len());
    Ok(())
}

async fn nobody_without_a_certificate(testbed: &Testbed) -> Result<()> {
    let (cas, server, _agent) = without_targets(testbed).await?;
    let web = Web::start(testbed, 1, 9100)?;
    let own = shown(&testbed.dir().join("server/ca/ca.crt"));
    let asked = ["--cacert", &own, LISTENER, "-H", "Host: edge-1:9100"];
    let answer = curl(testbed, &asked).await?;
    answer.expect(401, "a client certificate or a bearer token is needed")?;
    let answer =
        curl(testbed, &[&asked[..], &["-H", "Authorization: Bearer tok-of-nobody"]].concat()).await?;
    answer.expect(401, "without a cluster there is nobody who knows bearer tokens")?;
    ensure!(!answer.body.contains("tok-of-nobody"), "{answer:?}");
    // An unauthenticated caller does not even learn the nodes' names.
    let answer = curl(testbed, &["--cacert", &own, LISTENER, "-H", "Host: edge-9:9100"]).await?;
    answer.expect(401, "a client certificate")?;
    // A certificate of a foreign CA.
    let (certificate, key) = cas.nodes.client("stranger")?;
    let (certificate, key) = (shown(&certificate), shown(&key));
    let answer = curl(testbed, &[&asked[..], &["--cert", &certificate, "--key", &key]].concat()).await?;
    ensure!(!answer.ok && answer.status == 0, "a stranger's certificate was taken: {answer:?}");
    ensure!(web.connections() == 0, "a stranger reached the edge");
    let log = server.settled_log().await?;
    ensure!(!log.contains("tok-of-nobody"), "a token is in the log");
    // An unknown server name: the listener knows only the names of nodes and of the server itself.
    let answer =
        curl(testbed, &["--insecure", "--connect-to", "edge-9:443:10.70.0.1:10263", "https://edge-9/"])
            .await?;
    ensure!(!answer.ok && answer.said.contains("unrecognized name"), "{answer:?}");
    Ok(())
}

async fn a_target_with_anothers_certificate_is_refused(testbed: &Testbed) -> Result<()> {
    let (cas, _server, _agent) = without_targets(testbed).await?;
    let strangers = Authority::new(testbed, "strangers")?;
    let edge = testbed.edge(1).address;
    let others = [SanType::DnsName("edge-2".try_into()?)];
    let _kubelet = Web::with_tls(testbed, 1, KUBELET, &cas.nodes, &others)?;
    let _strange = Web::with_tls(testbed, 1, 9101, &strangers, &[SanType::IpAddress(edge.into())])?;
    for host in ["Host: edge-1:10250", "Host: edge-1:9101"] {
        let answer = call(testbed, &cas, &[LISTENER, "-H", host]).await?;
        answer.expect(502, "TLS to edge-1 at")?;
        ensure!(answer.body.contains("certificate"), "{answer:?}");
    }
    Ok(())
}

async fn certificates_are_reloaded(testbed: &Testbed) -> Result<()> {
    let (cas, server, _agent) = without_targets(testbed).await?;
    let later = Authority::new(testbed, "later")?;
    let names = [SanType::DnsName("edge-1".try_into()?)];
    let _kubelet = Web::with_tls(testbed, 1, KUBELET, &later, &names)?;
    let asked = [LISTENER, "-H", "Host: edge-1:10250"];
    call(testbed, &cas, &asked).await?.expect(502, "TLS to edge-1 at")?;
    // A file that becomes invalid: its last good content stays in effect.
    let file = cas.nodes.file();
    std::fs::write(&file, "broken")?;
    testbed.expect_error("trust bundle: it has no certificate");
    server.wait_log("keeping its last good content").await?;
    // Both change together: the kubelet accepts only certificates of the same CA.
    later.client("postern-kubelet-client")?;
    std::fs::copy(later.file(), &file)?;
    server.wait_log("reloaded the file").await?;
    call(testbed, &cas, &asked).await?.expect(200, "client=certificate")?;
    Ok(())
}

async fn upgrades_are_relayed_by_both_listeners(testbed: &Testbed) -> Result<()> {
    let (cas, server, _agent, _targets) = started(testbed).await?;
    let (https, http) = (async || connect(testbed, &cas).await, async || client::connect(HTTP).await);
    for asked in [("GET", "websocket"), ("POST", "SPDY/3.1")] {
        for host in HOSTS {
            let what = || format!("{} to {host}", asked.1);
            front::an_upgrade_is_relayed(&https, host, asked).await.with_context(what)?;
            front::a_refused_upgrade_is_answered(&https, host, asked).await.with_context(what)?;
        }
        front::an_upgrade_without_a_target_is_answered(&https, "edge-1:9101", asked).await?;
        front::an_upgrade_is_relayed(&http, HOSTS[1], asked).await.context("http listener")?;
        front::a_refused_upgrade_is_answered(&http, HOSTS[1], asked).await.context("http listener")?;
    }
    let line = server.wait_access("of an upgrade", |line| line.text("listener") == "https").await?;
    ensure!(line.text("caller") == "prometheus" && line.text("outcome") == "ok", "access line {line:?}");
    Ok(())
}

async fn an_expected_upload_arrives(testbed: &Testbed) -> Result<()> {
    let (cas, server, _agent, _targets) = started(testbed).await?;
    for host in HOSTS {
        let connect = async || connect(testbed, &cas).await;
        front::an_expectation_is_answered(connect, host).await.context(host)?;
    }
    front::an_unwanted_upload_is_answered(async || connect(testbed, &cas).await).await?;
    let uploaded = |line: &postern_testbed::access_log::AccessLine| {
        line.text("listener") == "https" && line.bytes_to_node().is_ok_and(|bytes| bytes > front::UPLOAD)
    };
    let line = server.wait_access("of an upload", uploaded).await?;
    ensure!(line.text("caller") == "prometheus" && line.text("outcome") == "ok", "access line {line:?}");
    Ok(())
}

async fn a_slow_upload_arrives_by_both_listeners(testbed: &Testbed) -> Result<()> {
    let (cas, _server, _agent, _targets) = started(testbed).await?;
    let connect = async || connect(testbed, &cas).await;
    // Concurrently, since each takes long.
    let [one, other] = HOSTS;
    tokio::try_join!(
        front::a_slow_upload_arrives(&connect, one),
        front::a_slow_upload_arrives(&connect, other),
        front::a_slow_upload_arrives(async || client::connect(HTTP).await, other)
    )?;
    Ok(())
}

async fn a_callers_end_reaches_the_target(testbed: &Testbed) -> Result<()> {
    let (cas, server, _agent, targets) = started(testbed).await?;
    for (host, target) in HOSTS.into_iter().zip(&targets) {
        let connect = async || connect(testbed, &cas).await;
        front::a_reset_reaches_the_target(&connect, |stream| stream.get_ref().0, host, target)
            .await
            .context(host)?;
        front::a_reset_ends_an_upgrade(&connect, |stream| stream.get_ref().0, host).await.context(host)?;
    }
    front::departures_are_logged(&server, "https", 6).await
}

/// Over TLS the end is a close_notify followed by the end of file.
async fn an_ended_half_is_answered_at_every_listener(testbed: &Testbed) -> Result<()> {
    const METRIC: &str = "postern_build_info{";
    let cas = Cas::new(testbed)?;
    let builder = cas.server(testbed)?.flag("--plain-port=10268").flag("--plain-clients=10.70.0.0/24");
    let server = builder.flag("--metrics-port=10269").flag("--terminate-tls=on").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let names = [SanType::DnsName("edge-1".try_into()?)];
    let _targets = [Web::with_tls(testbed, 1, KUBELET, &cas.nodes, &names)?, Web::start(testbed, 1, 9100)?];
    for host in HOSTS {
        let connect = async || connect(testbed, &cas).await;
        front::an_ended_half_is_answered(connect, host, ("/late", "late\n"))
            .await
            .context("https listener")?;
    }
    let connect = async || connect_to(10269, testbed, &cas).await;
    front::an_ended_half_is_answered(connect, "x", ("/metrics", METRIC)).await.context("metrics listener")?;
    for (name, address) in [("http", HTTP), ("plain", (CLOUD.octets(), 10268))] {
        let connect = async || client::connect(address).await;
        front::an_ended_half_is_answered(connect, HOSTS[1], ("/late", "late\n")).await.context(name)?;
    }
    let connect = async || client::connect(([127, 0, 0, 1], 10265)).await;
    front::an_ended_half_is_answered(connect, "localhost", ("/metrics", METRIC))
        .await
        .context("admin port")?;
    let edge = testbed.edge(1);
    let connect = async || {
        let port = ([127, 0, 0, 1], 10266).into();
        Ok(client::connect_from(&edge.ns, port, client::PATIENCE).await?)
    };
    front::an_ended_half_is_answered(connect, "localhost", ("/metrics", METRIC)).await.context("agent's")
}

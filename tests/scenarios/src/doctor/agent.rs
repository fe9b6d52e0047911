use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::authority::Authority;
use postern_testbed::process::program;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed, tls};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tunnel_pki::SERVER_NAME;

use super::{Said, run};
use crate::common::{server, server_and_agent, target};
use crate::proxy;

scenarios! {
    a_healthy_agent_is_fine(quick),
    what_answers_instead_of_a_server_is_told,
    large_packets_that_are_lost_are_found,
    a_proxy_in_the_way_is_told,
    an_identity_that_is_of_no_use_is_found,
    a_session_that_is_refused_or_lost_is_told,
}

const DAY: Duration = Duration::from_secs(86_400);

/// Returns the command `tunnel-agent doctor` on edge 1.
pub(crate) fn command(testbed: &Testbed, args: &[&str]) -> Result<Command> {
    let mut command = testbed.on_edge(1).command(&program("tunnel-agent")?);
    for name in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"] {
        command.env_remove(name);
    }
    command.args(["doctor", "-o", "json"]).args(args);
    Ok(command)
}

async fn doctor(testbed: &Testbed, args: &[&str]) -> Result<Said> {
    run(command(testbed, args)?).await
}

/// Runs the doctor of an agent that has enrolled but does not run, for this server.
async fn towards(agent: &Agent<'_>, testbed: &Testbed, server: &str) -> Result<Said> {
    let state = format!("--state-dir={}", agent.state_dir().display());
    doctor(testbed, &[&state, "--node-name=edge-1", &format!("--server={server}")]).await
}

/// Returns an agent that has enrolled and was stopped.
async fn enrolled<'a>(server: &Server<'a>) -> Result<Agent<'a>> {
    let mut agent = Agent::enrol(server, 1).await?;
    agent.process.stop().await?;
    Ok(agent)
}

async fn a_healthy_agent_is_fine(testbed: &Testbed) -> Result<()> {
    let (_server, agent) = server_and_agent(testbed).await?;
    let ready = async || Ok(agent.get("/readyz").await?.0);
    wait_until("the agent to be ready", agent::START, ready, |status| *status == 200).await?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&["kubelet-silent"])?;
    ensure!(said.exit == 1, "{:#}", said.report);
    let _kubelet = target(testbed, 1, 10250, Behaviour::Echo)?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&[])?;
    for check in [
        "running",
        "ready",
        "limits",
        "state directory",
        "certificate",
        "names",
        "servers",
        "attached",
        "policy",
        "kubelet",
    ] {
        ensure!(said.state(check)? == "ok", "{check}: {:#}", said.report);
    }
    Ok(())
}

/// Opens a listener on the cloud host, where this process is.
async fn listener() -> Result<(TcpListener, String)> {
    let listener = TcpListener::bind((CLOUD, 0)).await?;
    let address = listener.local_addr()?.to_string();
    Ok((listener, address))
}

async fn what_answers_instead_of_a_server_is_told(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let agent = enrolled(&server).await?;
    let said = towards(&agent, testbed, &server.agent_address()).await?;
    said.expect_only(&["not-running", "kubelet-silent"])?;

    let (free, address) = listener().await?;
    drop(free);
    towards(&agent, testbed, &address).await?.expect("server-unreachable", "refused")?;

    let (plain, address) = listener().await?;
    let said = tokio::select! {
        end = greet(plain) => return end,
        said = towards(&agent, testbed, &address) => said?,
    };
    said.expect("not-a-tunnel-server", &address)?;

    let (silent, address) = listener().await?;
    towards(&agent, testbed, &address).await?.expect("handshake-silent", "no answer in the handshake")?;
    drop(silent);

    for impostor in impostors(&testbed.dir().join("server"))? {
        let (open, address) = listener().await?;
        let said = tokio::select! {
            end = present(open, impostor.chain, impostor.key) => return end,
            said = towards(&agent, testbed, &address) => said?,
        };
        said.expect(impostor.code, impostor.found)?;
    }

    // A server of another installation.
    let neighbour = testbed.add_neighbour()?;
    let other = Builder::alone_on_neighbour(testbed, &neighbour).start().await?;
    towards(&agent, testbed, &other.agent_address())
        .await?
        .expect("ca-mismatch", &format!("{NEIGHBOUR}:10262"))
}

/// Answers with a greeting that is not TLS.
async fn greet(listener: TcpListener) -> Result<()> {
    loop {
        let (mut stream, _) = listener.accept().await?;
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await?;
    }
}

/// A TLS endpoint in place of a server, and the doctor's expected finding.
struct Impostor {
    chain: Vec<CertificateDer<'static>>,
    key: KeyPair,
    code: &'static str,
    found: &'static str,
}

fn impostors(state: &Path) -> Result<[Impostor; 3]> {
    let root = CertificateDer::from_pem_file(state.join("ca/ca.crt")).context("the root")?;

    let inspector = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec!["tunnel.example.org".to_owned()])?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, "Inspection Ltd");
    let inspection = params.self_signed(&inspector)?.der().clone();

    // It has the server's name and presents the real root, which has not signed it.
    let forger = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let forged = params.self_signed(&forger)?.der().clone();

    // As from a server whose clock is three days ahead of this node's.
    let ahead = KeyPair::generate()?;
    let now = SystemTime::now();
    let early = Authority::open(state)?.server(&ahead, now + 2 * DAY..now + 33 * DAY)?;
    Ok([
        Impostor {
            chain: vec![inspection],
            key: inspector,
            code: "tls-intercepted",
            found: "issued by \"O=Inspection Ltd\"",
        },
        Impostor {
            chain: vec![forged, root.clone()],
            key: forger,
            code: "server-certificate-untrusted",
            found: "certificate",
        },
        Impostor {
            chain: vec![early, root],
            key: ahead,
            code: "clock-skew",
            found: "after this host's clock",
        },
    ])
}

/// Accepts TLS connections with these certificates.
async fn present(listener: TcpListener, chain: Vec<CertificateDer<'static>>, key: KeyPair) -> Result<()> {
    let acceptor = tls::acceptor(chain, &key, None)?;
    loop {
        let (stream, _) = listener.accept().await?;
        let acceptor = acceptor.clone();
        tokio::spawn(async move { acceptor.accept(stream).await.map(drop) });
    }
}

async fn large_packets_that_are_lost_are_found(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let agent = enrolled(&server).await?;
    // The site's line has a smaller MTU than its ends, and ICMP messages are dropped.
    testbed.router.ip(&format!("link set dev {} mtu 700", testbed.edge(1).router_port))?;
    testbed.router.iptables("-I OUTPUT -p icmp -j DROP")?;
    // The kernel would cut larger packets to size behind the device.
    testbed.edge(1).ns.ip("link set dev eth0 gso_max_segs 1")?;
    let said = towards(&agent, testbed, &server.agent_address()).await?;
    said.expect("mtu-black-hole", "segments of 536 bytes")
}

async fn a_proxy_in_the_way_is_told(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let agent = enrolled(&server).await?;
    let state = format!("--state-dir={}", agent.state_dir().display());
    let to = format!("--server={}", server.agent_address());
    let through = async |proxy: &str| {
        let mut command = command(testbed, &[&state, "--node-name=edge-1", &to])?;
        command.env("HTTPS_PROXY", proxy);
        run(command).await
    };
    through("http://192.168.50.1:3128").await?.expect("proxy-unreachable", "192.168.50.1:3128")?;
    let _proxy = proxy::start(testbed, "ConnectPort 443")?;
    let refused = async || Ok(through("http://192.168.50.1:3128").await?.has("proxy-refuses"));
    wait_until("the proxy's refusal", agent::START, refused, |refused| *refused).await?;
    Ok(())
}

async fn an_identity_that_is_of_no_use_is_found(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let none = format!("--state-dir={}", testbed.dir().join("nothing").display());
    let to = format!("--server={}", server.agent_address());
    doctor(testbed, &[&none, &to, "--node-name=edge-1"]).await?.expect("not-enrolled", "no --token")?;
    doctor(testbed, &["--server=a:1", "--pod-targets=on"]).await?.expect_only(&["bad-flags"])?;
    let agent = enrolled(&server).await?;
    let dir = agent.state_dir();
    let state = format!("--state-dir={}", dir.display());
    let said = doctor(testbed, &[&state, &to, "--node-name=edge-9"]).await?;
    said.expect("identity-of-another-node", "for edge-1")?;
    let rules = doctor(testbed, &[&state, &to, "--node-name=edge-1", "--allow-target=node:22"]).await?;
    rules.expect("kubelet-not-allowed", "node:22")?;
    let mode = |mode| fs::set_permissions(dir.join("agent.key"), fs::Permissions::from_mode(mode));
    mode(0o640)?;
    let readable = doctor(testbed, &[&state, &to, "--node-name=edge-1"]).await?;
    readable.expect("key-readable-by-others", "mode 0640")?;
    mode(0o600)?;

    // Validity of 30 days, as the CA issues: expired yesterday, about to expire, and not yet valid because this node's
    // clock is behind.
    let authority = Authority::open(&testbed.dir().join("server"))?;
    let key = KeyPair::from_pem(&fs::read_to_string(dir.join("agent.key"))?).context("agent.key")?;
    let now = SystemTime::now();
    for (begin, end, code, found) in [
        (now - 31 * DAY, now - DAY, "certificate-expired", "expired at"),
        (now - 28 * DAY, now + 2 * DAY, "renewal-overdue", "90 %"),
        (now + DAY, now + 31 * DAY, "clock-skew", "after this host's clock"),
    ] {
        fs::write(dir.join("agent.crt"), authority.agent("edge-1", &key, begin..end)?)?;
        doctor(testbed, &[&state, &to, "--node-name=edge-1"]).await?.expect(code, found)?;
    }

    fs::write(dir.join("agent.key"), "nothing")?;
    let said = doctor(testbed, &[&state, &to, "--node-name=edge-1"]).await?;
    said.expect("identity-unusable", "agent.key")
}

async fn a_session_that_is_refused_or_lost_is_told(testbed: &Testbed) -> Result<()> {
    let (mut server, _agent) = server_and_agent(testbed).await?;
    let told = async |code: &'static str| {
        let said = async || doctor(testbed, &[]).await;
        wait_until(code, agent::START, said, |said| said.has(code)).await
    };
    server.process.crash().await?;
    let said = told("not-attached").await?;
    said.expect("not-attached", &server.agent_address())?;
    said.expect("server-unreachable", "refused")?;
    server.start_again().await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    server.run(&["agent", "revoke", "edge-1"])?;
    told("session-refused").await?;
    Ok(())
}

//! The connect listener and static maps, with real client programs: curl, OpenSSH, Prometheus.
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, connect, visit};
use postern_testbed::process::Process;
use postern_testbed::server::{self, Builder};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed, prometheus};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::{expect_reset, target};
use crate::web::{Authority, Web, shown};

scenarios! {
    curl_by_certificate_token_and_address(edges = 2, quick),
    a_refused_upgrade_ends_the_connection,
    a_duplicated_address_is_reached_by_name(twin),
    the_policy_follows_its_file,
    ssh_through_connect,
    prometheus_scrapes_through_its_proxy_url(edges = 2),
    maps_follow_their_file(edges = 2),
    maps_outlive_a_successor,
}

pub(crate) const PORT: u16 = 10280;
/// The targets' answer to each request.
pub(crate) const ANSWER: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi";
const SOON: Duration = Duration::from_secs(20);
pub(crate) const TOKENS: &str = "alices-own-token,alice,1,\"ops\"\nbobs-random-token,bob,2\n";

pub(crate) const POLICY: &str = r#"
rules:
- name: operators
  from:
  - group: ops
  - organization: ops
  to:
  - nodes: node-role.kubernetes.io/edge
    ports: [9100]
- name: this host
  from:
  - clients: [127.0.0.0/8]
  to:
  - node: edge-1
    ports: [9101, 2222]
  - addresses: [10.70.0.0/24]
    ports: [9300]
"#;

pub(crate) fn write(testbed: &Testbed, name: &str, text: &str) -> Result<PathBuf> {
    let path = testbed.dir().join(name);
    let new = path.with_extension("new");
    fs::write(&new, text).with_context(|| format!("writing {}", new.display()))?;
    fs::rename(&new, &path).with_context(|| format!("renaming {}", new.display()))?;
    Ok(path)
}

pub(crate) fn listener<'a>(testbed: &'a Testbed, policy: &str) -> Result<Builder<'a>> {
    let policy = write(testbed, "policy.yaml", policy)?;
    Ok(Builder::new(testbed)
        .flag(format!("--connect-port={PORT}"))
        .flag(format!("--policy={}", policy.display())))
}

/// Runs a program to its end without blocking this program's tasks.
async fn run(mut command: Command) -> Result<Output> {
    let what = format!("{command:?}");
    tokio::task::spawn_blocking(move || command.output()).await?.with_context(|| what)
}

/// Runs curl on the cloud host; returns its output and error, and the status codes.
pub(crate) async fn curl(testbed: &Testbed, args: &[&str]) -> Result<String> {
    let mut command = testbed.on_cloud().command(Path::new("curl"));
    command.args(["-sS", "-m", "15", "-w", " status %{http_code} connect %{http_connect}"]).args(args);
    let output = run(command).await?;
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

async fn curl_by_certificate_token_and_address(testbed: &Testbed) -> Result<()> {
    let callers = Authority::new(testbed, "callers")?;
    let tokens = write(testbed, "tokens.csv", TOKENS)?;
    let server = listener(testbed, POLICY)?
        .flag(format!("--client-ca-file={}", shown(&callers.file())))
        .flag("--terminate-tls=off")
        .flag(format!("--token-auth-file={}", tokens.display()))
        .start()
        .await?;
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let exporters = [
        target(testbed, 1, 9100, Behaviour::Answers(ANSWER))?,
        target(testbed, 2, 9100, Behaviour::Answers(ANSWER))?,
    ];
    let local = target(testbed, 1, 9101, Behaviour::Answers(ANSWER))?;
    let in_cloud = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Answers(ANSWER))?;
    let ca = testbed.dir().join("server/ca/ca.crt").display().to_string();
    let (certificate, key) = callers.member("ops", "carol")?;
    let (foreign, foreign_key) = callers.member("sales", "dave")?;
    let (certificate, key) = (shown(&certificate), shown(&key));
    let (foreign, foreign_key) = (shown(&foreign), shown(&foreign_key));
    let (plain, secure) = (format!("http://127.0.0.1:{PORT}"), format!("https://{CLOUD}:{PORT}"));
    let (plain, secure) = (plain.as_str(), secure.as_str());
    let elsewhere = format!("http://{CLOUD}:{PORT}");
    let by_address = format!("http://{}:9100/", testbed.edge(2).address);
    let cloud_url = format!("http://{CLOUD}:9300/");
    let tls = ["--proxy-cacert", &ca, "-x", secure];
    let first = "http://edge-1:9100/";
    let reached = "hi status 200";
    for (args, expected) in [
        // By certificate: CONNECT, and a plain request through the proxy.
        (
            [&tls[..], &["--proxy-cert", &certificate, "--proxy-key", &key, "-p", first]].concat(),
            "hi status 200 connect 200",
        ),
        ([&tls[..], &["--proxy-cert", &certificate, "--proxy-key", &key, first]].concat(), reached),
        (
            [&tls[..], &["--proxy-cert", &certificate, "--proxy-key", &key, "-p", &by_address]].concat(),
            reached,
        ),
        (
            [&tls[..], &["--proxy-cert", &foreign, "--proxy-key", &foreign_key, "-p", first]].concat(),
            "connect 403",
        ),
        // By token: as a password over TLS, and as a bearer token from this host.
        ([&tls[..], &["-U", "alice:alices-own-token", "-p", first]].concat(), "hi status 200 connect 200"),
        (
            vec!["-x", plain, "--proxy-header", "Proxy-Authorization: Bearer alices-own-token", "-p", first],
            "connect 200",
        ),
        (
            vec!["-x", plain, "--proxy-header", "Proxy-Authorization: Bearer bobs-random-token", "-p", first],
            "connect 403",
        ),
        (
            vec!["-x", plain, "--proxy-header", "Proxy-Authorization: Bearer nobodys", "-p", first],
            "connect 407",
        ),
        // Not unencrypted over the network.
        (vec!["-x", &elsewhere, "-U", "alice:alices-own-token", "-p", first], "connect 403"),
        // By address instead of name.
        (vec!["-x", plain, "-p", "http://edge-1:9101/"], "hi status 200 connect 200"),
        (vec!["-x", plain, "http://edge-1:9101/"], reached),
        (vec!["-x", plain, "-p", &cloud_url], "hi status 200 connect 200"),
        (vec!["-x", plain, &cloud_url], reached),
        (vec!["-x", plain, "-p", first], "connect 407"),
        (vec!["-x", plain, "-p", "http://edge-1:22/"], "connect 407"),
        (vec!["-x", &elsewhere, "-p", "http://edge-1:9101/"], "connect 407"),
        // The error of the dial to the target.
        (vec!["-x", plain, "-p", "http://edge-1:2222/"], "connect 502"),
        (vec!["-x", plain, "-p", "http://edge-9:9101/"], "connect 400"),
    ] {
        let seen = curl(testbed, &args).await?;
        ensure!(seen.contains(expected), "curl {args:?} printed {seen:?}, not {expected:?}");
    }
    let own = curl(testbed, &["-x", plain, "http://edge-1:22/"]).await?;
    ensure!(own.contains("the policy does not permit nobody from 127.0.0.1 to reach edge-1:22"), "{own:?}");
    drop((exporters, local, in_cloud));
    let line = |caller: &'static str, node: &'static str| {
        move |line: &postern_testbed::access_log::AccessLine| {
            line.text("listener") == "connect" && line.text("caller") == caller && line.text("node") == node
        }
    };
    server.wait_access("by certificate", line("certificate carol by operators", "edge-2")).await?;
    server.wait_access("by token", line("user alice by operators", "edge-1")).await?;
    server.wait_access("by address", line("nobody by this host", "edge-1")).await?;
    server.wait_access("in the cloud", line("nobody by this host", "")).await?;
    let log = server.settled_log().await?;
    ensure!(!log.contains("alices-own-token") && !log.contains("nobodys"), "a token is in the log");
    Ok(())
}

/// A connection belongs to one target: the client must not send its next request on it, which may be for another.
async fn a_refused_upgrade_ends_the_connection(testbed: &Testbed) -> Result<()> {
    let server = listener(testbed, POLICY)?.start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _web = Web::start(testbed, 1, 9101)?;
    let mut stream = connect(([127, 0, 0, 1], PORT)).await?;
    let request =
        "GET http://edge-1:9101/refuse HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    stream.write_all(request.as_bytes()).await?;
    let answer = client::text(&mut stream, "the connection was kept").await?;
    ensure!(answer.starts_with("HTTP/1.1 403 ") && answer.ends_with("not for you\n"), "{answer:?}");
    ensure!(answer.to_lowercase().contains("connection: close\r\n"), "{answer:?}");
    Ok(())
}

async fn a_duplicated_address_is_reached_by_name(testbed: &Testbed) -> Result<()> {
    let server = listener(testbed, "rules:\n- name: all\n  from: [{clients: [127.0.0.0/8]}]\n  to: [{nodes: node-role.kubernetes.io/edge, ports: [9100]}]\n")?
        .start()
        .await?;
    let (first, second) = (testbed.edge(1), testbed.edge(2));
    ensure!(first.address == second.address, "the twin has {}", second.address);
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let greeting = |text: &'static str| Behaviour::EndsFirst(text);
    let _targets = [
        target(testbed, 1, 9100, greeting("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirst"))?,
        target(testbed, 2, 9100, greeting("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond"))?,
    ];
    let proxy = format!("http://127.0.0.1:{PORT}");
    for (node, body) in [(&first.name, "first status 200"), (&second.name, "second status 200")] {
        let seen = curl(testbed, &["-x", &proxy, "-p", &format!("http://{node}:9100/")]).await?;
        ensure!(seen.contains(body), "{node}: {seen:?}");
    }
    let seen = curl(testbed, &["-x", &proxy, &format!("http://{}:9100/", first.address)]).await?;
    ensure!(seen.contains("name the node instead"), "by address: {seen:?}");
    // The same at the http listener.
    let host = format!("Host: {}:9100", first.address);
    let seen = curl(testbed, &["http://127.0.0.1:10264/", "-H", &host]).await?;
    ensure!(seen.contains("name the node instead") && seen.contains("status 400"), "by address: {seen:?}");
    Ok(())
}

/// Opens a tunnel through the listener, without a token; `None` if it is refused.
async fn tunnel(to: &str) -> Result<Option<TcpStream>> {
    let mut stream = connect(([127, 0, 0, 1], PORT)).await?;
    stream.write_all(format!("CONNECT {to} HTTP/1.1\r\n\r\n").as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tokio::time::timeout(SOON, stream.read_u8()).await.context("no whole answer")??);
    }
    Ok(head.starts_with(b"HTTP/1.1 200 ").then_some(stream))
}

async fn the_policy_follows_its_file(testbed: &Testbed) -> Result<()> {
    const RULE: &str =
        "rules:\n- name: a\n  from: [{clients: [127.0.0.0/8]}]\n  to: [{node: edge-1, ports: [9100]}]\n";
    let server = listener(testbed, "rules: []\n")?.start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _target = target(testbed, 1, 9100, Behaviour::Answers(ANSWER))?;
    let proxy = format!("http://127.0.0.1:{PORT}");
    let status = async || {
        let seen = curl(testbed, &["-x", &proxy, "-p", "http://edge-1:9100/"]).await?;
        Ok(seen.contains("status 200"))
    };
    ensure!(!status().await?, "an empty policy permits");
    let path = write(testbed, "policy.yaml", RULE)?;
    wait_until("the rule to take effect", SOON, status, |reached| *reached).await?;

    testbed.expect_error("is not a port, a range such as");
    write(testbed, "policy.yaml", &RULE.replace("9100", "91000"))?;
    server.wait_log("keeping its last good content").await?;
    server.wait_log("rules[0].to[0].ports").await?;
    ensure!(status().await?, "a bad file took the rules away");
    server.expect_metric("postern_file_in_effect", &[("file", "policy")], 0.0).await?;
    let checked = server::run(testbed, &["policy", "check", &path.display().to_string()])?;
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    ensure!(checked.status.code() == Some(64), "policy check ended with {}", checked.status);
    ensure!(
        said.contains("line 4") && said.contains("\"91000\" is not a port"),
        "policy check said {said:?}"
    );

    // An open connection goes on with another rule, and ends with the last one that permits it.
    let _echo = target(testbed, 1, 9101, Behaviour::Echo)?;
    let both = RULE.replace("9100", "9100, 9101");
    write(testbed, "policy.yaml", &both)?;
    let mut held = wait_for("a connection by the rule", SOON, async || tunnel("edge-1:9101").await).await?;
    write(testbed, "policy.yaml", &RULE.replace("9100", "9101").replace("name: a", "name: b"))?;
    wait_until("the rule to be gone", SOON, status, |reached| !*reached).await?;
    client::echo(&mut held, b"by another rule").await?;
    write(testbed, "policy.yaml", "rules: []\n")?;
    let end = client::end_of(&mut held, SOON).await.context("without its rule")?;
    ensure!(end == client::End::Reset, "without its rule: {end:?}");
    let why = "the policy no longer permits nobody to reach this";
    server
        .wait_access("of what lost its rule", |line| {
            line.text("outcome") == "denied" && line.text("error") == why
        })
        .await?;
    let checked = server::run(testbed, &["policy", "check", &path.display().to_string()])?;
    ensure!(checked.status.success(), "policy check of a good file: {checked:?}");
    Ok(())
}

/// Starts Debian's sshd on edge 1, for root with a key.
async fn sshd(testbed: &Testbed) -> Result<(Process, PathBuf)> {
    let dir = testbed.dir().join("ssh");
    fs::create_dir_all(&dir)?;
    for name in ["host", "user"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(name));
        let made = run(keygen).await?;
        ensure!(made.status.success(), "ssh-keygen: {made:?}");
    }
    fs::create_dir_all("/run/sshd")?;
    let edge = testbed.edge(1);
    let at = |name: &str| dir.join(name).display().to_string();
    let config = format!(
        "ListenAddress {}:2222\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\nStrictModes no\n\
         PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n",
        edge.address,
        at("host"),
        at("user.pub"),
    );
    let path = dir.join("sshd_config");
    fs::write(&path, config)?;
    // sshd insists on an absolute path.
    let mut command = testbed.on_edge(1).command(Path::new("/usr/sbin/sshd"));
    command.args(["-D", "-e", "-f"]).arg(&path);
    let mut sshd = Process::spawn(testbed.dir(), "sshd", command)?;
    wait_for("sshd to listen", SOON, async || {
        ensure!(sshd.ended()?.is_none(), "sshd ended:\n{}", sshd.output()?);
        Ok(client::connect_from(&edge.ns, (edge.address, 2222).into(), Duration::from_secs(1)).await.ok())
    })
    .await?;
    Ok((sshd, dir.join("user")))
}

fn ssh(testbed: &Testbed, key: &Path, more: &[&str]) -> Command {
    let mut command = testbed.on_cloud().command(Path::new("ssh"));
    command
        .args(["-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"])
        .args(["-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "-i"])
        .arg(key)
        .args(more);
    command
}

async fn ssh_through_connect(testbed: &Testbed) -> Result<()> {
    let server = listener(testbed, POLICY)?.flag("--map=127.0.0.1:2022=edge-1/2222").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let (_sshd, key) = sshd(testbed).await?;
    let proxy = format!("ProxyCommand=nc -X connect -x 127.0.0.1:{PORT} %h %p");
    // 4 MiB from the edge and the exit code; then the same through a static map.
    let work = "head -c 4194304 /dev/zero | sha256sum; exit 7";
    let zeros = "bb9f8df61474d25e71fa00722318cd387396ca1736605e1248821cc0de3d3af8";
    for more in [
        vec!["-o", proxy.as_str(), "-p", "2222", "root@edge-1", work],
        vec!["-p", "2022", "root@127.0.0.1", work],
    ] {
        let output = run(ssh(testbed, &key, &more)).await?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.code() == Some(7) && said.starts_with(zeros), "ssh {more:?}: {output:?}");
    }
    let mut upload = ssh(testbed, &key, &["-o", &proxy, "-p", "2222", "root@edge-1", "sha256sum"]);
    let file = write(testbed, "zeros", &"\0".repeat(4 << 20))?;
    upload.stdin(fs::File::open(file)?);
    let output = run(upload).await?;
    ensure!(String::from_utf8_lossy(&output.stdout).starts_with(zeros), "an upload by ssh: {output:?}");
    let denied = run(ssh(testbed, &key, &["-o", &proxy, "-p", "22", "root@edge-1", "true"])).await?;
    ensure!(denied.status.code() == Some(255), "a port that no rule names: {denied:?}");
    for listener in ["connect", "map"] {
        let ended = |line: &postern_testbed::access_log::AccessLine| {
            line.text("listener") == listener && line.text("node") == "edge-1" && line.text("outcome") == "ok"
        };
        server.wait_access("of ssh", ended).await?;
    }
    Ok(())
}

async fn prometheus_scrapes_through_its_proxy_url(testbed: &Testbed) -> Result<()> {
    // Started before the server, whose redirect would otherwise take this process's connections to the edge too.
    let mut exporters = Vec::new();
    for n in [1, 2] {
        let mut exporter = prometheus::start_exporter(testbed, n)?;
        let edge = testbed.edge(n);
        wait_for("the node exporter to answer on its own host", SOON, async || {
            ensure!(exporter.ended()?.is_none(), "the node exporter ended:\n{}", exporter.output()?);
            Ok(client::connect_from(&edge.ns, (edge.address, 9100).into(), Duration::from_secs(1)).await.ok())
        })
        .await?;
        exporters.push(exporter);
    }
    let tokens = write(testbed, "tokens.csv", TOKENS)?;
    let server =
        listener(testbed, POLICY)?.flag(format!("--token-auth-file={}", tokens.display())).start().await?;
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let ca = testbed.dir().join("server/ca/ca.crt");
    // Names that only the server knows: neither a DNS record nor the redirect helps here.
    let configuration = format!(
        "global:\n  scrape_interval: 1s\nscrape_configs:\n\
         - job_name: secure\n  proxy_url: https://alice:alices-own-token@{CLOUD}:{PORT}\n  tls_config: {{ca_file: {}}}\n  \
         static_configs:\n  - targets: ['edge-1:9100', 'edge-2:9100']\n\
         - job_name: denied\n  proxy_url: http://bob:bobs-random-token@127.0.0.1:{PORT}\n  static_configs:\n  - targets: ['edge-1:9100']\n",
        ca.display()
    );
    let _prometheus = prometheus::start(testbed, &configuration)?;
    let up = async || {
        let series = prometheus::query("sum_over_time(up{job=\"secure\"}[1m])").await.unwrap_or_default();
        Ok(series.iter().filter(|one| one.number() >= 2.0).count())
    };
    wait_until("both edges to be up in Prometheus", 2 * SOON, up, |count| *count == 2).await?;
    for name in ["edge-1", "edge-2"] {
        let uname =
            prometheus::samples(&format!("node_uname_info{{instance=\"{name}:9100\",job=\"secure\"}}"))
                .await?;
        ensure!(
            uname.first().is_some_and(|one| one.label("nodename") == name),
            "{name} was answered by {uname:?}"
        );
    }
    let denied = async || {
        let targets = prometheus::targets().await?;
        Ok(targets.into_iter().find(|target| target.job == "denied").map(|target| target.health))
    };
    let refused = |health: &Option<String>| health.as_ref().is_some_and(|health| health.contains("403"));
    wait_until("the denied job to say so", SOON, denied, refused).await?;
    Ok(())
}

/// Reports whether a visit works; a removed listener refuses connections.
async fn reaches(address: SocketAddr) -> bool {
    visit(address).await.is_ok()
}

async fn maps_follow_their_file(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let local = "maps:\n- {listen: '127.0.0.1:3001', node: edge-1, target: 9101}\n";
    let file = write(testbed, "maps.yaml", local)?;
    let server = Builder::new(testbed)
        .flag(format!("--map={CLOUD}:3000=edge-1/127.0.0.1:9102,{NEIGHBOUR}/32"))
        .flag(format!("--maps={}", file.display()))
        .start()
        .await?;
    let first = Agent::enrol(&server, 1).await?;
    let _second = Agent::enrol(&server, 2).await?;
    let echo = |edge, port| target(testbed, edge, port, Behaviour::Echo);
    let _targets = [echo(1, 9101)?, echo(2, 9101)?, echo(2, 9102)?];
    visit(([127, 0, 0, 1], 3001).into()).await?;
    // The allow-list has the neighbour but not this host; the agent's own allow-list decides about the target.
    expect_reset((CLOUD, 3000).into()).await?;
    let allowed = client::connect_from(&neighbour, (CLOUD, 3000).into(), SOON).await;
    let end = client::end_at_once(allowed).await.context("the neighbour's connection")?;
    ensure!(end == client::End::Reset, "a port that the agent does not allow ended with {end:?}");
    server.wait_access("of the denied target", |line| line.text("outcome") == "denied").await?;

    let mut held = connect(([127, 0, 0, 1], 3001)).await?;
    client::echo(&mut held, b"before").await?;
    // One map gets another target and one is new; then the first is removed.
    let second = "maps:\n- {listen: '127.0.0.1:3001', node: edge-2, target: 9101}\n- {listen: '127.0.0.1:3002', node: edge-2, target: 9102}\n";
    write(testbed, "maps.yaml", second)?;
    let new = SocketAddr::from(([127, 0, 0, 1], 3002));
    wait_until("the new map", SOON, async || Ok(reaches(new).await), |reached| *reached).await?;
    visit(([127, 0, 0, 1], 3001).into()).await?;
    server
        .wait_access("of the map that leads elsewhere now", |line| {
            line.text("listener") == "map" && line.text("node") == "edge-2"
        })
        .await?;
    let end = client::end_of(&mut held, SOON).await.context("through the map that leads elsewhere")?;
    ensure!(end == client::End::Reset, "through the map that leads elsewhere: {end:?}");
    let mut held = connect(([127, 0, 0, 1], 3001)).await?;
    client::echo(&mut held, b"to the second").await?;
    // An invalid file, and one whose port is taken.
    write(testbed, "maps.yaml", &second.replace("target: 9101", "target: ssh"))?;
    testbed.expect_error("maps[0].target: ");
    server.wait_log("\\\"ssh\\\" is not a port of the node").await?;
    let taken = Target::start(&testbed.cloud, [127, 0, 0, 1], 3003, Behaviour::Echo)?;
    write(
        testbed,
        "maps.yaml",
        &format!("{second}- {{listen: '127.0.0.1:3003', node: edge-1, target: 9101}}\n"),
    )?;
    testbed.expect_error("maps[2].listen: cannot listen");
    server.wait_log("cannot listen on 127.0.0.1:3003").await?;
    visit(new).await?;
    visit(([127, 0, 0, 1], 3001).into()).await?;
    let in_effect = [("file", "maps")];
    server.expect_metric("postern_file_in_effect", &in_effect, 0.0).await?;
    // Once the port is free the file takes effect, without another change.
    let third = taken.address;
    drop(taken);
    server.expect_metric("postern_file_in_effect", &in_effect, 1.0).await?;
    visit(third).await?;
    // One map moves to an address that overlaps its current one, and back.
    let own = "'127.0.0.1:3001', node: edge-2";
    let wide = second.replace(own, "'0.0.0.0:3001', clients: [127.0.0.0/8], node: edge-2");
    let elsewhere = SocketAddr::from(([127, 0, 0, 2], 3001));
    for (maps, reached) in [(wide.as_str(), true), (second, false)] {
        write(testbed, "maps.yaml", maps)?;
        let reaches = async || Ok(reaches(elsewhere).await);
        wait_until("the map to have moved", SOON, reaches, |reaches| *reaches == reached).await?;
    }
    visit(([127, 0, 0, 1], 3001).into()).await?;
    client::echo(&mut held, b"the map has only moved").await?;
    write(testbed, "maps.yaml", "maps: []\n")?;
    wait_until("the maps to be gone", SOON, async || Ok(reaches(new).await), |reached| !*reached).await?;
    let end = client::end_of(&mut held, SOON).await.context("without its map")?;
    ensure!(end == client::End::Reset, "without its map: {end:?}");
    server
        .wait_access("of what lost its map", |line| {
            line.text("outcome") == "denied"
                && line.text("error").starts_with("no map leads 127.0.0.1 to 9101")
        })
        .await?;
    drop(first);
    Ok(())
}

/// The listeners of maps are handed to a successor like all others.
async fn maps_outlive_a_successor(testbed: &Testbed) -> Result<()> {
    let file = write(testbed, "maps.yaml", "maps: []\n")?;
    let policy = write(testbed, "policy.yaml", POLICY)?;
    let server = Builder::new(testbed)
        .flag("--map=127.0.0.1:3000=edge-1/9101")
        .flag(format!("--maps={}", file.display()))
        .flag(format!("--connect-port={PORT}"))
        .flag(format!("--policy={}", policy.display()))
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _target = target(testbed, 1, 9101, Behaviour::Echo)?;
    // A map added after the start.
    write(testbed, "maps.yaml", "maps:\n- {listen: '127.0.0.1:3001', node: edge-1, target: 9101}\n")?;
    let [fixed, later] = [3000, 3001].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    wait_until("the new map", SOON, async || Ok(reaches(later).await), |reached| *reached).await?;
    let successor = server.take_over().await?;
    for address in [fixed, later] {
        visit(address).await?;
    }
    let relayed = |line: &postern_testbed::access_log::AccessLine| line.text("listener") == "map";
    successor.wait_access("of a map", relayed).await?;
    Ok(())
}

//! The units of deploy/systemd, started by systemd as docs/install/systemd.md tells. It installs into /etc, /usr and
//! /var/lib of the machine that it runs on: a virtual one, which `cargo xtask test --kernel` boots for it.
#![forbid(unsafe_code)]

mod confinement;
mod guide;
mod host;
mod unit;

use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, End, PATIENCE, Pattern, echo, end_of, hold, pattern_digest, visit};
use postern_testbed::netns::Namespace;
use postern_testbed::server::Token;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, while_running};
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

use guide::{Guide, Shell, edit_flags, run, run_newer};
use unit::{LONG, expect_state, main_pid, property, systemctl, wait_logged, wait_state};

/// Maximum time of the whole test.
const LIMIT: Duration = Duration::from_secs(720);
/// Environment variable that is set where the machine is the test's own.
const WHOLE_MACHINE: &str = "POSTERN_UNITS_WHOLE_MACHINE";
/// Pause between visits: each takes one of the agent's ports for a minute.
const PACE: Duration = Duration::from_millis(20);
/// Edit of the drain timeout in the flags: longer than a connection is held here, however slow the machine is.
const DRAIN: (&str, &str) = ("--drain-timeout 30s", "--drain-timeout 2m");

const PACKAGED_UNIT: &str = "/usr/lib/systemd/system/postern-server@.service";
const OWN_UNIT: &str = "/etc/systemd/system/postern-server@.service";

const SERVER: [&str; 2] = ["postern-server@a", "postern-server@b"];
const AGENT: [&str; 2] = ["postern-agent@a", "postern-agent@b"];

fn main() -> ExitCode {
    match started() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("units: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn started() -> Result<()> {
    let init = fs::read_to_string("/proc/1/comm").context("what PID 1 is")?;
    ensure!(
        std::env::var_os(WHOLE_MACHINE).is_some() && init.trim() == "systemd",
        "only for a virtual machine of its own, whose PID 1 is systemd: `cargo xtask test --kernel 6.1`"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.context("runtime")?.block_on(async {
        let tested = timeout(LIMIT, tested()).await;
        let tested = tested.unwrap_or_else(|_| Err(anyhow::anyhow!("not finished after {LIMIT:?}")));
        if tested.is_err() {
            explain();
        }
        tested
    })
}

/// Prints the state of the units and the end of the journal.
fn explain() {
    let [a, b] = SERVER;
    let [c, d] = AGENT;
    for command in [
        &["systemctl", "--no-pager", "--lines=0", "status", a, b, c, d][..],
        &["journalctl", "--no-pager", "--lines=200"],
    ] {
        match Command::new(command[0]).args(&command[1..]).output() {
            Ok(output) => {
                let (said, errors) = (output.stdout, output.stderr);
                println!("{}{}", String::from_utf8_lossy(&said), String::from_utf8_lossy(&errors));
            }
            Err(error) => println!("{}: {error}", command[0]),
        }
    }
}

fn step(text: &str) {
    println!("units: {text}");
}

async fn tested() -> Result<()> {
    let guide = Guide::read()?;
    let edge = host::wire()?;
    let (cloud, node): (Shell<'_>, Shell<'_>) = (&|| Command::new("sh"), &|| edge.command("sh"));
    guide::lay_out()?;

    server_as_installed(guide, cloud).await.context("the server as installed")?;
    agent_as_installed(guide, node, &edge).await.context("the agent as installed")?;
    let target = Target::start(&edge, host::EDGE, 10250, Behaviour::Echo)?;
    let address = target.address;
    wait_visit(address).await?;
    checked_bytes(&edge).await.context("bytes")?;
    killed_and_back(address).await.context("a server that is killed")?;
    step("the server is upgraded");
    let logged = "took over from the previous server";
    upgraded((cloud, guide.upgrade), SERVER, logged, address).await.context("the server's upgrade")?;
    step("the agent is upgraded");
    let logged = "took over from the agent before";
    upgraded((node, guide.copy_again), AGENT, logged, address).await.context("the agent's upgrade")?;
    step("the agent is removed");
    run(node, guide.remove).await?;
    step("a server that was stopped is upgraded and removed");
    systemctl(&["stop", SERVER[1]]).await?;
    run(cloud, "dpkg --install new/*.deb").await?;
    // A program that was killed because it had not stopped in time would have failed.
    for unit in SERVER.iter().chain(&AGENT) {
        expect_state(unit, "inactive").await?;
    }
    expect_enabled(SERVER[1], true)?;
    run(cloud, "dpkg --remove postern-server").await?;
    expect_enabled(SERVER[1], false)?;
    ensure!(Path::new("/etc/postern/server.env").exists(), "a removal alone took the flags");
    run(cloud, guide.purge).await?;
    for path in [
        "/etc/postern",
        "/var/lib/postern",
        "/usr/bin/tunnel-server",
        PACKAGED_UNIT,
        "/etc/systemd/system/postern-agent@.service",
        "/sys/fs/cgroup/system.slice/system-postern\\x2dserver.slice/postern-server@b.service",
    ] {
        ensure!(!Path::new(path).exists(), "{path} is left");
    }
    host::nothing_is_left()?;
    purged_beside_a_copied_unit(guide, cloud).await.context("a purge beside a copy of the unit")?;
    purged_beside_a_program(guide, cloud).await.context("a purge beside a program of the host's own")
}

/// As `systemctl edit --full` copies it: the unit in /etc still starts the package's program, which has to end before it is
/// removed.
async fn purged_beside_a_copied_unit(guide: Guide, cloud: Shell<'_>) -> Result<()> {
    step("a package is purged whose unit was copied to /etc");
    run(cloud, guide.install).await?;
    fs::copy(PACKAGED_UNIT, OWN_UNIT).context("copying the unit")?;
    // For the test that follows.
    fs::copy("/usr/bin/tunnel-server", "/root/tunnel-server").context("copying the server")?;
    systemctl(&["daemon-reload"]).await?;
    host::write_inventory()?;
    systemctl(&["enable", "--now", SERVER[0]]).await?;
    host::wait_ready().await?;
    run(cloud, guide.purge).await?;
    expect_state(SERVER[0], "inactive").await?;
    expect_enabled(SERVER[0], false)?;
    for path in ["/etc/postern", "/var/lib/postern", "/usr/bin/tunnel-server"] {
        ensure!(!Path::new(path).exists(), "{path} is left");
    }
    host::nothing_is_left()?;
    fs::remove_file(OWN_UNIT).context("the unit that is the administrator's")?;
    systemctl(&["daemon-reload"]).await.map(drop)
}

/// `service install` of a program without a package, beside which a package comes and goes.
async fn purged_beside_a_program(guide: Guide, cloud: Shell<'_>) -> Result<()> {
    step("a package is purged beside a program of the host's own");
    let own = "/usr/local/bin/tunnel-server";
    fs::rename("/root/tunnel-server", own).context("installing the server")?;
    fs::create_dir_all("/etc/postern").context("/etc/postern")?;
    host::write_inventory()?;
    run(cloud, &format!("{own} service install --inventory /etc/postern/nodes.yaml")).await?;
    host::wait_ready().await?;
    let server = main_pid(SERVER[0]).await?;
    run(cloud, guide.install).await?;
    run(cloud, guide.purge).await?;
    expect_enabled(SERVER[0], true)?;
    ensure!(main_pid(SERVER[0]).await? == server, "the server was replaced");
    for path in ["/etc/postern/server.env", "/etc/postern/nodes.yaml", "/var/lib/postern/server", OWN_UNIT] {
        ensure!(Path::new(path).exists(), "{path} is gone, which the server of the host's own uses");
    }
    ensure!(!Path::new("/usr/bin/tunnel-server").exists(), "the package's program is left");
    run(cloud, &format!("{own} service uninstall")).await?;
    host::nothing_is_left()
}

/// Starts it with the flags of deploy/systemd: the redirect is attached to the root of the machine's cgroups.
async fn server_as_installed(guide: Guide, cloud: Shell<'_>) -> Result<()> {
    step("the server starts");
    run(cloud, guide.install).await?;
    expect_state(SERVER[0], "inactive").await.context("an installation starts nothing")?;
    expect_enabled(SERVER[0], false)?;
    edit_flags("server", &[DRAIN])?;
    host::write_inventory()?;
    run(cloud, guide.start).await?;
    host::wait_ready().await?;
    expect_enabled(SERVER[0], true)?;
    let never_gives_up = property(SERVER[0], "StartLimitIntervalUSec").await?;
    ensure!(never_gives_up == "0", "starts are limited in {never_gives_up}");
    let writable = ["/var/lib/postern/server", "/sys/fs/bpf", "/tmp", "/var/tmp"];
    confinement::expect(
        main_pid(SERVER[0]).await?,
        confinement::OF_REDIRECT,
        &writable,
        &["/var/lib/postern/agent", "/dev"],
    )?;
    ensure!(!host::pins().is_empty(), "nothing is pinned");
    let by_route = Path::new("/sys/class/net/postern0").exists();
    // Before Linux 5.14, pods are redirected at connect().
    let can = tunnel_runtime::kernel::version().context("the kernel's version")? >= (5, 14);
    ensure!(by_route == can, "a TUN device: {by_route}; does the unit permit /dev/net/tun?");
    not_direct(SocketAddr::new(host::EDGE.into(), 10250)).await?;

    // The edge is in the machine's cgroups too, and the agent's own dials must not be redirected.
    let cgroup = "--redirect-cgroup /sys/fs/cgroup/system.slice --redirect-ports";
    edit_flags("server", &[("--redirect-ports", cgroup)])?;
    systemctl(&["restart", SERVER[0]]).await?;
    host::wait_ready().await
}

/// Fails if a connect bypasses the redirect: nothing answers there. No agent is attached, so that the connect has to
/// fail, or to be reset where the kernel cannot fail it.
async fn not_direct(address: SocketAddr) -> Result<()> {
    match client::attempt(address, PATIENCE).await {
        Ok(mut stream) => {
            let end = end_of(&mut stream, PATIENCE).await?;
            ensure!(end == End::Reset, "a connection to nobody ended with {end:?}");
        }
        Err(error) => ensure!(error.kind() != ErrorKind::TimedOut, "a connect was not redirected"),
    }
    Ok(())
}

/// Starts it on the edge: in the edge's network namespace, and in no slice that is redirected.
async fn agent_as_installed(guide: Guide, node: Shell<'_>, edge: &Namespace) -> Result<()> {
    step("the agent starts");
    let dropins = Path::new("/etc/systemd/system/postern-agent@.service.d");
    fs::create_dir_all(dropins).with_context(|| format!("creating {}", dropins.display()))?;
    let here = format!("[Service]\nNetworkNamespacePath={}\nSlice=edge.slice\n", edge.path().display());
    fs::write(dropins.join("edge.conf"), here).context("writing the agent's place")?;

    let mut create = tokio::process::Command::new("tunnel-server");
    create.args(["token", "create", "--node", host::NODE, "-o", "json"]);
    let token = unit::output(create).await?;
    let token: Token = serde_json::from_str(&token).with_context(|| format!("the token {token:?}"))?;
    run(node, guide.copy).await?;
    let install = format!(
        "tunnel-agent service install --server {}:10262 {} --node-name {} --ca-hash {} --token",
        host::CLOUD,
        DRAIN.1,
        host::NODE,
        token.ca_hash
    );
    let said = run(node, &format!("{install} {}", token.token)).await?;
    ensure!(said.contains("wrote /etc/postern/token (mode 600)"), "service install said {said}");
    expect_enabled(AGENT[0], true)?;
    let writable = ["/var/lib/postern/agent", "/tmp", "/var/tmp"];
    confinement::expect(main_pid(AGENT[0]).await?, 0, &writable, &["/var/lib/postern/server", "/sys/fs/bpf"])
}

async fn wait_visit(address: SocketAddr) -> Result<()> {
    wait_for("a visit that succeeds", LONG, async || Ok(visit(address).await.ok())).await.map(drop)
}

/// Checks bytes in both directions.
async fn checked_bytes(edge: &Namespace) -> Result<()> {
    let length = 3_000_000;
    let source = Target::start(edge, host::EDGE, 10255, Behaviour::Source(7, length))?;
    let mut stream = client::connect(source.address).await?;
    let got = client::digest(&mut stream).await?;
    ensure!(got == (length, pattern_digest(7, length)), "from the edge: {got:?}");
    stream.shutdown().await.context("closing")?;

    let sink = Target::start(edge, host::EDGE, 9100, Behaviour::Sink)?;
    let mut stream = client::connect(sink.address).await?;
    let mut pattern = Pattern::new(8, length);
    pattern.write_to(&mut stream).await?;
    stream.shutdown().await.context("closing")?;
    let got = client::text(&mut stream, "the sink has not answered").await?;
    ensure!(got == format!("{length} {}", pattern.digest()), "to the edge: {got}");
    Ok(())
}

/// Kills the server: systemd starts it again, and until then no connect bypasses it.
async fn killed_and_back(address: SocketAddr) -> Result<()> {
    step("the server is killed");
    systemctl(&["kill", "--signal=KILL", SERVER[0]]).await?;
    let back = async || {
        let connected = client::attempt(address, PATIENCE).await;
        let direct = connected.is_err_and(|error| error.kind() == ErrorKind::TimedOut);
        ensure!(!direct, "a connect went past a server that was killed");
        let restarts = property(SERVER[0], "NRestarts").await?;
        anyhow::Ok((restarts == "1").then_some(()))
    };
    wait_for("systemd to start the server again", LONG, back).await?;
    wait_visit(address).await
}

/// The second instance takes over under load; the first one keeps its connections, and ends with them.
async fn upgraded(
    (shell, commands): (Shell<'_>, &str),
    [first, second]: [&'static str; 2],
    logged: &str,
    address: SocketAddr,
) -> Result<()> {
    let mut held = hold(address, b"before").await?;
    let work = async {
        run_newer(shell, commands).await?;
        wait_logged(second, logged).await?;
        echo(&mut held, b"after").await.context("on the connection held")?;
        expect_state(first, "active").await.context("with a connection open")?;
        held.shutdown().await.context("closing")?;
        let end = end_of(&mut held, PATIENCE).await?;
        ensure!(end == End::Eof(0), "the connection held ended with {end:?}");
        wait_state(first, "inactive").await?;
        expect_state(second, "active").await
    };
    let visits = visited(address, work).await?;
    step(&format!("{visits} visits meanwhile"));
    expect_enabled(first, false)?;
    expect_enabled(second, true)
}

/// Makes visits one after the other while `work` runs; returns their number, or an error if one fails.
async fn visited(address: SocketAddr, work: impl Future<Output = Result<()>>) -> Result<u32> {
    let visits = async |done: &Cell<bool>| {
        let mut count = 0;
        while !done.get() {
            count += 1;
            visit(address).await.with_context(|| format!("visit {count}"))?;
            tokio::time::sleep(PACE).await;
        }
        Ok(count)
    };
    let ((), count): ((), u32) = while_running(work, visits).await?;
    Ok(count)
}

/// Checks if the unit starts with the machine.
fn expect_enabled(unit: &str, expected: bool) -> Result<()> {
    let link = Path::new("/etc/systemd/system/multi-user.target.wants").join(format!("{unit}.service"));
    ensure!(
        link.is_symlink() == expected,
        "{} is {}there",
        link.display(),
        if expected { "not " } else { "" }
    );
    Ok(())
}

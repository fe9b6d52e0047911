use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MsFlags, mount};
use postern_testbed::authority::Authority;
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::process::program;
use postern_testbed::server::Builder;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed, agent, maps, server};

use super::{Said, run};
use crate::common::server_and_agent;

scenarios! {
    a_healthy_server_is_fine(quick),
    what_others_take_from_the_kernel_is_found,
    a_failed_self_test_is_found(waits),
    programs_that_are_not_pinned_are_found,
    what_a_killed_server_leaves_is_found,
    damaged_files_are_found,
    a_host_that_cannot_redirect_is_found,
    a_pod_without_a_memory_limit_is_told(quick),
}

/// Runs `tunnel-server doctor` on the cloud host.
pub(super) async fn doctor(testbed: &Testbed, args: &[&str]) -> Result<Said> {
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]).args(args);
    run(command).await
}

/// As [`doctor`], without the programs that show rules, as in the image.
pub(super) async fn without_tools(testbed: &Testbed, args: &[&str]) -> Result<Said> {
    let mut command = testbed.on_cloud().command(Path::new("env"));
    command.arg("PATH=/nowhere").arg(program("tunnel-server")?).args(["doctor", "-o", "json"]).args(args);
    run(command).await
}

/// Returns the flags of a server that does not run.
fn flags(testbed: &Testbed) -> Vec<String> {
    vec![
        format!("--inventory={}", testbed.dir().join("nodes.yaml").display()),
        format!("--state-dir={}", testbed.dir().join("server").display()),
        format!("--redirect-cgroup={}", testbed.cloud_cgroup.path().display()),
        format!("--bpffs={}", testbed.bpffs().display()),
    ]
}

/// Runs the doctor of a server that does not run, with more flags.
async fn without_server(testbed: &Testbed, more: &[&str]) -> Result<Said> {
    let flags = flags(testbed);
    let replaced = |flag: &&String| {
        let name = flag.split('=').next().unwrap_or_default();
        !more.iter().any(|other| other.split('=').next() == Some(name))
    };
    let mut args: Vec<&str> = flags.iter().filter(replaced).map(String::as_str).collect();
    args.extend(more);
    doctor(testbed, &args).await
}

async fn a_healthy_server_is_fine(testbed: &Testbed) -> Result<()> {
    // With an agent: `pods` connects to an edge node by route.
    let (server, agent) = server_and_agent(testbed).await?;
    // The running server reports its own flags: its state directory is not the default one.
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&[])?;
    ensure!(said.exit == 0, "{:#}", said.report);
    for check in [
        "running",
        "ready",
        "limits",
        "kernel",
        "cgroup",
        "sk_lookup",
        "redirect route",
        "self-test",
        "pins",
        "arrivals",
        "conntrack",
        "rules",
        "pods",
        "listeners",
        "state directory",
        "CA",
        "server certificate",
        "inventory",
    ] {
        ensure!(said.state(check)? == "ok", "{check}: {:#}", said.report);
    }
    let text = server::run(testbed, &["doctor"])?;
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    ensure!(text.contains("ok       self-test") && text.contains(" 0 broken"), "{text}");
    drop((server, agent));
    Ok(())
}

/// Waits until there are no findings. The self-test may have met the rules, and is repeated only within 30 s.
pub(super) async fn fine_again(testbed: &Testbed) -> Result<()> {
    let said = async || Ok([doctor(testbed, &[]).await?, without_tools(testbed, &[]).await?]);
    let fine = |said: &[Said; 2]| said.iter().all(|said| said.codes().is_empty());
    wait_until("nothing to be wrong", Duration::from_secs(60), said, fine).await.map(drop)
}

async fn what_others_take_from_the_kernel_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    // Only if the self-test runs while the route is another program's.
    testbed.allow_error("redirect verification failed");
    // The server restores a lost route at once, but not one that another program has taken.
    testbed.cloud.ip("route replace unreachable 198.18.0.0/15 table local")?;
    let said = doctor(testbed, &[]).await?;
    said.expect("redirect-route-missing", "no route `local 198.18.0.0/15 dev lo`")?;
    said.expect("redirect-range-used", "the route 198.18.0.0/15 in the table local")?;
    server.wait_log("redirect range is in use").await?;
    testbed.cloud.ip("route del unreachable 198.18.0.0/15 table local")?;
    // No room for a further node.
    testbed.expect_error("map ROUTES_V4: `bpf_map_update_elem` failed: No space left on device");
    maps::fill_routes(server.process.pid())?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("edge-7", true, &["192.168.57.2".parse()?], &[]));
    inventory.write()?;
    let said = async || doctor(testbed, &[]).await;
    // The doctor asks whether the server is ready before it asks about the maps; the maps may become stale in between.
    let stale = |said: &Said| said.has("maps-not-current") && said.has("not-ready");
    let said = wait_until("the full map to be found", agent::START, said, stale).await?;
    said.expect("maps-not-current", "ROUTES_V4")?;
    said.expect("not-ready", "the kernel's routes are not current")?;
    drop(server);
    Ok(())
}

async fn a_failed_self_test_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    testbed.expect_error("did not reach the listener");
    testbed.cloud.iptables("-I INPUT -i lo -d 198.18.0.0/15 -p tcp -j DROP")?;
    let degraded = async || Ok(server.status().await?["redirect"]["state"] == "degraded");
    wait_until("the self-test to fail", Duration::from_secs(60), degraded, |degraded| *degraded).await?;
    doctor(testbed, &[]).await?.expect("redirect-degraded", "did not reach the listener")
}

async fn programs_that_are_not_pinned_are_found(testbed: &Testbed) -> Result<()> {
    // As in a unit or container without write access there.
    let bpffs = testbed.bpffs();
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(None::<&str>, &bpffs, None::<&str>, read_only, None::<&str>)
        .with_context(|| format!("remounting {}", bpffs.display()))?;
    let server = Builder::new(testbed).start().await?;
    let said = doctor(testbed, &[]).await?;
    said.expect("not-pinned", "mounted read-only")?;
    said.expect_only(&["not-pinned"])?;
    ensure!(said.exit == 1, "{:#}", said.report);
    drop(server);
    Ok(())
}

async fn what_a_killed_server_leaves_is_found(testbed: &Testbed) -> Result<()> {
    let mut server = Builder::new(testbed).start().await?;
    server.process.crash().await?;
    let said = without_server(testbed, &[]).await?;
    said.expect("not-running", "Connection refused")?;
    said.expect("programs-left-behind", "postern")?;
    ensure!(
        said.state("self-test")? == "skipped" && said.state("redirect route")? == "skipped",
        "{:#}",
        said.report
    );
    let other = TcpListener::bind((CLOUD, 10262)).context("another program")?;
    without_server(testbed, &[]).await?.expect("port-taken", "10262")?;
    drop(other);
    let bpffs = format!("--bpffs={}", testbed.bpffs().display());
    ensure!(server::run(testbed, &["cleanup", &bpffs])?.status.success(), "cleanup");
    without_server(testbed, &[]).await?.expect_only(&["not-running"])
}

async fn damaged_files_are_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    let state = testbed.dir().join("server");
    let keys_have = |mode: u32| {
        for entry in fs::read_dir(state.join("ca"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "key") {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            }
        }
        anyhow::Ok(())
    };
    keys_have(0o644)?;
    doctor(testbed, &[]).await?.expect("key-readable-by-others", "0644")?;
    keys_have(0o600)?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("edge-8", true, &[testbed.edge(1).ip()], &[]));
    inventory.write()?;
    let said = async || doctor(testbed, &[]).await;
    let conflict = |said: &Said| said.has("inventory-conflict");
    let said = wait_until("the shared address to be found", agent::START, said, conflict).await?;
    said.expect("inventory-conflict", "edge-8")?;
    testbed.expect_error("items: expected sequence start");
    fs::write(testbed.dir().join("nodes.yaml"), "kind: NodeList\nitems: 7\n")?;
    let refused = async || Ok(!server.status().await?["inventory"]["last_error"].is_null());
    wait_until("the file to be refused", agent::START, refused, |refused| *refused).await?;
    doctor(testbed, &[]).await?.expect("inventory-unusable", "items")?;
    // Ten years after its creation, less a month.
    let (now, month) = (SystemTime::now(), Duration::from_secs(30 * 86_400));
    let root = Authority::open(&state)?.root(now - 120 * month..now + month)?;
    fs::write(state.join("ca/ca.crt"), root)?;
    doctor(testbed, &[]).await?.expect("ca-expires", "in 90 days: expired")?;
    // The server reads it every few seconds.
    testbed.allow_error("ca.crt: trust bundle: it has no certificate");
    fs::write(state.join("ca/ca.crt"), "nothing")?;
    let said = doctor(testbed, &[]).await?;
    said.expect("ca-unusable", "ca.crt")?;
    ensure!(said.state("server certificate")? == "skipped", "{:#}", said.report);
    Ok(())
}

async fn a_host_that_cannot_redirect_is_found(testbed: &Testbed) -> Result<()> {
    Inventory::of(testbed)?;
    without_server(testbed, &["--redirect-ports="]).await?.expect_only(&["bad-flags"])?;
    without_server(testbed, &["--edge-selector=nobody=has"]).await?.expect("no-edge-nodes", "none of")?;
    let cgroup = format!("--redirect-cgroup={}", testbed.dir().display());
    without_server(testbed, &[&cgroup]).await?.expect("cgroup-unusable", "not on a cgroup v2 file system")?;
    let file = testbed.dir().join("nodes.yaml");
    let state = format!("--state-dir={}", file.display());
    without_server(testbed, &[&state]).await?.expect("state-directory-unusable", "not a directory")?;
    let peers = without_server(testbed, &["--peers=tunnel.invalid:10262"]).await?;
    peers.expect("name-does-not-resolve", "tunnel.invalid")?;
    let kubeconfig = format!("--kubeconfig={}", file.display());
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    command.args(["doctor", "-o", "json", "--redirect=off"]).arg(kubeconfig);
    run(command).await?.expect("api-server-unreachable", "--kubeconfig=")?;
    // With the capabilities of a user namespace only, as in a rootless container.
    let mut command = testbed.on_cloud().command(Path::new("unshare"));
    command.args(["--user", "--map-root-user"]).arg(program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]).args(flags(testbed));
    run(command).await?.expect("kernel-lacks-feature", "EPERM at loading a program")?;
    // Without the required capabilities.
    let mut command = testbed.on_cloud().command(Path::new("setpriv"));
    command.args(["--bounding-set=-all", "--inh-caps=-all"]).arg(program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]).args(flags(testbed));
    let said = run(command).await?;
    said.expect("capability-missing", "CAP_BPF")?;
    ensure!(said.state("sk_lookup")? == "skipped", "{:#}", said.report);
    Ok(())
}

/// Outside of a pod a missing memory limit causes no warning.
async fn a_pod_without_a_memory_limit_is_told(testbed: &Testbed) -> Result<()> {
    let unlimited = testbed.limit_on_cloud("unlimited", i64::MAX.unsigned_abs())?;
    let server =
        Builder::new(testbed).memory(&unlimited).env("KUBERNETES_SERVICE_HOST", "10.96.0.1").start().await?;
    let log = server.settled_log().await?;
    ensure!(log.contains("no memory limit found for this pod"), "{log}");
    doctor(testbed, &[]).await?.expect_only(&[])?;
    let mut in_pod = testbed.on_cloud().command(&program("tunnel-server")?);
    in_pod.args(["doctor", "-o", "json"]).env("KUBERNETES_SERVICE_HOST", "10.96.0.1");
    let said = run(in_pod).await?;
    said.expect("memory-limit-unseen", "(/proc/meminfo)")
}

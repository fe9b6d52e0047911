use std::collections::BTreeSet;
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
use serde_json::Value;

use super::{Said, findings, run};

scenarios! {
    a_healthy_server_is_fine(quick),
    rules_of_other_programs_are_named(quick, limit = 180),
    what_others_take_from_the_kernel_is_found,
    a_failed_self_test_is_found,
    a_port_that_another_program_takes_is_found(limit = 150),
    closed_listeners_are_found,
    programs_that_are_not_pinned_are_found,
    what_a_killed_server_leaves_is_found,
    damaged_files_are_found,
    a_host_that_cannot_redirect_is_found,
    a_pod_without_a_memory_limit_is_told(quick),
}

/// `tunnel-server doctor` on the cloud host.
async fn doctor(testbed: &Testbed, args: &[&str]) -> Result<Said> {
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]).args(args);
    run(command).await
}

/// The same without the programs that show rules, as in the image: the kernel itself is asked.
async fn without_tools(testbed: &Testbed) -> Result<Said> {
    let mut command = testbed.on_cloud().command(Path::new("env"));
    command.arg("PATH=/nowhere").arg(program("tunnel-server")?).args(["doctor", "-o", "json"]);
    run(command).await
}

/// The flags of a server that does not run.
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
    let server = Builder::new(testbed).start().await?;
    // The server says its own flags: its state directory is not the default one.
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
        "token route",
        "maps",
        "self-test",
        "pins",
        "rules",
        "firewall",
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
    drop(server);
    Ok(())
}

async fn rules_of_other_programs_are_named(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    let rules = |rules: &[&str]| rules.iter().try_for_each(|rule| testbed.cloud.iptables(rule));
    let named = async |expected: &[(&'static str, &str)]| {
        for said in [doctor(testbed, &[]).await?, without_tools(testbed).await?] {
            expected.iter().try_for_each(|&(code, found)| said.expect(code, found))?;
            ensure!(said.exit == 2, "{:#}", said.report);
        }
        anyhow::Ok(())
    };
    // YurtTunnel's, as it writes them.
    rules(&[
        "-t nat -N TUNNEL-PORT",
        "-t nat -N TUNNEL-PORT-10250",
        "-t nat -A OUTPUT -p tcp -j TUNNEL-PORT",
        "-t nat -A TUNNEL-PORT -p tcp --dport 10250 -j TUNNEL-PORT-10250",
        "-t nat -A TUNNEL-PORT-10250 -d 127.0.0.1/32 -j RETURN",
        "-t nat -A TUNNEL-PORT-10250 -p tcp -j DNAT --to-destination 10.70.0.1:10263",
    ])?;
    named(&[("yurttunnel-rules", "chain TUNNEL-PORT-10250, takes port 10250")]).await?;
    // CloudCore's.
    rules(&[
        "-t nat -F TUNNEL-PORT-10250",
        "-t nat -F TUNNEL-PORT",
        "-t nat -A TUNNEL-PORT -p tcp --dport 9100 -j DNAT --to-destination 10.70.0.1:10003",
    ])?;
    named(&[("kubeedge-rules", "takes port 9100")]).await?;
    // A NodePort of kube-proxy's, and hostPorts.
    rules(&[
        "-t nat -F TUNNEL-PORT",
        "-t nat -N KUBE-NODEPORTS",
        "-t nat -A OUTPUT -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
        "-t nat -A KUBE-NODEPORTS -p tcp --dport 10255 -j DNAT --to-destination 10.71.0.9:80",
        "-t nat -N CNI-HOSTPORT-DNAT",
        "-t nat -A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
        "-t nat -A CNI-HOSTPORT-DNAT ! -d 10.0.0.0/9 -p tcp -m multiport --dports 80,9101:9102 -j DNAT --to-destination 10.71.0.9",
        "-t nat -A CNI-HOSTPORT-DNAT -d 10.0.0.0/9 -p tcp --dport 9103 -j DNAT --to-destination 10.71.0.9",
        "-t nat -A CNI-HOSTPORT-DNAT -p udp --dport 9104 -j DNAT --to-destination 10.71.0.9",
    ])?;
    named(&[("kube-proxy-rules", "takes port 10255"), ("foreign-rules", "takes port 9101,9102: ")]).await?;
    // As it is done for what only another program can read.
    let saved = testbed.dir().join("rules");
    fs::write(&saved, testbed.cloud.output("iptables-save", "")?)?;
    rules(&["-t nat -F OUTPUT"])?;
    let from_file = format!("--rules={}", saved.display());
    doctor(testbed, &[&from_file]).await?.expect("foreign-rules", "9101")?;
    fine_again(testbed).await?;
    native_rules(testbed).await?;
    drop(server);
    Ok(())
}

/// Waits until nothing is found. The self-test may have met the rules, and is repeated within 30 s.
async fn fine_again(testbed: &Testbed) -> Result<()> {
    let said = async || Ok([doctor(testbed, &[]).await?, without_tools(testbed).await?]);
    let fine = |said: &[Said; 2]| said.iter().all(|said| said.codes().is_empty());
    wait_until("nothing to be wrong", Duration::from_secs(60), said, fine).await.map(drop)
}

/// kube-proxy's of its mode nftables, a firewall, and what else nft can say. None of it is for 9104 and 9105.
const NATIVE: &str = r#"
table ip kube-proxy {
    set not-nodeports { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, 172.16.0.5-172.16.0.9 } }
    map service-nodeports {
        type inet_proto . inet_service : verdict
        elements = { tcp . 9102 : goto external-WEB, udp . 9104 : goto external-WEB, tcp . 30443 : goto external-WEB }
    }
    map of-networks {
        type ipv4_addr . inet_service : verdict; flags interval
        elements = { 198.18.0.0/15 . 9103 : jump external-WEB, 10.0.0.0/8 . 9104-9105 : jump external-WEB }
    }
    chain nat-output { type nat hook output priority -100; policy accept; jump services; }
    chain services {
        ip daddr @not-nodeports return
        ip daddr != 127.0.0.0/8 fib daddr type local meta l4proto . th dport vmap @service-nodeports
        ip daddr . tcp dport vmap @of-networks
        tcp dport vmap { 9105 : return, 9104 : return, 80-90 : goto external-WEB }
        tcp dport != { 1-9099, 9101-65535 } counter redirect to :1
        ip daddr != 127.0.0.0/8 tcp dport >= 10255 tcp sport 1-65535 dnat to 10.71.0.9
    }
    chain external-WEB { meta l4proto tcp dnat to 10.71.0.9:80; }
}
table inet filter {
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established,related accept
        ct state vmap { invalid : drop, established : accept }
        ct status dnat accept
        iif lo accept
        tcp dport { 22, 10000-10200 } accept
        ip saddr 10.70.0.0/25 tcp dport 22 accept
        udp dport 10262 accept
        meta nfproto ipv6 tcp dport 10000-10261 accept
        tcp dport 10263-10268 accept
    }
}
"#;

/// The kernel's own expressions are read as nft prints them.
async fn native_rules(testbed: &Testbed) -> Result<()> {
    let file = testbed.dir().join("native.nft");
    fs::write(&file, NATIVE)?;
    testbed.cloud.output("nft", &format!("-f {}", file.display()))?;
    let (by_tools, by_kernel) = (doctor(testbed, &[]).await?, without_tools(testbed).await?);
    let of = |said: &Said| {
        let ours = |finding: &&Value| {
            ["kube-proxy-rules", "foreign-rules", "agent-port-filtered"]
                .map(Value::from)
                .contains(&finding["code"])
        };
        let found = findings(&said.report).filter(ours).filter_map(|finding| finding["found"].as_str());
        // Without the rule, which they word in their own ways.
        let found = found.map(|found| found.split(": ").next().unwrap_or_default().to_owned());
        found.collect::<BTreeSet<String>>()
    };
    let table = |what: &str| format!("table ip kube-proxy, chain {what}");
    let expected = BTreeSet::from([
        table("external-WEB, takes port 9102"),
        table("external-WEB, takes port 9103"),
        table("services, takes port 9100"),
        table("services, takes port 10255"),
        "table inet filter, chain input".to_owned(),
    ]);
    for said in [&by_tools, &by_kernel] {
        ensure!(of(said) == expected, "not {expected:?}: {:#}", said.report);
    }
    testbed.cloud.output("nft", "add rule inet filter input tcp dport 10262 accept")?;
    testbed.cloud.output("nft", "delete table ip kube-proxy")?;
    fine_again(testbed).await?;
    testbed.cloud.output("nft", "delete table inet filter").map(drop)
}

async fn what_others_take_from_the_kernel_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    // The server restores one that is lost at once, but not one that another has taken.
    testbed.cloud.ip("route replace unreachable 198.18.0.0/15 table local")?;
    let said = doctor(testbed, &[]).await?;
    said.expect("token-route-missing", "no route `local 198.18.0.0/15 dev lo`")?;
    said.expect("token-range-used", "the route 198.18.0.0/15 in the table local")?;
    server.wait_log("a token range is in use").await?;
    testbed.cloud.ip("route del unreachable 198.18.0.0/15 table local")?;
    // No room for a node that comes now.
    maps::fill_routes(server.process.pid())?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("edge-7", true, &["192.168.57.2".parse()?], &[]));
    inventory.write()?;
    let said = async || doctor(testbed, &[]).await;
    // The doctor asks whether the server is ready before it asks about the maps, which may fail in between.
    let stale = |said: &Said| said.has("maps-not-current") && said.has("not-ready");
    let said = wait_until("the full map to be found", agent::START, said, stale).await?;
    said.expect("maps-not-current", "ROUTES_V4")?;
    said.expect("not-ready", "the kernel's routes are not current")?;
    drop(server);
    Ok(())
}

async fn a_failed_self_test_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    testbed.cloud.iptables("-I INPUT -i lo -d 198.18.0.0/15 -p tcp -j DROP")?;
    let degraded = async || Ok(server.status().await?["redirect"]["state"] == "degraded");
    wait_until("the self-test to fail", Duration::from_secs(60), degraded, |degraded| *degraded).await?;
    doctor(testbed, &[]).await?.expect("redirect-degraded", "did not reach the listener")
}

async fn a_port_that_another_program_takes_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).ports("9100,9200").start().await?;
    testbed.cloud.iptables("-t nat -A OUTPUT -p tcp --dport 9200 -j REDIRECT --to-ports 9999")?;
    doctor(testbed, &[]).await?.expect("foreign-rules", "takes port 9200")?;
    // Each verification takes the next port.
    let degraded = async || Ok(server.status().await?["redirect"]["state"] == "degraded");
    wait_until("the self-test of the port to fail", Duration::from_secs(100), degraded, |degraded| *degraded)
        .await?;
    doctor(testbed, &[]).await?.expect("redirect-degraded", ":9200 did not reach the listener")
}

async fn closed_listeners_are_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    testbed.cloud.iptables("-I INPUT -p tcp --dport 10263 -j REJECT --reject-with tcp-reset")?;
    doctor(testbed, &[]).await?.expect("listener-silent", ":10263")?;
    testbed.cloud.iptables("-F INPUT")?;
    testbed.cloud.iptables("-A INPUT -i lo -j ACCEPT")?;
    testbed.cloud.iptables("-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT")?;
    testbed.cloud.iptables("-A INPUT -p tcp --dport 22 -j ACCEPT")?;
    testbed.cloud.iptables("-P INPUT DROP")?;
    doctor(testbed, &[]).await?.expect("agent-port-filtered", "policy DROP")?;
    without_tools(testbed).await?.expect("agent-port-filtered", "policy DROP")?;
    testbed.cloud.iptables("-A INPUT -p tcp --dport 10262 -j ACCEPT")?;
    fine_again(testbed).await?;
    drop(server);
    Ok(())
}

async fn programs_that_are_not_pinned_are_found(testbed: &Testbed) -> Result<()> {
    // As it is in a unit or container that may not write there.
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
        said.state("self-test")? == "skipped" && said.state("token route")? == "skipped",
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
    fs::write(testbed.dir().join("nodes.yaml"), "kind: NodeList\nitems: 7\n")?;
    let refused = async || Ok(!server.status().await?["inventory"]["last_error"].is_null());
    wait_until("the file to be refused", agent::START, refused, |refused| *refused).await?;
    doctor(testbed, &[]).await?.expect("inventory-unusable", "items")?;
    // Ten years after it was made, less a month.
    let (now, month) = (SystemTime::now(), Duration::from_secs(30 * 86_400));
    let root = Authority::open(&state)?.root(now - 120 * month..now + month)?;
    fs::write(state.join("ca/ca.crt"), root)?;
    doctor(testbed, &[]).await?.expect("ca-expires", "in 90 days: expired")?;
    fs::write(state.join("ca/ca.crt"), "nothing")?;
    let said = doctor(testbed, &[]).await?;
    said.expect("ca-unusable", "ca.crt")?;
    ensure!(said.state("server certificate")? == "skipped", "{:#}", said.report);
    Ok(())
}

async fn a_host_that_cannot_redirect_is_found(testbed: &Testbed) -> Result<()> {
    Inventory::of(testbed)?;
    without_server(testbed, &["--redirect-ports=x"]).await?.expect_only(&["bad-flags"])?;
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
    // Its capabilities are those of a user namespace, as in a rootless container.
    let mut command = testbed.on_cloud().command(Path::new("unshare"));
    command.args(["--user", "--map-root-user"]).arg(program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]).args(flags(testbed));
    run(command).await?.expect("kernel-lacks-feature", "EPERM at loading a program")?;
    // Without its capabilities.
    let mut command = testbed.on_cloud().command(Path::new("setpriv"));
    command.args(["--bounding-set=-all", "--inh-caps=-all"]).arg(program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]).args(flags(testbed));
    let said = run(command).await?;
    said.expect("capability-missing", "CAP_BPF")?;
    ensure!(said.state("sk_lookup")? == "skipped", "{:#}", said.report);
    Ok(())
}

/// Outside of a pod it is nothing to warn of.
async fn a_pod_without_a_memory_limit_is_told(testbed: &Testbed) -> Result<()> {
    let unlimited = testbed.limit_on_cloud("unlimited", i64::MAX.unsigned_abs())?;
    let server =
        Builder::new(testbed).memory(&unlimited).env("KUBERNETES_SERVICE_HOST", "10.96.0.1").start().await?;
    let log = server.process.output()?;
    ensure!(log.contains("this pod's memory limit was not found"), "{log}");
    doctor(testbed, &[]).await?.expect_only(&[])?;
    let mut in_pod = testbed.on_cloud().command(&program("tunnel-server")?);
    in_pod.args(["doctor", "-o", "json"]).env("KUBERNETES_SERVICE_HOST", "10.96.0.1");
    let said = run(in_pod).await?;
    said.expect("memory-limit-unseen", "(/proc/meminfo)")
}

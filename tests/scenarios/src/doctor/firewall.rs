//! Foreign firewall rules in the way of redirected connections: `tunnel-server doctor` tries the path, and names the
//! rule.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::client::{connect_from, visit};
use postern_testbed::netns::Namespace;
use postern_testbed::process::program;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;

use super::server::{doctor, fine_again, without_tools};
use super::{Said, findings};
use crate::common::target;

scenarios! {
    rules_of_other_programs_are_named(quick, limit = 180),
    a_port_that_another_program_takes_is_found(waits, limit = 150),
    a_closed_listener_is_found,
    pods_that_input_drops(quick),
    a_full_conntrack_table,
    a_policy_that_drops_tokens,
    pods_by_route_that_input_drops,
}

/// Timeout of a client whose packets are dropped.
const DROPPED: Duration = Duration::from_secs(2);
const MOMENT: Duration = Duration::from_secs(20);

/// Returns the command that fixes the finding.
fn fix<'a>(said: &'a Said, code: &str) -> Result<&'a str> {
    let finding = findings(&said.report).find(|finding| finding["code"] == code);
    finding
        .and_then(|finding| finding["fix"].as_str())
        .with_context(|| format!("no {code}: {:#}", said.report))
}

/// Like ufw and firewalld: connections of this host and of agents pass, those of its pods do not.
const FIREWALL: [&str; 4] = [
    "-A INPUT -i lo -j ACCEPT",
    "-A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    "-A INPUT -p tcp --dport 10262 -j ACCEPT",
    "-P INPUT DROP",
];

fn run_rules(testbed: &Testbed, rules: &[&str]) -> Result<()> {
    rules.iter().try_for_each(|rule| testbed.cloud.iptables(rule))
}

async fn rules_of_other_programs_are_named(testbed: &Testbed) -> Result<()> {
    // The rules are about virtual addresses, also those for pods.
    let server = Builder::new(testbed).flag("--redirect-pods=connect").start().await?;
    let rules = |rules: &[&str]| run_rules(testbed, rules);
    let named = async |expected: &[(&'static str, &str)]| {
        let said = doctor(testbed, &[]).await?;
        expected.iter().try_for_each(|&(code, found)| said.expect(code, found))?;
        ensure!(said.exit == 2, "{:#}", said.report);
        anyhow::Ok(())
    };
    // The self-test, every 30 s, may meet the rules.
    testbed.allow_error("did not reach the listener");
    // Rules as YurtTunnel writes them.
    rules(&[
        "-t nat -N TUNNEL-PORT",
        "-t nat -N TUNNEL-PORT-10250",
        "-t nat -A OUTPUT -p tcp -j TUNNEL-PORT",
        "-t nat -A TUNNEL-PORT -p tcp --dport 10250 -j TUNNEL-PORT-10250",
        "-t nat -A TUNNEL-PORT-10250 -d 127.0.0.1/32 -j RETURN",
        "-t nat -A TUNNEL-PORT-10250 -p tcp -j DNAT --to-destination 10.70.0.1:10263",
    ])?;
    named(&[("yurttunnel-rules", "chain TUNNEL-PORT: -A TUNNEL-PORT -p tcp -m tcp --dport 10250")]).await?;
    // CloudCore's rules.
    rules(&[
        "-t nat -F TUNNEL-PORT-10250",
        "-t nat -F TUNNEL-PORT",
        "-t nat -A TUNNEL-PORT -p tcp --dport 9100 -j DNAT --to-destination 10.70.0.1:10003",
    ])?;
    named(&[(
        "kubeedge-rules",
        "suspects: table ip nat, chain TUNNEL-PORT: -A TUNNEL-PORT -p tcp -m tcp --dport 9100",
    )])
    .await?;
    // A NodePort of kube-proxy, and hostPorts.
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
    let node_port =
        "suspects: table ip nat, chain KUBE-NODEPORTS: -A KUBE-NODEPORTS -p tcp -m tcp --dport 10255 -j DNAT";
    let host_port = "suspects: table ip nat, chain CNI-HOSTPORT-DNAT: -A CNI-HOSTPORT-DNAT ! -d 10.0.0.0/9 ";
    let ports = "port 9101,9102 of the virtual addresses";
    named(&[("kube-proxy-rules", node_port), ("foreign-rules", host_port), ("foreign-rules", ports)]).await?;
    // Without the tools the ports are found; a file with the tools' output has the rules.
    let said = without_tools(testbed, &[]).await?;
    said.expect("foreign-rules", "port 9101,9102,10255 of the virtual addresses")?;
    let saved = testbed.dir().join("rules");
    fs::write(&saved, testbed.cloud.output("iptables-save", "")?)?;
    let from_file = format!("--rules={}", saved.display());
    let said = without_tools(testbed, &[&from_file]).await?;
    said.expect("kube-proxy-rules", node_port)?;
    // Rules in chains for pods only: only a connection from a pod meets them.
    rules(&["-t nat -F OUTPUT", "-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT"])?;
    let said = doctor(testbed, &[]).await?;
    said.expect("foreign-rules", "port 9101,9102 of the virtual addresses, from a pod of ")?;
    said.expect("foreign-rules", "suspects: table ip nat, chain CNI-HOSTPORT-DNAT: ")?;
    ensure!(said.state("rules")? == "ok", "{:#}", said.report);
    let commands = fix(&said, "foreign-rules")?.split('`').nth(1).context("no command")?;
    let commands: Vec<&str> =
        commands.split(" && ").map(|line| line.trim_start_matches("iptables ")).collect();
    rules(&commands)?;
    fine_again(testbed).await?;
    rules(&["-t nat -F PREROUTING", "-t nat -F OUTPUT"])?;
    native_rules(testbed).await?;
    drop(server);
    Ok(())
}

/// Rules of kube-proxy in nftables mode, of a firewall, and other forms of nft's syntax. None of them matches 9104 and
/// 9105.
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

async fn native_rules(testbed: &Testbed) -> Result<()> {
    let file = testbed.dir().join("native.nft");
    fs::write(&file, NATIVE)?;
    testbed.cloud.output("nft", &format!("-f {}", file.display()))?;
    let said = doctor(testbed, &[]).await?;
    for line in [
        "map service-nodeports: tcp . 9102 : goto external-WEB",
        "map of-networks: 198.18.0.0/15 . 9103 : jump external-WEB",
        "chain services: tcp dport != { 1-9099, 9101-65535 }",
        "chain services: ip daddr != 127.0.0.0/8 tcp dport >= 10255",
    ] {
        said.expect("kube-proxy-rules", &format!("table ip kube-proxy, {line}"))?;
    }
    said.expect("pods-filtered", "suspects: table inet filter, chain input: policy drop")?;
    testbed.cloud.output("nft", "delete table ip kube-proxy")?;
    let said = doctor(testbed, &[]).await?;
    // Run as a shell would.
    let command = fix(&said, "pods-filtered")?.strip_prefix("nft ").context("not nft's")?;
    testbed.cloud.output("nft", command)?;
    fine_again(testbed).await?;
    testbed.cloud.output("nft", "delete table inet filter").map(drop)
}

async fn a_port_that_another_program_takes_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).ports("9100,9200").start().await?;
    testbed
        .cloud
        .iptables("-t nat -A OUTPUT -p tcp -d 198.18.0.0/15 --dport 9200 -j REDIRECT --to-ports 9")?;
    doctor(testbed, &[]).await?.expect("foreign-rules", "--dport 9200 -j REDIRECT")?;
    // Each self-test takes the next port.
    testbed.expect_error(":9200 did not reach the listener");
    let degraded = async || Ok(server.status().await?["redirect"]["state"] == "degraded");
    wait_until("the self-test of the port to fail", Duration::from_secs(100), degraded, |degraded| *degraded)
        .await?;
    doctor(testbed, &[]).await?.expect("redirect-degraded", ":9200 did not reach the listener")
}

async fn a_closed_listener_is_found(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).start().await?;
    testbed.cloud.iptables("-I INPUT -p tcp --dport 10263 -j REJECT --reject-with tcp-reset")?;
    doctor(testbed, &[]).await?.expect("listener-silent", ":10263")?;
    testbed.cloud.iptables("-F INPUT")?;
    fine_again(testbed).await?;
    drop(server);
    Ok(())
}

async fn pods_that_input_drops(testbed: &Testbed) -> Result<()> {
    let pod = testbed.add_pod()?;
    let server = Builder::new(testbed).flag("--redirect-pods=connect").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    connect_from(&pod, on_edge.address, MOMENT).await.context("from the pod")?;
    doctor(testbed, &[]).await?.expect_only(&[])?;
    run_rules(testbed, &FIREWALL)?;
    visit(on_edge.address).await?;
    let dropped = connect_from(&pod, on_edge.address, DROPPED).await;
    ensure!(dropped.is_err(), "the firewall lets the pod through");
    killed_while_it_tries(testbed).await?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&["pods-filtered"])?;
    said.expect("pods-filtered", "from a pod of 10.71.0.0/24: no answer within 3 s")?;
    said.expect("pods-filtered", "suspects: table ip filter, chain INPUT: policy DROP")?;
    without_tools(testbed, &[]).await?.expect("pods-filtered", "no answer within 3 s")?;
    let command = fix(&said, "pods-filtered")?;
    ensure!(
        command == "iptables -t filter -I INPUT -s 10.71.0.0/24 -d 198.18.0.0/15 -p tcp -j ACCEPT",
        "{command}"
    );
    testbed.cloud.iptables(command.trim_start_matches("iptables "))?;
    connect_from(&pod, on_edge.address, MOMENT).await.context("after the fix")?;
    fine_again(testbed).await?;
    ensure!(!links(testbed)?.contains("doctor"), "a cable is left: {}", links(testbed)?);
    // Without the right to make a namespace doctor reports that, and another way to try the path.
    let mut command = testbed.on_cloud().command(Path::new("setpriv"));
    command.args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]).arg(program("tunnel-server")?);
    command.args(["doctor", "-o", "json"]);
    let said = super::run(command).await?;
    let pods = said.report["checks"].as_array().into_iter().flatten().find(|check| check["name"] == "pods");
    let found = pods.and_then(|check| check["found"].as_str()).unwrap_or_default();
    ensure!(said.state("pods")? == "skipped" && found.contains("CAP_SYS_ADMIN"), "{:#}", said.report);
    Ok(())
}

fn links(testbed: &Testbed) -> Result<String> {
    Ok(testbed.cloud.output("ip", "-o link")? + &testbed.cloud.output("ip", "route")?)
}

/// A doctor that is killed leaves neither its veth pair nor its route.
async fn killed_while_it_tries(testbed: &Testbed) -> Result<()> {
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    let mut child =
        command.arg("doctor").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let name = format!("doctor{}", child.id());
    let wired = async || Ok(testbed.cloud.output("ip", "route")?);
    wait_until("the doctor to be at it", MOMENT, wired, |routes| routes.contains(&name)).await?;
    child.kill()?;
    child.wait()?;
    let left = async || links(testbed);
    wait_until("nothing to be left", MOMENT, left, |left| !left.contains("doctor")).await.map(drop)
}

/// The kernel limits the number of tracked connections per namespace.
async fn a_full_conntrack_table(testbed: &Testbed) -> Result<()> {
    let _server = Builder::new(testbed).start().await?;
    testbed.cloud.iptables("-A OUTPUT -m conntrack --ctstate INVALID -j DROP")?;
    testbed.cloud.write("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", "600")?;
    let number = |name: &str| -> Result<u64> {
        let text = testbed.cloud.output("cat", &format!("/proc/sys/net/netfilter/nf_conntrack_{name}"))?;
        text.trim().parse().with_context(|| format!("{name}: {text}"))
    };
    let max = number("max")?;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    for sent in 0..max + 1_000 {
        let (host, port) = (2 + sent / 60_000, 1 + sent % 60_000);
        let to = Ipv4Addr::new(127, 0, (host / 250) as u8, (host % 250) as u8);
        // No socket is bound to these ports.
        let _ = socket.send_to(&[], (to, port as u16));
    }
    let count = number("count")?;
    ensure!(count >= max - max / 50, "{count} of {max} connections: the table is not full");
    let said = doctor(testbed, &[]).await?;
    said.expect("conntrack-full", &format!("nf_conntrack_max {max}"))?;
    ensure!(said.exit == 2, "{:#}", said.report);
    Ok(())
}

/// Connects twenty times from the pod, whose packets are dropped, until the server has counted them.
async fn lose(pod: &Namespace, to: SocketAddr, server: &Server<'_>, counter: &str) -> Result<()> {
    for _ in 0..20 {
        let dropped = connect_from(pod, to, Duration::from_millis(50)).await;
        ensure!(dropped.is_err(), "nothing drops the pod's packets");
    }
    let counted = async || {
        let counters = server.status().await?["redirect"]["counters"].clone();
        Ok(counters[counter].as_u64().unwrap_or_default())
    };
    wait_until("the connects to be counted", MOMENT, counted, |count| *count >= 20).await.map(drop)
}

/// A NetworkPolicy sees the virtual address at the pod's interface, but permits only the edge node's address.
async fn a_policy_that_drops_tokens(testbed: &Testbed) -> Result<()> {
    let pod = testbed.add_pod()?;
    let server = Builder::new(testbed).flag("--redirect-pods=connect").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    testbed
        .cloud
        .iptables("-t raw -A PREROUTING -i pod0 ! -d 192.168.50.0/24 -p tcp --dport 9100 -j DROP")?;
    lose(&pod, on_edge.address, &server, "connect4/redirected").await?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&["connects-lost"])?;
    said.expect("connects-lost", "redirected connections since the server started")?;
    ensure!(fix(&said, "connects-lost")?.contains("permit 198.18.0.0/15"), "{:#}", said.report);
    Ok(())
}

/// By route a pod's packets have the edge node's address when INPUT sees them.
async fn pods_by_route_that_input_drops(testbed: &Testbed) -> Result<()> {
    let pod = testbed.add_pod()?;
    let edges = "--edge-addresses=192.168.0.0/16,fd50::/16";
    let server = Builder::new(testbed).flag("--redirect-pods=route").flag(edges).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    connect_from(&pod, on_edge.address, MOMENT).await.context("from the pod")?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&[])?;
    ensure!(said.state("pods")? == "ok", "{:#}", said.report);
    // A rule that suffices where pods are redirected at connect().
    testbed.cloud.iptables("-A INPUT -s 10.71.0.0/24 -d 198.18.0.0/15 -p tcp -j ACCEPT")?;
    run_rules(testbed, &FIREWALL)?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&["pods-filtered"])?;
    let found = "of the edge node's address 192.168.50.2, by route, from a pod of 10.71.0.0/24: no answer within 3 s; suspects: table ip filter, chain INPUT: policy DROP";
    said.expect("pods-filtered", found)?;
    let command = fix(&said, "pods-filtered")?;
    ensure!(
        command == "iptables -t filter -I INPUT -s 10.71.0.0/24 -d 192.168.0.0/16 -p tcp -j ACCEPT",
        "{command}"
    );
    testbed.cloud.iptables(command.trim_start_matches("iptables "))?;
    connect_from(&pod, on_edge.address, MOMENT).await.context("after the fix")?;
    fine_again(testbed).await?;

    // Packets of real pods that never come here, as with Cilium's host routing; the trial's own would.
    testbed.cloud.ip("link add cilium_host type veth peer name cilium_net")?;
    testbed.cloud.iptables("-t raw -A PREROUTING -i pod0 -d 192.168.50.0/24 -j DROP")?;
    lose(&pod, on_edge.address, &server, "connect4/by_route").await?;
    let said = doctor(testbed, &[]).await?;
    said.expect_only(&["connects-lost"])?;
    said.expect("connects-lost", "connections of pods by route since the server started")?;
    let fix = fix(&said, "connects-lost")?;
    ensure!(
        fix.contains("permit the edge nodes' addresses") && fix.contains("bpf.hostLegacyRouting=true"),
        "{fix}"
    );
    Ok(())
}

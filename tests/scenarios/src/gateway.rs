//! Gateways: hosts to which the network routes edge nodes' addresses, for clients without a program of ours.
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{End, PATIENCE, connect_from, echo, end_at_once, end_of, is_unreachable};
use postern_testbed::inventory::{self, Inventory};
use postern_testbed::netns::Namespace;
use postern_testbed::report::figure;
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CloudHost, ROUTER, Testbed};
use tokio::net::TcpStream;

use crate::common::target;
use crate::redirector::{enrolled, token};

scenarios! {
    clients_without_a_program_of_ours(limit = 180, quick),
    one_of_two_gateways_fails(limit = 180),
    what_a_gateway_does_not_take_fails,
}

/// A client host of which only the routes know of edge nodes.
const CLIENT: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(10, 70, 0, 5), Ipv6Addr::new(0xfd70, 0, 0, 0, 0, 0, 0, 5));
const GATEWAYS: [(&str, Ipv4Addr); 2] =
    [("gateway-1", Ipv4Addr::new(10, 70, 0, 3)), ("gateway-2", Ipv4Addr::new(10, 70, 0, 4))];
/// A client that is not named gets no answer with IPv4.
const NO_ANSWER: Duration = Duration::from_secs(2);
const FLAGS: [&str; 3] = ["--redirect-pods=route", "--gateway", "--edge-addresses=192.168.0.0/16,fd50::/16"];

/// Hosts of the cloud's network: those of the gateways, and clients.
pub(crate) struct Hosts {
    server: Namespace,
    pub(crate) gateways: Vec<CloudHost>,
    pub(crate) client: Namespace,
}

impl Hosts {
    pub(crate) fn create(testbed: &Testbed) -> Result<Self> {
        let hosts = Self {
            server: testbed.add_neighbour()?,
            gateways: GATEWAYS
                .iter()
                .map(|(name, address)| testbed.add_cloud_host(name, *address))
                .collect::<Result<_>>()?,
            client: testbed.add_to_cloud_lan("client", CLIENT.0)?,
        };
        hosts.server.ip("-6 addr add fd70::2/64 dev eth0 nodad")?;
        hosts.client.ip(&format!("-6 addr add {}/64 dev eth0 nodad", CLIENT.1))?;
        // As a host that is no router follows a redirect.
        hosts.client.write("/proc/sys/net/ipv4/ip_forward", "0")?;
        for interface in ["all", "eth0"] {
            hosts.client.write(&format!("/proc/sys/net/ipv4/conf/{interface}/accept_redirects"), "1")?;
        }
        for gateway in &hosts.gateways {
            let last = gateway.address.octets()[3];
            gateway.ns.ip(&format!("-6 addr add fd70::{last}/64 dev eth0 nodad"))?;
            gateway.ns.ip("-6 route add default via fd70::fe")?;
            // As a node of Kubernetes.
            gateway.ns.write("/proc/sys/net/ipv4/ip_forward", "1")?;
            gateway.ns.write("/proc/sys/net/ipv6/conf/all/forwarding", "1")?;
            for interface in ["all", "eth0"] {
                let sysctl = format!("/proc/sys/net/ipv4/conf/{interface}/send_redirects");
                gateway.ns.write(&sysctl, "1")?;
            }
        }
        Ok(hosts)
    }

    /// Has a host send what is for edge nodes to these gateways.
    pub(crate) fn route(&self, from: &Namespace, to: &[usize]) -> Result<()> {
        let hops = |of: &dyn Fn(u8) -> String| -> String {
            let hop =
                |number: &usize| format!(" nexthop via {}", of(self.gateways[*number].address.octets()[3]));
            to.iter().map(hop).collect()
        };
        from.ip(&format!("route replace 192.168.0.0/16{}", hops(&|last| format!("10.70.0.{last}"))))?;
        from.ip(&format!("-6 route replace fd50::/16{}", hops(&|last| format!("fd70::{last}"))))
    }
}

/// A server without a redirect, an agent, and redirectors that are gateways.
pub(crate) struct Fleet<'a> {
    server: Server<'a>,
    pub(crate) gateways: Vec<Server<'a>>,
    _agent: Agent<'a>,
}

impl<'a> Fleet<'a> {
    pub(crate) async fn start(testbed: &'a Testbed, hosts: &'a Hosts) -> Result<Self> {
        let mut inventory = Inventory::of(testbed)?;
        let node = |(name, address): (&str, Ipv4Addr)| inventory::node(name, false, &[address.into()], &[]);
        inventory.nodes.extend(GATEWAYS.map(node));
        inventory.write()?;
        let server = Builder::alone_on_neighbour(testbed, &hosts.server).ports(server::PORTS).start().await?;
        let agent = Agent::enrol(&server, 1).await?;
        let mut gateways = Vec::new();
        for (host, (name, _)) in hosts.gateways.iter().zip(GATEWAYS) {
            let builder = Builder::redirector_on(testbed, host, name);
            let mut gateway = enrolled(builder, name, &token(&server, name)?)
                .flag(format!("--redirect-clients={}/32,{}/128", CLIENT.0, CLIENT.1));
            for flag in FLAGS {
                gateway = gateway.flag(flag);
            }
            gateways.push(gateway.start().await?);
        }
        let fleet = Self { server, gateways, _agent: agent };
        for gateway in &fleet.gateways {
            let told = async || gateway.holders().await;
            wait_until("a gateway to know of the node", PATIENCE, told, |via| !via.is_empty()).await?;
        }
        Ok(fleet)
    }
}

/// Both addresses of a target of an edge.
fn targets(testbed: &Testbed, port: u16) -> Result<[Target; 2]> {
    let edge = testbed.edge(1);
    Ok([
        target(testbed, 1, port, Behaviour::Echo)?,
        Target::start(&edge.ns, edge.address_v6, port, Behaviour::Echo)?,
    ])
}

async fn open(from: &Namespace, to: SocketAddr) -> Result<TcpStream> {
    let mut stream = connect_from(from, to, PATIENCE).await.with_context(|| format!("to {to}"))?;
    echo(&mut stream, b"by a gateway").await?;
    Ok(stream)
}

/// A connect that must not succeed.
async fn refused(from: &Namespace, to: SocketAddr) -> Result<std::io::Error> {
    match connect_from(from, to, NO_ANSWER).await {
        Ok(_) => anyhow::bail!("{} reached {to}", from.name()),
        Err(error) => Ok(error),
    }
}

/// With IPv6 the kernel tells another host that there is no route.
fn is_refused(error: &std::io::Error) -> bool {
    is_unreachable(error) || error.raw_os_error() == Some(nix::libc::ENETUNREACH)
}

fn hook(to: SocketAddr) -> &'static str {
    if to.is_ipv4() { "route4" } else { "route6" }
}

async fn counted(gateway: &Server<'_>, to: SocketAddr, outcome: &str, least: f64) -> Result<()> {
    let labels = [("hook", hook(to)), ("outcome", outcome)];
    gateway.wait_metric("postern_redirect_verdicts_total", &labels, |count| count >= least).await.map(drop)
}

async fn clients_without_a_program_of_ours(testbed: &Testbed) -> Result<()> {
    let hosts = Hosts::create(testbed)?;
    let mut fleet = Fleet::start(testbed, &hosts).await?;
    hosts.route(&hosts.client, &[0])?;
    hosts.route(&hosts.server, &[0])?;
    let gateway = &fleet.gateways[0];
    for on_edge in &targets(testbed, 10250)? {
        let stream = open(&hosts.client, on_edge.address).await?;
        ensure!(stream.peer_addr()? == on_edge.address, "the client sees {}", stream.peer_addr()?);
        let client = stream.local_addr()?;
        drop(stream);
        // The log names the client, not the gateway.
        let line =
            gateway.wait_access("of the client", |line| line.text("client") == client.to_string()).await?;
        ensure!(line.text("destination") == on_edge.address.to_string(), "{line:?}");
        counted(gateway, on_edge.address, "steered", 1.0).await?;

        // A host of the same network that no --redirect-clients names.
        let before = on_edge.connections();
        refused(&hosts.server, on_edge.address).await?;
        counted(gateway, on_edge.address, "foreign_client", 1.0).await?;
        ensure!(on_edge.connections() == before, "the target saw a connection of a client without a name");
    }
    // The node leaves, and comes back: no hook sees the client's connects, which are accepted and reset.
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    fleet.server.process.crash().await?;
    let ready = async || Ok(gateway.get("/readyz").await?.0);
    wait_until("a gateway without a server to be not ready", PATIENCE, ready, |ready| *ready == 503).await?;
    let end = end_at_once(connect_from(&hosts.client, on_edge.address, PATIENCE).await).await?;
    ensure!(end == End::Reset, "a connection to a node without a tunnel ended with {end:?}");
    fleet.server.start_again().await?;
    fleet.server.wait_connected("edge-1", true, PATIENCE).await?;
    wait_until("the gateway to be ready again", PATIENCE, ready, |ready| *ready == 200).await?;
    let again = async || Ok(open(&hosts.client, on_edge.address).await.is_ok());
    wait_until("the client to reach the node again", PATIENCE, again, |works| *works).await?;
    Ok(())
}

/// A connect, repeated as long as there is no gateway, since `start`.
async fn back(from: &Namespace, to: SocketAddr, start: Instant) -> Result<()> {
    let works = async || Ok(connect_from(from, to, Duration::from_millis(200)).await.is_ok());
    wait_until("new connections", PATIENCE, works, |works| *works).await?;
    let taken = start.elapsed();
    figure(&format!("a connection to {to} by the other gateway {taken:.2?} after the change of the route"));
    Ok(())
}

async fn one_of_two_gateways_fails(testbed: &Testbed) -> Result<()> {
    let hosts = Hosts::create(testbed)?;
    let mut fleet = Fleet::start(testbed, &hosts).await?;
    let targets = targets(testbed, 10250)?;
    // Both at once, as with ECMP; the kernel chooses by the ports.
    hosts.client.write("/proc/sys/net/ipv4/fib_multipath_hash_policy", "1")?;
    hosts.client.write("/proc/sys/net/ipv6/fib_multipath_hash_policy", "1")?;
    hosts.route(&hosts.client, &[0, 1])?;
    let mut held = Vec::new();
    for on_edge in &targets {
        for _ in 0..16 {
            held.push(open(&hosts.client, on_edge.address).await?);
        }
        for gateway in &fleet.gateways {
            counted(gateway, on_edge.address, "steered", 1.0).await.context("one gateway has everything")?;
        }
    }
    let sockets = hosts.gateways[0].ns.output("ss", "-Htn state established")?;
    let of_first = |stream: &TcpStream| {
        let client = stream.local_addr()?.to_string();
        anyhow::Ok(sockets.split_whitespace().any(|word| word == client))
    };

    // The first host fails, silently; then the network changes its route.
    hosts.gateways[0].ns.ip("link set eth0 down")?;
    fleet.gateways[0].process.crash().await?;
    let start = Instant::now();
    hosts.route(&hosts.client, &[1])?;
    for on_edge in &targets {
        back(&hosts.client, on_edge.address, start).await?;
    }
    let (mut reset, mut gone_on) = (0, 0);
    for mut stream in held {
        if of_first(&stream)? {
            // The other gateway does not know it.
            tokio::io::AsyncWriteExt::write_all(&mut stream, b"x").await?;
            let end = end_of(&mut stream, PATIENCE).await?;
            ensure!(end == End::Reset, "a connection of the gateway that failed ended with {end:?}");
            reset += 1;
        } else {
            echo(&mut stream, b"of the other gateway").await?;
            gone_on += 1;
        }
    }
    ensure!(reset > 0 && gone_on > 0, "{reset} connections were reset, {gone_on} went on");
    figure(&format!(
        "{reset} connections of the gateway that failed were reset, {gone_on} of the other went on"
    ));

    // It comes back: its neighbours need some time to find its IPv6 address again.
    hosts.gateways[0].ns.ip("link set eth0 up")?;
    hosts.gateways[0].ns.ip("route replace default via 10.70.0.254")?;
    hosts.gateways[0].ns.ip("-6 addr replace fd70::3/64 dev eth0 nodad")?;
    fleet.gateways[0].start_again().await?;
    hosts.route(&hosts.client, &[0])?;
    let start = Instant::now();
    for on_edge in &targets {
        back(&hosts.client, on_edge.address, start).await?;
    }
    Ok(())
}

/// Whatever else the network routes here would be sent back into it: round and round, and with an ICMP redirect, after
/// which the client goes past the gateway.
async fn what_a_gateway_does_not_take_fails(testbed: &Testbed) -> Result<()> {
    let hosts = Hosts::create(testbed)?;
    let mut fleet = Fleet::start(testbed, &hosts).await?;
    hosts.route(&hosts.client, &[0])?;
    let on_edge = &targets(testbed, 10250)?;
    // A redirect to a router that the client has never talked to has no effect.
    refused(&hosts.client, (ROUTER, 9).into()).await?;
    for on_edge in on_edge {
        open(&hosts.client, on_edge.address).await?;
        let other = SocketAddr::new(on_edge.address.ip(), 2222);
        let error = refused(&hosts.client, other).await?;
        let cache = hosts.client.output("ip", &format!("route get {}", other.ip()))?;
        let last = hosts.gateways[0].address.octets()[3];
        let via = if other.is_ipv4() { format!("via 10.70.0.{last} ") } else { format!("via fd70::{last} ") };
        ensure!(cache.contains(&via), "the gateway has sent its client away: {cache}");
        ensure!(is_refused(&error), "{other}: {error}");
        open(&hosts.client, on_edge.address).await.context("after a packet that is not taken")?;
    }
    // Nor does one whose program was killed send it on.
    fleet.gateways[0].process.crash().await?;
    for on_edge in on_edge {
        let gone = refused(&hosts.client, on_edge.address).await?;
        ensure!(is_refused(&gone), "{}: {gone}", on_edge.address);
    }
    Ok(())
}

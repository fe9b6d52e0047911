//! A cloud host, a router with NAT and edge hosts behind it, made of network namespaces and cgroups.
//!
//! ```text
//!  cloud 10.70.0.1 ──┐                        ┌── edge-1 192.168.50.2  (LAN of its own, NAT)
//!  neighbour .0.2  ──┴ router 10.70.0.254 ────┼── edge-2 192.168.51.2
//!  pod 10.71.0.2 (behind cloud)               └── …
//! ```
//! The router masquerades what the edges send and drops every new connection from the cloud's side. No namespace
//! has a route out of the testbed.
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cgroup::{self, Cgroup, MemoryLimit};
use crate::id::Id;
use crate::logs::Announced;
use crate::netns::Namespace;
use crate::process::{self, Placement};
use crate::sweep;
use crate::wan::{self, Wan};

/// The cloud host's address on its LAN.
pub const CLOUD: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 1);
/// Another machine on the cloud's LAN.
pub const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 2);
/// The router on the cloud's LAN.
pub const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 254);
/// The router of the twin's site.
const TWIN_ROUTER: &str = "10.70.0.253";
/// A pod on the cloud host.
pub const POD: Ipv4Addr = Ipv4Addr::new(10, 71, 0, 2);
/// The pods of the cloud host.
pub const POD_CIDR: &str = "10.71.0.0/24";

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub edges: u8,
    /// Adds another edge with edge 1's addresses, in a site of its own behind its own NAT.
    pub twin: bool,
}

#[derive(Debug)]
pub struct Edge {
    /// Node name, `edge-N`.
    pub name: String,
    /// IPv4 address on its LAN.
    pub address: Ipv4Addr,
    /// IPv6 address on its LAN.
    pub address_v6: Ipv6Addr,
    /// The router's interface to it.
    pub router_port: String,
    pub ns: Namespace,
}

/// Another machine of the cloud.
#[derive(Debug, Clone)]
pub struct CloudHost {
    pub ns: Namespace,
    /// Cgroup of everything on it; its own redirect is attached there.
    pub cgroup: Cgroup,
    pub address: Ipv4Addr,
}

impl CloudHost {
    /// Returns the placement of a process on it.
    pub fn placement(&self) -> Placement<'_> {
        Placement { ns: &self.ns, cgroup: &self.cgroup }
    }
}

/// The namespaces, cgroups and files of one run. Dropping it removes the namespaces and cgroups; the folder with the
/// logs stays until the supervisor removes it ([`sweep::remove`]).
#[derive(Debug)]
pub struct Testbed {
    id: Id,
    pub cloud: Namespace,
    /// The router between cloud and edges.
    pub router: Namespace,
    edges: Vec<Edge>,
    /// Cgroup of everything on the cloud host; the redirect is attached there.
    pub cloud_cgroup: Cgroup,
    /// Cgroup of everything else. Separate from the cloud's: the redirect must not see an agent's own connections.
    pub edge_cgroup: Cgroup,
    home_cgroup: PathBuf,
    dir: PathBuf,
    announced: Announced,
}

impl Testbed {
    /// Builds the namespaces and cgroups. Must run before the process starts any thread if [`Testbed::enter_cloud`]
    /// is to follow.
    pub fn new(id: Id, shape: Shape) -> Result<Self> {
        let dir = id.dir();
        fs::create_dir_all(dir.join("logs")).with_context(|| format!("creating {}", dir.display()))?;
        let bpffs = sweep::bpffs(&id);
        fs::create_dir_all(&bpffs).with_context(|| format!("creating {}", bpffs.display()))?;
        nix::mount::mount(Some("bpf"), &bpffs, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting a BPF file system at {}", bpffs.display()))?;
        let mount = cgroup::unified_mount()?;
        let home_cgroup = cgroup::of_this_process(&mount)?;
        let parent = Cgroup::create(mount.join(id.to_string()))?;
        // Named like its node in a cluster.
        let cloud_cgroup = Cgroup::create(parent.path().join("cloud-1"))?;
        let edge_cgroup = Cgroup::create(parent.path().join("edge"))?;
        let mut testbed = Self {
            cloud: Namespace::create(&id, "cloud")?,
            router: Namespace::create(&id, "router")?,
            edges: Vec::new(),
            cloud_cgroup,
            edge_cgroup,
            home_cgroup,
            dir,
            id,
            announced: Announced::default(),
        };
        testbed.wire_cloud()?;
        let router = testbed.router.clone();
        for number in 1..=shape.edges {
            testbed.wire_edge(number, number, &router)?;
        }
        if shape.twin {
            let router = testbed.wire_twin_router()?;
            testbed.wire_edge(shape.edges + 1, 1, &router)?;
        }
        Ok(testbed)
    }

    /// Returns the unique name of this run.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Returns the folder for state, logs and files of this run.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Announces that a program logs a line at level ERROR with this text. Any other ERROR fails the scenario, and so
    /// does this one if it is missing at the end.
    pub fn expect_error(&self, text: &str) {
        self.announced.add(text, false);
    }

    /// As [`Self::expect_error`], but a race determines whether it is logged.
    pub fn allow_error(&self, text: &str) {
        self.announced.add(text, true);
    }

    /// Fails if the logs have a panic or an ERROR that was not announced, or lack an announced one. For the end of a
    /// run, when its programs have ended.
    pub fn judge_logs(&self) -> Result<()> {
        self.announced.judge(&self.dir)
    }

    /// Returns the BPF file system of this run.
    pub fn bpffs(&self) -> PathBuf {
        sweep::bpffs(&self.id)
    }

    /// Returns edge number `n`, counted from 1 as in its name.
    pub fn edge(&self, n: usize) -> &Edge {
        &self.edges[n - 1]
    }

    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Returns the placement of a process on the cloud host.
    pub fn on_cloud(&self) -> Placement<'_> {
        Placement { ns: &self.cloud, cgroup: &self.cloud_cgroup }
    }

    /// Returns the placement of a process on edge `n`.
    pub fn on_edge(&self, n: usize) -> Placement<'_> {
        Placement { ns: &self.edge(n).ns, cgroup: &self.edge_cgroup }
    }

    /// Makes a memory limit for one program on the cloud host.
    pub fn limit_on_cloud(&self, name: &str, bytes: u64) -> Result<MemoryLimit> {
        MemoryLimit::create(&self.id, &self.cloud_cgroup, name, bytes)
    }

    /// As [`Self::limit_on_cloud`], with a CPU limit: this share of each 100 ms, in microseconds.
    pub fn limits_on_cloud(&self, name: &str, bytes: u64, microseconds: u32) -> Result<MemoryLimit> {
        self.limit_on_cloud(name, bytes)?.with_cpu(&self.id, name, microseconds)
    }

    /// Makes a memory limit for one program on an edge.
    pub fn limit_on_edge(&self, name: &str, bytes: u64) -> Result<MemoryLimit> {
        MemoryLimit::create(&self.id, &self.edge_cgroup, name, bytes)
    }

    /// Moves this process into the cloud's cgroup and network namespace. Only the calling thread changes its
    /// namespace, so no other thread may exist yet.
    pub fn enter_cloud(&self) -> Result<()> {
        ensure!(process::thread_count()? == 1, "enter_cloud needs a process with a single thread");
        self.cloud_cgroup.add(std::process::id())?;
        self.cloud.enter()
    }

    fn wire_cloud(&self) -> Result<()> {
        self.router.ip("link add cloud0 type bridge")?;
        self.router.ip("link set cloud0 up")?;
        self.router.ip(&format!("addr add {ROUTER}/24 dev cloud0"))?;
        self.router.ip("-6 addr add fd70::fe/64 dev cloud0 nodad")?;
        self.plug_into_cloud_lan(&self.cloud, "p-cloud", CLOUD)?;
        self.cloud.ip("-6 addr add fd70::1/64 dev eth0 nodad")?;
        self.cloud.ip("-6 route add default via fd70::fe")?;
        self.cloud.write("/proc/sys/net/ipv4/ip_forward", "1")?;
        self.router.write("/proc/sys/net/ipv4/ip_forward", "1")?;
        self.router.write("/proc/sys/net/ipv6/conf/all/forwarding", "1")?;
        filter_and_masquerade(&self.router)
    }

    fn wire_twin_router(&self) -> Result<Namespace> {
        let router = Namespace::create(&self.id, "twin-router")?;
        router.ip(&format!("link add cloud0 type veth peer name p-twin netns {}", self.router.name()))?;
        router.ip("link set cloud0 up")?;
        router.ip(&format!("addr add {TWIN_ROUTER}/24 dev cloud0"))?;
        self.router.ip("link set p-twin master cloud0 up")?;
        router.write("/proc/sys/net/ipv4/ip_forward", "1")?;
        filter_and_masquerade(&router)?;
        Ok(router)
    }

    fn plug_into_cloud_lan(&self, ns: &Namespace, port: &str, address: Ipv4Addr) -> Result<()> {
        ns.ip(&format!("link add eth0 type veth peer name {port} netns {}", self.router.name()))?;
        ns.ip(&format!("addr add {address}/24 dev eth0"))?;
        ns.ip("link set eth0 up")?;
        self.router.ip(&format!("link set {port} master cloud0 up"))?;
        ns.ip(&format!("route add default via {ROUTER}"))
    }

    /// Adds edge `number` behind a router, with the addresses that edge `like` has.
    fn wire_edge(&mut self, number: u8, like: u8, router: &Namespace) -> Result<()> {
        let name = format!("edge-{number}");
        let ns = Namespace::create(&self.id, &name)?;
        let net = 49 + like;
        let router_port = format!("edge{number}");
        ns.ip(&format!("link add eth0 type veth peer name {router_port} netns {}", router.name()))?;
        ns.ip(&format!("addr add 192.168.{net}.2/24 dev eth0"))?;
        ns.ip(&format!("-6 addr add fd50:{like}::2/64 dev eth0 nodad"))?;
        ns.ip("link set eth0 up")?;
        router.ip(&format!("addr add 192.168.{net}.1/24 dev {router_port}"))?;
        router.ip(&format!("link set {router_port} up"))?;
        ns.ip(&format!("route add default via 192.168.{net}.1"))?;
        router.ip(&format!("-6 addr add fd50:{like}::1/64 dev {router_port} nodad"))?;
        ns.ip(&format!("-6 route add default via fd50:{like}::1"))?;
        self.edges.push(Edge {
            name,
            address: Ipv4Addr::new(192, 168, net, 2),
            address_v6: Ipv6Addr::new(0xfd50, like.into(), 0, 0, 0, 0, 0, 2),
            router_port,
            ns,
        });
        Ok(())
    }

    /// Adds another machine to the cloud's LAN, at [`NEIGHBOUR`].
    pub fn add_neighbour(&self) -> Result<Namespace> {
        self.add_to_cloud_lan("neighbour", NEIGHBOUR)
    }

    /// Adds another machine to the cloud's LAN. The name has at most 13 characters.
    pub fn add_to_cloud_lan(&self, name: &str, address: Ipv4Addr) -> Result<Namespace> {
        let ns = Namespace::create(&self.id, name)?;
        self.plug_into_cloud_lan(&ns, &format!("p-{name}"), address)?;
        Ok(ns)
    }

    /// As [`Self::add_to_cloud_lan`], with a cgroup of its own.
    pub fn add_cloud_host(&self, name: &str, address: Ipv4Addr) -> Result<CloudHost> {
        let parent = self.cloud_cgroup.path().parent().context("the cloud's cgroup has no parent")?;
        let cgroup = Cgroup::create(parent.join(name))?;
        Ok(CloudHost { ns: self.add_to_cloud_lan(name, address)?, cgroup, address })
    }

    /// Adds a pod to the cloud host, at [`POD`], connected by a veth pair as by a CNI plugin.
    pub fn add_pod(&self) -> Result<Namespace> {
        let ns = Namespace::create(&self.id, "pod")?;
        ns.ip(&format!("link add eth0 type veth peer name pod0 netns {}", self.cloud.name()))?;
        ns.ip(&format!("addr add {POD}/24 dev eth0"))?;
        ns.ip("link set eth0 up")?;
        self.cloud.ip("addr add 10.71.0.1/24 dev pod0")?;
        self.cloud.ip("link set pod0 up")?;
        ns.ip("route add default via 10.71.0.1")?;
        Ok(ns)
    }

    /// Replaces the cable between edge `n` and its router with a wide-area path. IPv4 only.
    pub fn wan(&self, n: usize, path: wan::Path) -> Result<Wan> {
        let edge = self.edge(n);
        let (port, network) = (&edge.router_port, edge.address.octets()[2]);
        self.router.ip(&format!("link del {port}"))?;
        let wan = Wan::start(path, (&self.router, port), (&edge.ns, "eth0"))?;
        self.router.ip(&format!("addr add 192.168.{network}.1/24 dev {port}"))?;
        edge.ns.ip(&format!("addr add {}/24 dev eth0", edge.address))?;
        edge.ns.ip(&format!("route add default via 192.168.{network}.1"))?;
        Ok(wan)
    }

    /// Cuts the link of edge `n`: the router drops its packets, and neither end is notified.
    pub fn cut_link(&self, n: usize) -> Result<()> {
        let port = &self.edge(n).router_port;
        self.drop_at_router("-I", port)
    }

    /// Undoes [`Testbed::cut_link`].
    pub fn restore_link(&self, n: usize) -> Result<()> {
        let port = &self.edge(n).router_port;
        self.drop_at_router("-D", port)
    }

    /// Changes the rules by which the router drops what comes from this interface of it or goes there: `-I` or `-D`.
    pub fn drop_at_router(&self, change: &str, port: &str) -> Result<()> {
        for rule in
            [format!("{change} FORWARD -i {port} -j DROP"), format!("{change} FORWARD -o {port} -j DROP")]
        {
            self.router.iptables(&rule)?;
            self.router.ip6tables(&rule)?;
        }
        Ok(())
    }

    /// Makes the NAT forget all mappings silently: packets of known connections are dropped from then on.
    pub fn forget_mappings(&self) -> Result<()> {
        // Otherwise a mid-connection packet creates a new mapping.
        self.router.write("/proc/sys/net/netfilter/nf_conntrack_tcp_loose", "0")?;
        // Ahead of all other rules, also for packets to the router itself: its kernel would answer with resets.
        for chain in ["FORWARD", "INPUT"] {
            self.router.iptables(&format!("-I {chain} -p tcp -m conntrack --ctstate INVALID -j DROP"))?;
            self.router.iptables(&format!(
                "-I {chain} -i cloud0 -p tcp ! --syn -m conntrack --ctstate NEW -j DROP"
            ))?;
        }
        self.router.output("conntrack", "-F").map(drop)
    }

    /// Makes edge `n` drop every packet to TCP `port`: a black hole for dials.
    pub fn black_hole(&self, n: usize, port: u16) -> Result<()> {
        self.edge(n).ns.iptables(&format!("-A INPUT -p tcp --dport {port} -j DROP"))
    }
}

/// Lets the edges dial out and rejects dials in.
fn filter_and_masquerade(router: &Namespace) -> Result<()> {
    // IPv6 without NAT, as in real sites.
    router.ip6tables("-P FORWARD DROP")?;
    router.ip6tables("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")?;
    router.ip6tables("-A FORWARD -i edge+ -o cloud0 -j ACCEPT")?;
    router.ip6tables("-A FORWARD -i cloud0 -o cloud0 -j ACCEPT")?;
    router.iptables("-P FORWARD DROP")?;
    router.iptables("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")?;
    router.iptables("-A FORWARD -i edge+ -o cloud0 -j ACCEPT")?;
    // Traffic within the cloud's LAN: kernels with br_netfilter send bridged frames through FORWARD too.
    router.iptables("-A FORWARD -i cloud0 -o cloud0 -j ACCEPT")?;
    router.iptables("-t nat -A POSTROUTING -s 192.168.0.0/16 -o cloud0 -j MASQUERADE")
}

impl Edge {
    pub fn ip(&self) -> IpAddr {
        self.address.into()
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // This process is in the cloud's cgroup itself and must leave before the cgroup can be emptied.
        if let Err(error) = cgroup::move_to(&self.home_cgroup, std::process::id()) {
            eprintln!("testbed: {error:#}");
        }
        if let Err(error) = sweep::namespaces_and_cgroups(&self.id) {
            eprintln!("testbed: {error:#}");
        }
    }
}

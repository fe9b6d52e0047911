//! The rounds: each measures every peer once, in a random order, with its programs freshly started.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::inventory::Inventory;
use postern_testbed::load_target::Target;
use postern_testbed::netns::Namespace;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::catalogue::{self, DISTURBANCES, ROUND_TRIP_CONNECTIONS, ROUND_TRIP_SIZES};
use crate::dial::Dialer;
use crate::line::{Group, Peer};
use crate::load::{self, Effort, Way};
use crate::options::Options;
use crate::peers::{self, Certificates, Running};
use crate::record::Record;
use crate::usage::Share;
use crate::wan::Place;
use crate::{connect, counts, disturbance, pods, scale, usage, wan};

/// Maximum time for the connections of one line to close before the next begins.
const SETTLE: Duration = Duration::from_secs(5);
/// The longest that one group of one peer may take.
const GROUP_LIMIT: Duration = Duration::from_secs(180);

/// The testbed and the values of all rounds.
pub(crate) struct Bench<'a> {
    testbed: &'a Testbed,
    options: &'a Options,
    effort: Effort,
    certificates: Certificates,
    targets: Vec<Target<'a>>,
    /// The host with the iptables rules, and with a second server.
    neighbour: &'a Namespace,
    pub(crate) record: Record,
}

/// One turn of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Relayed(Peer),
    Connect(Peer),
}

impl<'a> Bench<'a> {
    /// Prepares the testbed and starts the targets.
    pub(crate) async fn new(
        testbed: &'a Testbed,
        neighbour: &'a Namespace,
        options: &'a Options,
    ) -> Result<Self> {
        let open = testbed.edge(peers::OPEN);
        // A site that the cloud can dial, for peers that need that.
        testbed.router.iptables(&format!("-I FORWARD -i cloud0 -o {} -j ACCEPT", open.router_port))?;
        let hosts = testbed.edges().iter().map(|edge| &edge.ns).chain([&testbed.cloud, neighbour]);
        for host in hosts {
            // Otherwise thousands of connections a second use up a destination's ports within seconds.
            host.write("/proc/sys/net/ipv4/ip_local_port_range", "16384 65000")?;
            host.write("/proc/sys/net/ipv4/tcp_tw_reuse", "1")?;
        }
        let mut targets = Vec::new();
        for edge in [peers::BEHIND_NAT, peers::OPEN] {
            targets.push(Target::start(testbed, edge).await?);
        }
        let certificates =
            Certificates::create(&testbed.dir().join("certificates"), &open.address.to_string())?;
        let effort = if options.smoke { Effort::SMOKE } else { Effort::FULL };
        let record = Record::default();
        Ok(Self { testbed, options, effort, certificates, targets, neighbour, record })
    }

    /// Runs all rounds of everything but wide-area paths, then scale.
    pub(crate) async fn run(&mut self) {
        let mut order = StdRng::seed_from_u64(self.options.seed);
        let start = Instant::now();
        let mut all = Record::default();
        for round in 1..=self.options.rounds {
            let mut turns = self.turns();
            turns.shuffle(&mut order);
            for turn in turns {
                let so_far = start.elapsed().as_secs();
                println!("[{so_far:>4} s] round {round} of {}: {turn:?}", self.options.rounds);
                match turn {
                    Turn::Relayed(peer) => self.relayed(peer).await,
                    Turn::Connect(peer) => self.connect(peer).await,
                }
            }
            all.add(std::mem::take(&mut self.record));
        }
        if self.options.wants_group(Group::Scale) && self.options.wants_peer(Peer::Postern) {
            println!("[{:>4} s] scale", start.elapsed().as_secs());
            let measured = scale::measure(self.testbed, self.options, &self.effort, &mut self.record).await;
            if let Err(error) = measured {
                self.failed(Group::Scale, Peer::Postern, &error);
            }
        }
        if self.options.wants_group(Group::Pods) && self.options.wants_peer(Peer::Postern) {
            println!("[{:>4} s] pods", start.elapsed().as_secs());
            let size = scale::Size::of(self.options.smoke);
            let measured = pods::measure(self.testbed, &self.effort, size, &mut self.record).await;
            if let Err(error) = measured {
                self.failed(Group::Pods, Peer::Postern, &error);
            }
        }
        self.record.add(all);
    }

    /// Measures every peer over this path, once.
    pub(crate) async fn wide_area(&mut self, place: &Place) -> Result<()> {
        let paths = wan::Paths::install(self.testbed, place, self.options.smoke)?;
        let mut peers: Vec<Peer> =
            Peer::FAR.into_iter().filter(|peer| self.options.wants_peer(*peer)).collect();
        peers.shuffle(&mut StdRng::seed_from_u64(self.options.seed));
        let lines = place.lines();
        for peer in peers {
            let left_out = place.leaves_out(peer, self.options.smoke).map(str::to_owned);
            if let Some(reason) = self.not_installed(peer).or(left_out) {
                for line in &lines {
                    self.record.missing(&line.id, peer, &reason);
                }
                continue;
            }
            let measured = tokio::time::timeout(GROUP_LIMIT, self.on_path(&paths, peer)).await;
            if let Err(error) = measured.context("took too long").and_then(|result| result) {
                println!("  {}, {peer}: {error:#}", place.title);
                self.record.lines_failed(&lines, peer, &error);
            }
        }
        Ok(())
    }

    async fn on_path(&mut self, paths: &wan::Paths<'_>, peer: Peer) -> Result<()> {
        let mut running = self.start(peer).await?;
        let target = &self.targets[running.edge - 1];
        let measured = paths.measure(peer, &mut running, target, &mut self.record).await;
        measured.and(running.stop().await)
    }

    fn turns(&self) -> Vec<Turn> {
        let relayed = Group::RELAYED.iter().any(|group| self.options.wants_group(*group));
        let relayed = Peer::CARRIERS.into_iter().filter(|_| relayed).map(Turn::Relayed);
        let connect = self.options.wants_group(Group::Connect);
        let connect = Peer::REDIRECTORS.into_iter().filter(|_| connect).map(Turn::Connect);
        let all = relayed.chain(connect);
        all.filter(|turn| match turn {
            Turn::Relayed(peer) | Turn::Connect(peer) => self.options.wants_peer(*peer),
        })
        .collect()
    }

    fn failed(&mut self, group: Group, peer: Peer, error: &anyhow::Error) {
        println!("  {}, {peer}: {error:#}", group.name());
        self.record.lines_failed(&catalogue::lines(group), peer, error);
    }

    fn target(&self, edge: usize) -> &Target<'a> {
        // Started in the order of the edges, which are counted from 1.
        &self.targets[edge - 1]
    }

    async fn start(&self, peer: Peer) -> Result<Running<'a>> {
        if [Peer::Postern, Peer::PosternForwarded].contains(&peer) {
            Inventory::of(self.testbed)?;
        }
        peers::start(self.testbed, self.neighbour, peer, &self.options.programs, &self.certificates)
            .await
            .with_context(|| format!("starting {peer}"))
    }

    /// Reason why the peer's programs are not installed; None if they are.
    fn not_installed(&self, peer: Peer) -> Option<String> {
        self.options.programs.path(peers::needs(peer)?).err()
    }

    /// Reports whether the peer's programs are installed; records the reason if not.
    fn installed(&mut self, peer: Peer, groups: &[Group]) -> bool {
        let Some(reason) = self.not_installed(peer) else { return true };
        println!("  left out: {reason}");
        for group in groups {
            self.record.group_missing(*group, peer, &reason);
        }
        false
    }

    async fn relayed(&mut self, peer: Peer) {
        if !self.installed(peer, &Group::RELAYED) {
            return;
        }
        let mut running = None;
        for group in Group::RELAYED {
            if !self.options.wants_group(group) {
                continue;
            }
            let start = Instant::now();
            let measured = tokio::time::timeout(GROUP_LIMIT, self.group(group, peer, &mut running)).await;
            println!("         {} took {:.1?}", group.name(), start.elapsed());
            let measured = measured.context("took too long").and_then(|result| result);
            if let Err(error) = measured {
                self.failed(group, peer, &error);
                // The next group gets a fresh one.
                stop(&mut running).await;
            }
        }
        stop(&mut running).await;
    }

    async fn group(&mut self, group: Group, peer: Peer, running: &mut Option<Running<'a>>) -> Result<()> {
        if group == Group::Beside {
            return self.beside(peer, running).await;
        }
        if running.is_none() {
            *running = Some(self.start(peer).await?);
        }
        let Some(on) = running.as_ref() else { return Ok(()) };
        self.target(on.edge).settle(SETTLE).await?;
        match group {
            Group::Held => self.held(peer, on).await,
            Group::Connections => self.connections(peer, on).await,
            Group::RoundTrips => self.round_trips(peer, on).await,
            Group::Counts => counts::measure(self.testbed, peer, on, &self.effort, &mut self.record).await,
            _ => self.bulk(peer, on).await,
        }
    }

    async fn held(&mut self, peer: Peer, on: &Running<'_>) -> Result<()> {
        if on.parts.is_empty() {
            self.record.group_missing(Group::Held, peer, "it has no programs");
            return Ok(());
        }
        let (cloud, edge) = usage::resident(&on.parts)?;
        self.record.value("held-idle", peer, cloud + edge);
        let streams = load::hold(&on.dialer, self.effort.held).await?;
        tokio::time::sleep(self.effort.idle).await;
        let (cloud, edge) = usage::resident(&on.parts)?;
        self.record.value("held", peer, cloud + edge);
        self.record.value("held-cloud", peer, cloud);
        self.record.value("held-edge", peer, edge);
        load::concurrently(streams.into_iter().map(crate::dial::Stream::close)).await?;
        Ok(())
    }

    async fn connections(&mut self, peer: Peer, on: &Running<'_>) -> Result<()> {
        let mut one = load::visits(&on.dialer, 1, &self.effort).await?;
        self.record.value("connections-1", peer, one.rate());
        self.record.value("connections-1-p99", peer, load::micros(&mut one.times, 0.99)?);
        self.target(on.edge).settle(SETTLE).await?;
        let before = usage::cpu_seconds(&on.parts)?;
        let shares = self.shares(on)?;
        let many = load::visits(&on.dialer, 16, &self.effort).await?;
        self.note_shares("connections-16", peer, &shares)?;
        // Include the cost of closing.
        self.target(on.edge).settle(SETTLE).await?;
        self.record.value("connections-16", peer, many.rate());
        let used = (before, usage::cpu_seconds(&on.parts)?);
        self.used("connections-cpu", peer, on, used, load::as_f64(many.count) / 1e3);
        self.egress(peer, on, many.rate()).await
    }

    /// Connections as kube-apiserver makes them with an EgressSelector. konnectivity has no others: `rate` is of these.
    async fn egress(&mut self, peer: Peer, on: &Running<'_>, rate: f64) -> Result<()> {
        let (socket, target) =
            (peers::postern::egress_socket(self.testbed), self.testbed.edge(peers::BEHIND_NAT).ip());
        let grpc = Dialer::Grpc { socket: socket.clone(), target };
        let http = Dialer::HttpConnect { socket, target };
        for (line, konnectivity, dialer) in [
            ("egress-16-grpc", Peer::KonnectivityGrpc, grpc),
            ("egress-16-http", Peer::KonnectivityHttp, http),
        ] {
            if peer == konnectivity {
                self.record.value(line, peer, rate);
            } else if peer == Peer::Postern {
                let many = load::visits(&dialer, 16, &self.effort).await?;
                self.record.value(line, peer, many.rate());
                self.target(on.edge).settle(SETTLE).await?;
            } else {
                self.record.missing(line, peer, "its egress listener is not measured, or it has none");
            }
        }
        Ok(())
    }

    fn shares(&self, on: &Running<'_>) -> Result<[Share; 2]> {
        Ok([Share::start(std::process::id())?, Share::start(self.target(on.edge).pid())?])
    }

    /// Records the CPU use of the load generator and of the target, each of which has one thread.
    fn note_shares(&mut self, line: &str, peer: Peer, shares: &[Share; 2]) -> Result<()> {
        for (share, of) in shares.iter().zip(["load", "target"]) {
            self.record.value(&format!("{line}-{of}"), peer, share.percent()?);
        }
        Ok(())
    }

    /// Records by how much `now` is more than `before` for each unit of work.
    fn used(&mut self, line: &str, peer: Peer, on: &Running<'_>, (before, now): (f64, f64), units: f64) {
        if on.parts.is_empty() {
            self.record.missing(line, peer, "it has no programs");
        } else {
            self.record.value(line, peer, (now - before) / units);
        }
    }

    async fn round_trips(&mut self, peer: Peer, on: &Running<'_>) -> Result<()> {
        for (bytes, _) in ROUND_TRIP_SIZES {
            for connections in ROUND_TRIP_CONNECTIONS {
                let mut times = load::round_trips(&on.dialer, bytes, connections, &self.effort).await?;
                for (part, share) in [("p50", 0.5), ("p99", 0.99)] {
                    let line = format!("round-trip-{bytes}-{connections}-{part}");
                    self.record.value(&line, peer, load::micros(&mut times, share)?);
                }
                self.target(on.edge).settle(SETTLE).await?;
            }
        }
        Ok(())
    }

    async fn bulk(&mut self, peer: Peer, on: &Running<'_>) -> Result<()> {
        for (way, name) in [(Way::Down, "down"), (Way::Up, "up")] {
            let bytes = load::bytes_for(&on.dialer, way, &self.effort).await?;
            let before = (usage::cpu_seconds(&on.parts)?, usage::minor_faults(&on.parts)?);
            let shares = self.shares(on)?;
            let one = load::bulk(&on.dialer, way, 1, bytes).await?;
            self.note_shares(&format!("bulk-{name}-1"), peer, &shares)?;
            let gigabytes = load::as_f64(one.bytes) / 1e9;
            let cpu = (before.0, usage::cpu_seconds(&on.parts)?);
            self.used(&format!("bulk-{name}-cpu"), peer, on, cpu, gigabytes);
            let faults = (before.1, usage::minor_faults(&on.parts)?);
            self.used(&format!("bulk-{name}-faults"), peer, on, faults, gigabytes);
            self.record.value(&format!("bulk-{name}-1"), peer, one.rate());
            let shares = self.shares(on)?;
            let many = load::bulk(&on.dialer, way, 8, bytes).await?;
            self.note_shares(&format!("bulk-{name}-8"), peer, &shares)?;
            self.record.value(&format!("bulk-{name}-8"), peer, many.rate());
            self.target(on.edge).settle(SETTLE).await?;
        }
        Ok(())
    }

    async fn beside(&mut self, peer: Peer, running: &mut Option<Running<'a>>) -> Result<()> {
        let mut failed = Ok(());
        for (what, _) in DISTURBANCES {
            let lines = ["trip", "visit"].map(|kind| format!("beside-{what}-{kind}"));
            let mut measured = self.beside_one(what, peer, running).await;
            if let Err(error) = &measured
                && peer != Peer::Postern
            {
                // It may not have recovered from the last disturbance, and this line is about the next one.
                let reason = format!("measured at the second attempt, the first failed: {error:#}");
                measured = self.beside_one(what, peer, running).await;
                if measured.is_ok() {
                    lines.iter().for_each(|line| self.record.missing(line, peer, &reason));
                }
            }
            if let Err(error) = measured {
                println!("  beside {what}, {peer}: {error:#}");
                lines.iter().for_each(|line| self.record.failed(line, peer, &format!("{error:#}")));
                failed = Err(error);
            }
        }
        failed
    }

    async fn beside_one(&mut self, what: &str, peer: Peer, running: &mut Option<Running<'a>>) -> Result<()> {
        if running.is_none() {
            *running = Some(self.start(peer).await?);
        }
        let Some(on) = running.as_ref() else { return Ok(()) };
        let measured = disturbance::measure(&on.dialer, what, &self.effort).await;
        let settled = self.target(on.edge).settle(SETTLE).await;
        if measured.is_err() || settled.is_err() {
            // Some peers do not recover: the next measurement gets a fresh one.
            stop(running).await;
        }
        for (line, others) in measured? {
            others.note(&mut self.record, peer, &line)?;
        }
        Ok(())
    }

    async fn connect(&mut self, peer: Peer) {
        let measured = tokio::time::timeout(GROUP_LIMIT, self.connect_of(peer)).await;
        if let Err(error) = measured.context("took too long").and_then(|result| result) {
            self.failed(Group::Connect, peer, &error);
        }
    }

    async fn connect_of(&mut self, peer: Peer) -> Result<()> {
        let open = self.testbed.edge(peers::OPEN).address;
        match peer {
            Peer::Iptables => {
                connect::iptables(self.neighbour, self.testbed, open, &self.effort, &mut self.record)
            }
            Peer::Postern => {
                let running = self.start(peer).await?;
                let measured = connect::postern(&running, self.testbed, &self.effort, &mut self.record).await;
                measured.and(running.stop().await)
            }
            _ => {
                let running = self.start(peer).await?;
                connect::direct(&running, &self.effort, &mut self.record).await
            }
        }
    }
}

async fn stop(running: &mut Option<Running<'_>>) {
    if let Some(running) = running.take()
        && let Err(error) = running.stop().await
    {
        println!("  stopping: {error:#}");
    }
}

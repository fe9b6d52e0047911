//! The table of listeners.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::iter::once;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

use tokio::net::TcpListener;
use tunnel_link::link::multipath_socket;
use tunnel_link::relay::{listen, listen_on, prepare_socket, tune_socket};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::takeover::MOST_SOCKETS;

use super::callers::{ASKED, follow};
use super::config::ListenersConfig;
use super::parts::Parts;
use crate::admission::{Budget, Part, Shares};
use crate::agent_port::{AGENTS_PARTS, AgentTokens, KONNECTIVITY};
use crate::caller::{Audiences, Reviewer, service_account_user};
use crate::listener::{
    Admission, CONNECT, Connect, EGRESS, Egress, EgressTls, Front, HTTP, HTTPS, Https, MAP, METRICS,
    MOST_SECURE_PORTS, Maps, MetricsPage, PLAIN, REDIRECT, Redirected, TargetTls,
};
use crate::maps::{MOST as MOST_MAPS, Map, check, overlap};
use crate::status::AGENTS;

/// A row of the table.
pub(super) struct Listener {
    /// In logs, metrics and the status, and for a successor.
    pub(super) name: &'static str,
    /// Its addresses, each with the flag that gives it.
    pub(super) addresses: fn(&ListenersConfig) -> Vec<(&'static str, SocketAddr)>,
    /// The part of the open files that is for its connections; None: they have their places elsewhere.
    part: Option<Part>,
    /// Serves the sockets, which are in the order of the addresses, with at most so many connections. None: it is served
    /// from the beginning.
    pub(super) start: Option<fn(&mut Parts<'_>, Vec<TcpListener>, u32)>,
}

/// The admin port's name among the listening sockets.
pub(crate) const ADMIN: &str = "admin";
/// Scrapers keep one connection each. They are counted in the part that is left for the server itself.
const MOST_SCRAPES: u32 = 32;

pub(super) static LISTENERS: [Listener; COUNT] = [
    Listener {
        name: AGENTS,
        addresses: |config| at("--agent-port", config.at(config.agents.port)),
        part: None,
        start: Some(agents),
    },
    Listener {
        name: HTTPS,
        addresses: |config| {
            let further = config.listeners.secure_ports.keys();
            let further = further.flat_map(|port| at("--secure-ports", config.at(Some(*port))));
            at("--secure-port", config.at(config.listeners.secure_port)).into_iter().chain(further).collect()
        },
        part: Some(Part::new(7, 64)),
        start: Some(https),
    },
    Listener {
        name: HTTP,
        addresses: |config| at("--insecure-port", config.listeners.insecure_address()),
        part: Some(Part::new(1, 32)),
        start: Some(http),
    },
    Listener {
        name: PLAIN,
        addresses: |config| at("--plain-port", config.at(config.listeners.plain.port)),
        part: Some(Part::new(1, 32)),
        start: Some(plain),
    },
    Listener {
        name: EGRESS,
        // Its Unix socket has none.
        addresses: |config| at("--egress-port", config.at(config.egress.port)),
        part: Some(Part::new(1, 64)),
        start: Some(egress),
    },
    Listener {
        name: CONNECT,
        addresses: |config| at("--connect-port", config.at(config.connect.connect_port)),
        part: Some(ASKED),
        start: Some(connect),
    },
    Listener {
        name: KONNECTIVITY,
        addresses: |config| at("--konnectivity-agent-port", config.at(config.konnectivity.port)),
        part: None,
        start: Some(konnectivity),
    },
    Listener {
        name: METRICS,
        addresses: |config| at("--metrics-port", config.at(config.common.metrics_port)),
        part: Some(Part::new(1, 64).at_most(MOST_SCRAPES)),
        start: Some(metrics),
    },
    Listener {
        name: ADMIN,
        addresses: |config| at("--admin-address", config.common.admin_address),
        part: None,
        start: None,
    },
    Listener {
        name: MAP,
        addresses: |config| config.connect.all_maps().iter().map(|map| ("--map", map.listen)).collect(),
        // All static maps together.
        part: Some(Part::new(1, 64)),
        start: Some(maps),
    },
    Listener {
        name: REDIRECT,
        // The kernel picks them when the redirect starts: one for IPv4 and one for IPv6.
        addresses: |_| Vec::new(),
        part: Some(Part::new(11, 32)),
        start: Some(redirect),
    },
];

const COUNT: usize = 11;
// A successor gets all of them at once: one of most rows, two of the redirect, and the egress listener's Unix socket.
const _: () = assert!(MOST_MAPS + MOST_SECURE_PORTS + COUNT + 2 <= MOST_SOCKETS);

fn at(flag: &'static str, address: Option<SocketAddr>) -> Vec<(&'static str, SocketAddr)> {
    address.map(|address| (flag, address)).into_iter().collect()
}

impl Listener {
    /// Sets the options that accepted sockets inherit.
    pub(super) fn prepare(&self, socket: &impl AsFd) {
        match self.part {
            Some(_) => prepare_socket(socket),
            // Agents, and the admin port: what they were sent last is not discarded.
            None => tune_socket(socket),
        }
    }

    pub(super) fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        // Edge hosts may have several uplinks.
        if self.name == AGENTS
            && let Ok(socket) = multipath_socket(address)
        {
            return listen_on(socket, address, |socket| self.prepare(socket));
        }
        listen(address, |socket| self.prepare(socket))
    }

    pub(super) fn places(&self, budget: &Budget) -> u32 {
        self.part.map_or(0, |part| budget.places(&part))
    }
}

/// Returns the number of connections for which there is room, by listener, and by stage at the agents' ports.
pub(crate) fn places(budget: &Budget) -> BTreeMap<&'static str, u32> {
    let own = LISTENERS.iter().filter(|row| row.part.is_some()).map(|row| (row.name, row.places(budget)));
    let agents = AGENTS_PARTS.iter().map(|(name, part)| (*name, budget.places(part)));
    own.chain(agents).chain([("unauthenticated", budget.unauthenticated)]).collect()
}

impl ListenersConfig {
    /// The addresses of all listeners except the redirect's, each with its flag.
    pub(crate) fn addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        LISTENERS.iter().flat_map(|row| (row.addresses)(self)).collect()
    }

    /// Returns the ports that other hosts may reach, except those of the file of maps.
    pub(crate) fn own_ports(&self) -> BTreeSet<u16> {
        let maps = &self.connect.maps_of_file;
        let of_file = |address: SocketAddr| maps.iter().any(|map| map.listen == address);
        let own = self.addresses().into_iter().map(|(_, address)| address);
        reachable(own.filter(|address| !of_file(*address)))
    }

    /// Checks and completes the settings that depend on several flags. See [`Self::complete`].
    ///
    /// # Errors
    /// If flags conflict or one is missing: names one of them and the reason.
    pub(crate) fn check(&mut self, standalone: bool, kubeconfig: bool) -> Result<(), ConfigError> {
        self.complete(standalone, kubeconfig)?;
        check(&self.connect.maps).map_err(|reason| ConfigError::without_value("--map", reason))?;
        self.check_addresses()
    }

    /// Refuses two listeners on one address: the second would fail to bind, with an error that does not name the flag
    /// of the first.
    pub(super) fn check_addresses(&self) -> Result<(), ConfigError> {
        let addresses = self.addresses();
        for (index, (key, address)) in addresses.iter().enumerate() {
            if let Some((other, _)) = addresses[..index].iter().find(|(_, other)| overlap(*address, *other)) {
                let reason = format!("{other} has port {} already; choose another", address.port());
                return Err(ConfigError::without_value(*key, reason));
            }
        }
        Ok(())
    }
}

/// Loopback, which only a range of its own opens, has ports that no other host reaches.
fn reachable(addresses: impl IntoIterator<Item = SocketAddr>) -> BTreeSet<u16> {
    let reachable = addresses.into_iter().filter(|address| !address.ip().is_loopback());
    reachable.map(|address| address.port()).collect()
}

fn agents(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, _: u32) {
    let Some(agents) = &parts.agents else { return };
    for socket in sockets {
        parts.runtime.tasks.spawn(agents.clone().serve(parts.gates.agents.guard(socket)));
    }
}

fn konnectivity(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, _: u32) {
    let Some(agents) = &parts.agents else { return };
    let options = &parts.config.konnectivity;
    for socket in sockets {
        // They are known by these if they have no certificate.
        let reviewer = parts.callers.client.clone();
        let reviewer = reviewer.map(|client| Reviewer::new(client, Audiences::only(&options.audience)));
        let tokens = AgentTokens::new(reviewer, service_account_user(&options.account));
        let port = agents.for_konnectivity(tokens);
        parts.runtime.tasks.spawn(port.serve(parts.gates.agents.guard(socket)));
    }
}

fn https(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    let listeners = &parts.config.listeners;
    let tls = parts.callers.tls.clone().filter(|_| listeners.terminate_tls);
    let front = tls.map(|tls| {
        let (file, material) = parts.targets.take().unzip();
        let (ports, settings) = (listeners.targets.plain_ports.clone(), parts.settings.clone());
        let targets = Arc::new(TargetTls::new(ports, material.unwrap_or_default(), settings));
        let followed = targets.clone();
        follow(file, parts.runtime, move |material| {
            followed.set(material);
            Ok(())
        });
        let admission = Admission::Callers(parts.callers.authenticator());
        Arc::new(Front { tls: Some(tls), targets: Some(targets), ..parts.front(HTTPS, admission) })
    });
    let shares = Shares::new(places).with_unauthenticated(&parts.callers.unauthenticated);
    let ports = once(None).chain(listeners.secure_ports.values().copied().map(Some));
    for (socket, port) in sockets.into_iter().zip(ports) {
        parts.serve(Https { front: front.clone(), port }, socket, &shares);
    }
}

fn http(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    for socket in sockets {
        let front = parts.front(HTTP, Admission::Everyone);
        parts.serve(Arc::new(front), socket, &Shares::new(places));
    }
}

fn plain(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    let config = &parts.config.listeners.plain;
    for socket in sockets {
        let (clients, ports) = (config.clients.clone(), config.ports.iter().copied().collect());
        let authenticator = parts.callers.authenticator();
        let admission = Admission::Listed { clients, ports, authenticator, exposed_tokens: config.tokens };
        let front = parts.front(PLAIN, admission);
        let shares = Shares::new(places).with_unauthenticated(&parts.callers.unauthenticated);
        parts.serve(Arc::new(front), socket, &shares);
    }
}

fn egress(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    let (direct, services) = (parts.config.egress.direct.clone(), parts.services.take());
    let egress = Egress::new(parts.context(), places, direct, services);
    if let Some(socket) = parts.egress_socket.take() {
        parts.runtime.drain.spawn(egress.clone().serve_unix(socket, parts.gates.listeners.clone()));
    }
    let tls = parts.egress_tls.take().zip(parts.egress.take());
    for (socket, (tls, (file, first))) in sockets.into_iter().zip(tls) {
        if let Err(error) = first.apply(&tls) {
            tracing::error!(error, "failed to set up TLS for --egress-port, it is closed");
            continue;
        }
        let (tls, rights) = (Arc::new(tls), parts.runtime.rights.clone());
        parts.runtime.drain.spawn(egress.clone().serve_tls(parts.gates.listeners.guard(socket), tls.clone()));
        follow(Some(file), parts.runtime, move |files: EgressTls| {
            files.apply(&tls)?;
            rights.notify_one();
            Ok(())
        });
    }
}

fn connect(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, _: u32) {
    for (socket, tls) in sockets.into_iter().zip(parts.callers.tls.clone()) {
        let reception = parts.callers.reception.clone();
        parts.serve(Connect { reception, tls }, socket, &parts.callers.asked);
    }
}

fn metrics(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    for (socket, tls) in sockets.into_iter().zip(parts.callers.tls.clone()) {
        let page = MetricsPage { registry: parts.registry.clone(), gate: parts.gates.listeners.clone() };
        let front = parts.front(METRICS, Admission::Callers(parts.callers.authenticator()));
        let front = Front { tls: Some(tls), pods: None, metrics: Some(page), ..front };
        parts.serve(Arc::new(front), socket, &Shares::new(places));
    }
}

fn maps(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    let connect = &parts.config.connect;
    let (gate, shares) = (parts.gates.listeners.clone(), Shares::new(places));
    let maps = Maps::new(connect.maps.clone(), gate, parts.context(), shares, parts.sockets.clone());
    maps.start(connect.all_maps().into_iter().zip(sockets));
    if let Some(file) = parts.maps.take() {
        let listen = |maps: &[Map]| reachable(maps.iter().map(|map| map.listen));
        let (maps, router) = (Arc::new(maps), parts.runtime.router.clone());
        let rights = parts.runtime.rights.clone();
        router.own_ports.set_maps(listen(&connect.maps_of_file));
        let apply = move |of_file: Vec<Map>| {
            let (maps, router, rights) = (maps.clone(), router.clone(), rights.clone());
            async move {
                let ports = listen(&of_file);
                let replaced = maps.replace(of_file).await;
                if replaced.is_ok() {
                    router.own_ports.set_maps(ports);
                }
                // Maps may have been removed even so.
                rights.notify_one();
                replaced
            }
        };
        parts.runtime.tasks.spawn(file.run(apply, parts.runtime.stop.clone()));
    }
}

fn redirect(parts: &mut Parts<'_>, sockets: Vec<TcpListener>, places: u32) {
    let Some(redirect) = &parts.runtime.redirect else { return };
    let shares = Shares::new(places);
    for socket in sockets {
        let redirected = Redirected { self_tests: redirect.self_tests(), by_route: redirect.routed };
        parts.serve(redirected, socket, &shares);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        listeners: ListenersConfig,
    }

    #[test]
    fn only_what_the_kernel_refuses_is_refused() {
        let check = |flags: &[&str]| {
            let flags = Flags::try_parse_from([&["tunnel-server"], flags].concat()).unwrap();
            let mut listeners = flags.listeners;
            listeners.check(false, true).map_err(|error| error.to_string())
        };
        assert_eq!(check(&["--map=[::1]:10262=edge-1/22", "--admin-address=[::1]:10263"]), Ok(()));
        let refused = "--map: --agent-port has port 10262 already; choose another";
        assert_eq!(check(&["--map=127.0.0.1:10262=edge-1/22"]), Err(refused.to_owned()));
        assert_eq!(check(&["--bind-address=::", "--map=127.0.0.1:10262=edge-1/22"]), Err(refused.to_owned()));
        let twice = check(&["--map=127.0.0.1:1=edge-1/22", "--map=127.0.0.1:1=edge-2/22"]).unwrap_err();
        assert!(twice.contains("127.0.0.1:1 to edge-1 has that port already"), "{twice}");
    }

    proptest! {
        #[test]
        fn a_quarter_is_left_for_links_and_the_server_itself(open_files: u32, memory: u64) {
            let budget = Budget::of(open_files, memory);
            let (scrapes, rows): (Vec<_>, Vec<_>) =
                LISTENERS.iter().filter(|row| row.part.is_some()).partition(|row| row.name == METRICS);
            let parts = rows.iter().filter_map(|row| row.part).chain(AGENTS_PARTS.map(|(_, part)| part));
            let files: Vec<u64> = parts.map(|part| budget.files(&part)).collect();
            prop_assert!(files.iter().sum::<u64>() <= u64::from(open_files) * 3 / 4, "{files:?} of {open_files}");
            prop_assert!(open_files < 96 || files.iter().all(|files| *files > 0), "{files:?} of {open_files}");
            let scrapes = scrapes[0].places(&budget);
            prop_assert!(scrapes <= 32 && (open_files < 64 || scrapes > 0), "{scrapes} of {open_files}");
        }
    }
}

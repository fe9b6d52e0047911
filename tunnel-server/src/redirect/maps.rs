//! The kernel's tables: one system call per [`Change`].

use std::net::IpAddr;
use std::os::fd::AsRawFd;

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, LpmTrie, MapData, MapError, PerCpuArray, SockMap};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_abi::{ANY_PORT, ANY_PORT_ROUTES, DOWN, Mapping, SERVING, V4, V6, counter, names};

use super::tables::{Change, Tables};
use super::{RedirectError, RouteTarget};

type Trie<A, V> = LpmTrie<MapData, A, V>;

/// Every map that user space writes or reads.
pub(super) struct Maps {
    excluded: (Trie<V4, u32>, Trie<V6, u32>),
    clients: (Trie<V4, u32>, Trie<V6, u32>),
    routes: (Trie<V4, Mapping<V4>>, Trie<V6, Mapping<V6>>),
    origins: (Trie<V4, Mapping<V4>>, Trie<V6, Mapping<V6>>),
    ports: Array<MapData, u64>,
    state: Array<MapData, u32>,
    /// What `state` holds.
    state_bits: u32,
    listener: SockMap<MapData>,
    counters: PerCpuArray<MapData, u64>,
}

macro_rules! take {
    ($ebpf:expr, $name:expr) => {
        $ebpf
            .take_map($name)
            .ok_or_else(|| RedirectError::Map { map: $name, reason: "the object has no such map".into() })?
            .try_into()
            .map_err(failed($name))?
    };
}

fn failed(map: &'static str) -> impl Fn(MapError) -> RedirectError {
    move |error| RedirectError::Map { map, reason: reason(&error) }
}

/// The error with its causes on one line; aya keeps the errno in the source.
fn reason(error: &MapError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

impl Maps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, RedirectError> {
        Ok(Self {
            excluded: (take!(ebpf, names::EXCLUDED_V4), take!(ebpf, names::EXCLUDED_V6)),
            clients: (take!(ebpf, names::CLIENTS_V4), take!(ebpf, names::CLIENTS_V6)),
            routes: (take!(ebpf, names::ROUTES_V4), take!(ebpf, names::ROUTES_V6)),
            origins: (take!(ebpf, names::ORIGINS_V4), take!(ebpf, names::ORIGINS_V6)),
            ports: take!(ebpf, names::PORTS),
            state: take!(ebpf, names::STATE),
            state_bits: 0,
            listener: take!(ebpf, names::LISTENER),
            counters: take!(ebpf, names::COUNTERS),
        })
    }

    /// Writes one change; `before` is what the maps hold without it.
    pub(super) fn write(&mut self, change: &Change, before: &Tables) -> Result<(), RedirectError> {
        match *change {
            Change::Exclude(IpNet::V4(net)) => {
                insert(&mut self.excluded.0, names::EXCLUDED_V4, &key_v4(net), &1)
            }
            Change::Exclude(IpNet::V6(net)) => {
                insert(&mut self.excluded.1, names::EXCLUDED_V6, &key_v6(net), &1)
            }
            Change::Include(IpNet::V4(net)) => remove(&mut self.excluded.0, names::EXCLUDED_V4, &key_v4(net)),
            Change::Include(IpNet::V6(net)) => remove(&mut self.excluded.1, names::EXCLUDED_V6, &key_v6(net)),
            Change::Admit(IpNet::V4(net)) => insert(&mut self.clients.0, names::CLIENTS_V4, &key_v4(net), &1),
            Change::Admit(IpNet::V6(net)) => insert(&mut self.clients.1, names::CLIENTS_V6, &key_v6(net), &1),
            Change::Dismiss(IpNet::V4(net)) => remove(&mut self.clients.0, names::CLIENTS_V4, &key_v4(net)),
            Change::Dismiss(IpNet::V6(net)) => remove(&mut self.clients.1, names::CLIENTS_V6, &key_v6(net)),
            Change::Unroute(IpNet::V4(net)) => remove(&mut self.routes.0, names::ROUTES_V4, &key_v4(net)),
            Change::Unroute(IpNet::V6(net)) => remove(&mut self.routes.1, names::ROUTES_V6, &key_v6(net)),
            Change::Forget(IpNet::V4(net)) => remove(&mut self.origins.0, names::ORIGINS_V4, &key_v4(net)),
            Change::Forget(IpNet::V6(net)) => remove(&mut self.origins.1, names::ORIGINS_V6, &key_v6(net)),
            Change::Route(net, target) => self.route(net, target),
            Change::Origin(block, net) => self.origin(block, net),
            Change::OpenPort(port) => self.port(port, true, before),
            Change::ClosePort(port) => self.port(port, false, before),
            Change::AnyPort(any) => self.set_state(ANY_PORT_ROUTES, any),
        }
    }

    fn route(
        &mut self,
        net: IpNet,
        RouteTarget { token, up, any_port }: RouteTarget,
    ) -> Result<(), RedirectError> {
        let flags = if up { 0 } else { DOWN } | if any_port { ANY_PORT } else { 0 };
        match (net, token) {
            (IpNet::V4(net), IpAddr::V4(token)) => {
                let value = Mapping { base: token.into(), host_mask: net.hostmask().into(), flags };
                insert(&mut self.routes.0, names::ROUTES_V4, &key_v4(net), &value)
            }
            (IpNet::V6(net), IpAddr::V6(token)) => {
                let value = Mapping { base: token.into(), host_mask: net.hostmask().into(), flags };
                insert(&mut self.routes.1, names::ROUTES_V6, &key_v6(net), &value)
            }
            _ => Err(RedirectError::Route {
                net,
                token,
                reason: "its token is of the other address family".into(),
            }),
        }
    }

    fn origin(&mut self, block: IpNet, net: IpNet) -> Result<(), RedirectError> {
        match (block, net) {
            (IpNet::V4(block), IpNet::V4(net)) => {
                let value =
                    Mapping { base: net.network().into(), host_mask: net.hostmask().into(), flags: 0 };
                insert(&mut self.origins.0, names::ORIGINS_V4, &key_v4(block), &value)
            }
            (IpNet::V6(block), IpNet::V6(net)) => {
                let value =
                    Mapping { base: net.network().into(), host_mask: net.hostmask().into(), flags: 0 };
                insert(&mut self.origins.1, names::ORIGINS_V6, &key_v6(block), &value)
            }
            _ => Err(RedirectError::Route {
                net,
                token: block.network(),
                reason: "its token is of the other address family".into(),
            }),
        }
    }

    fn port(&mut self, port: u16, open: bool, before: &Tables) -> Result<(), RedirectError> {
        let word = port >> 6;
        // Within one word the bits of u16 ports cannot overflow: word << 6 | 63 <= 65535.
        let range = (word << 6)..=(word << 6 | 63);
        let bits = before.ports.range(range).fold(0_u64, |bits, port| bits | 1 << (port & 63));
        let bit = 1_u64 << (port & 63);
        let bits = if open { bits | bit } else { bits & !bit };
        self.ports.set(u32::from(word), bits, 0).map_err(failed(names::PORTS))
    }

    pub(super) fn set_serving(&mut self, serving: bool) -> Result<(), RedirectError> {
        self.set_state(SERVING, serving)
    }

    fn set_state(&mut self, bit: u32, on: bool) -> Result<(), RedirectError> {
        let bits = if on { self.state_bits | bit } else { self.state_bits & !bit };
        self.state.set(0, bits, 0).map_err(failed(names::STATE))?;
        self.state_bits = bits;
        Ok(())
    }

    pub(super) fn set_listener(&mut self, slot: u32, socket: &impl AsRawFd) -> Result<(), RedirectError> {
        self.listener.set(slot, socket, 0).map_err(failed(names::LISTENER))
    }

    /// A counter, summed over the CPUs.
    pub(super) fn counter(&self, index: u32) -> Result<u64, RedirectError> {
        let values = self.counters.get(&index, 0).map_err(failed(names::COUNTERS))?;
        Ok(values.iter().sum())
    }

    /// All counters with their names.
    pub(super) fn counters(&self) -> Result<Vec<(&'static str, u64)>, RedirectError> {
        (0_u32..).zip(counter::NAMES).map(|(index, name)| Ok((name, self.counter(index)?))).collect()
    }
}

fn key_v4(net: Ipv4Net) -> Key<V4> {
    Key::new(u32::from(net.prefix_len()), net.network().into())
}

fn key_v6(net: Ipv6Net) -> Key<V6> {
    Key::new(u32::from(net.prefix_len()), net.network().into())
}

fn insert<A: aya::Pod, V: aya::Pod>(
    map: &mut Trie<A, V>,
    name: &'static str,
    key: &Key<A>,
    value: &V,
) -> Result<(), RedirectError> {
    map.insert(key, value, 0).map_err(failed(name))
}

fn remove<A: aya::Pod, V: aya::Pod>(
    map: &mut Trie<A, V>,
    name: &'static str,
    key: &Key<A>,
) -> Result<(), RedirectError> {
    match map.remove(key) {
        // Gone is gone: somebody's bpftool, or an earlier attempt that failed after the deletion.
        Err(error) if is_not_found(&error) => Ok(()),
        result => result.map_err(failed(name)),
    }
}

fn is_not_found(error: &MapError) -> bool {
    match error {
        MapError::KeyNotFound | MapError::ElementNotFound => true,
        MapError::SyscallError(error) => error.io_error.raw_os_error() == Some(nix::libc::ENOENT),
        _ => false,
    }
}

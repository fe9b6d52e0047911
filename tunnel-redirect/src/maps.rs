//! Writes the kernel's maps, with one system call per [`Change`].

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, MapData, MapError, PerCpuArray, SockMap};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_abi::{
    ANY_PORT, ANY_PORT_ROUTES, DOWN, FROM_ANYWHERE, FROM_HERE, FROM_PODS, Mapping, SERVING, STATE_BITS,
    STATE_DEVICE, V4, V6, counter, names,
};
use tunnel_routing::RouteTarget;
use tunnel_runtime::error::chain;

use super::change::{Change, ComesIn};
use super::error::RedirectError;
use super::map_contents::MapContents;
use super::pins::monotonic_nanos;

/// All maps that user space writes or reads, but those of [`Heartbeat`] and [`Counters`].
pub(super) struct Maps {
    excluded: Tries<u32, u32>,
    clients: Tries<u32, u32>,
    uplinks: HashMap<MapData, u32, u32>,
    routes: Tries<Mapping<V4>, Mapping<V6>>,
    origins: Tries<Mapping<V4>, Mapping<V6>>,
    ports: Array<MapData, u64>,
    state: Array<MapData, u32>,
    /// Current value of `state`.
    state_bits: u32,
    listener: SockMap<MapData>,
}

/// The map that tells the programs that this process is alive. Apart from the others, as a change of these may take longer than
/// the programs wait for a heartbeat.
pub(super) struct Heartbeat {
    alive: Array<MapData, u64>,
}

/// The counters of the programs. Apart from the other maps, so that reading them waits for no change of these.
pub(super) struct Counters {
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

macro_rules! tries {
    ($ebpf:expr, $v4:expr, $v6:expr) => {
        Tries { v4: take!($ebpf, $v4), v6: take!($ebpf, $v6), names: [$v4, $v6] }
    };
}

/// Includes the source, which holds the errno.
fn failed(map: &'static str) -> impl Fn(MapError) -> RedirectError {
    move |error| RedirectError::Map { map, reason: chain(&error) }
}

impl Heartbeat {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, RedirectError> {
        Ok(Self { alive: take!(ebpf, names::ALIVE) })
    }

    pub(super) fn beat(&mut self) -> Result<(), RedirectError> {
        self.alive.set(0, monotonic_nanos(), 0).map_err(failed(names::ALIVE))
    }
}

impl Counters {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, RedirectError> {
        Ok(Self { counters: take!(ebpf, names::COUNTERS) })
    }

    /// Value of a counter, summed over the CPUs.
    pub(super) fn get(&self, index: u32) -> Result<u64, RedirectError> {
        let values = self.counters.get(&index, 0).map_err(failed(names::COUNTERS))?;
        Ok(values.iter().sum())
    }

    /// All of them, with their names.
    pub(super) fn all(&self) -> Result<Vec<(&'static str, u64)>, RedirectError> {
        (0_u32..).zip(counter::NAMES).map(|(index, name)| Ok((name, self.get(index)?))).collect()
    }
}

impl Maps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, RedirectError> {
        Ok(Self {
            excluded: tries!(ebpf, names::EXCLUDED_V4, names::EXCLUDED_V6),
            clients: tries!(ebpf, names::CLIENTS_V4, names::CLIENTS_V6),
            uplinks: take!(ebpf, names::UPLINKS),
            routes: tries!(ebpf, names::ROUTES_V4, names::ROUTES_V6),
            origins: tries!(ebpf, names::ORIGINS_V4, names::ORIGINS_V6),
            ports: take!(ebpf, names::PORTS),
            state: take!(ebpf, names::STATE),
            state_bits: 0,
            listener: take!(ebpf, names::LISTENER),
        })
    }

    /// Writes one change; `before` is the maps' contents without it.
    pub(super) fn write(&mut self, change: &Change, before: &MapContents) -> Result<(), RedirectError> {
        match *change {
            Change::Exclude(net) => self.excluded.insert(net, 1),
            Change::Include(net) => self.excluded.remove(net),
            Change::Admit(net, from) => {
                let value = match from {
                    ComesIn::Anywhere => FROM_ANYWHERE,
                    ComesIn::Here => FROM_HERE,
                    ComesIn::Pods => FROM_PODS,
                };
                self.clients.insert(net, value)
            }
            Change::Dismiss(net) => self.clients.remove(net),
            Change::Route(net, RouteTarget { virtual_address, up, any_port }) => {
                let flags = if up { 0 } else { DOWN } | if any_port { ANY_PORT } else { 0 };
                self.routes.map(net, virtual_address, flags)
            }
            Change::Unroute(net) => self.routes.remove(net),
            Change::Origin(block, net) => self.origins.map(block, net.network(), 0),
            Change::Forget(block) => self.origins.remove(block),
            Change::OpenPort(port) => self.port(port, true, before),
            Change::ClosePort(port) => self.port(port, false, before),
            Change::AnyPort(any) => self.set_state(ANY_PORT_ROUTES, any),
        }
    }

    fn port(&mut self, port: u16, open: bool, before: &MapContents) -> Result<(), RedirectError> {
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
        self.state.set(STATE_BITS, bits, 0).map_err(failed(names::STATE))?;
        self.state_bits = bits;
        Ok(())
    }

    /// Sets the device of the routes to edge nodes.
    pub(super) fn set_device(&mut self, index: u32) -> Result<(), RedirectError> {
        self.state.set(STATE_DEVICE, index, 0).map_err(failed(names::STATE))
    }

    /// Sets the interfaces that lead to other hosts; `before` are those of the last call.
    pub(super) fn set_uplinks(
        &mut self,
        uplinks: &BTreeSet<u32>,
        before: &BTreeSet<u32>,
    ) -> Result<(), RedirectError> {
        for gone in before.difference(uplinks) {
            match self.uplinks.remove(gone) {
                Err(error) if !is_not_found(&error) => return Err(failed(names::UPLINKS)(error)),
                _ => {}
            }
        }
        for new in uplinks.difference(before) {
            self.uplinks.insert(new, 1, 0).map_err(failed(names::UPLINKS))?;
        }
        Ok(())
    }

    pub(super) fn set_listener(&mut self, slot: u32, socket: &impl AsRawFd) -> Result<(), RedirectError> {
        self.listener.set(slot, socket, 0).map_err(failed(names::LISTENER))
    }
}

type Trie<A, V> = LpmTrie<MapData, A, V>;

/// The IPv4 and the IPv6 map of one purpose, keyed by network.
struct Tries<T4: aya::Pod, T6: aya::Pod> {
    v4: Trie<V4, T4>,
    v6: Trie<V6, T6>,
    names: [&'static str; 2],
}

impl<T4: aya::Pod, T6: aya::Pod> Tries<T4, T6> {
    fn remove(&mut self, net: IpNet) -> Result<(), RedirectError> {
        let (result, name) = match net {
            IpNet::V4(net) => (self.v4.remove(&key_v4(net)), self.names[0]),
            IpNet::V6(net) => (self.v6.remove(&key_v6(net)), self.names[1]),
        };
        match result {
            // Already removed, by bpftool or by an earlier attempt that failed after the deletion.
            Err(error) if is_not_found(&error) => Ok(()),
            result => result.map_err(failed(name)),
        }
    }
}

impl Tries<u32, u32> {
    fn insert(&mut self, net: IpNet, value: u32) -> Result<(), RedirectError> {
        match net {
            IpNet::V4(net) => self.v4.insert(&key_v4(net), value, 0).map_err(failed(self.names[0])),
            IpNet::V6(net) => self.v6.insert(&key_v6(net), value, 0).map_err(failed(self.names[1])),
        }
    }
}

impl Tries<Mapping<V4>, Mapping<V6>> {
    /// Maps `net` to the block of the same size that starts at `base`.
    fn map(&mut self, net: IpNet, base: IpAddr, flags: u32) -> Result<(), RedirectError> {
        match (net, base) {
            (IpNet::V4(net), IpAddr::V4(base)) => {
                let value = Mapping { base: base.into(), host_mask: net.hostmask().into(), flags };
                self.v4.insert(&key_v4(net), value, 0).map_err(failed(self.names[0]))
            }
            (IpNet::V6(net), IpAddr::V6(base)) => {
                let value = Mapping { base: base.into(), host_mask: net.hostmask().into(), flags };
                self.v6.insert(&key_v6(net), value, 0).map_err(failed(self.names[1]))
            }
            _ => Err(RedirectError::Route {
                net,
                virtual_address: base,
                reason: "its virtual address is of the other address family".into(),
            }),
        }
    }
}

fn key_v4(net: Ipv4Net) -> Key<V4> {
    Key::new(u32::from(net.prefix_len()), net.network().into())
}

fn key_v6(net: Ipv6Net) -> Key<V6> {
    Key::new(u32::from(net.prefix_len()), net.network().into())
}

fn is_not_found(error: &MapError) -> bool {
    match error {
        MapError::KeyNotFound | MapError::ElementNotFound => true,
        MapError::SyscallError(error) => error.io_error.raw_os_error() == Some(nix::libc::ENOENT),
        _ => false,
    }
}

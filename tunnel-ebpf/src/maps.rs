//! Maps and load-time constants of the programs.

use core::arch::asm;
use core::ffi::c_void;
use core::ptr::null_mut;

use aya_ebpf::{
    Global,
    bindings::bpf_sock_addr,
    helpers::{bpf_ktime_get_ns, bpf_map_lookup_elem, bpf_sk_release, generated::bpf_get_netns_cookie},
    macros::map,
    maps::{Array, HashMap, LpmTrie, PerCpuArray, SockMap, lpm_trie::Key},
};
use tunnel_abi::{
    ANY_PORT_ROUTES, EXCLUDED_ENTRIES, INITIAL_NETNS, LIST_CAPACITY, LISTENER_SLOTS, LISTENER_V4, Mapping,
    PORT_WORDS, Prefix, ROUTE_ENTRIES, SERVING, STATE_BITS, STATE_SLOTS, UPLINK_CAPACITY, V4, V6, counter,
    verdict::{GlobalState, Tables},
};

#[map]
pub(crate) static EXCLUDED_V4: LpmTrie<V4, u32> = LpmTrie::with_max_entries(EXCLUDED_ENTRIES, 0);
#[map]
pub(crate) static EXCLUDED_V6: LpmTrie<V6, u32> = LpmTrie::with_max_entries(EXCLUDED_ENTRIES, 0);
#[map]
pub(crate) static ROUTES_V4: LpmTrie<V4, Mapping<V4>> = LpmTrie::with_max_entries(ROUTE_ENTRIES, 0);
#[map]
pub(crate) static ROUTES_V6: LpmTrie<V6, Mapping<V6>> = LpmTrie::with_max_entries(ROUTE_ENTRIES, 0);
#[map]
pub(crate) static ORIGINS_V4: LpmTrie<V4, Mapping<V4>> = LpmTrie::with_max_entries(ROUTE_ENTRIES, 0);
#[map]
pub(crate) static ORIGINS_V6: LpmTrie<V6, Mapping<V6>> = LpmTrie::with_max_entries(ROUTE_ENTRIES, 0);
#[map]
pub(crate) static CLIENTS_V4: LpmTrie<V4, u32> = LpmTrie::with_max_entries(LIST_CAPACITY, 0);
#[map]
pub(crate) static CLIENTS_V6: LpmTrie<V6, u32> = LpmTrie::with_max_entries(LIST_CAPACITY, 0);
#[map]
pub(crate) static UPLINKS: HashMap<u32, u32> = HashMap::with_max_entries(UPLINK_CAPACITY, 0);
#[map]
pub(crate) static PORTS: Array<u64> = Array::with_max_entries(PORT_WORDS, 0);
#[map]
pub(crate) static STATE: Array<u32> = Array::with_max_entries(STATE_SLOTS, 0);
#[map]
pub(crate) static LISTENER: SockMap = SockMap::with_max_entries(LISTENER_SLOTS, 0);
#[map]
pub(crate) static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);

#[map]
pub(crate) static ALIVE: Array<u64> = Array::with_max_entries(1, 0);

/// Off unless set by the loader: kernels before 6.1 refuse a program that calls the helper.
#[unsafe(no_mangle)]
pub(crate) static SET_RETVAL: Global<u8> = Global::new(0);
#[unsafe(no_mangle)]
pub(crate) static INGRESS_IFINDEX: Global<u8> = Global::new(0);
#[unsafe(no_mangle)]
pub(crate) static HOST_NETNS: Global<u64> = Global::new(0);
#[unsafe(no_mangle)]
pub(crate) static ORPHAN_AFTER: Global<u64> = Global::new(u64::MAX);
#[unsafe(no_mangle)]
pub(crate) static REFUSE_ORPHANED: Global<u8> = Global::new(0);
#[unsafe(no_mangle)]
pub(crate) static VIRTUAL_V4: Global<Prefix<V4>> = Global::new(Prefix { base: V4(0), mask: V4(!0) });
#[unsafe(no_mangle)]
pub(crate) static VIRTUAL_V6: Global<Prefix<V6>> =
    Global::new(Prefix { base: V6([0; 4]), mask: V6([!0; 4]) });

/// Adds one to a counter.
#[inline(always)]
pub(crate) fn count(index: u32) {
    if let Some(slot) = COUNTERS.get_ptr_mut(index) {
        // SAFETY: the pointer refers to a live, aligned u64 in this CPU's slot; the instruction adds to it and touches
        // nothing else. Atomic, because a process in a cgroup hook may be preempted by another one on the same CPU. In
        // assembly, because the target declares no atomics to Rust.
        unsafe { asm!("lock *(u64 *)({slot} + 0) += {one}", slot = in(reg) slot, one = in(reg) 1_u64) };
    }
}

/// True while the server lives: the kernel takes a socket that is closed out of the map at once, also that of a process
/// that was killed.
///
/// # Safety
/// To be called from a program whose type has `bpf_sk_release`, such as the connect hooks.
#[inline(always)]
unsafe fn has_listener() -> bool {
    let map = (&raw const LISTENER).cast_mut().cast::<c_void>();
    let slot = LISTENER_V4;
    // SAFETY: `map` is a map definition, and the slot a live u32.
    let socket = unsafe { bpf_map_lookup_elem(map, (&raw const slot).cast()) };
    if socket.is_null() {
        return false;
    }
    // SAFETY: not null, so it is a socket that the lookup has acquired.
    unsafe { bpf_sk_release(socket) };
    true
}

/// Answers the verdict's lookups from the maps.
pub(crate) struct KernelTables {
    /// The kernel's context of a connect hook; null in other programs, which do not ask for the namespace.
    pub(crate) connect: *mut bpf_sock_addr,
}

impl GlobalState for KernelTables {
    #[inline(always)]
    fn tunnelled(&self, port: u16) -> bool {
        PORTS.get(u32::from(port >> 6)).is_some_and(|word| word >> (port & 63) & 1 == 1)
    }

    #[inline(always)]
    fn serving(&self) -> bool {
        STATE.get(STATE_BITS).is_some_and(|state| *state & SERVING != 0)
    }

    #[inline(always)]
    fn orphaned(&self) -> bool {
        // SAFETY: the helper takes no arguments and only reads the clock.
        let now = unsafe { bpf_ktime_get_ns() };
        // A value ahead of `now` was just written on another CPU.
        ALIVE.get(0).is_none_or(|alive| now.saturating_sub(*alive) > ORPHAN_AFTER.load())
    }

    #[inline(always)]
    fn refuse_orphaned(&self) -> bool {
        REFUSE_ORPHANED.load() != 0
    }

    #[inline(always)]
    fn fails_at_connect(&self) -> bool {
        SET_RETVAL.load() != 0
    }

    #[inline(always)]
    fn by_route(&self) -> bool {
        let host = match HOST_NETNS.load() {
            0 => return false,
            // SAFETY: without a context the helper returns the cookie of the initial namespace.
            INITIAL_NETNS => unsafe { bpf_get_netns_cookie(null_mut()) },
            host => host,
        };
        // SAFETY: `connect` is the hook's context, as only connect hooks ask.
        unsafe { bpf_get_netns_cookie(self.connect.cast()) != host && has_listener() }
    }

    #[inline(always)]
    fn any_port_routes(&self) -> bool {
        STATE.get(STATE_BITS).is_some_and(|state| *state & ANY_PORT_ROUTES != 0)
    }
}

impl Tables<V4> for KernelTables {
    #[inline(always)]
    fn excluded(&self, address: V4) -> bool {
        EXCLUDED_V4.get(Key::new(32, address)).is_some()
    }

    #[inline(always)]
    fn route(&self, address: V4) -> Option<Mapping<V4>> {
        ROUTES_V4.get(Key::new(32, address)).copied()
    }
}

impl Tables<V6> for KernelTables {
    #[inline(always)]
    fn excluded(&self, address: V6) -> bool {
        EXCLUDED_V6.get(Key::new(128, address)).is_some()
    }

    #[inline(always)]
    fn route(&self, address: V6) -> Option<Mapping<V6>> {
        ROUTES_V6.get(Key::new(128, address)).copied()
    }
}

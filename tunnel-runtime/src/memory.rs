//! Division of this process's memory.

use crate::limits::Limits;

/// Minimum of the budget for stalled receivers, in bytes: a few windows.
const MIN_BUDGET: u64 = 8 << 20;
/// Bytes that an idle connection takes at one end: 4.3 KB in the program (docs/benchmarks.md: 8.6 KB for both ends),
/// and 4.1 to 4.5 KB that Linux 6.18 charges for a dialled socket with its file and its epoll entry.
/// `memory::idle_connections_to_a_small_agent` and `memory::idle_connections_of_several_sources` print the actual
/// values.
const CONNECTION: u64 = 9 << 10;

/// Returns the bytes that may be held for receivers that do not read: a sixth of the cgroup's memory limit, or of the
/// machine's memory. A quarter more is allowed temporarily, and the rest is for everything else: 2,000 connections
/// with their sockets take half of an agent's 64 MiB.
pub fn stall_budget() -> usize {
    let memory = Limits::of_process().memory.amount;
    usize::try_from((memory / 6).max(MIN_BUDGET)).unwrap_or(usize::MAX)
}

/// Returns the bytes that may be queued in front of one link.
pub fn link_queue() -> usize {
    stall_budget() / 2
}

/// Makes glibc's allocator use the memory of freed buffers again. Call it before anything else.
///
/// At first glibc maps each allocation of 128 KiB or more afresh and unmaps it when it is freed, and also gives the end of
/// its heap back above that much: every 4 KiB of relayed data are a page fault then. When a mapped allocation is freed, that
/// threshold becomes the allocation's size, and the one for the heap's end twice that (mallopt(3), M_MMAP_THRESHOLD). So
/// what is freed first during the start would decide how fast bulk transfers are, and it is this.
pub fn reuse_freed() {
    /// Covers what the buffers of a transfer vary by; more than that is still given back.
    #[cfg(target_env = "gnu")]
    const REUSED: usize = 8 << 20;
    // Never written to: it takes no memory.
    #[cfg(target_env = "gnu")]
    drop(std::hint::black_box(Vec::<u8>::with_capacity(REUSED)));
}

/// Returns the number of connections that fit into `memory` bytes.
pub fn connections(memory: u64) -> u32 {
    u32::try_from(memory / CONNECTION).unwrap_or(u32::MAX)
}

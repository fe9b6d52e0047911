//! The parts that this process's memory is divided into.

use crate::limits::Limits;

/// What the process's bound on stalled receivers is at least, in bytes: a few windows.
const MIN_BUDGET: u64 = 8 << 20;
/// Bytes that an idle connection takes at one end: 4.3 KB of the program (docs/benchmarks.md: 8.6 KB for both ends), and 4.1 to 4.5 KB
/// that Linux 6.18 charges for a socket that was dialled, with its file and its place in epoll.
/// `memory::idle_connections_to_a_small_agent` and `memory::idle_connections_of_several_sources` print what it is.
const CONNECTION: u64 = 9 << 10;

/// Bytes that may be held for receivers that do not read: a sixth of the cgroup's memory limit, or of the machine's
/// memory. A quarter more is allowed for a while, and the rest is for everything else: 2,000 connections with their sockets
/// take half of an agent's 64 MiB.
pub(crate) fn stall_budget() -> usize {
    let memory = Limits::of_process().memory.amount;
    usize::try_from((memory / 6).max(MIN_BUDGET)).unwrap_or(usize::MAX)
}

/// Bytes that may wait in front of one link.
pub(crate) fn link_queue() -> usize {
    stall_budget() / 2
}

/// The connections for which a part of `memory` is enough, in bytes.
pub fn connections(memory: u64) -> u32 {
    u32::try_from(memory / CONNECTION).unwrap_or(u32::MAX)
}

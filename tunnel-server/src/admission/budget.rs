//! Divides the process's open files, or the number its memory allows, into parts, so that each kind of use is
//! guaranteed its own. Also bounds the memory that unauthenticated connections may use.

use tunnel_runtime::memory::connections;

/// Bytes that one unauthenticated connection may make the server hold: a head of 64 KiB, 128 KiB of HTTP/2 bodies, TLS, and the
/// state that serves it.
const UNAUTHENTICATED: u64 = 224 << 10;
/// Minimum, however little memory there is.
const LEAST_UNAUTHENTICATED: u32 = 64;
const LEAST_FILES: u32 = 1024;

/// A part of the open files, for one kind of connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    share: u32,
    of: u32,
    /// Open files of one connection.
    each: u32,
    most: u32,
}

impl Part {
    /// `share` parts in `of`.
    pub(crate) const fn new(share: u32, of: u32) -> Self {
        Self { share, of, each: 1, most: u32::MAX }
    }

    /// Limits the number of connections.
    pub(crate) const fn at_most(self, most: u32) -> Self {
        Self { most, ..self }
    }

    /// Sets the number of open files that each connection takes.
    pub(crate) const fn of_files(self, each: u32) -> Self {
        Self { each, ..self }
    }
}

/// The number of connections that this process may have.
///
/// The parts of all kinds together leave a quarter, which is for the first links of attached agents, and for what the
/// server opens itself: the admin endpoints and the metrics listener, the inventory, the self-test, the BPF maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    files: u32,
    /// Connections to the https and plain listeners, and requests there, whose sender or node is not known yet. They
    /// are bounded by memory; their files are counted by the listener.
    pub unauthenticated: u32,
}

impl Budget {
    /// Divides `open_files`, or the number of connections that fit in half of `memory` (bytes) if that is lower. Takes
    /// a sixth of `memory` for unauthenticated connections. The listeners get 37/64 of the files, so that idle
    /// connections on all of them take three tenths of the memory.
    pub fn of(open_files: u32, memory: u64) -> Self {
        Self {
            files: open_files.min(connections(memory / 2).max(LEAST_FILES)),
            unauthenticated: u32::try_from(memory / 6 / UNAUTHENTICATED)
                .unwrap_or(u32::MAX)
                .max(LEAST_UNAUTHENTICATED),
        }
    }

    /// Maximum number of concurrent connections of one kind.
    pub(crate) fn places(&self, part: &Part) -> u32 {
        ((self.files / part.of).saturating_mul(part.share) / part.each).min(part.most)
    }

    /// Open files of these.
    #[cfg(test)]
    pub(crate) fn files(&self, part: &Part) -> u64 {
        u64::from(self.places(part)) * u64::from(part.each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unauthenticated_have_a_sixth_of_the_memory() {
        let unauthenticated = |memory| Budget::of(524_288, memory).unauthenticated;
        assert_eq!(unauthenticated(2 << 30), 1560);
        assert_eq!(unauthenticated(256 << 20), 195);
        assert_eq!(unauthenticated(0), LEAST_UNAUTHENTICATED);
        assert_eq!(unauthenticated(u64::MAX), u32::MAX);
    }

    #[test]
    fn connections_are_bounded_by_memory_as_well_as_by_files() {
        let places = |open_files, memory| Budget::of(open_files, memory).places(&Part::new(11, 32));
        // LimitNOFILE=infinity gives the first value on most hosts, and higher ones on others.
        for open_files in [1_048_576, 1_073_741_816, u32::MAX] {
            assert_eq!(places(open_files, 2 << 30), 40_040);
            assert_eq!(places(open_files, 128 << 20), 2_497);
            assert_eq!(places(open_files, 0), 352);
        }
        assert_eq!(places(20_000, 2 << 30), 6_875, "the files are fewer");
        assert!(places(u32::MAX, u64::MAX) > 1_000_000_000);
    }

    #[test]
    fn a_part_counts_files_and_has_a_limit() {
        let places = |part: Part| Budget::of(6_400, 1 << 40).places(&part);
        assert_eq!(places(Part::new(1, 64)), 100);
        assert_eq!(places(Part::new(1, 64).of_files(3)), 33);
        assert_eq!(places(Part::new(1, 64).at_most(32)), 32);
    }
}

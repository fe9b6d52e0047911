//! Divides the process's open files, or the number its memory allows, into parts, so that each kind of use is
//! guaranteed its own. Also bounds the memory that unauthenticated connections may use.

use tunnel_core::memory::connections;

/// More concurrent handshakes would only wait for each other's signatures.
const MOST_HANDSHAKES: u32 = 4096;
/// Scrapers keep one connection each. They are counted in the part that is left for the server itself.
const MOST_SCRAPES: u32 = 32;
/// An enrolment takes tens of milliseconds.
const MOST_ENROLMENTS: u32 = 1024;
/// Bytes that one unauthenticated connection may make the server hold: a head of 64 KiB, TLS, and the state that serves
/// it.
const NEWCOMER: u64 = 96 << 10;
/// Minimum, however little memory there is.
const LEAST_NEWCOMERS: u32 = 64;
const LEAST_FILES: u32 = 1024;

/// Maximum number of concurrent connections of each kind. Each takes one open file of the process.
///
/// The remaining quarter is for the first links of attached agents, and for what the server opens itself: the admin
/// endpoints and the metrics listener, the inventory, the self-test, the BPF maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub redirect: u32,
    pub https: u32,
    pub http: u32,
    pub plain: u32,
    pub egress: u32,
    /// A connection with TLS takes three files.
    pub connect: u32,
    /// All static maps together.
    pub maps: u32,
    pub metrics: u32,
    /// Handshakes on the agent port from sources from which no agent has attached yet.
    pub strangers: u32,
    /// Handshakes from sources from which an agent has attached before.
    pub known: u32,
    /// Connections that have shown a certificate: links until they are attached, and renewals.
    pub certified: u32,
    /// Connections for an enrolment, which need no certificate.
    pub enrolments: u32,
    /// Links of busy nodes beyond the first one.
    pub additional: u32,
    /// Connections to the https and plain listeners, and requests there, whose sender or node is not known yet. They
    /// are bounded by memory; their files are counted by the listener.
    pub newcomers: u32,
}

impl Budget {
    /// Divides `open_files`, or the number of connections that fit in half of `memory` (bytes) if that is lower. Takes
    /// a sixth of `memory` for unauthenticated connections. The listeners get 37/64 of the files, so that idle
    /// connections on all of them take three tenths of the memory.
    pub fn of(open_files: u32, memory: u64) -> Self {
        let files = open_files.min(connections(memory / 2).max(LEAST_FILES));
        let part = |share: u32, of: u32| (files / of).saturating_mul(share);
        Self {
            redirect: part(11, 32),
            https: part(7, 64),
            http: part(1, 32),
            plain: part(1, 32),
            egress: part(1, 64),
            connect: part(1, 96),
            maps: part(1, 64),
            metrics: part(1, 64).min(MOST_SCRAPES),
            strangers: part(1, 16).min(MOST_HANDSHAKES),
            known: part(1, 32).min(MOST_HANDSHAKES),
            certified: part(1, 32).min(MOST_HANDSHAKES),
            enrolments: part(1, 64).min(MOST_ENROLMENTS),
            additional: part(1, 32),
            newcomers: u32::try_from(memory / 6 / NEWCOMER).unwrap_or(u32::MAX).max(LEAST_NEWCOMERS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn newcomers_have_a_sixth_of_the_memory() {
        let newcomers = |memory| Budget::of(524_288, memory).newcomers;
        assert_eq!(newcomers(2 << 30), 3640);
        assert_eq!(newcomers(256 << 20), 455);
        assert_eq!(newcomers(0), LEAST_NEWCOMERS);
        assert_eq!(newcomers(u64::MAX), u32::MAX);
    }

    #[test]
    fn connections_are_bounded_by_memory_as_well_as_by_files() {
        let redirect = |open_files, memory| Budget::of(open_files, memory).redirect;
        // LimitNOFILE=infinity gives the first value on most hosts, and higher ones on others.
        for open_files in [1_048_576, 1_073_741_816, u32::MAX] {
            assert_eq!(redirect(open_files, 2 << 30), 40_040);
            assert_eq!(redirect(open_files, 128 << 20), 2_497);
            assert_eq!(redirect(open_files, 0), 352);
        }
        assert_eq!(redirect(20_000, 2 << 30), 6_875, "the files are fewer");
        assert!(redirect(u32::MAX, u64::MAX) > 1_000_000_000);
    }

    proptest! {
        #[test]
        fn a_quarter_is_left_for_links_and_the_server_itself(open_files: u32, memory: u64) {
            let Budget {
                redirect,
                https,
                http,
                plain,
                egress,
                connect,
                maps,
                metrics,
                strangers,
                known,
                certified,
                enrolments,
                additional,
                newcomers: _,
            } = Budget::of(open_files, memory);
            let own = [redirect, https, http, plain, egress, 3 * connect, maps];
            let agents = [strangers, known, certified, enrolments, additional];
            let parts = [&own[..], &agents].concat();
            let sum: u64 = parts.iter().map(|part| u64::from(*part)).sum();
            prop_assert!(sum <= u64::from(open_files) * 3 / 4, "{parts:?} of {open_files}");
            prop_assert!(metrics <= 32 && (open_files < 64 || metrics > 0), "{metrics} of {open_files}");
            prop_assert!(open_files < 96 || parts.iter().all(|part| *part > 0), "{parts:?} of {open_files}");
        }
    }
}

//! Log lines of the BPF programs (aya-log), at debug level only.
#![expect(unsafe_code, reason = "registering with AsyncFd is unsafe for descriptors that may change")]

use aya::Ebpf;
use aya_log::EbpfLogger;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::error::RedirectError;

/// Target of the programs' lines in the server's log.
const TARGET: &str = "tunnel_ebpf";

/// True if the log level includes them. Decided once, before loading: otherwise the verifier removes the log
/// statements, so a later change of the level has no effect on the programs.
pub(super) fn wanted() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// Forwards to tracing, as aya-log writes to the log crate.
struct ToTracing;

impl log::Log for ToTracing {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        tracing::debug!(target: TARGET, "{}", record.args());
    }

    fn flush(&self) {}
}

/// Reads the programs' ring buffer.
pub(super) struct ProgramLog(EbpfLogger<ToTracing>);

impl ProgramLog {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, RedirectError> {
        EbpfLogger::init_with_logger(ebpf, ToTracing)
            .map(Self)
            .map_err(|error| RedirectError::Map { map: "AYA_LOGS", reason: error.to_string() })
    }

    /// Runs until dropped.
    pub(super) async fn run(self) {
        // SAFETY: the logger owns its map's descriptor, keeps it open and never changes it while it lives.
        let mut ring = match unsafe { AsyncFd::register_with_interest(self.0, Interest::READABLE) } {
            Ok(ring) => ring,
            Err(error) => {
                tracing::warn!(%error, "failed to read the log of the BPF programs");
                return;
            }
        };
        loop {
            match ring.readable_mut().await {
                Ok(mut guard) => {
                    guard.get_inner_mut().flush();
                    guard.clear_ready();
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to read the log of the BPF programs");
                    return;
                }
            }
        }
    }
}

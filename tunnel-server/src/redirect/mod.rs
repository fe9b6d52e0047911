//! The eBPF redirect: loads the programs, writes their maps, verifies them and restores what gets lost.
//!
//! Everything in the kernel is held by file descriptors of this process, so that it vanishes with the process, even
//! after SIGKILL. Only the token route stays, which is harmless and taken over by the next start.

mod attached;
mod cgroup;
mod checks;
mod config;
mod desired;
mod error;
mod feed;
mod listen;
mod load;
mod map_contents;
#[cfg(test)]
mod map_contents_tests;
mod maps;
mod metrics;
mod netlink;
mod own_addresses;
mod preflight;
mod program_log;
mod running;
mod self_test;
mod self_test_addresses;
mod start;
mod verify_loop;
mod withdraw;

pub use checks::{Check, checks};
pub use config::RedirectConfig;
pub use desired::{Desired, RouteTarget};
pub use error::{RedirectError, SelfTestError};
pub use feed::Feeder;
pub use listen::listen;
pub use load::ProgramInfo;
pub use metrics::RedirectMetrics;
pub use running::{Applied, Health, Redirect};
pub use self_test_addresses::{MAX_ROUTES, reserved_tokens, reserved_tokens_v6};
pub use tunnel_abi::SOCKET_MARK;
pub use withdraw::cleanup;

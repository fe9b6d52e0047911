//! The eBPF redirect: loads the programs, writes their maps, verifies them and restores lost parts.
//!
//! The programs stay attached and are pinned in a BPF file system, so that after a server dies, connects to edge nodes
//! fail at once instead of going to a listener that is gone. Without a heartbeat for [`RedirectConfig::orphan_timeout`]
//! the programs stop redirecting. A server that stops removes everything; one that starts takes over the virtual addresses that it
//! finds and removes the rest ([`Orphans`]).
#![deny(unsafe_code)]

mod attached;
mod by_route;
mod cgroup;
mod change;
mod checks;
mod claim;
mod config;
mod error;
mod feed;
mod freed;
mod kernel;
mod listen;
mod load;
mod map_changes;
mod map_contents;
#[cfg(test)]
mod map_contents_tests;
mod maps;
mod metrics;
mod netlink;
mod netns;
mod own_addresses;
mod pins;
mod preflight;
mod privileges;
mod program_log;
mod range_routes;
mod range_use;
mod running;
mod self_test;
mod self_test_addresses;
mod start;
mod verify_loop;
mod withdraw;

pub use by_route::is_led_here;
pub use checks::{
    HostCheck, fails_at_connect, foreign_lookups, host_checks, left_behind, missing_range_routes,
};
pub use config::{LEAST_ORPHAN_TIMEOUT, ORPHAN_TIMEOUT, OrphanPolicy, PinConfig, Pods, RedirectConfig};
pub use error::{RedirectError, SelfTestError};
pub use feed::Feeder;
pub use listen::listen;
pub use metrics::register_redirect;
pub use pins::{Orphans, Others};
pub use privileges::give_up_capabilities;
pub use running::{Applied, Health, Redirect};
pub use self_test_addresses::SelfTestAddresses;
pub use start::has_cilium;
pub use withdraw::{Cleaned, cleanup};

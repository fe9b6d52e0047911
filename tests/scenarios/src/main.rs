//! The scenarios by subject, and the program that runs them: `[--quick] [FILTER] [--list]` and what libtest takes.
//!
//! A module declares its scenarios with `scenarios!`, and is listed in `all`.
#![forbid(unsafe_code)]

#[macro_use]
mod scenario;

mod common;
mod deploy;
mod disks;
mod docs;
mod hostile;
mod hostile_frames;
mod hostile_peer;
mod http;
mod https;
mod identity;
mod kubernetes;
mod limits;
mod load;
mod logs;
mod memory;
mod operating;
mod path;
mod proxy;
mod redirect;
mod relayed;
mod reload;
mod restart;
mod runner;
mod servers;
mod soak;
mod takeover;
mod testbed;
mod wan;

use scenario::Scenario;

fn main() -> std::process::ExitCode {
    runner::main(std::env::args_os().collect(), all().collect())
}

fn all() -> impl Iterator<Item = &'static Scenario> {
    [
        testbed::SCENARIOS,
        path::SCENARIOS,
        load::SCENARIOS,
        memory::SCENARIOS,
        restart::SCENARIOS,
        servers::SCENARIOS,
        takeover::SCENARIOS,
        relayed::SCENARIOS,
        identity::SCENARIOS,
        http::SCENARIOS,
        https::SCENARIOS,
        reload::SCENARIOS,
        hostile::SCENARIOS,
        limits::SCENARIOS,
        operating::SCENARIOS,
        logs::SCENARIOS,
        disks::SCENARIOS,
        wan::SCENARIOS,
        proxy::SCENARIOS,
        soak::SCENARIOS,
        deploy::SCENARIOS,
        docs::SCENARIOS,
        redirect::SCENARIOS,
        kubernetes::SCENARIOS,
    ]
    .into_iter()
    .flatten()
}

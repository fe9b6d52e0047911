//! The redirect on the real kernel.
//!
//! Every case runs in a process of its own: in a child cgroup made for it, which the programs are attached
//! to, and in a network namespace of its own. The parent removes the cgroup whatever happens; namespaces and
//! programs vanish with the process.
//!
//! `cargo xtask test redirect_kernel [NAME]` as root.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a panic is how a case fails")]

mod by_route;
mod connects;
mod failures;
mod gateway;
mod harness;
mod lifecycle;
mod modules;
mod networks;
mod others;
mod peer;
mod pod;
mod pod_clients;
mod raw;
mod route_life;
mod scale;
mod support;
mod uplinks;

use std::process::ExitCode;

/// A case: its name, and the function that runs inside its own cgroup and network namespace.
type Case = (&'static str, fn());

fn cases() -> Vec<Case> {
    let everywhere = [
        connects::CASES,
        networks::CASES,
        by_route::CASES,
        route_life::CASES,
        gateway::CASES,
        uplinks::CASES,
        pod_clients::CASES,
        lifecycle::CASES,
        others::CASES,
        failures::CASES,
        scale::CASES,
    ];
    let whole_machine = [pod::CASES, modules::CASES];
    let whole_machine = std::env::var_os(harness::WHOLE_MACHINE).map_or(&[][..], |_| &whole_machine);
    [&everywhere[..], whole_machine].concat().concat()
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(harness::ROLE) {
        return peer::run_role(&role);
    }
    if let Ok(name) = std::env::var(harness::CASE) {
        return harness::run_case(&name, &cases());
    }
    harness::run_all(cases())
}

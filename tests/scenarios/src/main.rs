//! The scenarios by subject, and the program that runs them.
//!
//! A module declares its scenarios with `scenarios!`, and is listed in `all`.
#![forbid(unsafe_code)]

#[macro_use]
mod scenario;

mod args;
mod arm64;
mod chaos;
mod common;
mod connect;
mod deploy;
mod disks;
mod docs;
mod doctor;
mod durations;
mod egress;
mod forwarded;
mod front;
mod gateway;
mod held;
mod hostile;
mod hostile_frames;
mod hostile_peer;
mod http;
mod https;
mod https_callers;
mod identity;
mod kubernetes;
mod limits;
mod load;
mod logs;
mod lookups;
mod mapped;
mod memory;
mod moved;
mod needs;
mod operating;
mod options;
mod outbound;
mod path;
mod plain;
mod proxy;
mod readme;
mod redirect;
mod redirector;
mod reload;
mod restart;
mod rights;
mod runner;
mod scrapes;
mod servers;
mod slots;
mod soak;
mod status_page;
mod systemd;
mod takeover;
mod testbed;
mod versions;
mod wan;
mod web;

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
        moved::SCENARIOS,
        lookups::SCENARIOS,
        options::SCENARIOS,
        restart::SCENARIOS,
        servers::SCENARIOS,
        takeover::SCENARIOS,
        versions::SCENARIOS,
        forwarded::SCENARIOS,
        gateway::SCENARIOS,
        redirector::SCENARIOS,
        identity::SCENARIOS,
        http::SCENARIOS,
        https::SCENARIOS,
        connect::SCENARIOS,
        scrapes::SCENARIOS,
        outbound::SCENARIOS,
        https_callers::SCENARIOS,
        plain::SCENARIOS,
        egress::SCENARIOS,
        reload::SCENARIOS,
        hostile::SCENARIOS,
        limits::SCENARIOS,
        operating::SCENARIOS,
        status_page::SCENARIOS,
        logs::SCENARIOS,
        disks::SCENARIOS,
        wan::SCENARIOS,
        proxy::SCENARIOS,
        soak::SCENARIOS,
        chaos::SCENARIOS,
        arm64::SCENARIOS,
        deploy::SCENARIOS,
        systemd::SCENARIOS,
        docs::SCENARIOS,
        readme::SCENARIOS,
        doctor::server::SCENARIOS,
        doctor::firewall::SCENARIOS,
        doctor::agent::SCENARIOS,
        doctor::node::SCENARIOS,
        doctor::bench::SCENARIOS,
        doctor::bundle::SCENARIOS,
        redirect::SCENARIOS,
        kubernetes::SCENARIOS,
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Calls `see` with each source file below the folder.
    fn sources(folder: &Path, see: &mut impl FnMut(&Path, &str)) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => sources(&path, see),
                false => see(&path, &std::fs::read_to_string(&path).unwrap()),
            }
        }
    }

    #[test]
    fn metrics_are_waited_for() {
        // A program counts after it has acted: what is read once may not be counted yet. Spelt in two parts, because
        // this file is read too.
        let once = [concat!("metrics()", ".await?."), concat!("metrics", ".expect(")];
        let judged = |line: &str| line.contains("ensure!") && line.contains(concat!(".met", "ric"));
        let mut seen = 0;
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut |path, text| {
            for (number, line) in (1..).zip(text.lines()) {
                seen += usize::from(line.contains(".expect_metric("));
                assert!(
                    !once.iter().any(|once| line.contains(once)) && !judged(line),
                    "{}:{number} reads a metric once: wait with expect_metric or wait_metric",
                    path.display()
                );
            }
        });
        assert!(seen > 20, "only {seen} lines wait for a metric");
    }

    /// `cargo xtask test` runs these: each subject has one, but for the emulated arm64 build, which takes longer than all of
    /// them to make, and the previous version's, which is made for them alone. One starts a cluster.
    #[test]
    fn a_case_of_every_subject_is_quick() {
        let subject = |scenario: &Scenario| scenario.name().split("::").next().unwrap();
        let quick: Vec<_> = all().filter(|scenario| scenario.quick).collect();
        let missing: BTreeSet<_> =
            all().map(subject).filter(|name| !quick.iter().any(|one| subject(one) == *name)).collect();
        assert_eq!(missing, BTreeSet::from(["arm64", "versions"]));
        assert!(
            quick.iter().all(|scenario| matches!(scenario.kind, "" | "cluster")),
            "others wait for long builds"
        );
        assert_eq!(quick.iter().filter(|scenario| scenario.has_cluster()).count(), 1);
    }

    #[test]
    fn scenarios_that_have_to_find_faults_exist() {
        for (name, _) in doctor::faults::BY_SCENARIO {
            assert!(all().any(|scenario| scenario.name() == *name), "there is no scenario {name}");
        }
    }
}

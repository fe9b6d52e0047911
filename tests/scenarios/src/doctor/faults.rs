//! Lists the test that puts in each fault, so that every code has one. A fault is real: in a file, in the kernel, on
//! the path, in the cluster.
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Result, ensure};

/// Codes that a scenario must find: it fails if one is missing, even if everything else passes.
pub(crate) const BY_SCENARIO: &[(&str, &[&str])] = &[
    (
        "doctor::firewall::rules_of_other_programs_are_named",
        &["yurttunnel-rules", "kubeedge-rules", "kube-proxy-rules", "foreign-rules"],
    ),
    (
        "doctor::server::what_others_take_from_the_kernel_is_found",
        &["redirect-route-missing", "redirect-range-used", "maps-not-current", "not-ready"],
    ),
    ("doctor::server::a_failed_self_test_is_found", &["redirect-degraded"]),
    ("doctor::firewall::a_closed_listener_is_found", &["listener-silent"]),
    ("doctor::firewall::pods_that_input_drops", &["pods-filtered"]),
    ("doctor::firewall::a_full_conntrack_table", &["conntrack-full"]),
    ("doctor::firewall::a_policy_that_drops_tokens", &["connects-lost"]),
    ("doctor::server::programs_that_are_not_pinned_are_found", &["not-pinned"]),
    (
        "doctor::server::what_a_killed_server_leaves_is_found",
        &["not-running", "programs-left-behind", "port-taken"],
    ),
    (
        "doctor::server::damaged_files_are_found",
        &["key-readable-by-others", "inventory-conflict", "inventory-unusable", "ca-expires", "ca-unusable"],
    ),
    (
        "doctor::server::a_host_that_cannot_redirect_is_found",
        &[
            "bad-flags",
            "no-edge-nodes",
            "cgroup-unusable",
            "state-directory-unusable",
            "name-does-not-resolve",
            "api-server-unreachable",
            "kernel-lacks-feature",
            "capability-missing",
        ],
    ),
    ("doctor::server::a_pod_without_a_memory_limit_is_told", &["memory-limit-unseen"]),
    ("kubernetes::in_cluster", &["api-right-missing"]),
    ("doctor::agent::a_healthy_agent_is_fine", &["kubelet-silent"]),
    (
        "doctor::agent::what_answers_instead_of_a_server_is_told",
        &[
            "server-unreachable",
            "not-a-tunnel-server",
            "handshake-silent",
            "tls-intercepted",
            "server-certificate-untrusted",
            "clock-skew",
            "ca-mismatch",
        ],
    ),
    ("doctor::agent::large_packets_that_are_lost_are_found", &["mtu-black-hole"]),
    ("doctor::agent::a_proxy_in_the_way_is_told", &["proxy-unreachable", "proxy-refuses"]),
    ("proxy::a_proxy_that_ends_idle_tunnels", &["proxy-cuts-idle"]),
    (
        "doctor::agent::an_identity_that_is_of_no_use_is_found",
        &[
            "not-enrolled",
            "identity-of-another-node",
            "kubelet-not-allowed",
            "certificate-expired",
            "renewal-overdue",
            "identity-unusable",
        ],
    ),
    ("doctor::agent::a_session_that_is_refused_or_lost_is_told", &["not-attached", "session-refused"]),
    (
        "doctor::node::the_way_to_a_node_is_tested",
        &[
            "node-unknown",
            "node-without-tunnel",
            "kubelet-unexpected",
            "port-not-reached",
            "kubelet-not-tunnelled",
        ],
    ),
];

/// Codes whose fault a kernel test puts in (tests/kernel).
#[cfg(test)]
const BY_KERNEL_TEST: &[(&str, &str)] = &[
    ("failures::foreign_exclusive_program", "foreign-exclusive-program"),
    ("failures::foreign_sk_lookup_program", "foreign-sk-lookup"),
    // On an old kernel, as by `cargo xtask test --kernel 5.10`; on others the test expects the opposite.
    ("failures::connects_that_do_not_fail_are_told", "kernel-old"),
];

/// Codes whose fault no scenario puts in, each with the reason.
#[cfg(test)]
const BY_NONE: &[(&str, &str)] = &[
    ("no-programs", "it takes a server that was built without them"),
    ("kubelet-by-name", "doctor/kubelet_names.rs has a process of that name and an API server"),
];

static FOUND: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());

fn lock() -> MutexGuard<'static, BTreeSet<&'static str>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that this process's scenario has expected and found a code.
pub(super) fn found(code: &'static str) {
    lock().insert(code);
}

/// Fails if the scenario, which has passed, has not found all codes listed for it.
pub(crate) fn all_found(scenario: &str) -> Result<()> {
    let found = lock();
    let listed = BY_SCENARIO.iter().filter(|(name, _)| *name == scenario).flat_map(|(_, codes)| *codes);
    let missing: Vec<_> = listed.filter(|code| !found.contains(**code)).collect();
    ensure!(
        missing.is_empty(),
        "doctor/faults.rs lists {missing:?} for this scenario, which it did not find"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use tunnel_doctor::codes;

    use super::*;

    #[test]
    fn each_code_is_listed_and_each_that_is_listed_exists() {
        let known: BTreeSet<&str> = codes::ALL.iter().map(|code| code.id).collect();
        let by_scenario = BY_SCENARIO.iter().flat_map(|(_, codes)| codes.iter().copied());
        let others =
            BY_KERNEL_TEST.iter().map(|(_, code)| *code).chain(BY_NONE.iter().map(|(code, _)| *code));
        let listed: Vec<&str> = by_scenario.chain(others).collect();
        let once: BTreeSet<&str> = listed.iter().copied().collect();
        assert_eq!(listed.len(), once.len(), "one test for each code is enough");
        let missing: Vec<_> = known.difference(&once).collect();
        assert!(missing.is_empty(), "put the faults {missing:?} into a test, and list it here");
        let gone: Vec<_> = once.difference(&known).collect();
        assert!(gone.is_empty(), "{gone:?} are no codes");
    }

    #[test]
    fn the_kernel_tests_expect_what_is_listed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel/src");
        for (name, code) in BY_KERNEL_TEST {
            let module = name.split("::").next().unwrap();
            let text = fs::read_to_string(folder.join(module).with_extension("rs")).unwrap();
            // Its entry in the list of cases names the function.
            let entry = format!("(\"{name}\", ");
            let (_, rest) = text.split_once(&entry).unwrap_or_else(|| panic!("there is no case {name}"));
            let function = rest.split(')').next().unwrap();
            let (_, body) = text.split_once(&format!("\nfn {function}() {{\n")).expect(function);
            let body = body.split("\n}\n").next().unwrap();
            assert!(body.contains(&format!("\"{code}\"")), "{name} does not expect {code}");
        }
    }

    #[test]
    fn a_scenario_that_misses_one_fails() {
        assert!(all_found("path::by_edge_address").is_ok());
        let error = all_found("doctor::firewall::a_closed_listener_is_found").unwrap_err().to_string();
        assert!(error.contains("listener-silent"), "{error}");
    }
}

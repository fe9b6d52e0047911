//! Checks that this host has what the redirect needs, and that the redirect works.

use tunnel_doctor::{Checkup, Code, Finding, Outcome, Running, codes, metric};
use tunnel_redirect::{OrphanPolicy, RedirectConfig, RedirectError};

use crate::config::Config;
use crate::status::{RedirectState, StatusReport};

/// Fewer lost connections may be a momentary state.
const FEW: u64 = 10;
/// Interval between two self-tests of a server, in seconds.
const VERIFIED_EVERY: u64 = 30;

pub(super) async fn check(checkup: &mut Checkup, config: &Config, running: Option<&Running<StatusReport>>) {
    let options = config.redirect_start();
    let Some(options) = &options else {
        checkup.add("redirect", Outcome::Skipped("--redirect=off".to_owned()));
        return;
    };
    for check in tunnel_redirect::host_checks(options) {
        // Without capabilities other programs cannot be seen.
        let blocked = checkup.blocked(&["kernel"]).filter(|_| check.name == "other programs");
        checkup.add(check.name, blocked.map_or_else(|| judge(check.name, check.outcome), Outcome::Skipped));
    }
    let lookups = async || judge_lookups(tunnel_redirect::foreign_lookups(), replaced(running));
    checkup.run("sk_lookup", &["kernel"], lookups).await;
    checkup.run("redirect route", &["running", "kernel"], async || virtual_address_route(options)).await;
    checkup.run("self-test", &["running"], async || running.map_or_else(unknown, self_test)).await;
    checkup
        .run("arrivals", &["running"], async || running.map_or_else(unknown, |it| arrivals(options, it)))
        .await;
    checkup.run("pins", &["running"], async || running.map_or_else(unknown, |it| pins(options, it))).await;
    checkup.run("left behind", &["kernel"], async || left_behind(options)).await;
}

pub(super) fn unknown() -> Outcome {
    Outcome::Skipped("the server does not run".to_owned())
}

/// Converts an error of the redirect to its finding.
fn judge(name: &str, outcome: Result<String, RedirectError>) -> Outcome {
    let error = match outcome {
        Ok(found) if name == "kernel" && !tunnel_redirect::fails_at_connect(&found) => {
            let fix = "upgrade to Linux 6.1 or newer if clients have to see that a node is away at connect()";
            return Finding::new(&codes::KERNEL_OLD, found, fix).into();
        }
        Ok(found) => return Outcome::Fine(found),
        // The doctor does not have to run in the server's cgroup.
        Err(RedirectError::Outside { path, .. }) => return Outcome::Fine(path.display().to_string()),
        // The addresses and routes could not be listed.
        Err(error @ RedirectError::Netlink { .. }) => return Outcome::Skipped(error.to_string()),
        Err(error) => error,
    };
    let (code, fix): (&'static Code, String) = match &error {
        RedirectError::NoObject { .. } => (
            &codes::NO_PROGRAMS,
            "cargo xtask build-ebpf && cargo build --release, and install that binary".into(),
        ),
        RedirectError::Capabilities { .. } => (
            &codes::CAPABILITY_MISSING,
            "sudo tunnel-server doctor; of the server: AmbientCapabilities=CAP_BPF CAP_NET_ADMIN".into(),
        ),
        RedirectError::NoCgroup | RedirectError::NotCgroup { .. } | RedirectError::NotRoot { .. } => (
            &codes::CGROUP_UNUSABLE,
            "name the host's cgroup v2 mount with --redirect-cgroup; if there is none, boot with systemd.unified_cgroup_hierarchy=1"
                .into(),
        ),
        RedirectError::Foreign { id, hook, path, .. } => (
            &codes::FOREIGN_EXCLUSIVE_PROGRAM,
            format!("bpftool cgroup detach {} {hook} id {id}, or upgrade what attached it", path.display()),
        ),
        RedirectError::RangeUsed { key, .. } => {
            (&codes::REDIRECT_RANGE_USED, format!("give a range that no network of yours uses with {key}"))
        }
        RedirectError::NotPermitted { fix, .. } => (&codes::KERNEL_LACKS_FEATURE, (*fix).into()),
        _ => (
            &codes::KERNEL_LACKS_FEATURE,
            "upgrade to Linux 5.10 or newer, or start with --redirect=off".into(),
        ),
    };
    Finding::new(code, error.to_string(), fix).into()
}

/// Number of redirected connections that another program had given to its own socket.
fn replaced(running: Option<&Running<StatusReport>>) -> u64 {
    let counters = running.into_iter().flat_map(|running| &running.status.redirect.counters);
    counters.filter(|(name, _)| name.ends_with("/replaced")).map(|(_, count)| count).sum()
}

fn judge_lookups(foreign: Result<Vec<String>, RedirectError>, replaced: u64) -> Outcome {
    let mut found = match foreign {
        Ok(foreign) if foreign.is_empty() => return Outcome::fine("no other program"),
        Ok(foreign) => format!("also attached to this network namespace: {}", foreign.join(", ")),
        Err(_) if replaced > 0 => "another program selects sockets for virtual addresses".to_owned(),
        Err(error) => return Outcome::Skipped(error.to_string()),
    };
    if replaced > 0 {
        found += &format!("; {replaced} connections were taken back from it");
    }
    let fix = "find its owner with `bpftool link show`; one that selects sockets for the redirect range has to leave it out";
    Finding::new(&codes::FOREIGN_SK_LOOKUP, found, fix).into()
}

fn virtual_address_route(options: &RedirectConfig) -> Outcome {
    match tunnel_redirect::missing_range_routes(options) {
        Ok(missing) => {
            let faults = missing.iter().map(|range| {
                let family = if range.addr().is_ipv6() { "-6 " } else { "" };
                let fix = format!(
                    "ip {family}route replace local {range} dev lo table local (and look for what has removed or replaced it)"
                );
                Finding::new(&codes::REDIRECT_ROUTE_MISSING, format!("no route `local {range} dev lo`"), fix)
            });
            Outcome::of(faults.collect(), "every redirect range leads to this host")
        }
        Err(error) => Outcome::Skipped(error.to_string()),
    }
}

fn self_test(running: &Running<StatusReport>) -> Outcome {
    let redirect = &running.status.redirect;
    match redirect.state {
        RedirectState::Off => Outcome::Skipped("the running server has --redirect=off".to_owned()),
        RedirectState::On => Outcome::fine(format!(
            "passed; {} routes, {} of them down; {} times something was restored",
            redirect.routes, redirect.routes_down, redirect.mended
        )),
        RedirectState::Degraded => {
            let reason = redirect.reason.as_deref().unwrap_or("no reason is known");
            let (code, fix) = match metric(&running.metrics, "postern_redirect_current") {
                Some(0.0) => (
                    &codes::MAPS_NOT_CURRENT,
                    "the server's log has the error of each write; `tunnel-server status` shows when it is over",
                ),
                _ => (
                    &codes::REDIRECT_DEGRADED,
                    "what the reason names; the server verifies again every 30 s, so no restart is needed",
                ),
            };
            Finding::new(code, reason, fix).into()
        }
    }
}

/// A redirected connection is then accepted, refused at the socket lookup, or lost on the way. The self-test's
/// connections are redirected too, and not counted on arrival. A pod's that is left to the route ends the same ways.
fn arrivals(options: &RedirectConfig, running: &Running<StatusReport>) -> Outcome {
    let status = &running.status;
    let sum = |hook: &str, outcome: &str| -> u64 {
        let of = |name: &str| {
            name.split_once('/').is_some_and(|(at, result)| at.starts_with(hook) && result == outcome)
        };
        let counters = status.redirect.counters.iter();
        counters.filter(|(name, _)| of(name)).map(|(_, count)| count).sum()
    };
    let refused = |hook: &str| sum(hook, "foreign_client") + sum(hook, "no_listener");
    let families = status.listeners.iter().filter(|listener| listener.name == "redirect");
    let accepted = families.clone().filter_map(|listener| listener.accepted).max().unwrap_or_default();
    let self_tests = families.count() as u64 * (status.uptime_s / VERIFIED_EVERY + 2);
    let by_route = sum("route", "steered");
    // A connection's later packets may be steered too, so that those by route cannot be taken from the accepted ones.
    let at_connect = Arrivals {
        sent: if by_route == 0 { sum("connect", "redirected") } else { 0 },
        arrived: accepted + self_tests + refused("lookup"),
    };
    let routed = Arrivals { sent: sum("connect", "by_route"), arrived: by_route + refused("route") };
    let cilium = if tunnel_redirect::has_cilium() {
        "; this host has Cilium, whose eBPF host routing drops them up to 1.16 at least: set bpf.hostLegacyRouting=true in its Helm values, \
         or upgrade it"
    } else {
        ""
    };
    let permit = |what: &str| {
        format!(
            "permit {what} in the NetworkPolicies of those clients, or in the firewall that the check `pods` names{cilium}"
        )
    };
    let mut faults = Vec::new();
    if let Some(lost) = at_connect.lost() {
        let found =
            format!("about {lost} of {} redirected connections since the server started", at_connect.sent);
        let fix = permit(&format!(
            "{} beside the edge nodes' addresses (a policy sees the virtual address)",
            options.redirect_range
        ));
        faults.push(Finding::new(&codes::CONNECTS_LOST, found, fix));
    }
    if let Some(lost) = routed.lost() {
        let found =
            format!("about {lost} of {} connections of pods by route since the server started", routed.sent);
        faults.push(Finding::new(&codes::CONNECTS_LOST, found, permit("the edge nodes' addresses")));
    }
    let redirected = sum("connect", "redirected");
    let fine = format!("{redirected} connections were redirected, {} of pods came by route", routed.sent);
    Outcome::of(faults, fine)
}

struct Arrivals {
    sent: u64,
    arrived: u64,
}

impl Arrivals {
    /// The number of those that are lost, if it means something.
    fn lost(&self) -> Option<u64> {
        let lost = self.sent.saturating_sub(self.arrived);
        (lost >= FEW && lost >= self.sent / 100).then_some(lost)
    }
}

fn pins(options: &RedirectConfig, running: &Running<StatusReport>) -> Outcome {
    match (&options.pins, &running.status.redirect.not_pinned) {
        (None, _) => Outcome::Skipped("--bpffs=off".to_owned()),
        (Some(pins), None) => Outcome::fine(format!("in {}", pins.dir.display())),
        (Some(_), Some(reason)) => {
            let fix = "name a BPF file system that the server may write to with --bpffs, and start it again; deploy/ has \
                       units and manifests that work";
            Finding::new(&codes::NOT_PINNED, reason, fix).into()
        }
    }
}

fn left_behind(options: &RedirectConfig) -> Outcome {
    match tunnel_redirect::left_behind(options) {
        Ok(folders) => {
            let effect = match options.orphan_policy {
                OrphanPolicy::Direct => "connects to edge nodes are direct after --orphan-timeout",
                OrphanPolicy::Refuse => "connects to edge nodes fail (--orphan-policy=refuse)",
            };
            let found = |folder: &std::path::PathBuf| {
                let found = format!("{}: {effect}", folder.display());
                Finding::new(&codes::PROGRAMS_LEFT_BEHIND, found, "tunnel-server cleanup")
            };
            Outcome::of(folders.iter().map(found).collect(), "nothing")
        }
        Err(error) => Outcome::Skipped(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(name: &str, outcome: Result<String, RedirectError>) -> &'static str {
        match judge(name, outcome) {
            Outcome::Faults(findings) => findings[0].code,
            _ => "",
        }
    }

    #[test]
    fn each_error_of_the_redirect_has_its_code() {
        for (error, expected) in [
            (RedirectError::NoObject { reason: "no toolchain" }, "no-programs"),
            (RedirectError::Kernel { release: "4.19".into(), feature: "sk_lookup" }, "kernel-lacks-feature"),
            (RedirectError::Capabilities { missing: vec!["CAP_BPF"] }, "capability-missing"),
            (RedirectError::NoCgroup, "cgroup-unusable"),
            (RedirectError::NotRoot { path: "/sys/fs/cgroup".into() }, "cgroup-unusable"),
            (
                RedirectError::Foreign { hook: "connect4", program: "old".into(), id: 7, path: "/c".into() },
                "foreign-exclusive-program",
            ),
            (RedirectError::Outside { path: "/a".into(), own: "/b".into() }, ""),
        ] {
            assert_eq!(code("cgroup", Err(error)), expected);
        }
        let kernel =
            |text: &str| code("kernel", Ok(format!("6.1; a connect to a node without a tunnel {text}")));
        assert_eq!(kernel("is accepted and reset"), "kernel-old");
        assert_eq!(kernel("fails at connect()"), "");
    }

    #[test]
    fn another_sk_lookup_program_is_a_warning() {
        let code = |foreign: Result<&[&str], &str>, replaced: u64| {
            let foreign = match foreign {
                Ok(names) => Ok(names.iter().map(|name| (*name).to_owned()).collect()),
                Err(reason) => {
                    Err(RedirectError::Io { what: reason.to_owned(), source: std::io::Error::other("EPERM") })
                }
            };
            match judge_lookups(foreign, replaced) {
                Outcome::Faults(findings) => (findings[0].code, findings[0].found.clone()),
                Outcome::Skipped(reason) => ("skipped", reason),
                Outcome::Fine(text) => ("", text),
            }
        };
        assert_eq!(code(Ok(&[]), 0).0, "");
        // A program that is gone.
        assert_eq!(code(Ok(&[]), 3).0, "");
        let (found, text) = code(Ok(&["tubular (id 7)"]), 0);
        assert_eq!(found, "foreign-sk-lookup");
        assert!(text.ends_with("tubular (id 7)"), "{text}");
        assert!(code(Ok(&["tubular (id 7)"]), 3).1.ends_with("; 3 connections were taken back from it"));
        // Names that may not be read prove nothing; the connections do.
        assert_eq!(code(Err("names"), 0), ("skipped", "names: EPERM".to_owned()));
        assert_eq!(code(Err("names"), 3).0, "foreign-sk-lookup");
    }

    #[test]
    fn what_was_redirected_and_never_came_is_counted() {
        let lost = |counters: serde_json::Value, accepted: u64, uptime: u64| {
            let listener = |address: &str| serde_json::json!({"name": "redirect", "address": address, "connections_active": 0, "accepted": accepted});
            let status = serde_json::json!({
                "version": "1", "server_id": "s", "uptime_s": uptime, "ready": true, "pending": [], "nodes": [],
                "listeners": [listener("127.0.0.1:4000"), listener("[::1]:4000")],
                "redirect": {"state": "on", "reason": null, "mended": 0, "routes": 1, "routes_down": 0, "excluded": 0,
                             "counters": counters},
                "inventory": {"source": "f", "edge": 0, "cloud": 0, "last_error": null, "conflicts": []},
            });
            let status = serde_json::from_value(status).unwrap();
            let running = Running { status, pending: None, metrics: String::new(), flags: None };
            match arrivals(&RedirectConfig::default(), &running) {
                Outcome::Faults(findings) => findings[0].found.split(' ').nth(1).map(str::to_owned),
                _ => None,
            }
        };
        let of = |redirected: u64, accepted: u64, uptime: u64, foreign: u64| {
            let counters = serde_json::json!({"connect4/redirected": redirected, "lookup4/steered": 1_000, "lookup4/foreign_client": foreign});
            lost(counters, accepted, uptime)
        };
        // Four of the self-tests' connections belong to the start, and two to each 30 s.
        assert_eq!(of(4, 0, 5, 0), None);
        assert_eq!(of(64, 60, 5, 0), None);
        assert_eq!(of(24, 0, 5, 0).as_deref(), Some("20"));
        assert_eq!(of(24, 0, 300, 0), None);
        assert_eq!(of(24, 0, 5, 15), None, "refused as foreign, which has a counter of its own");
        assert_eq!(of(1_000_000, 999_900, 5, 0), None, "a few of very many");
        assert_eq!(of(1_000_000, 0, 5, 0).as_deref(), Some("999996"));
        // By route: a pod's connects that are left to it, and what came of them.
        let of = |left: u64, steered: u64, foreign: u64| {
            let counters = serde_json::json!({"connect4/by_route": left, "route4/steered": steered, "route6/foreign_client": foreign});
            lost(counters, steered, 5)
        };
        assert_eq!((of(20, 20, 0), of(20, 5, 10)), (None, None));
        assert_eq!(of(20, 2, 0).as_deref(), Some("18"));
        // Among accepted connections those by route cannot be told from the others.
        let both = serde_json::json!({"connect4/redirected": 40, "route4/steered": 40});
        assert_eq!(lost(both, 40, 5), None);
    }

    #[test]
    fn connections_that_were_taken_back_are_counted() {
        let status = serde_json::json!({
            "version": "1", "server_id": "s", "uptime_s": 1, "ready": true, "pending": [], "nodes": [], "listeners": [],
            "redirect": {"state": "on", "reason": null, "mended": 0, "routes": 1, "routes_down": 0, "excluded": 0,
                         "counters": {"lookup4/steered": 7, "lookup4/replaced": 2, "lookup6/replaced": 1}},
            "inventory": {"source": "f", "edge": 0, "cloud": 0, "last_error": null, "conflicts": []},
        });
        let status = serde_json::from_value(status).unwrap();
        let running = Running { status, pending: None, metrics: String::new(), flags: None };
        assert_eq!((replaced(Some(&running)), replaced(None)), (3, 0));
    }

    #[test]
    fn stale_maps_and_a_failed_self_test_are_told() {
        let status = serde_json::json!({
            "version": "1", "server_id": "s", "uptime_s": 1, "ready": false, "pending": [], "nodes": [], "listeners": [],
            "redirect": {"state": "degraded", "reason": "map routes: E2BIG", "mended": 0, "counters": {}, "routes": 1,
                         "routes_down": 0, "excluded": 0},
            "inventory": {"source": "f", "edge": 0, "cloud": 0, "last_error": null, "conflicts": []},
        });
        let running = |current: u8| Running {
            status: serde_json::from_value::<StatusReport>(status.clone()).unwrap(),
            pending: None,
            metrics: format!("# HELP\npostern_redirect_current {current}\n"),
            flags: None,
        };
        let code = |outcome| match outcome {
            Outcome::Faults(findings) => (findings[0].code, findings[0].found.clone()),
            _ => ("", String::new()),
        };
        assert_eq!(code(self_test(&running(0))), ("maps-not-current", "map routes: E2BIG".to_owned()));
        assert_eq!(code(self_test(&running(1))), ("redirect-degraded", "map routes: E2BIG".to_owned()));
    }
}

//! Every line of the report, by group.
use crate::line::{Group, Line};
use crate::wan;

/// Agents on one server.
pub(crate) const AGENTS: [usize; 4] = [100, 1_000, 5_000, 10_000];
/// Edge nodes in the inventory.
pub(crate) const ROUTES: [usize; 4] = [10, 1_000, 10_000, 100_000];
/// Numbers of nodes, or of rules, at which connect() is measured.
pub(crate) const NODES: [usize; 4] = [1, 1_000, 5_000, 10_000];

/// Disturbances during which other connections are measured: id and title.
pub(crate) const DISTURBANCES: [(&str, &str); 6] = [
    ("alone", "nothing else"),
    ("stalled", "one reader that does not read"),
    ("stalled-500", "500 readers that do not read"),
    ("hole", "one dial into a black hole"),
    ("bulk-1", "one bulk download"),
    ("bulk-4", "four bulk downloads"),
];

pub(crate) fn lines(group: Group) -> Vec<Line> {
    let line = |id: &str, title: &str, unit| Line::new(group, id, title, unit);
    match group {
        Group::Connections => vec![
            line("connections-1", "one at once", "1/s"),
            line("connections-16", "16 at once", "1/s"),
            line("connections-1-p99", "one at once, p99 of one", "µs"),
            line("connections-cpu", "CPU time for 1,000 connections", "s"),
            line("connections-16-load", "16 at once: CPU of the load generator's one thread", "%"),
            line("connections-16-target", "16 at once: CPU of the target's one thread", "%"),
            line("egress-16-grpc", "16 at once as kube-apiserver's, gRPC", "1/s"),
            line("egress-16-http", "16 at once as kube-apiserver's, HTTP CONNECT", "1/s"),
        ],
        Group::RoundTrips => round_trips(group),
        Group::Bulk => bulk(group),
        Group::Counts => counts(group),
        Group::Held => vec![
            line("held-idle", "resident memory of both ends, no connection", "MB"),
            line("held", "resident memory of both ends, 2,000 connections", "MB"),
            line("held-cloud", "of it in the cloud", "MB"),
            line("held-edge", "of it at the edge", "MB"),
        ],
        Group::Beside => beside(group),
        Group::Connect => connect(group),
        Group::Scale => scale(group),
        Group::Pods => pods(group),
        Group::Wan => wan::PLACES.iter().flat_map(wan::Place::lines).collect(),
    }
}

fn round_trips(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for (bytes, size) in ROUND_TRIP_SIZES {
        for connections in ROUND_TRIP_CONNECTIONS {
            for part in ["p50", "p99"] {
                let many = if connections == 1 { "one connection" } else { "32 connections" };
                let id = format!("round-trip-{bytes}-{connections}-{part}");
                lines.push(Line::new(group, &id, &format!("{size}, {many}, {part}"), "µs"));
            }
        }
    }
    lines
}

/// Sizes of a message in bytes, with their titles.
pub(crate) const ROUND_TRIP_SIZES: [(usize, &str); 2] = [(64, "64 B"), (4096, "4 KiB")];
/// Numbers of concurrent connections.
pub(crate) const ROUND_TRIP_CONNECTIONS: [usize; 2] = [1, 32];

/// Operations that are counted: id and title.
pub(crate) const COUNTED: [(&str, &str); 3] = [
    ("visit", "one connection: connect, 16 B there and back, close"),
    ("trip", "one round trip of 64 B"),
    ("mb", "1 MB down, one stream"),
];

fn bulk(group: Group) -> Vec<Line> {
    let line = |id: &str, title: &str, unit| Line::new(group, id, title, unit);
    let transfers = [
        ("bulk-down-1", "download, one stream"),
        ("bulk-up-1", "upload, one stream"),
        ("bulk-down-8", "download, 8 streams"),
        ("bulk-up-8", "upload, 8 streams"),
    ];
    let mut lines = transfers.map(|(id, title)| line(id, title, "MB/s")).to_vec();
    lines.push(line("bulk-down-cpu", "CPU time for 1 GB down, one stream", "s"));
    lines.push(line("bulk-up-cpu", "CPU time for 1 GB up, one stream", "s"));
    lines.push(line("bulk-down-faults", "page faults of both ends for 1 GB down, one stream", "faults"));
    lines.push(line("bulk-up-faults", "page faults of both ends for 1 GB up, one stream", "faults"));
    for (id, title) in transfers {
        for (of, whose) in [("load", "load generator"), ("target", "target")] {
            let title = format!("{title}: CPU of the {whose}'s one thread");
            lines.push(line(&format!("{id}-{of}"), &title, "%"));
        }
    }
    lines
}

fn counts(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for (kind, title, unit) in [
        ("calls", "system calls", "calls"),
        ("wakes", "task wake-ups (voluntary context switches)", "wake-ups"),
    ] {
        for (id, of) in COUNTED {
            lines.push(Line::new(group, &format!("counts-{kind}-{id}"), &format!("{title}, {of}"), unit));
        }
    }
    lines
}

fn beside(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for (id, what) in DISTURBANCES {
        for (kind, title) in [("trip", "round trip of 64 B"), ("visit", "connect, 16 B, close")] {
            lines.push(Line::new(
                group,
                &format!("beside-{id}-{kind}"),
                &format!("{title}, beside {what}"),
                "µs",
            ));
        }
    }
    lines
}

fn connect(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for nodes in NODES {
        let of = format!("{nodes} nodes or rules");
        lines.push(Line::new(group, &format!("connect-{nodes}"), &format!("connect() p50, {of}"), "µs"));
        let title = format!("an unrelated connect() p50, {of}");
        lines.push(Line::new(group, &format!("connect-other-{nodes}"), &title, "µs"));
        let title = format!("connect, 16 bytes, close, 16 at once, {of}");
        lines.push(Line::new(group, &format!("connect-rate-{nodes}"), &title, "1/s"));
    }
    lines
}

fn scale(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut line = |id: &str, title: &str, unit| lines.push(Line::new(group, id, title, unit));
    for agents in AGENTS {
        let of = format!("{agents} idle agents");
        line(
            &format!("scale-agents-memory-{agents}"),
            &format!("memory of the server for one of {of}"),
            "KiB",
        );
        line(
            &format!("scale-agents-cpu-{agents}"),
            &format!("CPU time of the server each second, {of}"),
            "ms",
        );
        for (id, how) in [("restart", "sessions resumed"), ("restart-full", "full handshakes")] {
            line(
                &format!("scale-agents-{id}-{agents}"),
                &format!("killed server started again until all are back, {of}, {how}"),
                "s",
            );
            line(
                &format!("scale-agents-{id}-cpu-{agents}"),
                &format!("CPU time of that server for one of {of}, {how}"),
                "ms",
            );
        }
    }
    line("scale-dials-rate", "1,000 connections a second asked for, across 10,000 agents", "1/s");
    line("scale-dials-p50", "one of them, p50", "µs");
    line("scale-dials-p99", "one of them, p99", "µs");
    line(
        "scale-upgrade",
        "a server with 10,000 agents replaced by a successor, beside 200 connections a second",
        "s",
    );
    line("scale-upgrade-p99", "one of those connections, p99, over before", "×");
    for routes in ROUTES {
        line(&format!("scale-routes-connect-{routes}"), &format!("connect() p50, {routes} nodes"), "µs");
    }
    line("scale-connect-100000", "connect() p50, the most nodes over the fewest", "×");
    line("scale-start", "a server with 10,000 nodes started until it is ready", "s");
    line("scale-routes-load", "a file with 100,000 nodes until it is in effect", "s");
    line("scale-routes-update", "one node of 100,000 added until connect() knows it", "ms");
    line("scale-routes-update-cpu", "CPU time of the server for it", "ms");
    line("scale-flaps-idle", "CPU time of the server each second, 100,000 nodes and 100 idle agents", "ms");
    line("scale-flaps-cpu", "the same while ten agents a second lose their session and come back", "ms");
    line("scale-lost-attach", "10,000 agents over three servers: until all are attached", "s");
    line("scale-lost-most", "the server with the most agents, over its share", "×");
    line("scale-lost-back", "one of the three killed: until all agents have a session", "s");
    line("scale-lost-most-after", "then the server with the most agents, over its share", "×");
    line("scale-routes-memory", "memory of the server, 100,000 nodes", "MB");
    line("scale-routes-maps", "memory of the kernel's maps, 100,000 nodes", "MB");
    line("scale-held-memory", "memory of both ends for one of 30,000 held connections", "KiB");
    line("scale-held-connect", "connect() p50 beside 30,000 held connections to the same node", "µs");
    line("scale-held-connect-empty", "connect() p50 beside none", "µs");
    lines
}

fn pods(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut line = |id: &str, title: &str, unit| lines.push(Line::new(group, id, title, unit));
    line("pods-route", "a pod's connect, 16 bytes, close, 16 at once, by route", "1/s");
    line("pods-connect", "the same at connect()", "1/s");
    line(
        "pods-forward-none",
        "UDP round trip of a pod that the host forwards both ways, without Postern",
        "µs",
    );
    for nodes in [ROUTES[0], ROUTES[ROUTES.len() - 1]] {
        line(
            &format!("pods-forward-{nodes}"),
            &format!("the same beside rules and routes of {nodes} nodes"),
            "µs",
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::line::{Better, Peer};

    #[test]
    fn ids_and_names_are_unique() {
        let lines: Vec<Line> = Group::ALL.into_iter().flat_map(lines).collect();
        let ids: BTreeSet<&str> = lines.iter().map(|line| line.id.as_str()).collect();
        assert_eq!(ids.len(), lines.len());
        let names: BTreeSet<&str> =
            Group::ALL.map(Group::name).into_iter().chain(Peer::ALL.map(Peer::name)).collect();
        assert_eq!(names.len(), Group::ALL.len() + Peer::ALL.len(), "`--only` takes either");
    }

    #[test]
    fn only_rates_are_better_when_higher() {
        for line in Group::ALL.into_iter().flat_map(lines) {
            assert_eq!(line.better == Better::Higher, line.unit.ends_with("/s"), "{line:?}");
        }
    }
}

//! Address ranges of this node's pods, which the servers may reach unless --allow-target says otherwise.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tunnel_kube::request;
use tunnel_runtime::NodeName;
use tunnel_runtime::backoff::{Backoff, jittered};
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::state_file::StateFile;

/// Minimum and maximum pause between reads. A new node gets its range within seconds and keeps it; in some clusters no
/// node gets one. The maximum means three requests a second for ten thousand agents.
const UNKNOWN: Duration = Duration::from_secs(30);
const KNOWN: Duration = Duration::from_secs(3600);
/// Maximum pause after a failure: ranges of the last run may be wrong by now, and without any no pod is reached.
const FAILED: Duration = Duration::from_secs(600);
const ANSWER: Duration = Duration::from_secs(15);

/// Keeps `pods` in sync with the Node. While the API server is unreachable they stay as they are, also over a restart.
pub async fn follow(api: Client, node: NodeName, pods: Arc<ArcSwap<Vec<IpNet>>>, state_dir: PathBuf) {
    let file = StateFile::<Vec<IpNet>>::new(state_dir.join("pod-ranges.json"));
    let known = usable(file.load().unwrap_or_default());
    if !known.is_empty() {
        tracing::info!(ranges = ?known, "read the pod ranges of the last run");
        pods.store(Arc::new(known));
    }
    let (mut errors, mut pauses) = (LogOnce::default(), Pauses::default());
    loop {
        let read = read(&api, &node).await;
        let pause = pauses.after(&read);
        match read {
            Ok(ranges) => {
                errors.clear();
                if **pods.load() != ranges {
                    tracing::info!(?ranges, "found this node's pod ranges");
                    pods.store(Arc::new(ranges.clone()));
                    file.save(ranges).await;
                }
            }
            Err(reason) => {
                if errors.is_new(&reason) {
                    tracing::warn!(
                        reason,
                        "failed to look up this node's pod ranges, keeping the last known ones"
                    );
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Pauses between reads.
struct Pauses {
    failed: Backoff,
    unknown: Backoff,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { failed: Backoff::new(UNKNOWN, FAILED), unknown: Backoff::new(UNKNOWN, KNOWN) }
    }
}

impl Pauses {
    fn after(&mut self, read: &Result<Vec<IpNet>, String>) -> Duration {
        let Ok(ranges) = read else { return self.failed.next_delay() };
        self.failed.reset();
        if !ranges.is_empty() {
            return jittered(KNOWN, 0.5);
        }
        self.unknown.next_delay()
    }
}

async fn read(api: &Client, node: &NodeName) -> Result<Vec<IpNet>, String> {
    let nodes = Api::<Node>::all(api.clone());
    let found = request(ANSWER, "reading Node", node.as_str(), nodes.get(node.as_str())).await;
    found.map(|found| ranges(&found)).map_err(|error| error.to_string())
}

/// Pod ranges of a Node. `podCIDR` repeats the first of `podCIDRs`. Skips invalid entries.
fn ranges(node: &Node) -> Vec<IpNet> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let listed = spec.pod_cidrs.iter().flatten().chain(&spec.pod_cidr);
    usable(listed.filter_map(|text| {
        text.parse()
            .inspect_err(|error| tracing::warn!(range = text, %error, "ignoring an invalid pod range"))
            .ok()
    }))
}

/// Removes duplicates and ranges of all addresses, which would give the servers access to the edge's whole network.
fn usable(listed: impl IntoIterator<Item = IpNet>) -> Vec<IpNet> {
    let mut ranges: Vec<IpNet> = Vec::new();
    for range in listed {
        if range.prefix_len() == 0 {
            tracing::warn!(%range, "ignoring a pod range of all addresses");
        } else if !ranges.contains(&range.trunc()) {
            ranges.push(range.trunc());
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(spec: &serde_json::Value) -> Vec<String> {
        let node: Node = serde_json::from_value(serde_json::json!({"metadata": {}, "spec": spec})).unwrap();
        ranges(&node).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn ranges_are_taken_once_and_never_everything() {
        use serde_json::json;
        assert_eq!(
            of(&json!({"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:1::/64"]})),
            ["10.244.1.0/24", "fd00:1::/64"]
        );
        assert_eq!(of(&json!({"podCIDR": "10.244.1.7/24"})), ["10.244.1.0/24"]);
        assert!(of(&json!({"podCIDRs": ["0.0.0.0/0", "::/0", "x"]})).is_empty());
        assert!(of(&json!({})).is_empty());
    }

    #[test]
    fn after_a_failure_the_node_is_read_again_soon() {
        let mut pauses = Pauses::default();
        let known = Ok(vec!["10.244.1.0/24".parse().unwrap()]);
        let failed = Err("connection refused".to_owned());
        assert!(pauses.after(&failed) <= UNKNOWN, "ranges may be known from the last run");
        for _ in 0..20 {
            assert!(pauses.after(&failed) <= FAILED);
        }
        assert!(pauses.after(&known) >= KNOWN / 2);
        assert!(pauses.after(&failed) <= UNKNOWN);
        assert!(pauses.after(&Ok(Vec::new())) <= UNKNOWN, "failures do not make the others rare");
        for _ in 0..20 {
            pauses.after(&Ok(Vec::new()));
        }
        assert!(pauses.after(&Ok(Vec::new())) >= KNOWN / 2, "some clusters give no ranges");
    }
}

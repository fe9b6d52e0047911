//! Heartbeats of a large cluster: they make no inventory and no request.
//!
//! Their cost is only printed: `cargo test --release -p tunnel-server --test kube_api -- heartbeats --nocapture` runs it with
//! 5,000 Nodes whose kubelets report every ten seconds. An unoptimised build runs the same with fewer nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use postern_fake_kube::{ApiServer, eventually};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;
use tunnel_routing::inventory::Selector;
use tunnel_server::kube::read::nodes;

use super::NODES;

const INTERVAL: Duration = Duration::from_secs(10);

/// Number of nodes, and duration of the measurement.
const fn scale() -> (usize, Duration) {
    if cfg!(debug_assertions) { (500, Duration::from_secs(3)) } else { (5000, Duration::from_secs(10)) }
}

/// A Node as a kubelet reports it: labels, annotations, managed fields, conditions and images.
fn realistic(n: usize) -> Value {
    let name = format!("edge-{n:05}.site-{:03}.example.com", n % 400);
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({"type": kind, "status": status, "reason": reason, "message": format!("kubelet has {reason}"),
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2025-11-05T09:31:08Z"})
    };
    let images: Vec<Value> = (0..15)
        .map(|i| {
            json!({"names": [
                format!("registry.example.com/platform/component-{i}@sha256:{}", format!("{:08x}", n * 31 + i).repeat(8)),
                format!("registry.example.com/platform/component-{i}:v1.{i}.{}", n % 7),
            ], "sizeBytes": 10_000_000 + i * 1_234_567})
        })
        .collect();
    let fields = json!({"f:metadata": {"f:annotations": {".": {}, "f:volumes.kubernetes.io/controller-managed-attach-detach": {}},
            "f:labels": {".": {}, "f:beta.kubernetes.io/arch": {}, "f:beta.kubernetes.io/os": {}, "f:kubernetes.io/arch": {},
                "f:kubernetes.io/hostname": {}, "f:kubernetes.io/os": {}, "f:openyurt.io/is-edge-worker": {}}},
        "f:status": {"f:addresses": {".": {}, "k:{\"type\":\"Hostname\"}": {}, "k:{\"type\":\"InternalIP\"}": {}},
            "f:conditions": {"k:{\"type\":\"DiskPressure\"}": {"f:lastHeartbeatTime": {}},
                "k:{\"type\":\"MemoryPressure\"}": {"f:lastHeartbeatTime": {}},
                "k:{\"type\":\"PIDPressure\"}": {"f:lastHeartbeatTime": {}},
                "k:{\"type\":\"Ready\"}": {"f:lastHeartbeatTime": {}, "f:lastTransitionTime": {}, "f:message": {}, "f:reason": {}, "f:status": {}}},
            "f:images": {}}});
    let manager = |name: &str| {
        json!({"manager": name, "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1", "fieldsV1": fields})
    };
    json!({
        "metadata": {
            "name": name,
            "labels": {
                "beta.kubernetes.io/arch": "arm64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64",
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "openyurt.io/is-edge-worker": "true",
                "apps.openyurt.io/nodepool": format!("site-{:03}", n % 400),
                "topology.kubernetes.io/region": "north", "topology.kubernetes.io/zone": format!("site-{:03}", n % 400),
            },
            "annotations": {
                "node.alpha.kubernetes.io/ttl": "15",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
                "csi.volume.kubernetes.io/nodeid": format!("{{\"local.csi.example.com\":\"{name}\"}}"),
            },
            "managedFields": [manager("kubelet"), manager("kube-controller-manager")],
        },
        "spec": {"podCIDR": format!("10.{}.{}.0/24", 128 + n / 256, n % 256),
            "podCIDRs": [format!("10.{}.{}.0/24", 128 + n / 256, n % 256)], "providerID": format!("edge://{name}")},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": format!("10.{}.{}.7", n / 256, n % 256)},
                {"type": "Hostname", "address": name},
            ],
            "allocatable": {"cpu": "4", "ephemeral-storage": "28453142Ki", "memory": "7929412Ki", "pods": "110"},
            "capacity": {"cpu": "4", "ephemeral-storage": "30873548Ki", "memory": "8031812Ki", "pods": "110"},
            "conditions": [
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID"),
                condition("Ready", "True", "KubeletReady"),
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "images": images,
            "nodeInfo": {"architecture": "arm64", "bootID": "0a8d0d61-fd0b-4d43-b5f1-5a7f1d9ac8a1",
                "containerRuntimeVersion": "containerd://1.7.24", "kernelVersion": "6.6.51", "kubeletVersion": "v1.34.4",
                "machineID": format!("{n:032x}"), "operatingSystem": "linux", "osImage": "Debian GNU/Linux 12 (bookworm)",
                "systemUUID": format!("{n:032x}")},
        },
    })
}

/// CPU time that the calling thread has used.
fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

/// The code under test on a thread of its own, so that its CPU time is its own.
struct Consumer {
    published: Arc<AtomicUsize>,
    nodes: Arc<AtomicUsize>,
    /// Asks for the thread's CPU time.
    ask: tokio::sync::mpsc::UnboundedSender<std::sync::mpsc::Sender<Duration>>,
    thread: Option<std::thread::JoinHandle<()>>,
    stop: CancellationToken,
}

impl Consumer {
    fn start(options: tunnel_server::kube::KubeOptions) -> Self {
        let (published, nodes) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let stop = CancellationToken::new();
        let (ask, mut asked) = tokio::sync::mpsc::unbounded_channel::<std::sync::mpsc::Sender<Duration>>();
        let thread = std::thread::spawn({
            let (published, nodes, stop) = (published.clone(), nodes.clone(), stop.clone());
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async move {
                    let (client, _) = options.connect().await.unwrap();
                    let publish = move |inventory: tunnel_routing::inventory::Inventory| {
                        published.fetch_add(1, Ordering::SeqCst);
                        nodes.store(inventory.len(), Ordering::SeqCst);
                    };
                    tokio::spawn(async move {
                        while let Some(answer) = asked.recv().await {
                            let _ = answer.send(thread_cpu());
                        }
                    });
                    let none = std::future::ready(tunnel_routing::inventory::Inventory::default());
                    let (selector, health) = (Selector::default(), Health::default());
                    nodes::run(client, selector, health, false, none, publish, stop).await;
                });
            }
        });
        Self { published, nodes, ask, thread: Some(thread), stop }
    }

    fn cpu(&self) -> Duration {
        let (answer, received) = std::sync::mpsc::channel();
        self.ask.send(answer).unwrap();
        received.recv().unwrap()
    }

    fn state(&self) -> (usize, usize) {
        (self.published.load(Ordering::SeqCst), self.nodes.load(Ordering::SeqCst))
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[tokio::test]
async fn heartbeats_of_a_large_cluster_make_no_inventory_and_no_request() {
    let (count, time) = scale();
    let server = ApiServer::start();
    let names: Vec<String> = (0..count)
        .map(|n| server.put(NODES, realistic(n))["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    let size = server.get(NODES, &names[0]).unwrap().to_string().len();
    let consumer = Consumer::start(crate::fixture::options(&server));
    let large = Duration::from_secs(120);
    let deadline = Instant::now() + large;
    while consumer.state() != (1, count) {
        assert!(Instant::now() < deadline, "the list took longer than {large:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    eventually("the watch", || (server.open_watches(NODES) == 1).then_some(())).await;
    let (listed, requests) = (consumer.cpu(), server.all_requests());
    let pages = count.div_ceil(500) - 1;
    assert_eq!(requests.values().sum::<usize>(), 2 + pages, "a list and a watch: {requests:?}");

    let started = Instant::now();
    let per_tick = count * 20 / INTERVAL.as_millis() as usize;
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let (mut sent, mut next) = (0_usize, 0_usize);
    while started.elapsed() < time {
        ticks.tick().await;
        for _ in 0..per_tick {
            let beat = format!("2026-01-01T{:02}:{:02}:{:02}Z", sent / 3600 % 24, sent / 60 % 60, sent % 60);
            server.edit(NODES, &names[next], |node| {
                for condition in node["status"]["conditions"].as_array_mut().unwrap() {
                    condition["lastHeartbeatTime"] = json!(beat);
                }
            });
            (sent, next) = (sent + 1, (next + 1) % count);
        }
    }
    let elapsed = started.elapsed();
    let used = consumer.cpu() - listed;
    // A watch keeps the order: once this node is known, every heartbeat was seen.
    server.put(NODES, realistic(count));
    eventually("the last node", || (consumer.state().1 == count + 1).then_some(())).await;
    assert_eq!(consumer.state(), (2, count + 1), "the list is one inventory, the last node another");
    assert_eq!(server.all_requests(), requests, "the watch did not last");
    println!(
        "{count} nodes of {size} bytes, {sent} heartbeats in {elapsed:.1?} ({:.0} a second): {used:.0?} of CPU, {:.2} % of a core, \
         {:.0} us each; the list took {listed:.0?} of CPU",
        sent as f64 / elapsed.as_secs_f64(),
        used.as_secs_f64() / elapsed.as_secs_f64() * 100.0,
        used.as_secs_f64() / sent as f64 * 1e6,
    );
}

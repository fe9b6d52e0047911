//! The steps of `cargo xtask demo --kubernetes`: each is announced, then shown as a command and its output.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, Pattern};
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::pods::{self, IDLE, TALK, shell, with_stdin};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, endpoints, monitoring, postern};
use postern_testbed::process::Process;
use postern_testbed::prometheus;
use postern_testbed::server::{self, Server};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

const STEPS: usize = 13;
const PATIENCE: Duration = Duration::from_secs(60);
const EXPORTER_PORT: u16 = 9100;
/// Lines shown of a long output.
const LINES: usize = 16;

pub(super) struct Running<'a> {
    cluster: Cluster<'a>,
    server: Server<'a>,
    agent: Agent<'a>,
    others: Vec<Process>,
}

impl super::Running for Running<'_> {
    async fn stop(mut self) -> Result<()> {
        self.others.clear();
        let status = self.agent.process.stop().await?;
        ensure!(status.success(), "the agent ended with {status}");
        let status = self.server.process.stop().await?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }

    const SHELL: &'static str = "A shell on the cloud host:";

    fn print_examples(&self, bin: &str) {
        let (program, kubeconfig) = self.cluster.kubectl.files();
        println!("  export KUBECONFIG={}; alias kubectl={}", kubeconfig.display(), program.display());
        println!("  kubectl logs -f talker");
        println!("  kubectl exec -it idle -- sh");
        println!("  kubectl describe node {EDGE_NODE}");
        println!("  {bin}/tunnel-server status");
        println!("  curl -s 'http://127.0.0.1:9090/api/v1/query?query=up'");
    }
}

pub(super) async fn run(testbed: &Testbed) -> Result<Running<'_>> {
    let edge = testbed.edge(1);
    step(1, "a real Kubernetes with a node behind NAT");
    line(&format!("{CLOUD_NODE}  {CLOUD}     the control plane, containerd, kubelet, kube-proxy"));
    line(&format!("{EDGE_NODE}   {}  containerd, kubelet, kube-proxy", edge.address));
    line("the router between them masquerades what the edge sends and drops new connections towards it");
    let cluster = Cluster::start_saying(testbed, line).await?;
    show(&cluster, &["get", "nodes", "--output=wide"]).await?;

    step(2, "pods on the edge node: one that prints, one that idles, one that reads, a web server");
    let listen = "while read line; do echo got $line; done";
    let all = [
        shell("talker", EDGE_NODE, TALK),
        shell("idle", EDGE_NODE, IDLE),
        with_stdin(shell("listener", EDGE_NODE, listen)),
        shell("web", EDGE_NODE, "exec httpd -f -p 80 -h /www"),
    ];
    pods::run(&cluster.api, &all).await?;
    show(&cluster, &["get", "pods", "--output=wide"]).await?;

    step(3, "without Postern: kube-apiserver cannot reach the kubelet of that node");
    let args = ["logs", "talker", "--request-timeout=5s"];
    command(&args);
    let start = Instant::now();
    let output = cluster.kubectl.output(&args).await?;
    ensure!(!output.status.success(), "logs worked without a tunnel: {}", said(&output));
    indented(&said(&output));
    line(&format!("gave up after {:.1?}", start.elapsed()));

    step(4, "Postern: its objects and rights as they are shipped, then the two programs");
    line(
        "$ kubectl apply -k deploy/base, with components for the Node's condition and the kubelets' credentials",
    );
    line("  (except the two DaemonSets: their programs are started here, with the same arguments)");
    let manifests = postern::install(&cluster, "base").await?;
    let server = postern::server(&cluster, &manifests).await?.flag("--redirect-pods=route").start().await?;
    line(&format!("{CLOUD_NODE} $ {}", command_line(&server.process)?));
    let start = Instant::now();
    let agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    line(&format!("{EDGE_NODE}  $ {}", command_line(&agent.process)?));
    line(&format!("enrolled by a CertificateSigningRequest and attached after {:.1?}:", start.elapsed()));
    show(&cluster, &["get", "csr"]).await?;
    line("kube-apiserver runs with unchanged flags, and verifies the kubelets' certificates:");
    for flag in cluster.control_plane.kubelet_flags()? {
        line(&format!("  {flag}"));
    }

    step(5, "logs");
    show(&cluster, &["logs", "talker", "--tail=3"]).await?;

    step(6, "exec");
    show(&cluster, &["exec", "idle", "--", "sh", "-c", "hostname; ip -4 addr show eth0 | grep inet"]).await?;

    step(7, "attach: input reaches the pod, and its answer comes back");
    attach(&cluster).await?;

    step(8, "port-forward");
    forward(&cluster).await?;

    step(9, "cp, both ways");
    copy(&cluster).await?;

    step(10, "what clients get from a kubelet through the API server");
    let cadvisor = format!("/api/v1/nodes/{EDGE_NODE}/proxy/metrics/cadvisor");
    show_first(&cluster, &["get", "--raw", &cadvisor], "pod=\"talker\"").await?;
    show(&cluster, &["get", "--raw", &format!("/api/v1/nodes/{EDGE_NODE}/proxy/logs/pods/")]).await?;

    step(11, "Prometheus finds the nodes through the API server and scrapes each by its own address");
    line("$ kubectl apply -k deploy/prometheus");
    line("$ kubectl patch configmap tunnel-server-cfg: http-proxy-ports 9100, localhost-proxy-ports 10266");
    let others = monitoring::start(&cluster).await?;
    show_targets(&cluster).await?;

    step(
        12,
        "a pod on the cloud's node, by the edge node's own address and by a Service that kube-proxy translates",
    );
    from_pod(&cluster, &server).await?;

    step(13, "the Node's condition and tunnel-server status");
    show_first(&cluster, &["describe", "node", EDGE_NODE], "PosternTunnel").await?;
    let output = server::run(testbed, &["status"])?;
    ensure!(output.status.success(), "status: {}", String::from_utf8_lossy(&output.stderr));
    line("$ tunnel-server status");
    indented(&String::from_utf8_lossy(&output.stdout));
    Ok(Running { cluster, server, agent, others })
}

fn step(number: usize, text: &str) {
    println!("\n[{number}/{STEPS}] {text}");
}

fn line(text: &str) {
    println!("      {text}");
}

fn indented(text: &str) {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    for shown in lines.iter().take(LINES) {
        line(shown);
    }
    if lines.len() > LINES {
        line(&format!("… and {} more lines", lines.len() - LINES));
    }
}

/// Shows the command as it would be typed.
fn command(args: &[&str]) {
    let quoted = args.iter().map(|arg| {
        if arg.len() > 1 && arg.contains([' ', ';', '|', '"']) {
            format!("'{arg}'")
        } else {
            (*arg).to_owned()
        }
    });
    line(&format!("$ kubectl {}", quoted.collect::<Vec<_>>().join(" ")));
}

/// Runs kubectl and shows command and output.
async fn show(cluster: &Cluster<'_>, args: &[&str]) -> Result<()> {
    command(args);
    indented(&cluster.kubectl.run(args).await?);
    Ok(())
}

/// As [`show`], but only output lines that contain `wanted`; waits until there are some.
async fn show_first(cluster: &Cluster<'_>, args: &[&str], wanted: &str) -> Result<()> {
    command(&[args, &["|", "grep", wanted, "|", "head", "-3"]].concat());
    let fitting = async || {
        let output = cluster.kubectl.run(args).await?;
        Ok(output.lines().filter(|line| line.contains(wanted)).map(str::to_owned).collect::<Vec<_>>())
    };
    let lines = wait_until(wanted, PATIENCE, fitting, |lines| !lines.is_empty()).await?;
    for shown in lines.iter().take(3) {
        line(shown.trim());
    }
    Ok(())
}

fn command_line(process: &Process) -> Result<String> {
    let text = std::fs::read(format!("/proc/{}/cmdline", process.pid())).context("reading a command line")?;
    let text = String::from_utf8_lossy(&text);
    let mut words = text.split('\0').filter(|word| !word.is_empty());
    let program = words.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or(program);
    Ok(std::iter::once(program).chain(words).collect::<Vec<_>>().join(" "))
}

async fn attach(cluster: &Cluster<'_>) -> Result<()> {
    let args = ["attach", "-i", "listener"];
    command(&args);
    let mut child = cluster.kubectl.start(&args)?;
    let mut stdin = child.stdin.take().context("no input")?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    for word in ["hello", "edge"] {
        line(&format!("> {word}"));
        stdin.write_all(format!("{word}\n").as_bytes()).await.context("typing")?;
        let answer = timeout(PATIENCE, lines.next_line()).await.context("no answer arrived")??;
        let answer = answer.context("attach ended")?;
        ensure!(answer == format!("got {word}"), "the pod answered {answer:?}");
        line(&answer);
    }
    Ok(())
}

async fn forward(cluster: &Cluster<'_>) -> Result<()> {
    let args = ["port-forward", "web", ":80", "--address=127.0.0.1"];
    command(&args);
    let mut child = cluster.kubectl.start(&args)?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    let said = timeout(PATIENCE, lines.next_line()).await.context("port-forward printed nothing")??;
    let said = said.context("port-forward ended")?;
    line(&said);
    // Forwarding from 127.0.0.1:40123 -> 80
    let address = said.split_whitespace().nth(2).context("no address")?;
    let stream = client::connect(address.parse::<std::net::SocketAddr>()?).await?;
    let (status, body) = client::http(stream, "GET", "/", "").await?;
    line(&format!("GET http://{address}/"));
    line(&format!("{status} {}", body.trim_end()));
    ensure!(status == 200, "the pod's web server answered {status}");
    Ok(())
}

async fn copy(cluster: &Cluster<'_>) -> Result<()> {
    const MEGABYTES: u64 = 50;
    let (here, back) = (cluster.testbed.dir().join("file"), cluster.testbed.dir().join("file-from-edge"));
    let mut pattern = Pattern::new(1, MEGABYTES << 20);
    let mut file = tokio::fs::File::create(&here).await.context("creating the file to copy")?;
    pattern.write_to(&mut file).await?;
    file.flush().await.context("writing the file to copy")?;
    line(&format!("a file of {MEGABYTES} MB, SHA-256 {}", pattern.digest()));
    let (here, back) = (here.to_string_lossy().into_owned(), back.to_string_lossy().into_owned());
    for args in [["cp", &here, "idle:/tmp/file"], ["cp", "idle:/tmp/file", &back]] {
        command(&args);
        let start = Instant::now();
        cluster.kubectl.run(&args).await?;
        line(&format!("{:.1?}", start.elapsed()));
    }
    show(cluster, &["exec", "idle", "--", "sha256sum", "/tmp/file"]).await?;
    let mut file = tokio::fs::File::open(&back).await.context("opening the copy")?;
    let (_, digest) = client::digest(&mut file).await?;
    ensure!(digest == pattern.digest(), "the copy that came back has the checksum {digest}");
    line(&format!("the copy that came back: SHA-256 {digest}"));
    Ok(())
}

/// Reads the edge node's exporter from a pod. The server's access log has the pod's address.
async fn from_pod(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    pods::run(&cluster.api, &[shell("client", CLOUD_NODE, IDLE)]).await?;
    let edge = cluster.testbed.edge(1).ip();
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "exporter" },
        "spec": { "ports": [{ "port": EXPORTER_PORT }] },
    });
    let service = cluster.api.create("/api/v1/namespaces/default/services", &service).await?;
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    cluster.api.create(slices, &endpoints::slice("exporter", "", edge, EXPORTER_PORT)).await?;
    show(cluster, &["get", "endpointslice", "exporter"]).await?;
    let service = service["spec"]["clusterIP"].as_str().context("a Service without an address")?.to_owned();
    for host in [edge.to_string(), service] {
        let url = format!("http://{host}:{EXPORTER_PORT}/metrics");
        show_first(cluster, &["exec", "client", "--", "wget", "-q", "-O-", &url], "node_uname_info{").await?;
    }
    let pod = pods::address(&cluster.api, "client").await?;
    let arrived =
        server.wait_access("of the pod", |line| line.text("client").starts_with(&format!("{pod}:"))).await?;
    let (client, destination) = (arrived.text("client"), arrived.text("destination"));
    line(&format!("in the server's access log: client {client}, destination {destination}"));
    Ok(())
}

async fn show_targets(cluster: &Cluster<'_>) -> Result<()> {
    // Three of every node, the agent of the edge node, and the server.
    let targets = 3 * cluster.hosts.len() + 2;
    let mut found =
        wait_until(&format!("{targets} targets to be up"), PATIENCE, prometheus::targets, |found| {
            found.len() == targets && found.iter().all(|target| target.health == "up")
        })
        .await?;
    found.sort_by(|a, b| (&a.job, &a.url).cmp(&(&b.job, &b.url)));
    for target in found {
        line(&format!("{:<14} {:<48} {}", target.job, target.url, target.health));
    }
    Ok(())
}

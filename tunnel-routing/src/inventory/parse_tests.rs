//! Tests of the inventory's parser.

use std::net::IpAddr;

use proptest::prelude::*;
use tunnel_runtime::yaml::Located;

use super::*;

/// Output of `kubectl get nodes -o yaml`, shortened.
const KUBECTL: &str = r#"apiVersion: v1
items:
- apiVersion: v1
  kind: Node
  metadata:
    annotations:
      node.alpha.kubernetes.io/ttl: "0"
      weird: "{\"json\":[1,2]}"
    creationTimestamp: "2024-05-01T08:00:00Z"
    labels:
      kubernetes.io/os: linux
      openyurt.io/is-edge-worker: "true"
    name: edge-1
    resourceVersion: "812"
    uid: 5d4bd1b0-3b6c-4a5c-a3c4-60b3b8b0a8d1
  spec:
    podCIDR: 10.244.1.0/24
    podCIDRs:
    - 10.244.1.0/24
    - fd00:10:244:1::/64
  status:
    addresses:
    - address: 203.0.113.9
      type: ExternalIP
    - address: 10.8.0.7
      type: InternalIP
    - address: fd00:8::7
      type: InternalIP
    - address: edge-1
      type: Hostname
    conditions:
    - lastHeartbeatTime: "2024-05-01T08:05:00Z"
      message: 'kubelet is posting ready status: "ok"'
      status: "True"
      type: Ready
    daemonEndpoints:
      kubeletEndpoint:
        Port: 10350
    images:
    - names:
      - registry/pause@sha256:abc
      sizeBytes: 301463
    nodeInfo:
      architecture: amd64
- apiVersion: v1
  kind: Node
  metadata:
    labels:
      openyurt.io/is-edge-worker: "false"
    name: master-1
  spec:
    podCIDR: 10.244.0.5/24
  status:
    addresses:
    - address: ::ffff:10.0.0.2
      type: InternalIP
    daemonEndpoints:
      kubeletEndpoint:
        Port: 0
kind: List
metadata:
  resourceVersion: ""
"#;

fn read(text: &str) -> Result<Inventory, Located> {
    parse(text, &Selector::default())
}

fn error(text: &str) -> String {
    read(text).expect_err(text).to_string()
}

fn ips(list: &[&str]) -> Vec<IpAddr> {
    list.iter().map(|ip| ip.parse().unwrap()).collect()
}

#[test]
fn reads_what_kubectl_prints() {
    let inventory = read(KUBECTL).unwrap();
    assert_eq!(inventory.counts(), (1, 1));
    let nodes: Vec<_> = inventory.iter().collect();
    let [edge, cloud] = nodes[..] else { panic!("{inventory:?}") };
    assert_eq!((edge.name.as_str(), edge.edge, edge.kubelet_port), ("edge-1", true, 10350));
    assert_eq!(edge.addresses, ips(&["10.8.0.7", "fd00:8::7", "203.0.113.9"]));
    assert_eq!(edge.pod_cidrs, ["10.244.1.0/24".parse().unwrap(), "fd00:10:244:1::/64".parse().unwrap()]);
    assert_eq!((cloud.name.as_str(), cloud.edge, cloud.kubelet_port), ("master-1", false, 10250));
    assert_eq!(cloud.addresses, ips(&["10.0.0.2"]));
    assert_eq!(cloud.pod_cidrs, ["10.244.0.0/24".parse().unwrap()]);
}

#[test]
fn reads_json_and_single_nodes_and_several_documents() {
    let json = r#"{
    "apiVersion": "v1",
    "items": [
        {"kind": "Node", "metadata": {"name": "edge-1", "labels": {"node-role.kubernetes.io/edge": ""},
            "annotations": {"a": "\u003cb\u003e \"q\" \/ \\ caf\u00e9 \ud83d\ude00"}},
         "status": {"addresses": [{"type": "InternalIP", "address": "10.8.0.7"}]}}
    ],
    "kind": "NodeList"
}"#;
    let inventory = read(json).unwrap();
    let node = inventory.get("edge-1").unwrap();
    assert_eq!(node.addresses, ips(&["10.8.0.7"]));
    assert!(node.edge);

    let documents = "kind: Node\nmetadata: {name: a}\n---\n# nothing\n---\nkind: NodeList\nitems: [{metadata: {name: b}}]\n---\nkind: List\nitems: []\n";
    let names: Vec<_> = read(documents).unwrap().iter().map(|node| node.name.to_string()).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn absent_and_null_fields_are_empty() {
    let text = "kind: List\nitems:\n- metadata: {name: a, labels: null}\n  spec: {podCIDRs: null, podCIDR: ''}\n  \
                status: {addresses: null, daemonEndpoints: {kubeletEndpoint: null}}\n- metadata: {name: b}\n";
    let inventory = read(text).unwrap();
    assert_eq!(inventory.len(), 2);
    assert!(inventory.iter().all(|node| node.addresses.is_empty() && node.kubelet_port == 10250));
    assert_eq!(read("kind: List\nitems: []\n").unwrap(), Inventory::default());
    for text in ["kind: List\n", "kind: NodeList\nitems: null\n", "{kind: List, Items: []}"] {
        let error = read(text).unwrap_err().to_string();
        assert_eq!(error, "line 1: items: missing or null; a list without nodes has `items: []`");
    }
    let edge = "kind: Node\nmetadata:\n  name: a\n  labels:\n    node-role.kubernetes.io/edge:\n";
    assert!(read(edge).unwrap().get("a").unwrap().edge, "a label without a value");
    let edge = "kind: Node\nmetadata:\n  name: a\n  labels:\n    openyurt.io/is-edge-worker: true\n";
    assert!(read(edge).unwrap().get("a").unwrap().edge, "a label that is not quoted");
}

#[test]
fn errors_name_line_key_and_reason() {
    for (text, expected) in [
        ("", "it is empty; a List of Nodes is expected, as `kubectl get nodes -o yaml` prints it"),
        ("# none\n", "it is empty; a List of Nodes is expected, as `kubectl get nodes -o yaml` prints it"),
        ("kind: Pod\n", "line 1: kind: \"Pod\" is not List, NodeList or Node"),
        ("kind: Node\n", "line 1: metadata: a Node without metadata"),
        (
            "kind: List\nitems:\n- kind: Node\n  metadata: {name: a}\n- kind: Pod\n  metadata: {name: b}\n",
            "line 5: items[1].kind: \"Pod\" is not a Node",
        ),
        (
            "kind: List\nitems:\n- metadata:\n    name: Edge-1\n",
            "line 4: items[0].metadata.name: node name \"Edge-1\": it has an upper-case letter; a node's name is lower-case",
        ),
        (
            "kind: List\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n- metadata:\n    name: a\n",
            "line 6: items[2].metadata.name: node a is there twice, first at items[0].metadata.name",
        ),
        (
            "kind: Node\nmetadata: {name: a}\n---\nkind: Node\nmetadata: {name: a}\n",
            "line 5: document 2: metadata.name: node a is there twice, first at document 1: metadata.name",
        ),
        (
            "kind: List\nitems:\n- metadata: {name: a}\n  status:\n    addresses:\n    - type: InternalIP\n      address: 10.0.0\n",
            "line 7: items[0].status.addresses[0].address: \"10.0.0\" is not an IP address",
        ),
        (
            "kind: Node\nmetadata: {name: a}\nspec:\n  podCIDRs: [10.0.0.0/33]\n",
            "line 4: spec.podCIDRs[0]: \"10.0.0.0/33\" is not an address range",
        ),
    ] {
        assert_eq!(error(text), expected, "{text}");
    }
}

#[test]
fn structural_errors_name_line_and_key_too() {
    for (text, line, key, part) in [
        (
            "kind: List\nitems:\n- metadata: {name: a}\n  status:\n    addresses: 5\n",
            5,
            "items[0].status.addresses",
            "",
        ),
        ("kind: List\nitems:\n- metadata:\n    labels: {}\n", 4, "items[0].metadata.name", "missing"),
        ("kind: List\nitems: edge-1\n", 2, "items", ""),
        (
            "kind: Node\nmetadata: {name: a}\nstatus:\n  daemonEndpoints:\n    kubeletEndpoint:\n      Port: 70000\n",
            6,
            "status.daemonEndpoints.kubeletEndpoint.Port",
            "",
        ),
        ("items: []\n", 1, "", "kind"),
    ] {
        let error = read(text).unwrap_err();
        assert_eq!((error.line, error.key.as_str()), (Some(line), key), "{text}: {error}");
        assert!(error.reason.contains(part), "{error}");
        assert!(!error.reason.contains("line "), "{error}");
    }
    // Not YAML at all.
    for text in [
        "kind: List\nitems:\n\t- a\n",
        "kind: \"List\nitems: []\n",
        "kind: List\nitems: [\n",
        "{\"kind\": \"List\", ",
    ] {
        let error = read(text).unwrap_err();
        assert!(error.line.is_some() && !error.reason.is_empty(), "{error:?}");
    }
}

#[test]
fn alias_bombs_and_deep_nesting_are_refused() {
    let mut bomb = "kind: Node\nmetadata: {name: a}\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for i in 1..10 {
        bomb += &format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i - 1); 10].join(","));
    }
    assert!(read(&bomb).is_err());
    for deep in ["[".repeat(200_000), "{a: ".repeat(200_000), "- ".repeat(200_000)] {
        assert!(read(&format!("kind: Node\nmetadata: {{name: a}}\nx: {deep}")).is_err());
        assert!(read(&deep).is_err());
    }
    let deep: String = (0..20_000).map(|depth| format!("{}a:\n", " ".repeat(depth.min(2000)))).collect();
    assert!(read(&deep).is_err());
    let huge = " ".repeat(MAX_BYTES + 1);
    assert_eq!(error(&huge), format!("{} bytes; at most {MAX_BYTES} are read", MAX_BYTES + 1));
}

#[test]
fn large_inventories_are_read() {
    let mut text = "kind: List\nitems:\n".to_owned();
    for i in 0..20_000 {
        text += &format!(
            "- kind: Node\n  metadata:\n    name: edge-{i}\n    labels:\n      node-role.kubernetes.io/edge: \"\"\n  status:\n    \
             addresses:\n    - {{type: InternalIP, address: 10.{}.{}.{}}}\n    images: [{{names: [a, b]}}, {{names: [c]}}]\n",
            i >> 16,
            i >> 8 & 255,
            i & 255
        );
    }
    let started = std::time::Instant::now();
    assert_eq!(read(&text).unwrap().counts(), (20_000, 0));
    println!("{} MiB in {:?}", text.len() >> 20, started.elapsed());
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}|[-a:\\[\\]{}&*!|>'\"%#,? \n]{0,120}") {
        let _ = read(&text);
    }

    /// A changed or truncated file gives an inventory or an error with a reason, never a panic.
    #[test]
    fn mutations_of_a_real_file_never_panic(at in 0..KUBECTL.len(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = KUBECTL.as_bytes().to_vec();
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        if let Ok(text) = String::from_utf8(bytes)
            && let Err(error) = read(&text)
        {
            prop_assert!(!error.reason.is_empty());
        }
    }

    #[test]
    fn reads_back_what_was_written(
        nodes in prop::collection::btree_map(
            "[a-z][a-z0-9]{0,10}",
            (any::<bool>(), prop::collection::vec(any::<IpAddr>(), 0..4), 1..=u16::MAX),
            0..8,
        )
    ) {
        let mut text = "kind: List\nitems:\n".to_owned();
        if nodes.is_empty() { text = "kind: List\nitems: []\n".to_owned(); }
        for (name, (edge, addresses, port)) in &nodes {
            let label = if *edge { "enable" } else { "disable" };
            text += &format!("- metadata:\n    name: \"{name}\"\n    labels: {{superedge.io/edge-node: {label}}}\n  status:\n    daemonEndpoints: {{kubeletEndpoint: {{Port: {port}}}}}\n    addresses:\n");
            for address in addresses { text += &format!("    - {{type: InternalIP, address: \"{address}\"}}\n"); }
        }
        let inventory = read(&text).unwrap();
        prop_assert_eq!(inventory.len(), nodes.len());
        for node in inventory.iter() {
            let (edge, addresses, port) = &nodes[node.name.as_str()];
            let mut expected: Vec<IpAddr> = Vec::new();
            for address in addresses.iter().map(IpAddr::to_canonical) {
                if !expected.contains(&address) { expected.push(address); }
            }
            prop_assert_eq!((node.edge, &node.addresses, node.kubelet_port), (*edge, &expected, *port));
        }
    }
}

#[test]
fn an_error_does_not_repeat_a_large_file() {
    let large = "x\u{1b}".repeat(2 << 20);
    let value = large.replace('\u{1b}', "y");
    for text in [
        format!("kind: {value}\n"),
        format!("kind: List\nitems:\n- metadata: {{name: {value}}}\n"),
        format!("kind: List\nitems: {value}\n"),
        format!("kind: List\nitems:\n- metadata: {{name: a, labels: {{{value}: [1]}}}}\n"),
        format!(
            "kind: List\nitems:\n- metadata: {{name: a}}\n  status: {{addresses: [{{type: InternalIP, address: {value}}}]}}\n"
        ),
        format!(
            "kind: List\nitems:\n- metadata: {{name: a}}\n  spec: {{podCIDR: \"{}\"}}\n",
            large.replace('\u{1b}', "\\e")
        ),
    ] {
        let error = read(&text).unwrap_err().to_string();
        assert!(error.len() < 800 && !error.contains('\u{1b}'), "{} bytes: {:.300}", error.len(), error);
    }
}

#[test]
fn a_node_with_50_000_addresses_is_read_in_linear_time_and_keeps_16() {
    let many = |count: u32| {
        let mut text = "kind: Node\nmetadata: {name: a}\nstatus:\n  addresses:\n".to_owned();
        for n in 0..count {
            let kind = if n == count - 1 { "InternalIP" } else { "ExternalIP" };
            text +=
                &format!("  - {{type: {kind}, address: {}}}\n", std::net::Ipv4Addr::from(0x0a00_0000 + n));
        }
        let started = std::time::Instant::now();
        let node = read(&text).unwrap().get("a").unwrap().clone();
        println!("{count} addresses: {:?}", started.elapsed());
        assert_eq!((node.addresses.len(), node.left_out), (MAX_ADDRESSES, count as usize - MAX_ADDRESSES));
        assert_eq!(
            node.addresses[0].to_string(),
            std::net::Ipv4Addr::from(0x0a00_0000 + count - 1).to_string()
        );
    };
    many(17);
    many(50_000);
}

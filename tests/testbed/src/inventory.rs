//! Inventory file of a run: a NodeList as `kubectl get nodes -o json` prints it (JSON is YAML too).
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::topology::{CLOUD, POD_CIDR, Testbed};

pub fn node(name: &str, edge: bool, addresses: &[IpAddr], pod_cidrs: &[&str]) -> Value {
    let mut labels = json!({ "kubernetes.io/hostname": name });
    if edge {
        labels["node-role.kubernetes.io/edge"] = json!("");
    }
    let mut listed: Vec<Value> =
        addresses.iter().map(|address| json!({ "type": "InternalIP", "address": address })).collect();
    listed.push(json!({ "type": "Hostname", "address": name }));
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "labels": labels },
        "spec": { "podCIDRs": pod_cidrs },
        "status": {
            "addresses": listed,
            "conditions": [{ "type": "Ready", "status": "True" }],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": 10250 } },
        },
    })
}

/// Name of the inventory file in the run's folder.
pub const FILE: &str = "nodes.yaml";

/// The nodes of a run and the file that lists them.
#[derive(Debug)]
pub struct Inventory {
    path: PathBuf,
    /// The Node objects; [`Inventory::write`] writes changes to the file.
    pub nodes: Vec<Value>,
}

impl Inventory {
    /// As [`Inventory::of`], with this file name.
    pub fn in_file(testbed: &Testbed, name: &str) -> Result<Self> {
        let inventory = Self { path: testbed.dir().join(name), ..Self::of(testbed)? };
        inventory.write()?;
        Ok(inventory)
    }

    /// Writes a file with the cloud host and its pods, and every edge of the testbed with its IPv4 and IPv6 address.
    pub fn of(testbed: &Testbed) -> Result<Self> {
        let mut nodes = vec![node("cloud-1", false, &[CLOUD.into(), "fd70::1".parse()?], &[POD_CIDR])];
        for edge in testbed.edges() {
            nodes.push(node(&edge.name, true, &[edge.address.into(), edge.address_v6.into()], &[]));
        }
        let inventory = Self { path: testbed.dir().join(FILE), nodes };
        inventory.write()?;
        Ok(inventory)
    }

    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Replaces the file as an editor does: writes a new file and renames it over the old one.
    pub fn write(&self) -> Result<()> {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": self.nodes });
        self.write_raw(&serde_json::to_string_pretty(&list).context("writing the inventory as JSON")?)
    }

    /// Replaces the file's content with any text.
    pub fn write_raw(&self, text: &str) -> Result<()> {
        let new = self.path.with_extension("new");
        fs::write(&new, text).with_context(|| format!("writing {}", new.display()))?;
        fs::rename(&new, &self.path).with_context(|| format!("renaming {} over the inventory", new.display()))
    }
}

//! Parses the output of `kubectl get nodes -o yaml` (or json) to an inventory.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_saphyr::Spanned;
use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;
use tunnel_runtime::yaml::{self, Located, MAX_DEPTH, Traced, locate};

use super::node::{NodeSpec, NodeStatus, read_node};
use super::{Inventory, InventoryNode, Selector};

/// Maximum size of a file. 100,000 nodes with their conditions and without their images are about 200 MiB.
pub const MAX_BYTES: usize = 256 << 20;

/// Parses a List of Nodes, a NodeList, a single Node, or several of these as YAML documents. JSON is valid YAML.
/// Unknown keys are ignored: the format is Kubernetes' and grows.
///
/// # Errors
/// With the line, the key and the reason. Node names must be unique.
pub fn parse(text: &str, selector: &Selector) -> Result<Inventory, Located> {
    parse_unbounded(text, selector).map_err(bounded)
}

/// Shortens the error for the log: keys and values may be as large as the file.
fn bounded(mut error: Located) -> Located {
    let bounded = |text: &str, max: usize| {
        let short = printable(text, max);
        if short.len() < text.len() { format!("{short}…") } else { short }
    };
    error.key = bounded(&error.key, 160);
    error.reason = bounded(&error.reason, 240);
    error
}

fn parse_unbounded(text: &str, selector: &Selector) -> Result<Inventory, Located> {
    if text.len() > MAX_BYTES {
        return Err(whole(format!("{} bytes; at most {MAX_BYTES} are read", text.len())));
    }
    yaml::begin();
    let documents: Vec<Traced<Document>> =
        serde_saphyr::from_str_multiple_with_options(text, options()).map_err(|error| locate(&error))?;
    if documents.is_empty() {
        return Err(whole(
            "it is empty; a List of Nodes is expected, as `kubectl get nodes -o yaml` prints it",
        ));
    }
    let several = documents.len() > 1;
    let mut reader = Reader { selector, nodes: Vec::new(), seen: HashMap::new() };
    for (number, Traced(document)) in documents.into_iter().enumerate() {
        let prefix = if several { format!("document {}: ", number + 1) } else { String::new() };
        reader.document(document, &prefix)?;
    }
    Ok(reader.nodes.into())
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        with_snippet: false,
        budget: serde_saphyr::budget! {
            // Bounded by the size of the text; the defaults are for small configurations.
            max_events: MAX_BYTES,
            max_nodes: MAX_BYTES,
            max_documents: MAX_BYTES,
            max_total_scalar_bytes: MAX_BYTES,
            max_total_comment_bytes: MAX_BYTES,
            max_depth: MAX_DEPTH,
            // Kubernetes prints no aliases; a few are harmless, an alias bomb is not.
            max_aliases: 1000,
            max_anchors: 1000,
        },
    }
}

/// A List, NodeList or Node.
#[derive(Deserialize)]
struct Document {
    kind: Spanned<String>,
    items: Option<Vec<Item>>,
    metadata: Option<Spanned<Metadata>>,
    spec: Option<NodeSpec<Spanned<String>>>,
    status: Option<NodeStatus<Spanned<String>, u16>>,
}

#[derive(Deserialize)]
struct Item {
    /// Optional in a NodeList.
    kind: Option<Spanned<String>>,
    metadata: Spanned<Metadata>,
    spec: Option<NodeSpec<Spanned<String>>>,
    status: Option<NodeStatus<Spanned<String>, u16>>,
}

#[derive(Deserialize)]
struct Metadata {
    /// None in a List.
    name: Option<Spanned<String>>,
    /// A label without a value has an empty one.
    labels: Option<BTreeMap<String, Option<String>>>,
}

struct Reader<'a> {
    selector: &'a Selector,
    nodes: Vec<InventoryNode>,
    /// The place at which each name was first seen.
    seen: HashMap<NodeName, String>,
}

impl Reader<'_> {
    fn document(&mut self, document: Document, prefix: &str) -> Result<(), Located> {
        let kind = &document.kind.value;
        match kind.as_str() {
            "Node" => {
                let Some(metadata) = document.metadata else {
                    let key = format!("{prefix}metadata");
                    return Err(at(&document.kind, key, "a Node without metadata"));
                };
                self.node(metadata, document.spec.as_ref(), document.status.as_ref(), prefix)
            }
            "List" | "NodeList" => {
                let Some(items) = document.items else {
                    let reason = "missing or null; a list without nodes has `items: []`";
                    return Err(at(&document.kind, format!("{prefix}items"), reason));
                };
                for (index, item) in items.into_iter().enumerate() {
                    let prefix = format!("{prefix}items[{index}].");
                    if let Some(kind) = item.kind.as_ref().filter(|kind| kind.value != "Node") {
                        return Err(at(
                            kind,
                            format!("{prefix}kind"),
                            format!("{:?} is not a Node", kind.value),
                        ));
                    }
                    self.node(item.metadata, item.spec.as_ref(), item.status.as_ref(), &prefix)?;
                }
                Ok(())
            }
            _ => {
                let reason = format!("{kind:?} is not List, NodeList or Node");
                Err(at(&document.kind, format!("{prefix}kind"), reason))
            }
        }
    }

    fn node(
        &mut self,
        metadata: Spanned<Metadata>,
        spec: Option<&NodeSpec<Spanned<String>>>,
        status: Option<&NodeStatus<Spanned<String>, u16>>,
        prefix: &str,
    ) -> Result<(), Located> {
        let key = format!("{prefix}metadata.name");
        let line = metadata.referenced.line();
        let Metadata { name: Some(text), labels } = metadata.value else {
            return Err(at_line(line, key, "missing"));
        };
        let name: NodeName =
            text.value.parse().map_err(|error| at(&text, key.clone(), format!("{error}")))?;
        if let Some(first) = self.seen.insert(name.clone(), key.clone()) {
            return Err(at(&text, key, format!("node {name} is there twice, first at {first}")));
        }
        let labels: BTreeMap<String, String> = labels
            .unwrap_or_default()
            .into_iter()
            .map(|(key, value)| (key, value.unwrap_or_default()))
            .collect();
        let edge = self.selector.matches(&labels);
        let node = read_node(name, edge, spec, status, |invalid| {
            let key = format!("{prefix}{}", invalid.field.path());
            Err(Located {
                line: invalid.line,
                key,
                reason: format!("{:?} is {}", invalid.value, invalid.reason),
            })
        })?;
        let labels = self.selector.kept(edge, &labels);
        self.nodes.push(InventoryNode { labels, ..node });
        Ok(())
    }
}

/// An error of the file as a whole.
fn whole(reason: impl Into<String>) -> Located {
    Located { line: None, key: String::new(), reason: reason.into() }
}

fn at<T>(value: &Spanned<T>, key: String, reason: impl Into<String>) -> Located {
    at_line(value.referenced.line(), key, reason)
}

fn at_line(line: u64, key: String, reason: impl Into<String>) -> Located {
    Located { line: Some(line).filter(|line| *line > 0), key, reason: reason.into() }
}

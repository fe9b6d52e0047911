//! docs/gateways.md: its overlays and its values of the chart, rendered without a cluster.
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::document::commands;
use postern_testbed::report::progress;
use serde_json::{Value, json};
use tokio::process::Command;

use super::guide::link_deploy;
use super::render::{kustomize, same, template};

/// Labels of masters, which the redirectors of gateways are kept from.
const MASTERS: [&str; 4] = [
    "node-role.kubernetes.io/control-plane",
    "node-role.kubernetes.io/controlplane",
    "node-role.kubernetes.io/master",
    "node.kubernetes.io/microk8s-controlplane",
];
const DOCUMENT: &str = include_str!("../../../../docs/gateways.md");

/// The document's lines make the same by Kustomize and by Helm, for servers and for redirectors: on the nodes with its label, with
/// its flags.
pub(super) async fn gateways_are_deployed_as_documented(testbed: &Testbed) -> Result<()> {
    let commands = commands(DOCUMENT, "In a cluster")?;
    let written = |line: &&str| !line.starts_with("kubectl ") && !line.starts_with("helm ");
    let overlay = commands.lines().filter(written).collect::<Vec<_>>().join("\n");
    let helm = commands.lines().find(|line| line.starts_with("helm ")).context("no line of helm's")?;
    let values: Vec<String> =
        helm.split(" --set ").skip(1).map(|set| set.trim_matches('\'').to_owned()).collect();
    let dir = link_deploy(testbed)?;

    let redirectors = [
        (
            "[../deploy/components/gateway]",
            "[../deploy/components/everywhere, ../deploy/components/everywhere-gateway]",
        ),
        ("name: tunnel-server", "name: tunnel-(server|redirector)"),
        ("server.gateway=true", "redirector.enabled=true,redirector.gateway=true"),
    ];
    for (name, replaced) in [("tunnel-server", &redirectors[..0]), ("tunnel-redirector", &redirectors)] {
        let replace =
            |text: &str| replaced.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
        write(&dir, &replace(&overlay)).await?;
        let rendered = kustomize(&dir.join("my-gateways")).await?;
        let values: Vec<String> = values.iter().map(|set| format!("--set={}", replace(set))).collect();
        same(&rendered, &template(&values).await?).with_context(|| format!("{name} and {values:?}"))?;

        let daemon_set = rendered.get(&("DaemonSet".to_owned(), name.to_owned())).context(name)?;
        let pod = &daemon_set["spec"]["template"]["spec"];
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        let terms = &pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"];
        let label = commands.split_whitespace().find_map(|word| word.strip_suffix("postern-gateway="));
        let label = format!("{}postern-gateway", label.context("no label")?);
        let mut expressions = vec![json!({ "key": label, "operator": "Exists" })];
        if name == "tunnel-redirector" {
            // Masters have servers.
            expressions.extend(MASTERS.map(|key| json!({ "key": key, "operator": "DoesNotExist" })));
        }
        let expected = json!([{ "matchExpressions": expressions }]);
        ensure!(*terms == expected, "{name} runs on {terms}");
        let has = |flag: &str| {
            pod["containers"][0]["args"].as_array().is_some_and(|args| args.contains(&Value::from(flag)))
        };
        // Those that the document begins with.
        for flag in [
            "--redirect-pods=route",
            "--gateway",
            "--redirect-clients=10.0.0.0/16",
            "--edge-addresses=192.168.50.0/24",
        ] {
            ensure!(has(flag), "{name} has no {flag}: {}", pod["containers"][0]["args"]);
        }
    }
    for (from, to) in &redirectors[..2] {
        ensure!(DOCUMENT.contains(from) && DOCUMENT.contains(to), "the document does not say {to}");
    }
    progress("the document's gateways are rendered by Kustomize and by Helm");
    Ok(())
}

async fn write(dir: &Path, commands: &str) -> Result<()> {
    let output = Command::new("sh").args(["-eux", "-c", commands]).current_dir(dir).output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    Ok(())
}

//! Every folder, component and rendering of the chart in a server-side dry run, which refuses unknown fields.
use std::fs;

use anyhow::{Context as _, Result};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::manifests::{deploy, write_overlay};
use postern_testbed::report::progress;
use serde_json::json;

use super::render::{COMPONENTS, OVERLAYS, yaml};
use super::text;

/// Of the chart, what no component has.
const FURTHER: [&str; 3] = [
    "--set=server.updateStrategy.type=OnDelete,server.extraEnv[0].name=A",
    "--set=agent.extraVolumes[0].name=a,agent.extraVolumes[0].emptyDir.medium=Memory",
    "--set=agent.extraVolumeMounts[0].name=a,agent.extraVolumeMounts[0].mountPath=/a",
];

pub(super) async fn by_the_api_server(cluster: &Cluster<'_>) -> Result<()> {
    let apply = ["apply", "--dry-run=server", "--validate=strict"];
    let dry = async |folder: &str| cluster.kubectl.run(&[&apply[..], &["-k", folder]].concat()).await;
    for folder in OVERLAYS.iter().map(|(folder, _)| *folder).chain(["prometheus"]) {
        dry(text(&deploy().join(folder))?).await?;
    }
    // The kinds of the component prometheus-operator belong to that operator.
    for component in components()?.iter().filter(|component| *component != "prometheus-operator") {
        let path = cluster.testbed.dir().join("component");
        write_overlay(&path, "base", &[extended(component), &[component]].concat(), &json!([]))?;
        dry(text(&path)?).await.with_context(|| format!("deploy/components/{component}"))?;
    }
    // Public addresses are for a Service of type ClusterIP, all other components go together.
    let (mut public, mut all) = (Vec::new(), FURTHER.to_vec());
    for (components, values) in COMPONENTS {
        match components {
            [.., "prometheus-operator"] => {}
            ["public-addresses"] => public.extend(values),
            _ => all.extend(values),
        }
    }
    for (_, values) in OVERLAYS {
        for features in [&[][..], &public, &all] {
            let rendered = yaml(&[values, features].concat()).await?;
            let file = [&apply[..], &["--filename=-"]].concat();
            let applied = cluster.kubectl.run_with_input(&file, rendered.as_bytes()).await;
            applied.with_context(|| format!("the chart with {values:?} {features:?}"))?;
        }
    }
    progress("the API server accepts every folder and component, and the chart");
    Ok(())
}

/// Returns the names below deploy/components.
pub(super) fn components() -> Result<Vec<String>> {
    let entries = fs::read_dir(deploy().join("components")).context("deploy/components")?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Returns the component that another one extends.
pub(super) fn extended(component: &str) -> &'static [&'static str] {
    if component.starts_with("everywhere-") { &["everywhere"] } else { &[] }
}

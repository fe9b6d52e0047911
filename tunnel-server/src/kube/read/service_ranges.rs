//! The ranges of Service addresses: an edge node never gets an address in them, whatever its kubelet reports.
//! Kubernetes has objects for them since 1.33.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tunnel_kube::{Attempts, Followed, request};
use tunnel_runtime::text::printable;

use crate::kube::context::KubeContext;

/// Time limit for the request that tests if the API server has these objects.
const REQUEST: Duration = Duration::from_secs(10);

/// Pause after which an API server without these objects is asked again: it may have been upgraded.
pub const AGAIN: Duration = Duration::from_secs(600);

/// Follows the ranges and publishes changes until the context's `stop`.
pub async fn run(context: KubeContext, publish: watch::Sender<Vec<IpNet>>, again: Duration) {
    let api = Api::<ServiceCIDR>::all(context.client.clone());
    let served = async {
        let mut told = false;
        while !are_served(&api).await {
            if !std::mem::replace(&mut told, true) {
                tracing::info!(
                    "API server has no ServiceCIDRs (Kubernetes 1.33), set --service-cidrs to keep edge nodes from claiming \
                     a Service's address"
                );
            }
            tokio::time::sleep(again).await;
        }
    };
    if context.stop.run_until_cancelled(served).await.is_none() {
        return;
    }
    let mut changes = pin!(context.health.follow(api, Config::default(), "servicecidrs"));
    let mut followed = Followed::default();
    let mut published = None;
    while let Some(Some(())) = context.stop.run_until_cancelled(followed.change(&mut changes)).await {
        let ranges: BTreeSet<IpNet> = followed.objects.values().flat_map(ranges).collect();
        if published.as_ref() != Some(&ranges) {
            publish.send_replace(ranges.iter().copied().collect());
            published = Some(ranges);
        }
    }
}

async fn are_served(api: &Api<ServiceCIDR>) -> bool {
    let mut attempts = Attempts::new("asking for the ranges of Service addresses");
    loop {
        match request(REQUEST, "listing", "ServiceCIDRs", api.list(&ListParams::default().limit(1))).await {
            Ok(_) => return true,
            Err(error) if error.is_not_found() => return false,
            Err(error) => attempts.report(&error),
        };
        tokio::time::sleep(attempts.next_delay()).await;
    }
}

/// Parses the ranges. Invalid ones are skipped; the API server accepts none.
fn ranges(object: &ServiceCIDR) -> Vec<IpNet> {
    let cidrs = object.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
    cidrs
        .filter_map(|cidr| match cidr.parse::<IpNet>() {
            Ok(range) => Some(range.trunc()),
            Err(_) => {
                tracing::warn!(value = %printable(cidr, 60), "ignoring an invalid ServiceCIDR");
                None
            }
        })
        .collect()
}

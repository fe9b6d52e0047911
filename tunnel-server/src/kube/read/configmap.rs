//! The port lists of the ConfigMap, with YurtTunnel's keys and rules.

use std::collections::{BTreeMap, BTreeSet};
use std::num::IntErrorKind;
use std::pin::pin;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference};
use kube::runtime::events::EventType;
use kube::{Api, Resource as _};
use tokio::sync::watch;
use tunnel_kube::{Followed, named};
use tunnel_routing::inventory::{DEFAULT_KUBELET_PORT, READ_ONLY_KUBELET_PORT};
use tunnel_runtime::text::printable;

use crate::kube::context::KubeContext;
use crate::kube::write::events::Events;
use crate::runtime::settings::{InternalListener, Listeners, Settings};

const HTTPS: &str = "https-proxy-ports";
const HTTP: &str = "http-proxy-ports";
const DNAT: &str = "dnat-ports-pair";
const LOOPBACK: &str = "localhost-proxy-ports";

/// Always tunnelled (--redirect-ports), and already ports of the internal Service.
const KUBELET: [u16; 2] = [DEFAULT_KUBELET_PORT, READ_ONLY_KUBELET_PORT];

/// Port expected as the http listener's in pairs while that listener is off.
const DEFAULT_HTTP: u16 = 10264;

/// A list entry that is left out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {value:?} {reason}")]
struct SkippedEntry {
    key: &'static str,
    value: String,
    reason: String,
}

/// Parses the ConfigMap's data. Entries that cannot be used are left out; unknown keys are ignored.
///
/// Lists are separated by commas. If a list has a `=`, all its entries must be pairs with the http listener as second half.
/// A port in several lists leads to the https listener rather than the http listener.
fn parse(data: &BTreeMap<String, String>, listeners: &Listeners) -> (Settings, Vec<SkippedEntry>) {
    let mut skipped = Vec::new();
    let mut list = |key| {
        let text = data.get(key).map(String::as_str).unwrap_or_default();
        ports(key, text, listeners, &mut skipped)
    };
    let mut settings = Settings::default();
    for (key, listener) in
        [(DNAT, InternalListener::Http), (HTTP, InternalListener::Http), (HTTPS, InternalListener::Https)]
    {
        let ports = list(key).into_iter().filter(|port| !KUBELET.contains(port));
        settings.internal.extend(ports.map(|port| (port, listener)));
    }
    settings.loopback = list(LOOPBACK);
    for port in KUBELET.into_iter().filter(|port| settings.loopback.remove(port)) {
        skipped.push(SkippedEntry {
            key: LOOPBACK,
            value: port.to_string(),
            reason: "is a port of the kubelet, which is reached at its node's address".to_owned(),
        });
    }
    settings.tunnelled = settings.internal.keys().chain(&settings.loopback).copied().collect();
    (settings, skipped)
}

fn ports(
    key: &'static str,
    text: &str,
    listeners: &Listeners,
    skipped: &mut Vec<SkippedEntry>,
) -> BTreeSet<u16> {
    let pairs = text.contains('=');
    let http = if listeners.pairs == 0 { DEFAULT_HTTP } else { listeners.pairs };
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let mut ports = BTreeSet::new();
    for entry in entries {
        match if pairs { pair(entry, http) } else { port(entry) } {
            Ok(port) => drop(ports.insert(port)),
            Err(reason) => skipped.push(SkippedEntry { key, value: entry.to_owned(), reason }),
        }
    }
    ports
}

fn pair(entry: &str, http: u16) -> Result<u16, String> {
    let Some((from, to)) = entry.split_once('=') else {
        return Err(format!(
            "is a plain port, but another entry has '='; write {entry}={http}, or only plain ports"
        ));
    };
    if to.trim().parse() == Ok(http) {
        port(from.trim())
    } else {
        Err(format!("does not lead to the http listener; the second half has to be {http}"))
    }
}

fn port(text: &str) -> Result<u16, String> {
    let number = match text.parse::<i64>() {
        Ok(number) => u16::try_from(number).ok(),
        Err(error) if matches!(error.kind(), IntErrorKind::PosOverflow | IntErrorKind::NegOverflow) => None,
        Err(_) => return Err("is not a number".to_owned()),
    };
    number.filter(|port| *port != 0).ok_or_else(|| "is not a port; ports are 1 to 65535".to_owned())
}

/// Follows the ConfigMap and publishes its ports until the context's `stop`. A missing ConfigMap counts as empty. Each
/// entry left out is logged, and reported as an Event if `events` is given, once for as long as it stays.
pub async fn run(
    context: KubeContext,
    events: Option<Events>,
    listeners: Listeners,
    publish: watch::Sender<Arc<Settings>>,
) {
    let api = Api::<ConfigMap>::namespaced(context.client.clone(), &context.namespace);
    let only = named(&context.names.configmap);
    let mut changes = pin!(context.health.follow(api, only, "configmaps/settings"));
    let mut followed = Followed::default();
    let mut reported = Vec::new();
    let mut published = false;
    while let Some(Some(())) = context.stop.run_until_cancelled(followed.change(&mut changes)).await {
        let data = followed.only().and_then(|configmap| configmap.data.as_ref());
        let (settings, skipped) = data.map(|data| parse(data, &listeners)).unwrap_or_default();
        if let Some(configmap) = followed.only() {
            for entry in skipped.iter().filter(|entry| !reported.contains(*entry)) {
                report(&context, events.as_ref(), configmap.object_ref(&()), entry);
            }
        }
        reported = skipped;
        publish.send_if_modified(|current| {
            // The first one is published even if equal: ports are removed only once it is certain that there are none.
            let changed = !std::mem::replace(&mut published, true) || **current != settings;
            if changed {
                tracing::info!(
                    configmap = context.names.configmap,
                    tunnelled = ?settings.tunnelled,
                    loopback = ?settings.loopback,
                    "applied the ports of the ConfigMap"
                );
                *current = Arc::new(settings);
            }
            changed
        });
    }
}

fn report(context: &KubeContext, events: Option<&Events>, configmap: ObjectReference, entry: &SkippedEntry) {
    let problem = printable(&entry.to_string(), 256);
    tracing::warn!(
        configmap = context.names.configmap,
        reason = problem,
        "ignoring an invalid entry of the ConfigMap"
    );
    if let Some(events) = events {
        events.publish(configmap, EventType::Warning, "InvalidPort", format!("left out: {problem}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use InternalListener::{Http, Https};

    const LISTENERS: Listeners =
        Listeners { https: 10263, secure: BTreeMap::new(), http: 10268, pairs: 10264 };

    fn data(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn clean(entries: &[(&str, &str)]) -> Settings {
        let (settings, problems) = parse(&data(entries), &LISTENERS);
        assert_eq!(problems, [], "{entries:?}");
        settings
    }

    fn problems(entries: &[(&str, &str)]) -> (Vec<u16>, Vec<String>) {
        let (settings, problems) = parse(&data(entries), &LISTENERS);
        (settings.tunnelled.into_iter().collect(), problems.iter().map(SkippedEntry::to_string).collect())
    }

    fn internal(settings: &Settings) -> Vec<(u16, InternalListener)> {
        settings.internal.iter().map(|(port, listener)| (*port, *listener)).collect()
    }

    /// From YurtTunnel's own tests.
    #[test]
    fn yurttunnels_cases() {
        assert_eq!(internal(&clean(&[("dnat-ports-pair", "9100=10264")])), [(9100, Http)]);
        assert_eq!(internal(&clean(&[("http-proxy-ports", "9100,9200")])), [(9100, Http), (9200, Http)]);
        let both = clean(&[("http-proxy-ports", "9100,9200"), ("https-proxy-ports", "9300,9400")]);
        assert_eq!(internal(&both), [(9100, Http), (9200, Http), (9300, Https), (9400, Https)]);
        assert_eq!(both.tunnelled, BTreeSet::from([9100, 9200, 9300, 9400]));
        assert_eq!(both.loopback, BTreeSet::new());
    }

    #[test]
    fn the_shipped_localhost_ports() {
        let settings = clean(&[("localhost-proxy-ports", "10266, 10267")]);
        let ports = BTreeSet::from([10266, 10267]);
        assert_eq!((&settings.loopback, &settings.tunnelled), (&ports, &ports));
        assert_eq!(internal(&settings), [], "they are not ports of the Service");
    }

    #[test]
    fn empty_lists_and_unknown_keys_are_ignored() {
        for entries in [
            &[][..],
            &[("http-proxy-ports", "")],
            &[("http-proxy-ports", " \n"), ("https-proxy-ports", ", ,")],
            &[("metrics", "not,a,list")],
        ] {
            assert_eq!(clean(entries), Settings::default());
        }
    }

    #[test]
    fn white_space_is_ignored() {
        let settings =
            clean(&[("http-proxy-ports", " 9100 ,\n\t9200,"), ("dnat-ports-pair", " 9300 = 10264 ")]);
        assert_eq!(internal(&settings), [(9100, Http), (9200, Http), (9300, Http)]);
    }

    #[test]
    fn https_precedes_http_precedes_dnat() {
        let all = [
            ("https-proxy-ports", "9100,9100"),
            ("http-proxy-ports", "9100,9200"),
            ("dnat-ports-pair", "9100=10264,9200=10264"),
        ];
        assert_eq!(internal(&clean(&all)), [(9100, Https), (9200, Http)]);
        assert_eq!(internal(&clean(&all[1..])), [(9100, Http), (9200, Http)]);
        let everywhere = clean(&[("https-proxy-ports", "9100"), ("localhost-proxy-ports", "9100")]);
        assert_eq!(
            (internal(&everywhere), everywhere.loopback),
            (vec![(9100, Https)], BTreeSet::from([9100]))
        );
    }

    #[test]
    fn the_kubelets_ports_are_left_out() {
        let settings = clean(&[
            ("https-proxy-ports", "10250,9100"),
            ("http-proxy-ports", "10255"),
            ("dnat-ports-pair", "10255=10264, 10250=10264"),
        ]);
        assert_eq!(internal(&settings), [(9100, Https)]);
        assert_eq!(settings.tunnelled, BTreeSet::from([9100]));
        let (tunnelled, problems) = problems(&[("localhost-proxy-ports", "10250, 10266")]);
        assert_eq!(tunnelled, [10266]);
        assert_eq!(
            problems,
            [
                "localhost-proxy-ports: \"10250\" is a port of the kubelet, which is reached at its node's address"
            ]
        );
    }

    #[test]
    fn a_pair_must_lead_to_the_http_listener() {
        assert_eq!(
            problems(&[("dnat-ports-pair", "9100=10264, 9200=10263, 9300=, 9400=x")]),
            (
                vec![9100],
                [
                    "dnat-ports-pair: \"9200=10263\" does not lead to the http listener; the second half has to be 10264",
                    "dnat-ports-pair: \"9300=\" does not lead to the http listener; the second half has to be 10264",
                    "dnat-ports-pair: \"9400=x\" does not lead to the http listener; the second half has to be 10264",
                ]
                .map(str::to_owned)
                .to_vec()
            )
        );
        // The rule depends on the text, not on the key, and allows plain ports.
        assert_eq!(internal(&clean(&[("http-proxy-ports", "9100=10264")])), [(9100, Http)]);
        assert_eq!(internal(&clean(&[("dnat-ports-pair", "9100")])), [(9100, Http)]);
        assert_eq!(
            problems(&[("http-proxy-ports", "9100=10264,9200")]),
            (
                vec![9100],
                vec![
                    "http-proxy-ports: \"9200\" is a plain port, but another entry has '='; write 9200=10264, or only \
                     plain ports"
                        .to_owned()
                ]
            )
        );
        let elsewhere = Listeners { https: 443, http: 0, pairs: 80, ..LISTENERS };
        let (settings, problems) = parse(&data(&[("dnat-ports-pair", "9100=80")]), &elsewhere);
        assert_eq!((internal(&settings), problems), (vec![(9100, Http)], Vec::new()));
    }

    #[test]
    fn ports_are_1_to_65535() {
        assert_eq!(
            problems(&[("http-proxy-ports", "0,1,65535,65536,-1,99999999999999999999,http,9100-9200,١")]),
            (
                vec![1, 65535],
                [
                    "http-proxy-ports: \"0\" is not a port; ports are 1 to 65535",
                    "http-proxy-ports: \"65536\" is not a port; ports are 1 to 65535",
                    "http-proxy-ports: \"-1\" is not a port; ports are 1 to 65535",
                    "http-proxy-ports: \"99999999999999999999\" is not a port; ports are 1 to 65535",
                    "http-proxy-ports: \"http\" is not a number",
                    "http-proxy-ports: \"9100-9200\" is not a number",
                    "http-proxy-ports: \"١\" is not a number",
                ]
                .map(str::to_owned)
                .to_vec()
            )
        );
        assert_eq!(
            problems(&[("localhost-proxy-ports", "10266; 10267"), ("dnat-ports-pair", "0=10264")]).1,
            [
                "dnat-ports-pair: \"0=10264\" is not a port; ports are 1 to 65535",
                "localhost-proxy-ports: \"10266; 10267\" is not a number",
            ]
        );
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9=, \n-]{0,40}|\\PC{0,40}") {
            let entries = [HTTP, HTTPS, DNAT, LOOPBACK].map(|key| (key, text.as_str()));
            let (settings, _) = parse(&data(&entries), &LISTENERS);
            proptest::prop_assert!(settings.tunnelled.iter().all(|port| *port != 0 && !KUBELET.contains(port)));
        }
    }
}

//! Makes the doors that speak HTTP from the configuration.

use std::sync::Arc;

use tokio::sync::watch;

use crate::caller::{CallerTls, Reviewer};
use crate::config::DoorConfig;
use crate::door::{
    Admission, Door as _, Front, Http, Https, MetricsDoor, MetricsPage, Plain, Pods, TargetFiles, TargetTls,
};
use crate::runtime::Runtime;
use crate::settings::Settings;

/// The metrics door's.
pub(crate) fn metrics_front(page: MetricsPage, tls: Arc<CallerTls>) -> Arc<Front> {
    Arc::new(Front {
        door: MetricsDoor::NAME,
        admission: Admission::Callers(page.reviewer.clone()),
        tls: Some(tls),
        targets: None,
        pods: None,
        metrics: Some(page),
    })
}

/// The doors that speak HTTP; the http door needs nothing but itself.
pub(crate) struct Fronts {
    /// None: the https door only passes through.
    pub(crate) https: Option<Arc<Front>>,
    pub(crate) http: Arc<Front>,
    /// None: it is off.
    pub(crate) plain: Option<Arc<Front>>,
}

/// What they are made from.
pub(crate) struct FrontParts<'a> {
    pub(crate) config: &'a DoorConfig,
    /// To ask the API server about pods, if there is one.
    pub(crate) client: Option<kube::Client>,
    pub(crate) reviewer: Option<Arc<Reviewer>>,
    /// None: the https door only passes through.
    pub(crate) tls: Option<Arc<CallerTls>>,
    pub(crate) targets: TargetFiles,
    pub(crate) settings: watch::Receiver<Arc<Settings>>,
    pub(crate) runtime: &'a Runtime,
}

impl Fronts {
    pub(crate) fn start(parts: FrontParts<'_>) -> Self {
        let FrontParts { config, client, reviewer, tls, targets, settings, runtime } = parts;
        let pods = client.zip(reviewer.as_ref());
        let pods = pods.map(|(client, reviewer)| Arc::new(Pods::new(client, reviewer.questions())));
        let everyone = Front {
            door: Http::NAME,
            admission: Admission::Everyone,
            tls: None,
            targets: None,
            pods: pods.clone(),
            metrics: None,
        };
        let plain = config.plain.port.map(|_| {
            let plain = &config.plain;
            let (clients, ports) = (plain.clients.clone(), plain.ports.iter().copied().collect());
            let admission = Admission::Listed { clients, ports, reviewer: reviewer.clone() };
            Arc::new(Front {
                door: Plain::NAME,
                admission,
                tls: None,
                targets: None,
                pods: pods.clone(),
                metrics: None,
            })
        });
        let https = tls.map(|tls| {
            let targets = TargetTls::start(targets, settings, &runtime.tasks, &runtime.stop);
            Arc::new(Front {
                door: Https::NAME,
                admission: Admission::Callers(reviewer),
                tls: Some(tls),
                targets: Some(targets),
                pods,
                metrics: None,
            })
        });
        Self { https, http: Arc::new(everyone), plain }
    }
}

//! Starts the doors.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tunnel_core::takeover::Copies;

use crate::admission::{Budget, Shares};
use crate::agent_port::{FromEdge, Tokens};
use crate::caller::{CallerTls, ClientRoots, Reviewer};
use crate::config::{Config, KonnectivityConfig};
use crate::door::{
    self, ClusterServices, Connect, DoorContext, Egress, EgressTls, Http, Https, Maps, MetricsDoor,
    MetricsPage, Plain, Reception, Redirected, Services, TargetFiles,
};
use crate::door_files::DoorFiles;
use crate::fronts::{FrontParts, Fronts, metrics_front};
use crate::kube::ServiceEndpoints;
use crate::listeners::Listeners;
use crate::pki::ServerCertificate;
use crate::runtime::Runtime;
use crate::settings::Settings;
use crate::takeover::Gates;

/// What the doors are made from.
pub(crate) struct DoorParts<'a> {
    pub(crate) config: &'a Config,
    /// To ask the API server, if there is one.
    pub(crate) client: Option<kube::Client>,
    /// For the egress door, if it is to know them.
    pub(crate) services: Option<ClusterServices>,
    /// None: this is a redirector.
    pub(crate) certificate: Option<&'a Arc<ServerCertificate>>,
    pub(crate) runtime: &'a Runtime,
    pub(crate) registry: &'a Arc<Registry>,
    pub(crate) budget: &'a Budget,
    pub(crate) gates: &'a Gates,
}

/// The doors, before they open.
pub(crate) struct Doors<'a> {
    parts: DoorParts<'a>,
    context: DoorContext,
    files: DoorFiles,
    fronts: Fronts,
    reception: Reception,
    /// None: there is no cluster.
    reviewer: Option<Arc<Reviewer>>,
    /// None: no door ends the TLS of callers.
    tls: Option<Arc<CallerTls>>,
    /// Places of callers of the connect door, and of workloads on edge nodes: these take as many files as a caller with TLS.
    asked: Shares,
}

impl<'a> Doors<'a> {
    pub(crate) fn new(
        parts: DoorParts<'a>,
        (mut files, targets): (DoorFiles, TargetFiles),
        settings: watch::Receiver<Arc<Settings>>,
    ) -> Self {
        let DoorParts { config, client, runtime, .. } = &parts;
        let context = DoorContext::of(runtime);
        let reviewer = client.clone().map(|client| Arc::new(Reviewer::new(client)));
        let tls = caller_tls(&parts, &mut files);
        let services = client.clone().map(ServiceEndpoints::new);
        let services = services.map_or(Services::Resolver, Services::Cluster);
        let reception =
            files.reception(context.clone(), (reviewer.clone(), services), (&runtime.tasks, &runtime.stop));
        let fronts = Fronts::start(FrontParts {
            config: &config.doors,
            client: client.clone(),
            reviewer: reviewer.clone(),
            tls: tls.clone().filter(|_| config.doors.terminate_tls),
            targets,
            settings,
            runtime,
        });
        let asked = Shares::new(parts.budget.connect);
        Self { parts, context, files, fronts, reception, reviewer, tls, asked }
    }

    /// What the links of agents for their nodes' workloads lead to; None: nothing is permitted to them.
    pub(crate) fn workloads(&self) -> Option<FromEdge> {
        let from_edge = FromEdge { reception: self.reception.clone(), shares: self.asked.clone() };
        self.parts.config.connect.policy.is_some().then_some(from_edge)
    }

    /// Opens all that have a listener. The drain waits for each to accept no more: it must not be over while what was accepted is
    /// not yet counted. `sockets`: the listeners, for a successor.
    pub(crate) fn start(self, listeners: Listeners, egress_tls: Option<EgressTls>, sockets: &Arc<Copies>) {
        let Self { parts, context, mut files, fronts, reception, reviewer, tls, asked } = self;
        let DoorParts { config, services, runtime, registry, budget, gates, .. } = parts;
        let Runtime { redirect, workers, tasks, stop, .. } = runtime;
        let Listeners {
            agents: _,
            konnectivity: _,
            https,
            secure,
            http,
            plain,
            egress,
            egress_socket,
            connect,
            metrics,
            maps,
            redirected,
        } = listeners;
        let direct = config.egress.direct.clone();
        let egress_door = Egress::new(context.clone(), budget.egress, direct, services, workers.clone());
        if let Some(socket) = egress_socket {
            context.drain.spawn(egress_door.clone().serve_unix(socket, gates.doors.clone()));
        }
        if let Some((listener, tls)) = egress.zip(egress_tls) {
            context.drain.spawn(egress_door.serve_tls(gates.door(listener), tls.current()));
            tasks.spawn(tls.follow(stop.clone()));
        }
        let newcomers = Arc::new(Shares::new(budget.newcomers));
        let shares = Shares::new(budget.https).with_newcomers(&newcomers);
        let secure = secure.into_iter().map(|(port, listener)| (Some(port), listener));
        for (port, listener) in https.map(|listener| (None, listener)).into_iter().chain(secure) {
            let door = Https { front: fronts.https.clone(), port };
            context.drain.spawn(door::serve(door, gates.door(listener), context.clone(), shares.clone()));
        }
        if let Some(listener) = http {
            let door = Http(fronts.http);
            context.drain.spawn(door::serve(
                door,
                gates.door(listener),
                context.clone(),
                Shares::new(budget.http),
            ));
        }
        if let Some((listener, front)) = plain.zip(fronts.plain) {
            let door = Plain(front);
            let shares = Shares::new(budget.plain).with_newcomers(&newcomers);
            context.drain.spawn(door::serve(door, gates.door(listener), context.clone(), shares));
        }
        if let Some((listener, tls)) = metrics.zip(tls.clone()) {
            let authenticator = reception.gatekeeper.authenticator.clone();
            let (registry, gate) = (registry.clone(), gates.doors.clone());
            let page = MetricsPage { registry, authenticator, reviewer, gate };
            let door = MetricsDoor(metrics_front(page, tls));
            context.drain.spawn(door::serve(
                door,
                gates.door(listener),
                context.clone(),
                Shares::new(budget.metrics),
            ));
        }
        if let Some((listener, tls)) = connect.zip(tls) {
            let door = Connect { reception, tls };
            context.drain.spawn(door::serve(door, gates.door(listener), context.clone(), asked));
        }
        let (gate, shares) = (gates.doors.clone(), Shares::new(budget.maps));
        let mapped = Maps::new(config.connect.maps.clone(), gate, context.clone(), shares, sockets.clone());
        files.start_maps(mapped, maps, tasks, stop);
        if let Some(redirect) = redirect {
            let shares = Shares::new(budget.redirect);
            for listener in redirected {
                let door = Redirected { redirect: redirect.clone() };
                context.drain.spawn(door::serve(door, gates.door(listener), context.clone(), shares.clone()));
            }
        }
    }
}

/// How konnectivity's agents are known that have no certificate.
pub(crate) fn konnectivity_tokens(options: &KonnectivityConfig, client: Option<kube::Client>) -> Tokens {
    let reviewer = client.map(|client| Reviewer::new(client).for_audience(&options.audience));
    Tokens { reviewer, user: options.user() }
}

/// The TLS of the https, the connect and the metrics door. Callers may show certificates of `--client-ca-file`, or in a cluster
/// of the CA that kube-apiserver accepts.
fn caller_tls(parts: &DoorParts<'_>, files: &mut DoorFiles) -> Option<Arc<CallerTls>> {
    let DoorParts { config, client, certificate, runtime, .. } = parts;
    if !config.doors.terminate_tls
        && config.connect.connect_port.is_none()
        && config.process.metrics_port.is_none()
    {
        return None;
    }
    let tls = match (certificate, &config.redirector) {
        (Some(certificate), _) => CallerTls::new(certificate.tls()),
        // Its certificate is a client's: no scraper would take it for a server's.
        (None, Some(redirector)) => CallerTls::self_signed(redirector.node.as_str()),
        (None, None) => return None,
    };
    // It has no settings that could be wrong.
    let tls = tls
        .inspect_err(
            |error| tracing::error!(%error, "failed to set up TLS for callers, TLS termination is off"),
        )
        .ok()?;
    let tls = Arc::new(tls);
    if !files.accept_roots(&tls, (&runtime.tasks, &runtime.stop))
        && let Some(client) = client
    {
        runtime.tasks.spawn(ClientRoots::new(client.clone(), tls.clone()).follow(runtime.stop.clone()));
    }
    Some(tls)
}

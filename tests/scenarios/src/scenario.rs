//! The type of a scenario, and the macro by which a subject declares its scenarios.
use std::pin::Pin;
use std::time::Duration;

use anyhow::Result;
use postern_testbed::Testbed;

use crate::slots::Load;

/// A running scenario.
pub(crate) type Run<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    /// `CRATE::subject::function`.
    path: &'static str,
    /// True if `--quick` includes it.
    pub(crate) quick: bool,
    /// Number of edge hosts that it needs.
    pub(crate) edges: u8,
    /// Name of the builds that it needs; `cargo xtask test` reads it from `--list`.
    pub(crate) kind: &'static str,
    /// True if it starts no cluster although its kind has one.
    clusterless: bool,
    /// True if it mostly waits, for long, and measures nothing that the load of others could change.
    waits: bool,
    /// True if it needs another edge with the address of edge 1, in a site of its own.
    pub(crate) twin: bool,
    /// Time limit on a machine that does nothing else; the runner kills its process after a multiple of it.
    pub(crate) limit: Duration,
    /// The scenario itself, run inside the cloud's cgroup and namespace.
    pub(crate) run: for<'a> fn(&'a Testbed) -> Run<'a>,
}

impl Scenario {
    pub(crate) const fn new(path: &'static str, run: for<'a> fn(&'a Testbed) -> Run<'a>) -> Self {
        Self {
            path,
            quick: false,
            edges: 1,
            kind: "",
            clusterless: false,
            waits: false,
            twin: false,
            limit: Duration::from_secs(120),
            run,
        }
    }

    /// Returns `subject::function`.
    pub(crate) fn name(&self) -> &'static str {
        self.path.split_once("::").map_or(self.path, |(_, name)| name)
    }

    pub(crate) const fn quick(mut self) -> Self {
        self.quick = true;
        self
    }

    pub(crate) const fn edges(mut self, count: u8) -> Self {
        self.edges = count;
        self
    }

    /// Marks it as running on a real Kubernetes.
    pub(crate) const fn cluster(mut self) -> Self {
        self.kind = "cluster";
        self
    }

    /// Marks it as running the images on a real Kubernetes.
    pub(crate) const fn images(mut self) -> Self {
        self.kind = "images";
        self
    }

    /// Marks it as running metrics-server, and perhaps kube-router's network policies, on a real Kubernetes.
    pub(crate) const fn metrics_server(mut self) -> Self {
        self.kind = "metrics-server";
        self
    }

    /// Marks it as running konnectivity's programs on a real Kubernetes.
    pub(crate) const fn cluster_and_konnectivity(mut self) -> Self {
        self.kind = "cluster-and-konnectivity";
        self
    }

    /// Marks it as needing konnectivity's programs.
    pub(crate) const fn konnectivity(mut self) -> Self {
        self.kind = "konnectivity";
        self
    }

    /// Marks it as needing Cilium's loader.
    pub(crate) const fn cilium(mut self) -> Self {
        self.kind = "cilium";
        self
    }

    /// Marks it as running the arm64 build of the agent.
    pub(crate) const fn arm64(mut self) -> Self {
        self.kind = "arm64";
        self
    }

    /// Marks it as running the programs of the previous version.
    pub(crate) const fn previous(mut self) -> Self {
        self.kind = "previous";
        self
    }

    /// Marks it as running them on a real Kubernetes.
    pub(crate) const fn cluster_and_previous(mut self) -> Self {
        self.kind = "cluster-and-previous";
        self
    }

    /// Marks it as needing the builds for such a cluster, but starting none.
    pub(crate) const fn no_cluster(mut self) -> Self {
        self.clusterless = true;
        self
    }

    /// Reports whether it starts a real Kubernetes.
    pub(crate) fn has_cluster(&self) -> bool {
        !self.clusterless
            && matches!(
                self.kind,
                "cluster" | "images" | "metrics-server" | "cluster-and-konnectivity" | "cluster-and-previous"
            )
    }

    /// Lets it run beside others: see the field.
    pub(crate) const fn waits(mut self) -> Self {
        self.waits = true;
        self
    }

    /// Returns its load on the machine.
    pub(crate) fn load(&self) -> Load {
        match (self.has_cluster(), self.waits) {
            (true, _) => Load::Cluster,
            (false, true) => Load::Waits,
            (false, false) => Load::Other,
        }
    }

    pub(crate) const fn twin(mut self) -> Self {
        self.twin = true;
        self
    }

    pub(crate) const fn limit(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }
}

/// Declares a module's scenarios: functions `async fn(&Testbed) -> Result<()>`, each with its options (the methods of
/// [`Scenario`]) if the defaults do not fit, as in `link_cut(edges = 2, limit = 180)`. The name consists of module and
/// function.
macro_rules! scenarios {
    ($($function:ident $(($($option:ident $(= $value:literal)?),+))?),+ $(,)?) => {
        pub(crate) const SCENARIOS: &[$crate::scenario::Scenario] = &[$(
            $crate::scenario::Scenario::new(
                concat!(module_path!(), "::", stringify!($function)),
                |testbed| Box::pin($function(testbed)),
            )$($(.$option($($value)?))+)?
        ),+];
    };
}

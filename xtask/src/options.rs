//! Options of `cargo xtask test`.
use std::num::NonZeroUsize;

use crate::chosen::Names;
use crate::cross::Profile;
use crate::kernel::Kernel;
use crate::peers::Kubernetes;

#[derive(clap::Args, Clone, Default)]
pub(crate) struct Options {
    /// Everything, as CI does. Without it and without names: unit, property and kernel tests and a part of the scenarios.
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,
    /// Only the kernel tests of the redirect, the demo and the systemd units, on another kernel in virtual machines; or those cases
    /// of them that are named, such as `systemd`. `--all` has 6.1.
    #[arg(long, value_enum, conflicts_with_all = ["all", "list", "repeat", "keep"])]
    pub(crate) kernel: Option<Kernel>,
    /// Only scenarios, with the static binaries and the images that a release has: those of a run without `--all`, and one in which
    /// the shipped manifests run. With names, these.
    #[arg(long, conflicts_with_all = ["all", "kernel", "list"])]
    pub(crate) released: bool,
    /// Only scenarios with a cluster, on another version of Kubernetes; without names those of `kubernetes::` and one in which the
    /// shipped manifests run.
    #[arg(long, value_enum, value_name = "VERSION", conflicts_with_all = ["all", "kernel", "list", "released"])]
    pub(crate) kubernetes: Option<Kubernetes>,
    /// Names the tests, and runs none.
    #[arg(long, conflicts_with_all = ["repeat", "keep"])]
    pub(crate) list: bool,
    /// Runs each scenario and kernel test so many times.
    #[arg(long, value_name = "N")]
    pub(crate) repeat: Option<NonZeroUsize>,
    /// Keeps the logs of scenarios that pass as well.
    #[arg(long)]
    pub(crate) keep: bool,
    #[command(flatten)]
    pub(crate) names: Names,
}

impl Options {
    pub(crate) fn everything() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// The same run for tests of this name, or of a run without names.
    pub(crate) fn part(&self, name: Option<&str>) -> Self {
        let Self { repeat, keep, released, kubernetes, ref names, .. } = *self;
        Self { repeat, keep, released, kubernetes, names: names.with(name), ..Self::default() }
    }

    /// Reports whether it runs scenarios with other programs than those of every run.
    pub(crate) fn is_variant(&self) -> bool {
        self.released || self.kubernetes.is_some()
    }

    /// The profile of the images.
    pub(crate) fn profile(&self) -> Profile {
        if self.released { Profile::Release } else { Profile::Dev }
    }

    /// Reports whether it runs such a test, of those that are only run by name or with `--all`.
    pub(crate) fn runs(&self, name: &str) -> bool {
        (self.all || self.names.are_given()) && self.names.select(name)
    }

    /// Reports whether it runs a part of everything.
    pub(crate) fn is_short(&self) -> bool {
        !self.all && !self.names.are_given()
    }

    /// Name of the kind of a run whose times are kept.
    pub(crate) fn kind(&self) -> Option<&'static str> {
        match (self.names.restrict() || self.repeat.is_some() || self.is_variant(), self.all) {
            (true, _) => None,
            (false, true) => Some("test-all"),
            (false, false) => Some("test"),
        }
    }
}

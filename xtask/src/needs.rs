//! Builds that take long and that scenarios need besides the two programs.
use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use crate::cross::{Arch, Profile};
use crate::image::{self, Image};
use crate::peers::Peer;
use crate::{bench, fuzz, packages, peers, previous};

/// A kind of scenario, as in `scenarios --list`, or another build that can be made before its turn.
/// In build order: those that the fewest scenarios wait for come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Need {
    /// The programs of the previous version.
    Previous,
    /// The programs of a Kubernetes cluster.
    Cluster,
    Konnectivity,
    /// The programs of a cluster and of konnectivity, which are built before.
    ClusterAndKonnectivity,
    /// The programs of a cluster and of the previous version.
    ClusterAndPrevious,
    /// The images for this machine, and the programs that deploy them.
    Images,
    /// metrics-server and kube-router's network policies, in a cluster.
    MetricsServer,
    /// A peer of the benchmark.
    Rathole,
    /// Cilium's loader.
    Cilium,
    /// Both programs for arm64, and images for both architectures.
    Arm64,
    /// The fuzz targets.
    Fuzz,
}

impl Need {
    /// Name for messages.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Previous => "the programs of the previous version",
            Self::Cluster => "the programs of the test cluster",
            Self::Images => "building the images",
            Self::MetricsServer => "metrics-server and kube-router's network policies",
            Self::Rathole => "rathole",
            Self::ClusterAndPrevious => "the programs of the test cluster and of the previous version",
            Self::Konnectivity => "the programs of konnectivity",
            Self::ClusterAndKonnectivity => "the programs of the test cluster and of konnectivity",
            Self::Cilium => "Cilium's loader",
            Self::Arm64 => "building images for both architectures",
            Self::Fuzz => "building the fuzz targets",
        }
    }

    /// The peers among it.
    fn peers(self) -> &'static [Peer] {
        use Peer::{Cilium, Helm, Konnectivity, KubeRouter, Kubernetes, MetricsServer, Prometheus};
        match self {
            Self::Cluster | Self::ClusterAndPrevious => peers::CLUSTER,
            // konnectivity, for the migration from it.
            Self::Images => &[Kubernetes, Prometheus, Helm, Konnectivity],
            Self::MetricsServer => &[Kubernetes, Prometheus, MetricsServer, KubeRouter],
            Self::ClusterAndKonnectivity => &[Kubernetes, Prometheus, Konnectivity],
            Self::Konnectivity => &[Konnectivity],
            Self::Cilium => &[Cilium],
            Self::Previous | Self::Rathole | Self::Arm64 | Self::Fuzz => &[],
        }
    }

    /// Debian packages, installed before anything is built: that takes little time, and no other run may do it meanwhile.
    pub(crate) fn packages(self) -> &'static [&'static [packages::Need]] {
        match self {
            Self::Cluster | Self::ClusterAndKonnectivity | Self::ClusterAndPrevious => &[packages::CLUSTER],
            Self::MetricsServer => &[packages::CLUSTER, packages::POLICIES],
            Self::Images => &[packages::CLUSTER, packages::PIP],
            Self::Arm64 if Arch::HOST != Arch::Arm64 => &[packages::PIP, packages::QEMU_USER],
            Self::Arm64 => &[packages::PIP],
            Self::Fuzz => &[packages::FUZZ],
            Self::Previous | Self::Rathole | Self::Konnectivity | Self::Cilium => &[],
        }
    }

    /// True if its scenarios start a cluster.
    pub(crate) fn has_cluster(self) -> bool {
        self.peers().contains(&Peer::Kubernetes)
    }

    /// Builds it, images with this profile and another version of Kubernetes if one is given, and returns the variables that tell
    /// scenarios where it is.
    pub(crate) fn make(
        self,
        profile: Profile,
        kubernetes: Option<peers::Kubernetes>,
    ) -> Result<Vec<(String, PathBuf)>> {
        packages::install(self.packages())?;
        match self {
            Self::Images => {
                image::build(profile, &Image::ALL.map(|image| (image, &[Arch::HOST][..])))?;
            }
            Self::Rathole => drop(bench::rathole()?),
            Self::Arm64 => {
                image::build(profile, &Image::ALL.map(|image| (image, Arch::ALL.as_slice())))?;
            }
            Self::Fuzz => fuzz::prepare()?,
            _ => {}
        }
        let mut variables = peers::variables(self.peers(), kubernetes)?;
        if matches!(self, Self::Previous | Self::ClusterAndPrevious) {
            variables.push(previous::variable()?);
        }
        Ok(variables)
    }
}

//! Builds that take long and that scenarios need besides the two programs.
use std::ffi::OsString;
use std::process::Command;

use anyhow::Result;

use crate::cross::{Arch, Profile};
use crate::image::{self, Image};
use crate::{bench, fuzz, packages, peers};

/// A kind of scenario, as in `scenarios --list`, or another build that can be made before its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The programs of a Kubernetes cluster.
    Cluster,
    /// The images for this machine, and the programs that deploy them.
    Images,
    MetricsServer,
    /// A peer of the benchmark.
    Rathole,
    Konnectivity,
    /// The programs of a cluster and of konnectivity, which are built before.
    ClusterAndKonnectivity,
    /// Cilium's loader.
    Cilium,
    /// Both programs for arm64, and images for both architectures.
    Arm64,
    /// The fuzz targets.
    Fuzz,
}

impl Need {
    /// All, in build order: those that the fewest scenarios wait for come last.
    pub(crate) const ALL: [Self; 9] = [
        Self::Cluster,
        Self::Konnectivity,
        Self::ClusterAndKonnectivity,
        Self::Images,
        Self::MetricsServer,
        Self::Rathole,
        Self::Cilium,
        Self::Arm64,
        Self::Fuzz,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Images => "images",
            Self::MetricsServer => "metrics-server",
            Self::Rathole => "rathole",
            Self::Konnectivity => "konnectivity",
            Self::ClusterAndKonnectivity => "cluster-and-konnectivity",
            Self::Cilium => "cilium",
            Self::Arm64 => "arm64",
            Self::Fuzz => "fuzz",
        }
    }

    /// Name for messages.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Cluster => "the programs of the test cluster",
            Self::Images => "building the images",
            Self::MetricsServer => "metrics-server",
            Self::Rathole => "rathole",
            Self::Konnectivity => "the programs of konnectivity",
            Self::ClusterAndKonnectivity => "the programs of the test cluster and of konnectivity",
            Self::Cilium => "Cilium's loader",
            Self::Arm64 => "building images for both architectures",
            Self::Fuzz => "building the fuzz targets",
        }
    }

    /// True if scenarios of this kind run on a cluster.
    fn has_cluster(self) -> bool {
        matches!(self, Self::Cluster | Self::Images | Self::MetricsServer | Self::ClusterAndKonnectivity)
    }

    /// Debian packages, installed before anything is built: that takes little time, and no other run may do it meanwhile.
    pub(crate) fn packages(self) -> &'static [&'static [packages::Need]] {
        match self {
            Self::Cluster | Self::MetricsServer | Self::ClusterAndKonnectivity => &[packages::CLUSTER],
            Self::Images => &[packages::CLUSTER, packages::PIP],
            Self::Arm64 if Arch::HOST != Arch::Arm64 => &[packages::PIP, packages::QEMU_USER],
            Self::Arm64 => &[packages::PIP],
            Self::Fuzz => &[packages::FUZZ],
            Self::Rathole | Self::Konnectivity | Self::Cilium => &[],
        }
    }

    /// Builds it, and returns the variables that tell scenarios where it is.
    pub(crate) fn make(self) -> Result<Vec<(OsString, OsString)>> {
        packages::install(self.packages())?;
        // Never started: it only collects the variables.
        let mut told = Command::new("scenarios");
        if self.has_cluster() {
            peers::for_cluster(&mut told)?;
        }
        match self {
            Self::Cluster => {}
            Self::Images => {
                image::build(Profile::Dev, &Image::ALL.map(|image| (image, &[Arch::HOST][..])))?;
                peers::for_deploy(&mut told)?;
            }
            Self::MetricsServer => peers::for_top(&mut told)?,
            Self::Rathole => drop(bench::rathole()?),
            Self::Konnectivity | Self::ClusterAndKonnectivity => peers::for_konnectivity(&mut told)?,
            Self::Cilium => peers::for_cilium(&mut told)?,
            Self::Arm64 => {
                drop(image::build(Profile::Dev, &Image::ALL.map(|image| (image, Arch::ALL.as_slice())))?);
            }
            Self::Fuzz => fuzz::prepare()?,
        }
        let told = told.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
        Ok(told.collect())
    }
}

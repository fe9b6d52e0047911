//! A single write to the kernel's maps.

use ipnet::IpNet;

use tunnel_routing::RouteTarget;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Exclude(IpNet),
    Include(IpNet),
    Admit(IpNet, ComesIn),
    Dismiss(IpNet),
    OpenPort(u16),
    ClosePort(u16),
    Route(IpNet, RouteTarget),
    Unroute(IpNet),
    Origin(IpNet, IpNet),
    Forget(IpNet),
    AnyPort(bool),
}

/// Where packets of a client network may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ComesIn {
    Anywhere,
    /// An address of this host itself.
    Here,
    /// Not by an interface that leads to other hosts.
    Pods,
}

impl Change {
    pub(super) fn is_delete(&self) -> bool {
        matches!(
            self,
            Self::Include(_)
                | Self::Dismiss(_)
                | Self::ClosePort(_)
                | Self::Unroute(_)
                | Self::Forget(_)
                | Self::AnyPort(false)
        )
    }
}

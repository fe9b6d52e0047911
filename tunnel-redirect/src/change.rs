//! A single write to the kernel's maps.

use ipnet::IpNet;

use tunnel_routing::RouteTarget;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Exclude(IpNet),
    Include(IpNet),
    /// With true, an address of this host itself.
    Admit(IpNet, bool),
    Dismiss(IpNet),
    OpenPort(u16),
    ClosePort(u16),
    Route(IpNet, RouteTarget),
    Unroute(IpNet),
    Origin(IpNet, IpNet),
    Forget(IpNet),
    AnyPort(bool),
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

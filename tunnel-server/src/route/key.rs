//! What a route is known by.

use ipnet::IpNet;

/// What may have a route. An address and a range of one pod with the same network are two; then the pod counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) pods: bool,
    pub(super) net: IpNet,
}

impl Key {
    pub(super) fn is_ipv4(self) -> bool {
        matches!(self.net, IpNet::V4(_))
    }
}

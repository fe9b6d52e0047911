//! Asks the kernel where it would send packets for edge nodes: rules of others may come first.

use std::io;
use std::net::SocketAddr;

use ipnet::IpNet;
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use nix::libc;
use nix::net::if_::if_indextoname;

use super::messages::Place;
use super::steady::ByRoute;
use super::wanted::{Kind, Packets, Route, Rule, Table};
use crate::error::{RedirectError, SelfTestError};
use crate::kernel::Kernel;
use crate::netlink::attribute;

impl ByRoute {
    /// Looks up one network of each family on this port, another one each time.
    ///
    /// # Errors
    /// [`SelfTestError::NotByRoute`]
    pub(crate) fn probe(&mut self, port: u16) -> Result<(), RedirectError> {
        if self.paused {
            return Ok(());
        }
        for (family, ipv6) in [false, true].into_iter().enumerate() {
            let Some(route) = self.after(self.probed[family], ipv6) else { continue };
            if !self.present.rules.contains(&Rule { ipv6, packets: Packets::Port(port) }) {
                continue;
            }
            let to = SocketAddr::new(route.net.network(), port);
            let found = self.kernel.route_of(to)?;
            if !found.as_ref().is_ok_and(leads_here) {
                return Err(SelfTestError::NotByRoute { to, found: describe(found) }.into());
            }
            self.probed[family] = Some(route);
        }
        Ok(())
    }

    /// The next route that takes connections on the tunnelled ports, or else the first.
    fn after(&self, last: Option<Route>, ipv6: bool) -> Option<Route> {
        let fits = |route: &&Route| {
            (route.table, route.kind) == (Table::Ports, Kind::Local)
                && matches!(route.net, IpNet::V6(_)) == ipv6
        };
        let next =
            last.and_then(|last| self.present.routes.range(last..).find(|next| **next != last && fits(next)));
        next.or_else(|| self.present.routes.iter().find(fits)).copied()
    }
}

/// True if the kernel leads TCP packets for an edge node's address to a server of this host, by route.
///
/// # Errors
/// [`RedirectError::Netlink`]
pub fn is_led_here(to: SocketAddr) -> Result<bool, RedirectError> {
    Ok(Kernel::open()?.route_of(to)?.as_ref().is_ok_and(leads_here))
}

/// The table may be another server's, before or after this one: it leads to the same listeners.
fn leads_here(found: &RouteMessage) -> bool {
    found.header.kind == RouteType::Local
        && table(found).is_some_and(|table| Place::of_table(table).is_some())
}

fn table(route: &RouteMessage) -> Option<u32> {
    attribute!(route, RouteAttribute::Table).copied()
}

fn describe(found: io::Result<RouteMessage>) -> String {
    let route = match found {
        Ok(route) => route,
        Err(error) => {
            let reason = error.raw_os_error().map_or_else(
                || error.to_string(),
                |errno| nix::errno::Errno::from_raw(errno).desc().to_owned(),
            );
            return format!("nowhere ({reason})");
        }
    };
    let device = attribute!(route, RouteAttribute::Oif);
    let name = device.and_then(|index| if_indextoname(*index as libc::c_uint).ok());
    let name = name.map_or_else(|| "?".to_owned(), |name| name.to_string_lossy().into_owned());
    format!("by {name}, by the routing table {}", table(&route).unwrap_or_default())
}

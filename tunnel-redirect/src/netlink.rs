//! Redirect routes and this host's addresses, through rtnetlink.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::thread;

use futures_util::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use nix::libc;
use rtnetlink::{Handle, RouteMessageBuilder};
use tunnel_abi::LOOPBACK_IFINDEX;

use super::error::RedirectError;

/// The value of a message's first attribute of a kind, by reference.
macro_rules! attribute {
    ($message:expr, $kind:path) => {
        $message.attributes.iter().find_map(|attribute| match attribute {
            $kind(value) => Some(value),
            _ => None,
        })
    };
}
pub(super) use attribute;

/// Runs `work` with a netlink connection on its own thread, so that it can be called inside or outside a runtime. The
/// thread inherits the calling thread's network namespace.
pub(super) fn blocking<T, F, W>(work: W) -> Result<T, RedirectError>
where
    T: Send,
    F: Future<Output = Result<T, RedirectError>>,
    W: FnOnce(Handle) -> F + Send,
{
    let failed = |reason: String| RedirectError::Netlink { operation: "open a connection".into(), reason };
    thread::scope(|scope| {
        let run = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_io()
                .build()
                .map_err(|error| failed(error.to_string()))?;
            runtime.block_on(async {
                let (connection, handle, _) =
                    rtnetlink::new_connection().map_err(|error| failed(error.to_string()))?;
                let connection = tokio::spawn(connection);
                let result = work(handle).await;
                connection.abort();
                result
            })
        };
        scope.spawn(run).join().unwrap_or_else(|_| Err(failed("its thread panicked".into())))
    })
}

/// The route `local <range> dev lo`: every address of the range belongs to this host.
fn message(range: IpNet) -> RouteMessage {
    match range {
        IpNet::V4(range) => {
            let route = RouteMessageBuilder::<Ipv4Addr>::new();
            local(route.destination_prefix(range.network(), range.prefix_len()), RouteScope::Host)
        }
        IpNet::V6(range) => {
            let route = RouteMessageBuilder::<Ipv6Addr>::new();
            local(route.destination_prefix(range.network(), range.prefix_len()), RouteScope::Universe)
        }
    }
}

fn local<T>(route: RouteMessageBuilder<T>, scope: RouteScope) -> RouteMessage {
    route
        .output_interface(LOOPBACK_IFINDEX)
        .table_id(u32::from(libc::RT_TABLE_LOCAL))
        .protocol(RouteProtocol::Boot)
        .scope(scope)
        .kind(RouteType::Local)
        .build()
}

/// Adds the redirect route. Returns false if it was there, left by a killed server; it is taken over.
pub(super) async fn add_route(handle: &Handle, range: IpNet) -> Result<bool, RedirectError> {
    changed(handle.route().add(message(range)).execute().await, libc::EEXIST, "add", range)
}

/// Removes the redirect route. Returns false if there was none.
pub(super) async fn remove_route(handle: &Handle, range: IpNet) -> Result<bool, RedirectError> {
    changed(handle.route().del(message(range)).execute().await, libc::ESRCH, "remove", range)
}

/// Networks that this namespace treats as its own addresses because of a route.
pub(super) async fn local_routes(handle: &Handle) -> Result<Vec<IpNet>, RedirectError> {
    let failed = |error: rtnetlink::Error| RedirectError::Netlink {
        operation: "list the routes".into(),
        reason: error.to_string(),
    };
    let mut routes = Vec::new();
    let v4 = RouteMessageBuilder::<Ipv4Addr>::new().build();
    let v6 = RouteMessageBuilder::<Ipv6Addr>::new().build();
    for request in [v4, v6] {
        let mut messages = handle.route().get(request).execute();
        while let Some(message) = messages.try_next().await.map_err(failed)? {
            if message.header.kind == RouteType::Local {
                routes.extend(destination(&message));
            }
        }
    }
    Ok(routes)
}

pub(super) fn destination(message: &RouteMessage) -> Option<IpNet> {
    let length = message.header.destination_prefix_length;
    message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => {
            IpNet::new((*address).into(), length).ok()
        }
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => {
            IpNet::new((*address).into(), length).ok()
        }
        _ => None,
    })
}

/// Returns false if the error is `needless`: there was nothing to change.
fn changed(
    result: Result<(), rtnetlink::Error>,
    needless: i32,
    verb: &str,
    range: IpNet,
) -> Result<bool, RedirectError> {
    match result {
        Ok(()) => Ok(true),
        Err(rtnetlink::Error::NetlinkError(message)) if message.to_io().raw_os_error() == Some(needless) => {
            Ok(false)
        }
        Err(error) => Err(RedirectError::Netlink {
            operation: format!("{verb} the route `local {range} dev lo`"),
            reason: error.to_string(),
        }),
    }
}

/// This host's address in a message: IFA_LOCAL, else IFA_ADDRESS, which is the same or a point-to-point peer's.
pub(super) fn own_address(message: &AddressMessage) -> Option<IpAddr> {
    let local = attribute!(message, AddressAttribute::Local);
    local.or_else(|| attribute!(message, AddressAttribute::Address)).copied()
}

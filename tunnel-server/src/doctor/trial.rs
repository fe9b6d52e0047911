//! Test connections: from this host, and from a network namespace that acts as one of its pods.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteScope};
use nix::sched::{CloneFlags, unshare};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of concurrent connections.
const AT_ONCE: usize = 64;
/// Time for a neighbour on a bridge or veth pair to announce its address.
const ARP: Duration = Duration::from_millis(500);
/// Number of addresses of a range that are examined for a free one.
const CANDIDATES: u8 = 8;
/// MAC address of the host's end of the veth pair.
const HIGH: [u8; 6] = [0xfe, 0xff, 0xff, 0x50, 0x4f, 0x53];
/// Name of the pod's end of the veth pair.
const POD_LINK: &str = "eth0";

/// A port at which a connection did not reach the server, and the result.
pub(super) type Failure = (u16, String);

/// An address that leads to the server.
#[derive(Clone, Copy, Debug)]
pub(super) enum To {
    /// A virtual address at which the running server closes every connection at once.
    Virtual(IpAddr),
    /// An edge node's own, whose connections the server accepts.
    Node(IpAddr),
}

impl To {
    pub(super) fn address(self) -> IpAddr {
        match self {
            Self::Virtual(address) | Self::Node(address) => address,
        }
    }
}

/// Tries each port.
pub(super) async fn from_here(to: To, ports: &[u16]) -> Vec<Failure> {
    let tried = futures_util::stream::iter(ports.iter().copied())
        .map(async |port| Some((port, failure(to, port).await?)));
    let mut failed: Vec<Failure> =
        tried.buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await;
    failed.sort_unstable();
    failed
}

async fn failure(to: To, port: u16) -> Option<String> {
    let silent = || format!("no answer within {} s", DEADLINE.as_secs());
    let mut stream = match timeout(DEADLINE, TcpStream::connect(SocketAddr::new(to.address(), port))).await {
        Ok(Ok(stream)) => stream,
        // The server accepted it and closed it before connect() saw that. What refuses a connection gives ECONNREFUSED.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => return None,
        Ok(Err(error)) => return Some(error.to_string()),
        Err(_) => return Some(silent()),
    };
    if matches!(to, To::Node(_)) {
        return None;
    }
    match timeout(DEADLINE, stream.read_u8()).await {
        Ok(Err(_)) => None,
        _ => Some("something else accepted it".to_owned()),
    }
}

/// Does the same from a pod with a free address of `range`, set up as a CNI plugin would. Also returns that address.
///
/// The namespace has no name: it vanishes with the thread in it, also when this process is killed, together with the
/// veth pair and this host's route to the address.
///
/// # Errors
/// The reason why there cannot be such a pod.
pub(super) async fn from_pod(
    range: IpNet,
    to: To,
    ports: Vec<u16>,
) -> Result<(IpAddr, Vec<Failure>), String> {
    let (send, tried) = tokio::sync::oneshot::channel();
    // Uses a thread of its own: after leaving this network namespace it is of no other use.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let tried = runtime
            .map_err(|error| error.to_string())
            .and_then(|runtime| runtime.block_on(Pod::attempt(range, to, &ports)));
        // Fails only if nobody waits any more.
        let _ = send.send(tried);
    });
    tried.await.map_err(|_| "the thread in the pod's namespace panicked".to_owned())?
}

/// A pod; the calling thread is in its namespace.
struct Pod {
    host: Handle,
    /// Index of the host's end of the veth pair, in the host's namespace.
    link: u32,
}

impl Pod {
    async fn attempt(range: IpNet, to: To, ports: &[u16]) -> Result<(IpAddr, Vec<Failure>), String> {
        let host = connection().map_err(|error| format!("failed to open netlink: {error}"))?;
        let address = free_address(&host, range).await.map_err(failed("list addresses"))?;
        let address = address.ok_or_else(|| format!("no address of {range} is known to be free"))?;
        let bridge = bridge_of(&host, address).await.map_err(failed("list links"))?;
        let own = File::open("/proc/thread-self/ns/net").map_err(|error| format!("/proc: {error}"))?;
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| {
            format!("failed to make a network namespace ({error}), which takes CAP_SYS_ADMIN")
        })?;
        let inside = connection().map_err(|error| format!("failed to open netlink: {error}"))?;
        let pod = Self::wire(host, &inside, &own, address, to.address(), bridge).await;
        let pod = pod.map_err(failed("connect a namespace with this host"))?;
        let failures = from_here(to, ports).await;
        let removed = pod.host.link().del(pod.link).execute().await;
        removed.map_err(failed("remove the cable to a namespace"))?;
        Ok((address, failures))
    }

    async fn wire(
        host: Handle,
        inside: &Handle,
        own: &File,
        address: IpAddr,
        to: IpAddr,
        bridge: Option<LinkMessage>,
    ) -> Result<Self, rtnetlink::Error> {
        let name = format!("doctor{}", std::process::id());
        inside.link().add(LinkVeth::new(POD_LINK, &name).build()).execute().await?;
        let (in_pod, on_host) = (link(inside, POD_LINK).await?, link(inside, &name).await?);
        // A bridge without an address of its own takes the lowest of its ports: this one must not be the lowest.
        let moved =
            LinkMessageBuilder::<LinkUnspec>::new().index(on_host.header.index).address(HIGH.to_vec());
        inside.link().set(moved.setns_by_fd(own.as_raw_fd()).build()).execute().await?;
        let on_host = link(&host, &name).await?;
        let (link, in_pod_index) = (on_host.header.index, in_pod.header.index);
        let pod = Self { host, link };
        let mut up = LinkMessageBuilder::<LinkUnspec>::new().index(link).up();
        if let Some(bridge) = &bridge {
            up = up.controller(bridge.header.index);
        }
        pod.host.link().set(up.build()).execute().await?;
        let up = LinkMessageBuilder::<LinkUnspec>::new().index(in_pod_index).up();
        inside.link().set(up.build()).execute().await?;
        let whole = if address.is_ipv4() { 32 } else { 128 };
        let mut add = inside.address().add(in_pod_index, address, whole);
        add.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        add.execute().await?;
        inside.route().add(direct(to, whole, in_pod_index)).execute().await?;
        // As if the host were its gateway.
        let gateway = match &bridge {
            // The bridge's address has changed with its first port.
            Some(bridge) => {
                let mut links = pod.host.link().get().match_index(bridge.header.index).execute();
                mac(&links.try_next().await?.ok_or(rtnetlink::Error::RequestFailed)?)
            }
            None => mac(&on_host),
        };
        inside.neighbours().add(in_pod_index, to).link_layer_address(&gateway).execute().await?;
        if bridge.is_none() {
            pod.host.route().add(direct(address, whole, link)).execute().await?;
            pod.host.neighbours().add(link, address).link_layer_address(&mac(&in_pod)).execute().await?;
        }
        Ok(pod)
    }
}

fn failed(what: &'static str) -> impl FnOnce(rtnetlink::Error) -> String {
    move |error| format!("failed to {what}: {error}")
}

/// Opens netlink in the calling thread's network namespace.
fn connection() -> io::Result<Handle> {
    let (connection, handle, _) = rtnetlink::new_connection()?;
    tokio::spawn(connection);
    Ok(handle)
}

fn direct(to: IpAddr, length: u8, link: u32) -> netlink_packet_route::route::RouteMessage {
    let route = match to {
        IpAddr::V4(to) => {
            let route = RouteMessageBuilder::<std::net::Ipv4Addr>::new().destination_prefix(to, length);
            return route.output_interface(link).scope(RouteScope::Link).build();
        }
        IpAddr::V6(to) => RouteMessageBuilder::<std::net::Ipv6Addr>::new().destination_prefix(to, length),
    };
    route.output_interface(link).build()
}

async fn link(handle: &Handle, name: &str) -> Result<LinkMessage, rtnetlink::Error> {
    let found = handle.link().get().match_name(name).execute().try_next().await?;
    found.ok_or(rtnetlink::Error::RequestFailed)
}

fn mac(link: &LinkMessage) -> Vec<u8> {
    let address = |attribute: &LinkAttribute| match attribute {
        LinkAttribute::Address(address) => Some(address.clone()),
        _ => None,
    };
    link.attributes.iter().find_map(address).unwrap_or_default()
}

/// Returns the bridge whose own range has `address`, as with the CNI plugin of that name.
async fn bridge_of(host: &Handle, address: IpAddr) -> Result<Option<LinkMessage>, rtnetlink::Error> {
    let mut addresses = host.address().get().execute();
    while let Some(message) = addresses.try_next().await? {
        let local = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
        let range = local.and_then(|local| IpNet::new(local, message.header.prefix_len).ok());
        if !range.is_some_and(|range| range.contains(&address)) {
            continue;
        }
        let mut links = host.link().get().match_index(message.header.index).execute();
        let is_bridge = |link: &LinkMessage| {
            let kinds = link.attributes.iter().filter_map(|attribute| match attribute {
                LinkAttribute::LinkInfo(infos) => Some(infos),
                _ => None,
            });
            kinds.flatten().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Bridge)))
        };
        return Ok(links.try_next().await?.filter(is_bridge));
    }
    Ok(None)
}

/// Returns an address at the end of a range that no route or neighbour has.
async fn free_address(host: &Handle, range: IpNet) -> Result<Option<IpAddr>, rtnetlink::Error> {
    let mut candidates = last_addresses(range);
    let mut addresses = host.address().get().execute();
    while let Some(message) = addresses.try_next().await? {
        candidates.retain(|candidate| {
            !message.attributes.iter().any(
                |attribute| matches!(attribute, AddressAttribute::Local(own) | AddressAttribute::Address(own) if own == candidate),
            )
        });
    }
    let all = match range {
        IpNet::V4(_) => RouteMessageBuilder::<std::net::Ipv4Addr>::new().build(),
        IpNet::V6(_) => RouteMessageBuilder::<std::net::Ipv6Addr>::new().build(),
    };
    let mut routes = host.route().get(all).execute();
    while let Some(route) = routes.try_next().await? {
        let length = route.header.destination_prefix_length;
        candidates.retain(|candidate| {
            let has = |to: &RouteAddress| match (to, candidate) {
                (RouteAddress::Inet(to), IpAddr::V4(candidate)) => length == 32 && to == candidate,
                (RouteAddress::Inet6(to), IpAddr::V6(candidate)) => length == 128 && to == candidate,
                _ => false,
            };
            !route
                .attributes
                .iter()
                .any(|attribute| matches!(attribute, RouteAttribute::Destination(to) if has(to)))
        });
    }
    // A neighbour on a bridge or veth pair of this host that has one of them answers its ARP request.
    let any = if matches!(range, IpNet::V4(_)) { "0.0.0.0:0" } else { "[::]:0" };
    if let Ok(socket) = UdpSocket::bind(any) {
        for candidate in &candidates {
            // Port 9 is the discard port. An address without a route is free.
            let _ = socket.send_to(&[], (*candidate, 9));
        }
        tokio::time::sleep(ARP).await;
    }
    let mut neighbours = host.neighbours().get().execute();
    while let Some(neighbour) = neighbours.try_next().await? {
        if matches!(
            neighbour.header.state,
            NeighbourState::Incomplete | NeighbourState::Failed | NeighbourState::None
        ) {
            continue;
        }
        candidates.retain(|candidate| {
            !neighbour.attributes.iter().any(|attribute| match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(has)) => candidate == has,
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(has)) => candidate == has,
                _ => false,
            })
        });
    }
    Ok(candidates.first().copied())
}

/// The last addresses of a range, except the very last, which is the broadcast address of an IPv4 network. CNI plugins
/// start with the first.
fn last_addresses(range: IpNet) -> Vec<IpAddr> {
    let candidate = |back: u8| -> Option<IpAddr> {
        let address: IpAddr = match range {
            IpNet::V4(range) => {
                std::net::Ipv4Addr::from(u32::from(range.broadcast()).checked_sub(back.into())?).into()
            }
            IpNet::V6(range) => {
                std::net::Ipv6Addr::from(u128::from(range.broadcast()).checked_sub(back.into())?).into()
            }
        };
        (range.contains(&address) && address != range.network()).then_some(address)
    };
    (1..=CANDIDATES).map_while(candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_the_last_hosts_of_the_range() {
        let of = |range: &str| last_addresses(range.parse().unwrap());
        let first = |range: &str| of(range).first().map(ToString::to_string);
        assert_eq!(first("10.71.0.0/24").as_deref(), Some("10.71.0.254"));
        assert_eq!(of("10.71.0.0/24").len(), usize::from(CANDIDATES));
        assert_eq!(of("10.71.0.0/30").len(), 2);
        assert_eq!(first("10.71.0.2/32"), None, "a single address is somebody's");
        assert_eq!(first("fd71::/64").as_deref(), Some("fd71::ffff:ffff:ffff:fffe"));
    }
}

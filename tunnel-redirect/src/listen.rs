//! The loopback listeners that accept redirected connections.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use socket2::SockRef;
use tokio::net::TcpListener;

use super::{Redirect, RedirectConfig, RedirectError};

/// Maximum number of connections that wait to be accepted (`net.core.somaxconn` may limit it further). Clients' kernels
/// retry the others after a second.
const BACKLOG: i32 = 4096;

/// Loads, attaches and verifies the programs, and returns the listeners that they redirect to: the given ones, or new
/// ones. `prepare` sets the options that connections inherit: it runs before the first one can come.
///
/// # Errors
/// As [`Redirect::start`], or a listener cannot be created.
pub async fn listen(
    options: RedirectConfig,
    [v4, v6]: [Option<std::net::TcpListener>; 2],
    prepare: fn(&std::net::TcpListener),
) -> Result<(Arc<Redirect>, Vec<TcpListener>), RedirectError> {
    let failed = |source| RedirectError::Listener { operation: "cannot listen on loopback", source };
    let started = tokio::task::spawn_blocking(move || {
        let v4 = v4.map_or_else(|| bind(Ipv4Addr::LOCALHOST.into()), Ok).map_err(failed)?;
        // A host without IPv6 has no IPv6 connections to redirect.
        let v6 = v6.or_else(|| bind(Ipv6Addr::LOCALHOST.into()).ok());
        std::iter::once(&v4).chain(&v6).for_each(prepare);
        let redirect = Redirect::start(options, &v4, v6.as_ref())?;
        let v6 = v6.filter(|_| redirect.ipv6);
        Ok::<_, RedirectError>((redirect, [Some(v4), v6]))
    });
    let (redirect, listeners) = started.await.map_err(|error| failed(io::Error::other(error)))??;
    let listeners = listeners.into_iter().flatten().map(TcpListener::from_std).collect::<Result<_, _>>();
    Ok((Arc::new(redirect), listeners.map_err(failed)?))
}

fn bind(address: IpAddr) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind((address, 0))?;
    SockRef::from(&listener).listen(BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

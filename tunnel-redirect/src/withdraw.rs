//! Ends the redirect, and removes the remains of a killed server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::by_route::{ByRoute, remove_leftovers};
use super::claim;
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::kernel::Kernel;
use super::pins::Others;
use super::running::Redirect;
use super::{pins, preflight};

/// Maximum time in which a server that resumes reattaches its programs.
const RESUMED: Duration = Duration::from_secs(1);

impl Redirect {
    /// Ends the redirect of new connects: hands it to another server of this host if one runs, else marks every route
    /// as down. Existing connections stay, with their peers' names.
    ///
    /// While both run, this server gets every connect. A connect that was redirected some microseconds before the
    /// change reaches the other server's listener; unless both gave the node the same virtual address, that server refuses it or
    /// relays it to the virtual address's owner there, whose TLS name then does not match.
    ///
    /// # Errors
    /// [`RedirectError::Map`], [`RedirectError::Io`]
    pub fn drain(&self) -> Result<(), RedirectError> {
        if !self.lock().claim.is_shared()? {
            return self.set_serving(false);
        }
        self.release();
        Ok(())
    }

    /// Leaves the redirect of new connects to a successor that is already attached. Existing connections stay, with
    /// their peers' names.
    pub fn release(&self) {
        let mut inner = self.lock();
        inner.released = true;
        // The successor may take nothing by route: what this server's routes led here would reach others' listeners.
        if let Some(Err(error)) = inner.by_route.as_mut().map(ByRoute::pause) {
            tracing::warn!(%error, "failed to remove rules for connections by route");
        }
        inner.programs.release(&self.cgroup);
        inner.claim.release();
    }

    /// Waits up to a second for another server that redirects here. Returns true if there is one; its programs may not
    /// be attached yet.
    pub async fn finds_another(&self) -> bool {
        let since = Instant::now();
        loop {
            let shared = self.lock().claim.is_shared();
            match shared {
                Ok(true) => return true,
                Ok(false) if since.elapsed() < RESUMED => tokio::time::sleep(RESUMED / 50).await,
                Ok(false) => return false,
                Err(error) => {
                    tracing::warn!(%error, "failed to look for another server that redirects");
                    return false;
                }
            }
        }
    }

    /// The other servers with the same state directory that have pins by now.
    pub async fn others(self: &Arc<Self>) -> Others {
        let found = self.offload(|redirect| match &redirect.config.pins {
            Some(pins) => Others::find(pins, redirect.pinned_in().as_deref()),
            None => Ok(Others::default()),
        });
        found.await.unwrap_or_else(|error| {
            tracing::warn!(%error, "failed to read the pins of other servers");
            Others::default()
        })
    }

    /// Takes the redirect back after [`release`](Self::release), as the successor is gone. If the ranges are another
    /// server's meanwhile, [`watch`](Self::watch) tries again each second, and attaches nothing until it has them.
    ///
    /// # Errors
    /// As [`Redirect::start`].
    pub fn resume(&self) -> Result<(), RedirectError> {
        let mut inner = self.lock();
        if !std::mem::take(&mut inner.released) {
            return Ok(());
        }
        inner.claim.retake()?;
        inner.programs.attach(&self.cgroup, &self.netns)?;
        if let Some(by_route) = &mut inner.by_route {
            by_route.unpause();
        }
        drop(inner);
        // The successor removed the routes if it checked for other servers before the claim was back.
        self.ensure_routes()?;
        self.verify_now()
    }

    /// Detaches everything and removes the redirect route, unless another server uses it. Idempotent.
    pub fn stop(&self) {
        let mut inner = self.lock();
        if std::mem::replace(&mut inner.stopped, true) {
            return;
        }
        // Before the programs go, without which the host's other listeners would get these connections.
        if let Some(Err(error)) = inner.by_route.take().map(ByRoute::withdraw) {
            tracing::warn!(%error, "failed to remove rules for connections by route");
        }
        inner.programs.detach(&self.cgroup);
        // Without the claim the routes belong to the successor, or to the server that has taken the ranges. Checked last, since
        // another server may start during the steps above.
        let shared = if inner.claim.is_held() { inner.claim.is_shared() } else { Ok(true) };
        drop(inner);
        match shared {
            Ok(true) => {
                tracing::info!("keeping the redirect route, another server redirects on this host");
                return;
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "failed to look for another server that redirects"),
        }
        if let Err(error) = remove_routes(self.config.ranges(self.ipv6)) {
            tracing::warn!(%error, "failed to remove a redirect route");
        }
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Result of [`cleanup`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Removed directories of pinned programs.
    pub pins: Vec<PathBuf>,
    /// Redirect ranges whose routes were removed.
    pub routes: Vec<IpNet>,
    /// Number of removed rules for connections by route.
    pub rules: usize,
    /// Number of removed routes for connections by route.
    pub edge_routes: usize,
}

/// Removes the remains of killed servers in this network namespace: pinned programs, redirect routes, and rules and routes for
/// connections by route.
///
/// # Errors
/// [`RedirectError::RangeTaken`] while a server with these ranges runs in this network namespace.
pub fn cleanup(config: &RedirectConfig) -> Result<Cleaned, RedirectError> {
    // First: an error must not hide what else was removed.
    let (rules, edge_routes) = remove_leftovers()?;
    let pins = match &config.pins {
        Some(pins) => pins::remove_dead(&pins.dir)?,
        None => Vec::new(),
    };
    let ipv6 = preflight::ipv6_usable().is_ok();
    if let Some(taken) = claim::holder(config, ipv6)? {
        return Err(taken);
    }
    let routes = remove_routes(config.ranges(ipv6))?;
    Ok(Cleaned { pins, routes, rules, edge_routes })
}

/// Removes the redirect routes of these ranges, and returns those ranges that had one.
fn remove_routes(ranges: Vec<IpNet>) -> Result<Vec<IpNet>, RedirectError> {
    let mut kernel = Kernel::open()?;
    let mut removed = Vec::new();
    for range in ranges {
        if kernel.remove_range_route(range)? {
            removed.push(range);
        }
    }
    Ok(removed)
}

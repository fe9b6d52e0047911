//! Ends the redirect, and removes what a killed server leaves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::claim::{self, Claim};
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::pins::Others;
use super::running::{Redirect, token_ranges};
use super::{netlink, pins, preflight};

/// How long a server that goes on may take to attach its programs again.
const RESUMED: Duration = Duration::from_secs(1);

impl Redirect {
    /// Ends the redirect of new connects: to another server of this host if one runs, else every route
    /// counts as down. Connections that exist stay, with their peers' names.
    ///
    /// While both run, every connect is this server's. A connect that was redirected here some microseconds before the
    /// change reaches the other server's listener; unless both gave the node the same token, that server refuses it or
    /// takes it for the token's owner there, whose TLS name then does not match.
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

    /// Leaves the redirect of new connects to a successor that is attached already. Connections that exist stay, with
    /// their peers' names.
    pub fn release(&self) {
        let mut inner = self.lock();
        inner.released = true;
        inner.programs.release(&self.cgroup);
        inner.claim.release();
    }

    /// Whether another server redirects here, which is about to attach its programs if it has not done so.
    pub async fn finds_another(&self) -> bool {
        let since = Instant::now();
        loop {
            let shared = self.lock().claim.is_shared();
            match shared {
                Ok(true) => return true,
                Ok(false) if since.elapsed() < RESUMED => tokio::time::sleep(RESUMED / 50).await,
                Ok(false) => return false,
                Err(error) => {
                    tracing::warn!(%error, "cannot tell whether another server redirects here");
                    return false;
                }
            }
        }
    }

    /// The other servers with the same state directory that have pinned something by now.
    pub async fn others(self: &Arc<Self>) -> Others {
        let found = self.offload(|redirect| match &redirect.config.pins {
            Some(pins) => Others::find(pins, redirect.pinned_in().as_deref()),
            None => Ok(Others::default()),
        });
        found.await.unwrap_or_else(|error| {
            tracing::warn!(%error, "what another server leaves should it die stays");
            Others::default()
        })
    }

    /// Takes the redirect back after [`release`](Self::release): the successor is gone.
    ///
    /// # Errors
    /// As [`Redirect::start`].
    pub fn resume(&self) -> Result<(), RedirectError> {
        let mut inner = self.lock();
        if !std::mem::take(&mut inner.released) {
            return Ok(());
        }
        inner.claim = Claim::take(&self.config, self.ipv6)?;
        inner.programs.attach(&self.cgroup, &self.netns)?;
        drop(inner);
        // The successor has removed them if it looked for other programs before these were back.
        self.ensure_routes()?;
        self.verify_now()
    }

    /// Detaches everything and removes the token route, unless another server uses it. Idempotent.
    pub fn stop(&self) {
        let mut inner = self.lock();
        if std::mem::replace(&mut inner.stopped, true) {
            return;
        }
        // Those that were released are the successor's.
        let shared = if inner.released { Ok(true) } else { inner.claim.is_shared() };
        inner.programs.detach(&self.cgroup);
        drop(inner);
        match shared {
            Ok(true) => {
                tracing::info!("another server redirects here: the token route stays");
                return;
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "cannot tell whether another server redirects here"),
        }
        let ranges = token_ranges(&self.config, self.ipv6);
        let removed = netlink::blocking(|handle| async move {
            for range in ranges {
                netlink::remove_route(&handle, range).await?;
            }
            Ok(())
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "a token route stays");
        }
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What [`cleanup`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Folders of pinned programs.
    pub pins: Vec<PathBuf>,
    /// Token ranges whose routes were there.
    pub routes: Vec<IpNet>,
}

/// Removes what killed servers left in this network namespace: pinned programs and token routes.
///
/// # Errors
/// [`RedirectError::RangeTaken`] while a server with these ranges runs in this network namespace.
pub fn cleanup(config: &RedirectConfig) -> Result<Cleaned, RedirectError> {
    let pins = match &config.pins {
        Some(pins) => pins::remove_dead(&pins.dir)?,
        None => Vec::new(),
    };
    let ipv6 = preflight::ipv6_usable().is_ok();
    if let Some(taken) = claim::holder(config, ipv6)? {
        return Err(taken);
    }
    let ranges = token_ranges(config, ipv6);
    let routes = netlink::blocking(|handle| async move {
        let mut removed = Vec::new();
        for range in ranges {
            if netlink::remove_route(&handle, range).await? {
                removed.push(range);
            }
        }
        Ok(removed)
    })?;
    Ok(Cleaned { pins, routes })
}

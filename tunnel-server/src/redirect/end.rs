//! Ending the redirect, and what a killed server leaves.

use std::fs::File;

use ipnet::IpNet;

use super::query::{self, Hook, Other};
use super::{Redirect, RedirectConfig, RedirectError, checks, netlink};

/// What [`cleanup`] found and removed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Token routes that were removed.
    pub routes_removed: Vec<IpNet>,
}

impl Redirect {
    /// Ends the redirect of new connects: to another server of this host if one runs, else every route
    /// counts as down. Connections that exist stay, with their peers' names.
    ///
    /// While both run, every connect is this server's. At the change a connect that was redirected here some
    /// microseconds before reaches the other server's listener; unless both gave the node the same token, that
    /// one refuses it or takes it for the token's owner there, whose TLS name then does not match.
    ///
    /// # Errors
    /// [`RedirectError::Map`], [`RedirectError::Io`]
    pub fn drain(&self) -> Result<(), RedirectError> {
        if !self.other_server()?.is_some_and(|other| other.certain) {
            return self.set_serving(false);
        }
        let mut inner = self.lock();
        inner.released = true;
        inner.programs.release();
        Ok(())
    }

    /// Detaches everything and removes the token route, unless another server uses it. Idempotent.
    pub fn stop(&self) {
        let mut inner = self.lock();
        if std::mem::replace(&mut inner.stopped, true) {
            return;
        }
        let own = inner.programs.id(Hook::SkLookup);
        inner.programs.detach();
        drop(inner);
        match query::other_server(&self.netns, own) {
            Ok(None) => {}
            Ok(Some(Other { id, certain })) => {
                tracing::info!(program = id, certain, "another server redirects here: the token route stays");
                return;
            }
            Err(error) => tracing::warn!(%error, "cannot tell whether another server redirects here"),
        }
        let ranges = self.ranges();
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

    /// The token ranges in use.
    fn ranges(&self) -> Vec<IpNet> {
        ranges(&self.config, self.ipv6)
    }

    pub(super) fn other_server(&self) -> Result<Option<Other>, RedirectError> {
        let own = self.lock().programs.id(Hook::SkLookup);
        query::other_server(&self.netns, own)
            .map_err(|source| RedirectError::Io { what: "cannot ask for sk_lookup programs".into(), source })
    }

    /// Adds missing token routes; true when one was missing.
    pub(super) fn ensure_routes(&self) -> Result<bool, RedirectError> {
        let ranges = self.ranges();
        netlink::blocking(|handle| async move {
            let mut added = false;
            for range in ranges {
                added |= netlink::add_route(&handle, range).await?;
            }
            Ok(added)
        })
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        self.stop();
    }
}

fn ranges(config: &RedirectConfig, ipv6: bool) -> Vec<IpNet> {
    let v6 = ipv6.then(|| IpNet::V6(config.token_range_v6.trunc()));
    [Some(IpNet::V4(config.token_range.trunc())), v6].into_iter().flatten().collect()
}

/// Removes the token routes that a killed server left. Its programs went with it.
///
/// # Errors
/// [`RedirectError::InUse`] while a server redirects in this network namespace.
pub fn cleanup(config: &RedirectConfig) -> Result<Report, RedirectError> {
    let netns_path = "/proc/thread-self/ns/net";
    let netns = File::open(netns_path)
        .map_err(|source| RedirectError::Io { what: format!("cannot open {netns_path}"), source })?;
    let other = query::other_server(&netns, None)
        .map_err(|source| RedirectError::Io { what: "cannot ask for sk_lookup programs".into(), source })?;
    if let Some(Other { id, .. }) = other {
        return Err(RedirectError::InUse { id });
    }
    let ranges = ranges(config, checks::ipv6_usable().is_ok());
    let routes_removed = netlink::blocking(|handle| async move {
        let mut removed = Vec::new();
        for range in ranges {
            if netlink::remove_route(&handle, range).await? {
                removed.push(range);
            }
        }
        Ok(removed)
    })?;
    Ok(Report { routes_removed })
}

//! Ends the redirect, and removes what a killed server leaves.

use ipnet::IpNet;

use super::attached::{self, AttachType, Other};
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::running::{Redirect, this_netns, token_ranges};
use super::{netlink, preflight};

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
        let own = inner.programs.id(AttachType::SkLookup);
        inner.programs.detach();
        drop(inner);
        match attached::other_server(&self.netns, own) {
            Ok(None) => {}
            Ok(Some(Other { id, certain })) => {
                tracing::info!(program = id, certain, "another server redirects here: the token route stays");
                return;
            }
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

/// Removes the token routes that a killed server left, and returns them. Its programs went with it.
///
/// # Errors
/// [`RedirectError::InUse`] while a server redirects in this network namespace.
pub fn cleanup(config: &RedirectConfig) -> Result<Vec<IpNet>, RedirectError> {
    let other = attached::other_server(&this_netns()?, None)
        .map_err(|source| RedirectError::Io { what: "cannot list the sk_lookup programs".into(), source })?;
    if let Some(Other { id, .. }) = other {
        return Err(RedirectError::InUse { id });
    }
    let ranges = token_ranges(config, preflight::ipv6_usable().is_ok());
    netlink::blocking(|handle| async move {
        let mut removed = Vec::new();
        for range in ranges {
            if netlink::remove_route(&handle, range).await? {
                removed.push(range);
            }
        }
        Ok(removed)
    })
}

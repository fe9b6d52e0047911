//! Files of the listeners other than the redirect's: policy, callers' roots and tokens, static maps. Each is read at
//! start, which fails if the file is wrong, and followed from then on, with the last good content in effect.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::config::ConfigError;
use tunnel_core::identity::TrustBundle;

use crate::caller::{Authenticator, CallerTls, Reviewer, Tokens};
use crate::config::Config;
use crate::door::{DoorContext, Gatekeeper, Maps, Reception, Services};
use crate::maps::{Map, check, parse_file};
use crate::policy::Policy;
use crate::reloaded::{FileMetrics, NamedFile, ReloadedFile};

type Followed<T> = Option<(ReloadedFile<T>, T)>;

/// The files with their first content.
pub(crate) struct DoorFiles {
    policy: Followed<Policy>,
    roots: Followed<TrustBundle>,
    tokens: Followed<Tokens>,
    maps: Followed<Vec<Map>>,
}

impl DoorFiles {
    /// # Errors
    /// A file cannot be used, or two maps exclude each other.
    pub(crate) fn open(config: &Config, metrics: &FileMetrics) -> Result<Self, ConfigError> {
        let roots = config.process.client_ca_file.as_deref();
        let tokens = config.process.token_auth_file.as_deref();
        let files = Self {
            policy: open("--policy", "policy", config.connect.policy.as_deref(), Policy::parse, metrics)?,
            roots: open("--client-ca-file", "client-ca", roots, parse_roots, metrics)?,
            tokens: open("--token-auth-file", "tokens", tokens, Tokens::parse, metrics)?,
            maps: open("--maps", "maps", config.connect.maps_file.as_deref(), parse_file, metrics)?,
        };
        check(&files.maps(&config.connect.maps))
            .map_err(|reason| ConfigError::without_value("--map", reason))?;
        Ok(files)
    }

    /// Returns all maps: those from flags and those from the file.
    pub(crate) fn maps(&self, fixed: &[Map]) -> Vec<Map> {
        let of_file = self.maps.as_ref().map_or(&[][..], |(_, maps)| maps);
        [fixed, of_file].concat()
    }

    /// Lets callers show certificates that the roots in the file have signed. Returns false if there is no file.
    pub(crate) fn accept_roots(
        &mut self,
        tls: &Arc<CallerTls>,
        (tasks, stop): (&TaskTracker, &CancellationToken),
    ) -> bool {
        let Some((file, roots)) = self.roots.take() else { return false };
        if let Err(error) = tls.accept_roots(&roots) {
            tracing::error!(%error, "failed to apply the client CA, client certificates are not accepted");
        }
        let tls = tls.clone();
        let apply = move |roots: TrustBundle| {
            std::future::ready(tls.accept_roots(&roots).map_err(|error| error.to_string()))
        };
        tasks.spawn(file.run(apply, stop.clone()));
        true
    }

    /// Returns the part that authenticates callers and decides about them. Follows the policy and the tokens.
    pub(crate) fn reception(
        &mut self,
        context: DoorContext,
        (reviewer, services): (Option<Arc<Reviewer>>, Services),
        (tasks, stop): (&TaskTracker, &CancellationToken),
    ) -> Reception {
        let (policy_file, policy) = self.policy.take().unzip();
        let (token_file, tokens) = self.tokens.take().unzip();
        let gatekeeper = Arc::new(Gatekeeper {
            authenticator: Arc::new(Authenticator::new(tokens.unwrap_or_default(), reviewer)),
            services,
            policy: ArcSwap::from_pointee(policy.unwrap_or_default()),
            router: context.router.clone(),
        });
        if let Some(file) = policy_file {
            let keeper = gatekeeper.clone();
            let apply = move |policy| {
                keeper.policy.store(Arc::new(policy));
                std::future::ready(Ok(()))
            };
            tasks.spawn(file.run(apply, stop.clone()));
        }
        if let Some(file) = token_file {
            let keeper = gatekeeper.clone();
            let apply = move |tokens| {
                keeper.authenticator.set_tokens(tokens);
                std::future::ready(Ok(()))
            };
            tasks.spawn(file.run(apply, stop.clone()));
        }
        Reception { gatekeeper, context }
    }

    /// Serves the maps whose listeners are bound, and follows their file.
    pub(crate) fn start_maps(
        &mut self,
        maps: Maps,
        bound: Vec<(Map, TcpListener)>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        maps.start(bound);
        let maps = Arc::new(maps);
        let Some((file, _)) = self.maps.take() else { return };
        let apply = move |of_file| {
            let maps = maps.clone();
            async move { maps.replace(of_file).await }
        };
        tasks.spawn(file.run(apply, stop.clone()));
    }
}

fn open<T: Send + 'static>(
    key: &'static str,
    what: &'static str,
    path: Option<&Path>,
    parse: fn(&str) -> Result<T, String>,
    metrics: &FileMetrics,
) -> Result<Followed<T>, ConfigError> {
    let Some(path) = path else { return Ok(None) };
    ReloadedFile::open_one(what, NamedFile::new(key, path), parse, metrics).map(Some)
}

fn parse_roots(pem: &str) -> Result<TrustBundle, String> {
    TrustBundle::from_pem(pem).map_err(|error| error.to_string())
}

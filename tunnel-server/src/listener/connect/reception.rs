//! Checks whether callers are permitted to reach what they ask for.

use std::net::IpAddr;
use std::sync::Arc;

use http::StatusCode;
use tunnel_runtime::text::printable;

use super::gatekeeper::{Denied, Gatekeeper, Permitted};
use super::request::ProxyRequest;
use crate::caller::{BearerToken, Shown};
use crate::listener::answer::Failure;
use crate::listener::context::{ListenerContext, Reached};
use crate::metrics::Permit;
use crate::policy::Identity;

/// Authenticates callers, and permits what the policy permits.
#[derive(Clone)]
pub(crate) struct Reception {
    pub(crate) gatekeeper: Arc<Gatekeeper>,
    pub(crate) context: ListenerContext,
}

impl Reception {
    /// Returns the permitted destination, the caller's description for the log, and the permit. `secure`: nobody else
    /// can read what the client sends.
    pub(crate) async fn decide(
        &self,
        request: &ProxyRequest,
        shown: Shown,
        client: IpAddr,
        secure: bool,
    ) -> Result<(Reached, Box<str>, Arc<dyn Permit>), Failure> {
        let shown = match &request.token {
            // A workload is identified by its node, whatever token it shows.
            Some(_) if matches!(shown, Shown::Node(_)) => shown,
            Some(token) => Shown::Token(BearerToken::new(token)),
            None => shown,
        };
        let exposed = (!secure).then_some("use this proxy as https://");
        let identity = self.gatekeeper.identify(&shown, client, exposed).await;
        let identity = identity.map_err(|refusal| Failure::from(refusal).at_proxy())?;
        match self.gatekeeper.reach(&identity, client, &request.host, request.port).await {
            Ok((reached, meant, rule)) => {
                let caller = format!("{identity} by {}", printable(&rule, 80)).into();
                let (gatekeeper, port) = (self.gatekeeper.clone(), request.port);
                Ok((reached, caller, Arc::new(Permitted { gatekeeper, shown, client, meant, port })))
            }
            Err(Denied::Policy) => {
                let (host, port) = (printable(&request.host, 100), request.port);
                let reason =
                    format!("the policy does not permit {identity} from {client} to reach {host}:{port}");
                let status = match identity {
                    Identity::None => StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                    _ => StatusCode::FORBIDDEN,
                };
                Err(Failure::new(status, reason))
            }
            Err(Denied::Unclear(reason)) => Err(Failure::bad_request(reason)),
            Err(Denied::Unavailable(reason)) => Err(Failure::new(StatusCode::BAD_GATEWAY, reason)),
        }
    }
}

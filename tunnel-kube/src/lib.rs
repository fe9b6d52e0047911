//! Kubernetes code shared by the server and the agent: the client, following objects through outages, and requests with
//! a deadline.

mod client;
mod follow;
mod followed;
mod health;
mod lasting;
mod request;

use kube::api::{PatchParams, PostParams};

pub use client::{ClientSettings, api_server_address, connect, reason};
pub use follow::{FollowSettings, Signal, follow, named};
pub use followed::Followed;
pub use health::{Health, WatchHealth};
pub use lasting::connect_lasting;
pub use request::{Attempts, RequestError, request};

/// Field manager of writes, and the reporting controller of Events.
pub const FIELD_MANAGER: &str = "postern";

/// The parameters of a write of a whole object.
pub fn post() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// The parameters of a patch, except an apply.
pub fn merge() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Signer name of the agents' CertificateSigningRequests.
pub const SIGNER: &str = "postern.internal/agent";

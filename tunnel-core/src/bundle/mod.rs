//! A support bundle: what somebody else needs to understand an installation, in one tar.gz and without secrets.

mod archive;
mod facts;
mod redact;
mod write;

pub use archive::BundleError;
pub use redact::redacted;
pub use write::{BundleArgs, write};

//! `postern.tunnel.v1`, generated from `proto/` and checked in (a test compares).

#![expect(clippy::allow_attributes_without_reason, reason = "generated code")]

include!("generated.rs");

//! `postern.tunnel.v1`, generated from `proto/` and checked in (a test compares).

#![expect(
    clippy::all,
    clippy::allow_attributes_without_reason,
    unreachable_pub,
    rust_2018_idioms,
    reason = "generated code"
)]

include!("generated.rs");

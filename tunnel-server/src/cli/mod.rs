//! The subcommands that are neither `token` nor `ca` (see [`crate::pki::cli`]).

pub mod cleanup;
pub mod status;

//! The listeners: [`table`] describes each of them once, and binding, the status, the checks and the start are loops over
//! it. A new one is its own module, with its flags, and a row of the table.

mod bound;
mod callers;
mod config;
mod parts;
mod table;

pub(crate) use bound::Listeners;
pub(crate) use callers::Callers;
pub use config::{CommonConfig, DEFAULT_ADMIN_ADDRESS, ListenersConfig};
pub(crate) use parts::{Files, Parts};
pub(crate) use table::{ADMIN, places};

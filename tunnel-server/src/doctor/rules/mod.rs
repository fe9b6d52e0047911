//! Rules of other programs that take the connections that the redirect makes, or keep agents out.

mod conflict;
mod iptables;
mod kernel;
mod model;
mod nft;
mod read;
#[cfg(test)]
mod tests;

pub(super) use conflict::{filtered, taken};
pub(super) use model::Ruleset;
#[cfg(test)]
use read::Rules;
pub(super) use read::read;

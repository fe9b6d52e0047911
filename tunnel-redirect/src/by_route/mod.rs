//! Takes connections for edge nodes by route: policy routing leads them to this host's own listener, with the true
//! address, whatever sent them. Used for all that does not pass the hooks at connect(): pods' packets, and Services
//! that a translation leads to an edge node.

mod device;
mod messages;
mod probe;
mod steady;
mod system;
mod uplinks;
mod wanted;

pub use probe::is_led_here;
pub(super) use steady::{ByRoute, Watched, remove_leftovers};
pub(super) use system::host_netns;
pub(super) use wanted::Wanted;

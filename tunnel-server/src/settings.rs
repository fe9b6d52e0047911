//! Settings that change while the server runs: the port lists of the ConfigMap.

pub use crate::kube::settings::{Doors, Settings};

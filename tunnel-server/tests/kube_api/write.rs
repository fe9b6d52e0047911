//! Objects that the server writes to the cluster.

mod csr;
mod dns;
mod events;
mod lease;
mod service;
mod tunnels;

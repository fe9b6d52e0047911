//! The Kubernetes side against a scripted API server over real HTTP: what a real one cannot be made to do on demand.

mod identity;
mod nodes;
mod scripted;
mod settings;
mod writers;

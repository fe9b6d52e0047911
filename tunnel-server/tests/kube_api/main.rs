//! The Kubernetes side against a scripted API server over real HTTP: what a real one cannot be made to do on demand.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod identity;
mod nodes;
mod scripted;
mod settings;
mod writers;

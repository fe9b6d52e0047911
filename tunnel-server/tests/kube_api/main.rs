//! The Kubernetes side against a fake API server over real HTTP, with outages that a real one cannot produce on demand.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod cache;
mod endpoints;
mod fixture;
mod read;
mod start;
mod write;

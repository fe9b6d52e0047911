//! The scenarios, by subject.
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Result;

use crate::testbed::Testbed;

mod common;
mod deploy;
mod docs;
mod hostile;
mod http;
mod https;
mod identity;
mod kubernetes;
mod load;
mod mend;
mod operating;
mod path;
mod reload;
mod restart;
mod testbed_itself;

/// A running scenario.
pub type Run<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// One scenario.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Its name, `subject::what_is_true`.
    pub name: &'static str,
    /// Whether `--quick` includes it.
    pub quick: bool,
    /// Edge hosts that it needs.
    pub edges: u8,
    /// Whether it needs one more with the address of edge 1, in a site of its own.
    pub twin: bool,
    /// When its process is killed.
    pub limit: Duration,
    /// The scenario itself, run inside the cloud's cgroup and namespace.
    pub run: for<'a> fn(&'a Testbed) -> Run<'a>,
}

impl Scenario {
    const fn new(name: &'static str, edges: u8, run: for<'a> fn(&'a Testbed) -> Run<'a>) -> Self {
        Self { name, quick: false, edges, twin: false, limit: Duration::from_secs(120), run }
    }

    const fn quick(mut self) -> Self {
        self.quick = true;
        self
    }

    const fn twin(mut self) -> Self {
        self.twin = true;
        self
    }

    const fn limit(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }
}

/// Every scenario.
pub fn all() -> impl Iterator<Item = &'static Scenario> {
    [
        testbed_itself::ALL,
        path::ALL,
        load::ALL,
        restart::ALL,
        identity::ALL,
        http::ALL,
        https::ALL,
        reload::ALL,
        hostile::ALL,
        operating::ALL,
        deploy::ALL,
        docs::ALL,
        mend::ALL,
        kubernetes::ALL,
    ]
    .into_iter()
    .flatten()
}

//! Many agents, many nodes, many connections: Postern alone.
use anyhow::Result;

use super::line::{Group, Line};
use super::load::Effort;
use super::options::Options;
use super::record::Record;
use crate::testbed::Testbed;

/// The lines of this group.
pub fn lines(_group: Group) -> Vec<Line> {
    Vec::new()
}

/// Measures them once.
pub async fn measure(_: &Testbed, _: &Options, _: &Effort, _: &mut Record) -> Result<()> {
    Ok(())
}

//! The programs of this and of the previous version with each other. They assert bytes, and no words of a log or of a
//! command, which may change with each version.
mod cluster;
mod fleet;
mod pair;
mod replaced;

use anyhow::{Result, ensure};
use postern_testbed::process::{Process, Version};

use cluster::a_cluster_is_upgraded_and_brought_back;
use fleet::{
    a_redirector_of_the_previous_version, a_server_of_the_previous_version_and_a_redirector,
    the_agent_is_at_a_server_of_the_previous_version, the_client_is_at_a_server_of_the_previous_version,
};
use pair::{a_server_of_the_previous_version, an_agent_of_the_previous_version};
use replaced::{
    an_agent_is_upgraded_and_brought_back, an_agent_is_upgraded_before_its_server,
    each_version_reads_what_the_other_has_stored, servers_are_upgraded_and_brought_back,
};

scenarios! {
    an_agent_of_the_previous_version(previous, limit = 180),
    a_server_of_the_previous_version(previous, limit = 180),
    the_agent_is_at_a_server_of_the_previous_version(previous, limit = 180),
    the_client_is_at_a_server_of_the_previous_version(previous, limit = 180),
    a_redirector_of_the_previous_version(previous, limit = 180),
    a_server_of_the_previous_version_and_a_redirector(previous, limit = 180),
    servers_are_upgraded_and_brought_back(previous, limit = 180),
    an_agent_is_upgraded_and_brought_back(previous, limit = 180),
    an_agent_is_upgraded_before_its_server(previous, limit = 180),
    each_version_reads_what_the_other_has_stored(previous, edges = 2, limit = 180),
    a_cluster_is_upgraded_and_brought_back(cluster_and_previous, limit = 300),
}

/// Fails if the process runs the program of another version.
fn expect_version(process: &Process, version: Version, name: &str) -> Result<()> {
    let (runs, wanted) = (process.program()?, std::fs::canonicalize(version.program(name)?)?);
    ensure!(runs == wanted, "{} runs {}, not {}", process.name(), runs.display(), wanted.display());
    Ok(())
}

//! Rotations of the CA as in docs/tasks/certificates.md: each step follows once the previous one has reached every agent.
use std::fs;

use anyhow::{Context as _, Result};
use postern_testbed::agent::Agent;
use postern_testbed::server::Server;

#[derive(Debug, Default)]
pub(super) enum Rotation {
    #[default]
    Done,
    Introduced,
    /// With the agents' certificates from before the activation.
    Activated(Vec<String>),
}

impl Rotation {
    /// Takes the next step if it is due.
    pub(super) fn step(&mut self, server: &Server<'_>, agents: &[Agent<'_>]) -> Result<()> {
        let read = |file: &str| -> Result<Vec<String>> {
            let files = agents.iter().map(|agent| fs::read_to_string(agent.state_dir().join(file)));
            files.map(|text| text.with_context(|| format!("an agent's {file}"))).collect()
        };
        match self {
            Self::Done => {
                server.run(&["ca", "introduce"])?;
                *self = Self::Introduced;
            }
            Self::Introduced => {
                if read("ca.crt")?.iter().all(|roots| roots.matches("BEGIN CERTIFICATE").count() == 2) {
                    let before = read("agent.crt")?;
                    server.run(&["ca", "activate"])?;
                    *self = Self::Activated(before);
                }
            }
            Self::Activated(before) => {
                if read("agent.crt")?.iter().zip(before).all(|(now, before)| now != before) {
                    // This server does not know the certificates that the others have issued.
                    server.run(&["ca", "retire", "--force"])?;
                    *self = Self::Done;
                }
            }
        }
        Ok(())
    }
}

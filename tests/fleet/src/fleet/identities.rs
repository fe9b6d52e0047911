//! Steps about identities: copied disks, and nodes that are revoked.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tunnel_runtime::files::create_private_directory;
use tunnel_server::pki::{Revocation, RevocationStore};

use super::{Fleet, Host, RIGHT};
use crate::agent;
use crate::model::Model;
use crate::plan::TwinEnd;
use crate::revocations;
use crate::server;

/// As a disk is copied while its agent runs.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        std::fs::remove_dir_all(to)?;
    }
    create_private_directory(to)?;
    if from.exists() {
        for file in std::fs::read_dir(from)? {
            let file = file?;
            std::fs::copy(file.path(), to.join(file.file_name()))?;
        }
    }
    Ok(())
}

impl Fleet {
    /// A copy of an agent's disk runs on another host.
    pub(super) fn start_twin(&mut self, index: usize, delay: Duration, model: &mut Model) -> Result<()> {
        let host = Host::Twin(index);
        copy(&self.state_at(Host::Agent(index)), &self.state_at(host))?;
        for server in 0..self.plan.servers {
            self.net.set_delay(host.address(), server::address(server).ip(), delay);
        }
        host.clock().set(RIGHT.now());
        let twin = self.how_to_start(index, host, 0).start()?;
        self.twins.insert(index, twin);
        model.doubled(self, index);
        Ok(())
    }

    pub(super) fn end_twin(&mut self, index: usize, end: TwinEnd, model: &mut Model) {
        match end {
            TwinEnd::Stopped => {
                if let Some(twin) = self.twins.get(&index) {
                    twin.stop();
                }
            }
            TwinEnd::Killed => drop(self.twins.remove(&index)),
            TwinEnd::PowerLoss => {
                for server in 0..self.plan.servers {
                    self.net.forget(agent::twin(index), server::address(server).ip());
                }
                self.twins.remove(&index);
            }
        }
        model.single(index);
    }

    /// An operator revokes a node.
    pub(super) fn revoke(&mut self, agent: usize, server: usize, model: &mut Model) -> Result<()> {
        let record = revocations::record(None, &self.identities[agent].node)?;
        self.say(server, &record)?;
        self.revoked.insert(agent, record);
        model.revoked(agent, server);
        Ok(())
    }

    /// The operator readmits it. Without an API server its agent then starts again without its files and with another
    /// certificate.
    pub(super) fn readmit(&mut self, agent: usize, server: usize, model: &mut Model) -> Result<()> {
        let before = self.revoked.remove(&agent);
        let record = revocations::record(before.as_ref(), &self.identities[agent].node)?;
        self.say(server, &record)?;
        if self.cluster.is_none() {
            self.identities[agent] = agent::identity(&self.ca, agent, record.issued_after())?;
            self.agents[agent].clear();
            if self.plan.may_lower_epochs() {
                model.epochs_may_fall();
            }
            let dir = self.state_at(Host::Agent(agent));
            if dir.exists() {
                std::fs::remove_dir_all(dir)?;
            }
            self.start_agent(agent)?;
        }
        model.readmitted(agent);
        Ok(())
    }

    /// In the cluster, or on the host of a server.
    fn say(&self, server: usize, record: &Revocation) -> Result<()> {
        match &self.cluster {
            Some(cluster) => cluster.set_revocation(record),
            None => Ok(RevocationStore::new(&self.state_at(Host::Server(server)))
                .merge(std::slice::from_ref(record))?),
        }
    }
}

//! The steps of a plan: each changes the fleet.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use tokio::time::Instant;
use tunnel_runtime::blocking::set_disk;
use tunnel_runtime::clock::Clock;

use super::{AT_ONCE, Fleet, HARMLESS, Host, RIGHT, hosts};
use crate::agent::{self, Agent};
use crate::model::Model;
use crate::plan::{PathFault, Step};
use crate::server::{self, Server};

fn jump(clock: Clock, from: SystemTime, ahead: bool, by: Duration) {
    clock.set(if ahead { from + by } else { from - by });
}

impl Fleet {
    pub(super) fn begin(&mut self, step: &Step, model: &mut Model) -> Result<()> {
        match step {
            Step::Silence { agent, server, .. } => {
                self.silence(Host::Agent(*agent), Host::Server(*server));
                model.silenced(self, *agent, *server);
            }
            Step::Offline { agent, .. } => {
                for server in 0..self.plan.servers {
                    self.silence(Host::Agent(*agent), Host::Server(server));
                }
            }
            Step::Partition { one, other, .. } => {
                self.silence(Host::Server(*one.min(other)), Host::Server(*one.max(other)));
            }
            Step::Forget { agent, server } => {
                self.net.forget(agent::host(*agent), server::address(*server).ip());
                model.disturbed(Host::Agent(*agent), Some(Host::Server(*server)));
            }
            Step::Reset { agent, server } => {
                self.net.reset(agent::host(*agent), server::address(*server).ip());
                model.disturbed(Host::Agent(*agent), Some(Host::Server(*server)));
            }
            Step::Crash { server, .. } => {
                model.killed(self, *server);
                self.servers[*server].clear();
            }
            Step::Upgrade { server, how } => {
                // One that is down has nothing to hand over. A cluster keeps two of a server at most.
                let waits = self.plan.in_cluster && self.servers[*server].len() > 1;
                if let Some(before) = self.servers[*server].last().filter(|_| !waits) {
                    before.relay(how.relays);
                    self.start_server(*server)?;
                }
            }
            Step::Replace { agent, how } => {
                // One that is down has nothing to hand over, and there are two of a node at most. On a host where each hears of
                // the other only after seconds, one after the other would give up before it is answered. While a server hears of its
                // successor so late, it does not know either that an agent's successor is attached there.
                let servers = (0..self.plan.servers).map(Host::Server);
                let busy = servers.chain([Host::Agent(*agent)]).any(|host| self.busy(host) > AT_ONCE);
                let may = !busy && !self.plan.is_of_konnectivity(*agent);
                if let ([before], true) = (&self.agents[*agent][..], may) {
                    before.relay(how.relays);
                    self.start_agent(*agent)?;
                }
            }
            Step::Restart { agent, .. } => self.agents[*agent].clear(),
            Step::Reinstall { agent, .. } => {
                self.agents[*agent].clear();
                if self.plan.may_lower_epochs() {
                    model.epochs_may_fall();
                }
                std::fs::remove_dir_all(self.dir.join(format!("agent-{agent}")))?;
            }
            Step::PowerLoss { agent, .. } => {
                for server in 0..self.plan.servers {
                    self.net.forget(agent::host(*agent), server::address(server).ip());
                }
                self.agents[*agent].clear();
            }
            Step::Twin { agent, delay, .. } => self.start_twin(*agent, *delay, model)?,
            Step::TwinPath { agent, server, how, .. } => {
                let (twin, at) = (Host::Twin(*agent), Host::Server(*server));
                match how {
                    PathFault::Silence => self.silence(twin, at),
                    PathFault::Forget => self.net.forget(twin.address(), at.address()),
                    PathFault::Reset => self.net.reset(twin.address(), at.address()),
                }
                model.disturbed(twin, Some(at));
            }
            Step::Revoke { agent, server, .. } => self.revoke(*agent, *server, model)?,
            Step::Disk { takes, lasts } => {
                let takes = *takes;
                set_disk(move || takes);
                // A write may wait for another one.
                self.unstored = self.unstored.max(Instant::now() + *lasts + takes * 2);
                model.excused(*lasts);
            }
            Step::Clock { ahead, by } => {
                self.clocks_jump(model);
                let twins = self.twins.keys().copied().map(Host::Twin);
                for clock in hosts(&self.plan).chain(twins).map(Host::clock).chain([RIGHT]) {
                    jump(clock, clock.now(), *ahead, *by);
                }
            }
            Step::WrongClock { host, ahead, by, .. } => {
                *self.wrong.entry(*host).or_default() += 1;
                self.clocks_jump(model);
                jump(host.clock(), RIGHT.now(), *ahead, *by);
                if *by > HARMLESS {
                    model.wrong(*host);
                }
            }
            Step::NoApi { server, silent, .. } => {
                if let Some(cluster) = &mut self.cluster {
                    cluster.cut(*server, *silent);
                }
            }
            Step::NoNode { agent, .. } => {
                if let Some(cluster) = &self.cluster {
                    cluster.delete_node(&self.identities[*agent].node);
                    model.deleted(*agent);
                }
            }
        }
        Ok(())
    }

    pub(super) fn end(&mut self, step: &Step, model: &mut Model) -> Result<()> {
        match step {
            Step::Silence { agent, server, .. } => {
                self.heal(Host::Agent(*agent), Host::Server(*server));
                model.disturbed(Host::Agent(*agent), Some(Host::Server(*server)));
            }
            Step::Offline { agent, .. } => {
                for server in 0..self.plan.servers {
                    self.heal(Host::Agent(*agent), Host::Server(server));
                }
                model.disturbed(Host::Agent(*agent), None);
            }
            Step::Partition { one, other, .. } => {
                self.heal(Host::Server(*one.min(other)), Host::Server(*one.max(other)));
                model.disturbed(Host::Server(*one), Some(Host::Server(*other)));
            }
            Step::Crash { server, .. } => {
                self.restart_server(*server, model)?;
            }
            Step::Restart { agent, .. } | Step::PowerLoss { agent, .. } | Step::Reinstall { agent, .. } => {
                self.restart_agent(*agent, model)?;
                model.disturbed(Host::Agent(*agent), None);
            }
            Step::Replace { agent, .. } => {
                self.set_busy(Host::Agent(*agent), None);
                if let Some((last, before)) = self.agents[*agent].split_last() {
                    before.iter().for_each(Agent::stop);
                    if !last.is_attached() {
                        model.disturbed(Host::Agent(*agent), None);
                    }
                }
                self.restart_agent(*agent, model)?;
            }
            Step::Disk { .. } => {
                let disk = self.plan.disk;
                set_disk(move || disk);
            }
            Step::Upgrade { server, .. } => {
                self.set_busy(Host::Server(*server), None);
                if let Some((_, before)) = self.servers[*server].split_last() {
                    before.iter().for_each(Server::stop);
                }
                self.restart_server(*server, model)?;
            }
            Step::WrongClock { host, .. } => {
                let reasons = self.wrong.entry(*host).or_default();
                *reasons -= 1;
                if *reasons == 0 {
                    self.clocks_jump(model);
                    host.clock().set(RIGHT.now());
                    model.right(*host);
                }
            }
            Step::NoApi { server, silent, .. } => {
                if let Some(cluster) = &mut self.cluster {
                    cluster.mend(*server, *silent);
                    model.reached(*server);
                }
            }
            Step::NoNode { agent, .. } => {
                if let Some(cluster) = &self.cluster {
                    cluster.set_node(*agent, &self.identities[*agent].node, Some(RIGHT.now()));
                    model.made(*agent);
                }
            }
            Step::Twin { agent, end, .. } => self.end_twin(*agent, *end, model),
            Step::TwinPath { agent, server, how: PathFault::Silence, .. } => {
                self.heal(Host::Twin(*agent), Host::Server(*server));
                model.disturbed(Host::Twin(*agent), Some(Host::Server(*server)));
            }
            Step::Revoke { agent, server, .. } => self.readmit(*agent, *server, model)?,
            Step::TwinPath { .. } | Step::Forget { .. } | Step::Reset { .. } | Step::Clock { .. } => {}
        }
        Ok(())
    }
}

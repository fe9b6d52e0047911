//! Checks of what servers know of each other.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use tokio::time::Instant;

use super::{KNOWN, Model, SILENCE};
use crate::fleet::{Fleet, Host};
use crate::server::Server;
use crate::view::OfServer;

impl Model {
    /// A server that does not answer is given up: another one may have its nodes as well.
    pub(super) fn given_up(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        let Some(seen) = self.view.server(index) else { return Ok(()) };
        for other in &seen.linked {
            let silence = fleet.silence_between(Host::Server(index), Host::Server(*other));
            ensure!(
                silence.is_none_or(|lasts| lasts < SILENCE),
                "{} is linked with server-{other}, which is silent for {SILENCE:?}",
                server.id
            );
        }
        Ok(())
    }

    /// The other servers know whom this one has.
    pub(super) fn known(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        for other in 0..self.servers {
            let (Some(follower), Some(seen)) = (fleet.server(other), self.view.server(other)) else {
                continue;
            };
            if other == index
                || !self.goes_on(other)
                || self.may_not_know_nodes(fleet, other)
                || !self.is_due(fleet, Host::Server(index), Host::Server(other))
            {
                continue;
            }
            for session in server.runtime.sessions.all() {
                let Some(node) = self.nodes.iter().position(|node| *node == session.node) else { continue };
                let processes = self.view.servers[index].iter();
                let mut having = processes.filter(|process| process.epochs[node].is_some());
                // New links go to the process that stays. The agent may still be attached to the one that stops.
                let goes_on = self.view.servers[index].iter().rev().find(|process| process.is_settled);
                let moves =
                    goes_on.is_some_and(|it| it.process != server.process) && having.clone().count() == 1;
                // A process takes a moment to tell the other servers of a new session.
                let has_just = |process: &Server| {
                    process.runtime.sessions.get(&session.node).is_some_and(|own| own.since.elapsed() < KNOWN)
                };
                ensure!(
                    fleet.servers[index].iter().any(has_just)
                        || moves
                        || having.any(|process| seen.holders[node].contains(&process.process)),
                    "{} does not know that {} has {}",
                    follower.id,
                    server.id,
                    session.node
                );
            }
        }
        Ok(())
    }

    /// A server's knowledge of another one is at most [`KNOWN`] old.
    pub(super) fn outdated(&mut self, fleet: &Fleet) -> Result<()> {
        let mut stale = BTreeMap::new();
        for index in 0..self.servers {
            let Some(follower) = self.view.server(index) else { continue };
            for (node, holders) in follower.holders.iter().enumerate() {
                for holder in holders {
                    let due = self.is_due(fleet, Host::Server(index), Host::Server(holder.0));
                    let mut processes = self.view.servers[holder.0].iter();
                    let has = |of: &OfServer| of.process == *holder && of.epochs[node].is_some();
                    if due && !processes.any(has) {
                        let key = (follower.process, *holder, node);
                        let since = self.stale.get(&key).copied().unwrap_or_else(Instant::now);
                        ensure!(
                            since.elapsed() < KNOWN,
                            "server-{}.{} believes that server-{}.{} has {}",
                            key.0.0,
                            key.0.1,
                            holder.0,
                            holder.1,
                            self.nodes[node]
                        );
                        stale.insert(key, since);
                    }
                }
            }
        }
        self.stale = stale;
        Ok(())
    }
}

//! Checks of what is there at the end.

use anyhow::{Context as _, Result, ensure};
use tokio::runtime::Handle;

use super::Model;
use crate::agent::Sessions;
use crate::client;
use crate::fleet::{Fleet, Host, RIGHT};

/// Tasks of a server, of each of its links with other servers at both ends, of an agent, and of each of its links likewise.
const TASKS: [usize; 4] = [7, 7, 6, 6];
/// The same of a server's port for konnectivity's agents, of such an agent, and of each of its streams at both ends.
const TASKS_OF_KONNECTIVITY: [usize; 3] = [1, 2, 11];

impl Model {
    /// Checks that nothing is left over.
    pub(crate) fn finish(&mut self, fleet: &Fleet) -> Result<()> {
        client::nothing_is_left(fleet)?;
        self.all_is_told(fleet)?;
        let (servers, agents, each) = (fleet.plan.servers, fleet.plan.agents, fleet.plan.links);
        for (index, processes) in fleet.servers.iter().enumerate() {
            ensure!(processes.len() == 1, "server-{index} has {} processes", processes.len());
        }
        for (index, processes) in fleet.agents.iter().enumerate() {
            ensure!(processes.len() == 1, "edge-{index} has {} processes", processes.len());
        }
        ensure!(
            fleet.twins.is_empty(),
            "agents are left on the hosts of copied disks: {:?}",
            fleet.twins.keys()
        );
        for (index, agent) in fleet
            .agents
            .iter()
            .enumerate()
            .flat_map(|(index, all)| all.iter().map(move |agent| (index, agent)))
        {
            let tasks = agent.runtime.tasks.len();
            let (links, keeper) = match &agent.sessions {
                Sessions::Links(running) => {
                    let running = running.get().context("an agent has no identity")?;
                    (running.links.status().len(), &running.keeper)
                }
                Sessions::OfKonnectivity(streams) => {
                    let status = streams.status();
                    let seen = (tasks, status.attached.len(), status.server_count);
                    ensure!(
                        seen == (1, each, Some(servers)),
                        "an agent of konnectivity's has (tasks, streams, servers) {seen:?}"
                    );
                    continue;
                }
            };
            ensure!((tasks, links) == (each, each), "an agent has {tasks} tasks and {links} links");
            let identity = keeper.current();
            let (validity, now) = (identity.validity, RIGHT.now());
            // One whose clock was ahead may have taken a certificate of a server whose clock was ahead too.
            let excused = self.righted.contains_key(&Host::Agent(index));
            ensure!(
                excused || (validity.not_before <= now && now < validity.renew_at()),
                "the certificate of {} is of no use: {validity:?}",
                identity.node
            );
        }
        for server in fleet.servers.iter().flatten() {
            let linked: Vec<_> =
                server.runtime.peers.all().iter().map(|peer| peer.server_id.clone()).collect();
            ensure!(linked.len() == servers - 1, "{} is linked with {linked:?}", server.id);
        }
        let open = fleet.net.open();
        let wanted = each * agents + servers * (servers - 1);
        ensure!(open.len() == wanted, "{} connections instead of {wanted}: {open:?}", open.len());
        if fleet.cluster.is_some() {
            // Watches have tasks as well, more of them where a process writes.
            return Ok(());
        }
        let of_konnectivity = fleet.plan.of_konnectivity;
        let others = agents - of_konnectivity;
        let numbers = [servers, servers * (servers - 1), others, each * others];
        let ports = if of_konnectivity > 0 { servers } else { 0 };
        let reading = if fleet.plan.reads.is_some() { servers } else { 0 };
        let more = [ports, of_konnectivity, each * of_konnectivity];
        let tasks_of = numbers.iter().zip(TASKS).chain(more.iter().zip(TASKS_OF_KONNECTIVITY));
        let wanted = reading + tasks_of.map(|(number, each)| number * each).sum::<usize>();
        let tasks = Handle::current().metrics().num_alive_tasks();
        ensure!(tasks == wanted, "{tasks} tasks instead of {wanted}");
        Ok(())
    }
}

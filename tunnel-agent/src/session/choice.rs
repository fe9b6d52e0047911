//! Chooses the servers that a node has sessions with, if not all, by rendezvous hashing. Every agent ranks the servers
//! by a hash of its node's name and the server's address. So a fleet spreads over them without any coordination, and
//! only the agents of a server that comes or goes move.

use std::time::Duration;

use sha2::{Digest, Sha256};
use tunnel_runtime::NodeName;

/// Maximum wait for an attempt to reach a server before the next one is dialled too.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time that the better servers must have had sessions before a substitute is left.
const SETTLED: Duration = Duration::from_secs(30);

/// Sorts the servers by preference. A node that is attached to all of them has none.
pub(super) fn rank(node: &NodeName, mut servers: Vec<String>, wanted: usize) -> Vec<String> {
    if wanted != usize::MAX {
        // The address decides between equal hashes.
        servers.sort_by_cached_key(|server| (std::cmp::Reverse(weight(node, server)), server.clone()));
    }
    servers
}

/// Hash of a node and a server. Must be the same in every version of the agent.
fn weight(node: &NodeName, server: &str) -> u64 {
    // Neither contains a NUL.
    let hash = Sha256::new().chain_update(node.as_str()).chain_update([0u8]).chain_update(server).finalize();
    hash.iter().take(8).fold(0, |weight, byte| weight << 8 | u64::from(*byte))
}

/// Present usefulness of a server, with the time since it changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Not dialled.
    Idle,
    /// Has a working session.
    Serves(Duration),
    /// Has no session yet, or has just lost it.
    Awaited(Duration),
    /// Not worth waiting for: it is silent, stops, refuses connections, or is attached through another address.
    Passed,
}

/// Returns how many of the ranked servers to dial, and whether those after them may be left.
pub(super) fn reach(ranked: impl IntoIterator<Item = Use>, wanted: usize) -> (usize, bool) {
    let (mut counted, mut all, mut settled) = (0, 0, true);
    for server in ranked {
        if counted == wanted {
            return (all, settled);
        }
        all += 1;
        match server {
            Use::Serves(time) => settled &= time >= SETTLED,
            Use::Idle => settled = false,
            Use::Awaited(time) if time < PATIENCE => settled = false,
            Use::Awaited(_) | Use::Passed => continue,
        }
        counted += 1;
    }
    (all, settled && counted == wanted)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn chosen(node: &NodeName, servers: &[String], number: usize) -> Vec<String> {
        let mut ranked = rank(node, servers.to_vec(), number);
        ranked.truncate(number);
        ranked
    }

    fn nodes(number: usize) -> Vec<NodeName> {
        (0..number).map(|n| format!("edge-{n}").parse().unwrap()).collect()
    }

    fn servers(number: usize) -> Vec<String> {
        (1..=number).map(|n| format!("192.0.2.{n}:31008")).collect()
    }

    #[test]
    fn a_fleet_balances() {
        for (number, links) in [(3, 1), (3, 2), (5, 1), (5, 2), (5, 4)] {
            let servers = servers(number);
            let mut agents = HashMap::<String, usize>::new();
            for node in nodes(10_000) {
                chosen(&node, &servers, links)
                    .into_iter()
                    .for_each(|server| *agents.entry(server).or_default() += 1);
            }
            let share = 10_000 * links / number;
            for server in &servers {
                let has = agents[server];
                assert!(
                    has.abs_diff(share) * 100 < share * 5,
                    "{server} of {number} has {has}, not about {share}"
                );
            }
        }
    }

    #[test]
    fn hashes_are_the_same_in_every_version() {
        let node = "edge-1".parse().unwrap();
        let ranked = rank(&node, servers(5), 1);
        let last: Vec<_> = ranked.iter().map(|server| &server[8..9]).collect();
        assert_eq!(last.concat(), "13524");
        assert_eq!(rank(&node, servers(5), usize::MAX), servers(5), "as they are given");
    }

    proptest! {
        #[test]
        fn only_the_agents_of_a_server_that_goes_or_comes_move(
            node in "[a-z0-9]{1,40}", number in 2usize..8, links in 1usize..4, gone in any::<prop::sample::Index>(),
        ) {
            let node: NodeName = node.parse().unwrap();
            let all = servers(number);
            let mut fewer = all.clone();
            let gone = fewer.remove(gone.index(number));
            let (with, without) = (chosen(&node, &all, links), chosen(&node, &fewer, links));
            let kept: Vec<_> = with.iter().filter(|server| **server != gone).cloned().collect();
            // Those that are still there keep their order. At most one takes the place of the one that is gone.
            prop_assert!(without.starts_with(&kept));
            prop_assert_eq!(without.len(), links.min(number - 1));
            if !with.contains(&gone) {
                prop_assert_eq!(with, without);
            }
        }

        #[test]
        fn the_order_of_the_addresses_does_not_matter(node in "[a-z0-9]{1,40}", mut servers in Just(servers(5)).prop_shuffle()) {
            let node: NodeName = node.parse().unwrap();
            let ranked = rank(&node, servers.clone(), 2);
            servers.sort();
            prop_assert_eq!(ranked, rank(&node, servers, 2));
        }
    }

    #[test]
    fn about_a_share_moves_to_a_server_that_comes() {
        let moved = nodes(10_000)
            .iter()
            .filter(|node| chosen(node, &servers(4), 1) != chosen(node, &servers(5), 1))
            .count();
        assert!((1_900..2_100).contains(&moved), "{moved}");
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_next_takes_the_place_of_one_that_does_not_serve() {
        let serves = Use::Serves(LONG);
        for (ranked, wanted, dialled, may_leave) in [
            (vec![Use::Idle; 3], 1, 1, false),
            (vec![serves, Use::Idle, Use::Idle], 1, 1, true),
            (vec![serves, serves, Use::Idle], 2, 2, true),
            // Silent, stopping or down: the next one at once.
            (vec![Use::Passed, Use::Idle, Use::Idle], 1, 2, false),
            (vec![Use::Passed, serves, Use::Idle], 1, 2, true),
            (vec![serves, Use::Passed, Use::Idle], 2, 3, false),
            // Being dialled, or lost: a little later.
            (vec![Use::Awaited(Duration::ZERO), Use::Idle], 1, 1, false),
            (vec![Use::Awaited(PATIENCE), Use::Idle], 1, 2, false),
            // None works: all are tried, and none is left.
            (vec![Use::Passed, Use::Awaited(LONG), Use::Passed], 1, 3, false),
            (vec![serves, Use::Passed], 2, 2, false),
            // Back, but not for long: its substitute stays.
            (vec![Use::Serves(Duration::ZERO), serves], 1, 1, false),
            (vec![Use::Awaited(Duration::ZERO), serves], 1, 1, false),
            (vec![serves; 3], usize::MAX, 3, false),
            (vec![], 1, 0, false),
        ] {
            assert_eq!(reach(ranked.clone(), wanted), (dialled, may_leave), "{wanted} of {ranked:?}");
        }
    }
}

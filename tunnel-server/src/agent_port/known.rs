//! Sources from which agents have attached, or servers and redirectors have linked: their handshakes do not compete with
//! those from unknown sources.

use std::collections::HashMap;
use std::net::IpAddr;

use parking_lot::Mutex;

use crate::admission::{decrement, source_key};

/// Maximum number of remembered clients.
const MOST: usize = 1 << 17;

/// The source of each client's last session or link, for as long as this process lives. There is one per client, so that
/// one with many addresses cannot push out the others.
#[derive(Debug, Default)]
pub(super) struct KnownSources(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By what the client is called in the log.
    of_client: HashMap<String, IpAddr>,
    /// Number of clients of each source.
    clients: HashMap<IpAddr, u32>,
}

impl KnownSources {
    pub(super) fn remember(&self, client: &str, address: IpAddr) {
        let source = source_key(address);
        let mut known = self.0.lock();
        if known.of_client.get(client) == Some(&source) {
            return;
        }
        // Forgets any other one: among so many, one that competes with unknown sources once makes no difference.
        if known.of_client.len() >= MOST
            && !known.of_client.contains_key(client)
            && let Some(other) = known.of_client.keys().next().cloned()
        {
            known.forget(&other);
        }
        known.forget(client);
        known.of_client.insert(client.to_owned(), source);
        *known.clients.entry(source).or_default() += 1;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().clients.is_empty()
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.0.lock().clients.contains_key(&source_key(address))
    }
}

impl Known {
    fn forget(&mut self, client: &str) {
        if let Some(source) = self.of_client.remove(client) {
            decrement(&mut self.clients, &source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: usize) -> String {
        format!("agent of edge-{number}")
    }

    #[test]
    fn a_source_is_known_while_it_is_some_nodes_last_one() {
        let (known, site, other) = (KnownSources::default(), [10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        assert!(!known.contains(site));
        known.remember(&node(1), site);
        known.remember(&node(2), site);
        known.remember(&node(1), other);
        assert!(known.contains(site) && known.contains(other));
        known.remember(&node(2), other);
        assert!(!known.contains(site) && known.contains(other));
        assert!(known.contains("::ffff:10.0.0.2".parse().unwrap()));
    }

    #[test]
    fn memory_is_bounded_and_an_agent_with_many_addresses_pushes_nobody_out() {
        let known = KnownSources::default();
        known.remember(&node(0), [192, 0, 2, 1].into());
        for number in 0..10_000u32 {
            known.remember(&node(1), number.to_be_bytes().into());
        }
        assert!(known.contains([192, 0, 2, 1].into()));
        assert_eq!(known.0.lock().clients.len(), 2);
        for number in 0..MOST + 10 {
            known.remember(&node(number), [192, 0, 2, 1].into());
        }
        let known = known.0.lock();
        assert_eq!((known.of_client.len(), known.clients.len()), (MOST, 1));
    }
}

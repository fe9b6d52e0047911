//! Which changes of tunnels are news: pure, with the time as an argument.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;
use tunnel_core::identity::NodeName;

/// How often the end of a node's tunnel is told at once. One that follows sooner may be a link that flaps.
const OFTEN: Duration = Duration::from_secs(60);
/// A tunnel that may be flapping has ended when it has been away for so long.
const AWAY: Duration = Duration::from_secs(10);

/// What was told of each node's tunnel.
#[derive(Debug, Default)]
pub(super) struct News(HashMap<NodeName, Story>);

#[derive(Debug)]
struct Story {
    live: bool,
    /// Since when it is live, or is not.
    since: Instant,
    /// Whether the last word was that it is up.
    told: bool,
    told_down: Option<Instant>,
}

impl Story {
    /// When the present state is news; None while it is what was told.
    fn due(&self) -> Option<Instant> {
        match (self.live, self.told) {
            (true, false) => Some(self.since),
            (false, true) => {
                let away = self.since + AWAY;
                Some(self.told_down.map_or(self.since, |told| (told + OFTEN).max(self.since).min(away)))
            }
            _ => None,
        }
    }
}

impl News {
    /// Takes up which nodes have a tunnel.
    pub(super) fn observe(&mut self, now: Instant, live: &HashSet<NodeName>) {
        for (node, story) in &mut self.0 {
            let is = live.contains(node);
            if story.live != is {
                (story.live, story.since) = (is, now);
            }
        }
        for node in live {
            if !self.0.contains_key(node) {
                let story = Story { live: true, since: now, told: false, told_down: None };
                self.0.insert(node.clone(), story);
            }
        }
        // Of a node that is gone nothing has to be remembered but that the end was told just now.
        self.0.retain(|_, story| {
            story.live || story.told || story.told_down.is_some_and(|told| now < told + OFTEN)
        });
    }

    /// When there will be news without any further change.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0.values().filter_map(Story::due).min()
    }

    /// The news, each once: the node, and whether its tunnel is up.
    pub(super) fn take(&mut self, now: Instant) -> Vec<(NodeName, bool)> {
        let due = self.0.iter_mut().filter(|(_, story)| story.due().is_some_and(|due| due <= now));
        due.map(|(node, story)| {
            story.told = story.live;
            if !story.live {
                story.told_down = Some(now);
            }
            (node.clone(), story.live)
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that is up or down, second by second; gives the seconds at which something was told.
    struct Told {
        news: News,
        start: Instant,
        said: Vec<(u64, bool)>,
    }

    impl Told {
        fn new() -> Self {
            Self { news: News::default(), start: Instant::now(), said: Vec::new() }
        }

        fn at(&mut self, second: u64, up: bool) {
            let now = self.start + Duration::from_secs(second);
            while let Some(due) = self.news.due().filter(|due| *due < now) {
                self.collect(due);
            }
            let live = if up { HashSet::from(["edge-1".parse().unwrap()]) } else { HashSet::new() };
            self.news.observe(now, &live);
            self.collect(now);
        }

        fn collect(&mut self, now: Instant) {
            let second = (now - self.start).as_secs();
            self.said.extend(self.news.take(now).into_iter().map(|(_, up)| (second, up)));
        }
    }

    #[test]
    fn up_and_down_are_told_at_once() {
        let mut told = Told::new();
        told.at(0, true);
        told.at(5, true);
        told.at(100, false);
        told.at(200, false);
        told.at(300, true);
        assert_eq!(told.said, [(0, true), (100, false), (300, true)]);
    }

    #[test]
    fn a_link_that_flaps_is_told_once_a_minute() {
        let mut told = Told::new();
        told.at(0, true);
        for second in (10..310).step_by(10) {
            told.at(second, false);
            told.at(second + 3, true);
        }
        let downs: Vec<_> = told.said.iter().filter(|(_, up)| !up).map(|(second, _)| *second).collect();
        assert_eq!(downs, [10, 70, 130, 190, 250]);
        assert_eq!(told.said.len(), 1 + 2 * downs.len(), "{:?}", told.said);
    }

    #[test]
    fn one_that_flapped_and_stays_away_is_told() {
        let mut told = Told::new();
        told.at(0, true);
        told.at(10, false);
        told.at(12, true);
        told.at(20, false);
        told.at(500, false);
        assert_eq!(told.said, [(0, true), (10, false), (12, true), (30, false)]);
    }

    #[test]
    fn what_was_told_of_a_node_that_is_gone_is_forgotten() {
        let mut told = Told::new();
        told.at(0, true);
        told.at(10, false);
        assert_eq!(told.news.0.len(), 1);
        told.at(10 + OFTEN.as_secs(), false);
        assert_eq!(told.news.0.len(), 0);
        assert_eq!(told.news.due(), None);
    }
}

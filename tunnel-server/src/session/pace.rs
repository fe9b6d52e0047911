//! The rate at which agents are told to attach again, to this server or to another one.

use std::time::Duration;

/// Number of agents that are told in a second: a fifth of those that a server can attach (docs/scale.md), so that connections do
/// not wait behind handshakes.
const EACH_SECOND: u32 = 200;
/// Number of agents that are told at once.
const FEW: usize = 400;
/// Maximum total wait for agents after all of them were told.
const LONGEST: Duration = Duration::from_secs(120);
/// Least time over which agents are told to attach again to this server.
const SPREAD: Duration = Duration::from_secs(2);

/// Time over which the agents of this many sessions are told.
pub(crate) fn told_over(sessions: usize) -> Duration {
    let more = u32::try_from(sessions.saturating_sub(FEW)).unwrap_or(u32::MAX);
    Duration::from_secs(more.into()) / EACH_SECOND
}

/// Time over which agents are told during a drain: at most half of it, so that the last ones have time to leave too.
pub(crate) fn told_within(sessions: usize, drain: Duration) -> Duration {
    told_over(sessions).min(drain / 2)
}

/// Maximum wait for this many agents.
pub(crate) fn longest(sessions: usize) -> Duration {
    told_over(sessions) + LONGEST
}

/// Time from the first notice to attach again to the end of sessions whose certificates are no longer accepted: the drain
/// timeout, or twice the time of the notices to this many sessions if that is longer.
pub(crate) fn grace(sessions: usize, drain: Duration) -> Duration {
    drain.max(told_over(sessions) * 2)
}

/// Time over which this many agents are told to attach again to this server.
pub(crate) fn spread(sessions: usize, drain: Duration) -> Duration {
    told_over(sessions).max(SPREAD).min(grace(sessions, drain) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_agents_are_told_over_a_time_and_few_at_once() {
        let seconds = |sessions| told_over(sessions).as_secs_f64();
        assert_eq!([0, 1, 400].map(told_over), [Duration::ZERO; 3]);
        assert_eq!((seconds(10_400), seconds(100_000)), (50.0, 498.0));
        for sessions in [1_000, 10_000, 100_000, 1_000_000, usize::MAX] {
            let each_second = 1.0 / (seconds(sessions) - seconds(sessions - 1));
            assert!(sessions == usize::MAX || (199.0..201.0).contains(&each_second), "{sessions}");
            assert!(longest(sessions) >= told_over(sessions) + LONGEST, "{sessions}");
        }
        assert_eq!(longest(1), LONGEST);
    }

    #[test]
    fn every_agent_has_time_to_attach_again_after_it_was_told() {
        let (second, drain) = (Duration::from_secs(1), Duration::from_secs(10));
        assert_eq!((spread(20_000, drain), grace(20_000, drain)), (98 * second, 196 * second));
        // The drain is long enough for few agents.
        assert_eq!((spread(400, drain), grace(400, drain)), (2 * second, drain));
        assert_eq!((spread(1, second), grace(1, second)), (second / 2, second));
        assert_eq!([1, 10_000].map(|sessions| told_within(sessions, drain)), [Duration::ZERO, drain / 2]);
        for sessions in [0, 401, 10_000, 1_000_000, usize::MAX] {
            for drain in [Duration::ZERO, second, 3600 * second] {
                assert!(grace(sessions, drain) >= (2 * spread(sessions, drain)).max(drain), "{sessions}");
            }
        }
    }
}

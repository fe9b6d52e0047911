//! The rate at which agents are told to move to the other server.

use std::time::Duration;

/// Sessions that a server can attach per second (docs/scale.md).
const EACH_SECOND: u32 = 400;
/// Number of agents that are told at once.
const FEW: usize = 400;
/// Maximum total wait for agents after all of them were told.
const LONGEST: Duration = Duration::from_secs(120);

/// Time over which the agents of this many sessions are told, so that they dial as fast as the other server attaches
/// them.
pub(super) fn told_over(sessions: usize) -> Duration {
    let more = u32::try_from(sessions.saturating_sub(FEW)).unwrap_or(u32::MAX);
    Duration::from_secs(more.into()) / EACH_SECOND
}

/// Maximum wait for this many agents.
pub(super) fn longest(sessions: usize) -> Duration {
    told_over(sessions) + LONGEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_agents_are_told_as_fast_as_they_attach_and_few_at_once() {
        let seconds = |sessions| told_over(sessions).as_secs_f64();
        assert_eq!([0, 1, 400].map(told_over), [Duration::ZERO; 3]);
        assert_eq!((seconds(10_400), seconds(100_000)), (25.0, 249.0));
        for sessions in [1_000, 10_000, 100_000, 1_000_000, usize::MAX] {
            let each_second = 1.0 / (seconds(sessions) - seconds(sessions - 1));
            assert!(sessions == usize::MAX || (399.0..401.0).contains(&each_second), "{sessions}");
            assert!(longest(sessions) >= told_over(sessions) + LONGEST, "{sessions}");
        }
        assert_eq!(longest(1), LONGEST);
    }
}

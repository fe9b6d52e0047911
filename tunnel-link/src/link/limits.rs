//! Causes that limit a link's sender: the peer's receive window, this end's send buffer, or only the path.

use std::time::Duration;

use crate::tcp_info::SendTimes;

/// Sending time after which older values are dropped. So the shares cover the last one to two spans.
const SPAN: Duration = Duration::from_secs(10);

/// Shares, 0 to 1, of the recent time in which a link had unsent or unacknowledged bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The peer's receive window was full: a larger one (net.ipv4.tcp_rmem there) would make the link faster.
    pub receive_window: f64,
    /// This end's send buffer held too little (net.ipv4.tcp_wmem here).
    pub send_buffer: f64,
}

/// Minimum share worth reporting.
const WORTH: f64 = 0.05;

/// Names the main limit of a link for people: `window 46 %` or `buffer 12 %`; `None` if nothing limited it.
pub fn limited_by(receive_window: f64, send_buffer: f64) -> Option<String> {
    let (what, share) =
        if receive_window >= send_buffer { ("window", receive_window) } else { ("buffer", send_buffer) };
    (share >= WORTH).then(|| format!("{what} {:.0} %", share * 100.0))
}

/// Follows the [`SendTimes`] of a link.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sending {
    /// Values at the start of the previous span.
    before: SendTimes,
    /// Values at the start of the current span.
    begin: SendTimes,
    now: SendTimes,
}

impl Sending {
    pub(super) fn add(&mut self, now: SendTimes) {
        self.now = now;
        if now.busy.saturating_sub(self.begin.busy) >= SPAN {
            self.before = self.begin;
            self.begin = now;
        }
    }

    /// Returns the shares; `None` before anything was sent.
    pub(super) fn limits(&self) -> Option<Limits> {
        let busy = self.now.busy.saturating_sub(self.before.busy);
        // The kernel counts in jiffies, so a share may exceed 1.
        let share = |now: Duration, before: Duration| {
            (now.saturating_sub(before).as_secs_f64() / busy.as_secs_f64()).min(1.0)
        };
        (!busy.is_zero()).then(|| Limits {
            receive_window: share(self.now.receive_window, self.before.receive_window),
            send_buffer: share(self.now.send_buffer, self.before.send_buffer),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(busy: u64, receive_window: u64, send_buffer: u64) -> SendTimes {
        let [busy, receive_window, send_buffer] =
            [busy, receive_window, send_buffer].map(Duration::from_secs);
        SendTimes { busy, receive_window, send_buffer }
    }

    fn limits(receive_window: f64, send_buffer: f64) -> Option<Limits> {
        Some(Limits { receive_window, send_buffer })
    }

    #[test]
    fn shares_are_of_the_time_spent_sending() {
        let mut sending = Sending::default();
        assert_eq!(sending.limits(), None);
        sending.add(times(0, 0, 0));
        assert_eq!(sending.limits(), None, "nothing was sent");
        sending.add(times(4, 1, 2));
        assert_eq!(sending.limits(), limits(0.25, 0.5));
    }

    #[test]
    fn the_larger_share_is_named_if_it_is_worth_it() {
        assert_eq!(limited_by(0.456, 0.2).as_deref(), Some("window 46 %"));
        assert_eq!(limited_by(0.0, 1.0).as_deref(), Some("buffer 100 %"));
        assert_eq!(limited_by(0.049, 0.0), None);
    }

    #[test]
    fn what_is_long_ago_does_not_count() {
        let mut sending = Sending::default();
        for second in 1..=100 {
            sending.add(times(second, second, 0));
        }
        assert_eq!(sending.limits(), limits(1.0, 0.0));
        // The receiver got a larger window.
        for second in 101..=120 {
            sending.add(times(second, 100, 0));
        }
        assert_eq!(sending.limits(), limits(0.0, 0.0));
    }
}

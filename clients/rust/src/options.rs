use std::time::Duration;

use crate::proto::{accepted::Mode, subscribe_request, Filter, FromEarliest, FromLatest, FromSnapshot};
use crate::{Error, Position};

/// The idle timeout until the server has sent its progress interval.
pub(crate) const FIRST_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// The default idle timeout in progress intervals of the server, and the least default.
pub(crate) const IDLE_INTERVALS: u32 = 3;
pub(crate) const LEAST_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest idle timeout allowed.
const MIN_IDLE_TIMEOUT: Duration = Duration::from_millis(10);

const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// What a subscription does when it cannot continue after its position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GapPolicy {
    /// It continues with a snapshot.
    #[default]
    Snapshot,
    /// It ends with an error whose reason is [`PositionCompacted`](crate::Reason::PositionCompacted) or
    /// [`EpochMismatch`](crate::Reason::EpochMismatch), with a [`Violation`](Error::Violation), or with
    /// [`Rejected`](Error::Rejected).
    Fail,
}

/// Where a subscription starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// With a snapshot of all workers.
    #[default]
    Snapshot,
    /// With the next entry. The existing state is not sent.
    Latest,
    /// With the oldest retained entry.
    Earliest,
    /// With the entry after a position. Without an epoch, it is a position of the server's current epoch.
    After(Position),
}

impl Start {
    /// Returns the mode in which the server accepts the start.
    pub(crate) fn mode(&self) -> Mode {
        match self {
            Self::Snapshot => Mode::Snapshot,
            Self::Latest => Mode::Latest,
            Self::Earliest => Mode::Earliest,
            Self::After(_) => Mode::Resume,
        }
    }

    pub(crate) fn to_proto(&self) -> subscribe_request::Start {
        match self {
            Self::Snapshot => subscribe_request::Start::Snapshot(FromSnapshot {}),
            Self::Latest => subscribe_request::Start::Latest(FromLatest {}),
            Self::Earliest => subscribe_request::Start::Earliest(FromEarliest {}),
            Self::After(p) => subscribe_request::Start::After(p.clone().into()),
        }
    }
}

/// The idle timeout of a subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum IdleTimeout {
    #[default]
    FromServer,
    Of(Duration),
    None,
}

/// Options of a subscription. By default it subscribes to everything, starting with a snapshot.
#[derive(Clone, Debug)]
pub struct SubscribeOptions {
    pub(crate) start: Start,
    pub(crate) filter: Option<Filter>,
    pub(crate) gap_policy: GapPolicy,
    pub(crate) idle_timeout: IdleTimeout,
    pub(crate) backoff_min: Duration,
    pub(crate) backoff_max: Option<Duration>,
}

impl Default for SubscribeOptions {
    fn default() -> Self {
        Self {
            start: Start::default(),
            filter: None,
            gap_policy: GapPolicy::default(),
            idle_timeout: IdleTimeout::default(),
            backoff_min: BACKOFF_MIN,
            backoff_max: None,
        }
    }
}

impl SubscribeOptions {
    /// Returns the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets where the subscription starts.
    pub fn start(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    /// Resumes after a position.
    pub fn after(self, position: Position) -> Self {
        self.start(Start::After(position))
    }

    /// Selects events.
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = Some(filter);
        self
    }

    /// Sets what happens if the server does not retain the entries after the position, if it has lost its journal, or if a
    /// stream violates the contract.
    pub fn gap_policy(mut self, policy: GapPolicy) -> Self {
        self.gap_policy = policy;
        self
    }

    /// Sets the time limit to connect and to receive the next message, after which the stream is replaced. It counts while
    /// the caller awaits an update. It is at least 10 ms, and should be several progress intervals of the server (1 s by
    /// default). Default: 30 s until the stream is accepted, then three times the server's progress interval, but at
    /// least 10 s.
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeout = IdleTimeout::Of(timeout);
        self
    }

    /// Sets no time limit to receive the next message.
    pub fn no_idle_timeout(mut self) -> Self {
        self.idle_timeout = IdleTimeout::None;
        self
    }

    /// Sets the bounds of the wait before another stream, by default 1 s and 30 s. The wait doubles with each failure, and
    /// up to half of it is subtracted at random. A longer delay that the server requests takes precedence, up to 5
    /// minutes. With several servers, this is the wait after all have failed, and before the next one it is at most a
    /// tenth of `min`.
    pub fn backoff(mut self, min: Duration, max: Duration) -> Self {
        (self.backoff_min, self.backoff_max) = (min, Some(max));
        self
    }

    pub(crate) fn backoff_max(&self) -> Duration {
        self.backoff_max.unwrap_or(BACKOFF_MAX)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.idle_timeout {
            IdleTimeout::Of(t) if t < MIN_IDLE_TIMEOUT => {
                return Err(Error::config("idle_timeout", format!("is {t:?}: want {MIN_IDLE_TIMEOUT:?} or more")));
            }
            _ => {}
        }
        if self.backoff_min.is_zero() {
            return Err(Error::config("backoff min", "is 0: want more"));
        }
        if self.backoff_max() < self.backoff_min {
            let problem = format!("is {:?}: want the minimum, {:?}, or more", self.backoff_max(), self.backoff_min);
            return Err(Error::config("backoff max", problem));
        }
        Ok(())
    }

    /// Returns the idle timeout of a stream. The server has sent its progress interval, if it is not 0.
    pub(crate) fn idle_timeout_for(&self, progress_interval: Duration) -> Option<Duration> {
        match self.idle_timeout {
            IdleTimeout::None => None,
            IdleTimeout::Of(t) => Some(t),
            IdleTimeout::FromServer if progress_interval.is_zero() => Some(FIRST_IDLE_TIMEOUT),
            IdleTimeout::FromServer => Some(progress_interval.saturating_mul(IDLE_INTERVALS).max(LEAST_IDLE_TIMEOUT)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn idle_timeouts() {
        let o = SubscribeOptions::new();
        assert_eq!(o.idle_timeout_for(Duration::ZERO), Some(30 * S));
        assert_eq!(o.idle_timeout_for(10 * S), Some(30 * S));
        assert_eq!(o.idle_timeout_for(S), Some(10 * S));
        assert_eq!(o.clone().idle_timeout(S).idle_timeout_for(10 * S), Some(S));
        assert_eq!(o.no_idle_timeout().idle_timeout_for(S), None);
    }

    #[test]
    fn checks() {
        let field = |o: SubscribeOptions| match o.check() {
            Err(Error::Config { field, .. }) => field,
            other => format!("{other:?}"),
        };
        let o = SubscribeOptions::new();
        assert!(o.check().is_ok());
        assert!(o.clone().backoff(S, S).check().is_ok());
        assert_eq!(field(o.clone().idle_timeout(S / 1000)), "idle_timeout");
        assert_eq!(field(o.clone().backoff(Duration::ZERO, S)), "backoff min");
        assert_eq!(field(o.backoff(2 * S, S)), "backoff max");
    }
}

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::proto::SubscribeResponse;
use crate::{Error, Position};

/// A message from the server or an interruption.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Update {
    /// What has happened.
    pub content: Content,
    /// The position from which to resume when this and all earlier updates are applied. It is None while the delivered
    /// state is incomplete or about to be replaced: before the first position, from an `Accepted` with `MODE_SNAPSHOT` or a
    /// `SnapshotBegin` to `SnapshotEnd`, and with an interruption after which a snapshot follows.
    pub position: Option<Position>,
    pub(crate) liveness: Arc<Liveness>,
}

impl Update {
    /// Returns the message; None for an interruption.
    pub fn message(&self) -> Option<&SubscribeResponse> {
        match &self.content {
            Content::Message(m) => Some(m),
            Content::Interruption(_) => None,
        }
    }

    /// Returns the interruption; None for a message.
    pub fn interruption(&self) -> Option<&Interruption> {
        match &self.content {
            Content::Message(_) => None,
            Content::Interruption(i) => Some(i),
        }
    }
}

/// What an [`Update`] is.
#[derive(Clone, Debug)]
pub enum Content {
    /// A message of the contract. The first message of each stream has an `Accepted`. The messages from `SnapshotBegin` to
    /// `SnapshotEnd` are a snapshot: the caller discards its state at `SnapshotBegin`.
    Message(Box<SubscribeResponse>),
    /// A stream has ended and another follows. The caller may ignore it.
    Interruption(Interruption),
}

/// The end of a stream that another stream replaces.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Interruption {
    /// Why the stream ended or failed to start.
    pub error: Error,
    /// Whether the next stream starts with a snapshot.
    pub snapshot: bool,
    /// The time until the next stream starts.
    pub wait: Duration,
    /// The number of consecutive streams without progress, including this one.
    pub failures: u32,
}

/// What a view must know of its subscription beyond the updates: a subscription that is dropped delivers none.
#[derive(Debug, Default)]
pub(crate) struct Liveness(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    ended: Option<Instant>,
    idle_timeout: Option<Duration>,
}

impl Liveness {
    /// Records that no update follows.
    pub fn end(&self) {
        self.state().ended.get_or_insert_with(Instant::now);
    }

    pub fn set_idle_timeout(&self, timeout: Option<Duration>) {
        self.state().idle_timeout = timeout;
    }

    /// Returns when the subscription has ended; None if it has not.
    pub fn ended(&self) -> Option<Instant> {
        self.state().ended
    }

    /// Returns the longest time between two updates, while the caller awaits them.
    pub fn idle_timeout(&self) -> Option<Duration> {
        self.state().idle_timeout
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

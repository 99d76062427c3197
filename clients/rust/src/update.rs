use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

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

/// What a view must know of its subscription beyond the updates: whether it has ended. One that is dropped delivers no update.
#[derive(Debug, Default)]
pub(crate) struct Liveness(AtomicBool);

impl Liveness {
    /// Records that no update follows.
    pub fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn has_ended(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

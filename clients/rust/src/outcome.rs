use std::time::Duration;

use crate::matches::nanoseconds;
use crate::proto::{self, Tier, Trust};
use crate::{Match, Position, Prompt};

/// What an engine has reused of a prompt, and what was predicted. Servers count how often predictions are right, and degrade a
/// rank whose predictions are too long again and again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The worker that computed the prompt.
    pub worker: String,
    /// The dp rank that computed it.
    pub rank: u32,
    /// The position of the prediction: [`MatchResult::position`](crate::MatchResult::position), or
    /// [`View::position`](crate::View::position) before the match.
    pub position: Position,
    /// The number of tokens that the engine was predicted to reuse.
    pub predicted: u64,
    /// The number of tokens that it has reused, as in `usage.prompt_tokens_details.cached_tokens`.
    pub reused: u64,
    /// The trust of the prediction. [`Trust::Unspecified`]: the rank's trust when the server gets the report.
    pub trust: Trust,
}

impl Outcome {
    /// Returns the outcome of a match of a prompt without its last token, which engines compute always. The prediction is that
    /// the engine reuses what its device memory holds.
    pub fn of(prediction: &Match, position: Position, reused: u64) -> Self {
        let device = prediction.tier(Tier::Device);
        Self {
            worker: prediction.worker.clone(),
            rank: prediction.rank,
            position,
            predicted: device.map_or(0, |t| t.tokens.into()),
            reused,
            trust: device.map_or(prediction.trust, |t| t.trust),
        }
    }

    pub(crate) fn to_proto(&self) -> proto::Outcome {
        proto::Outcome {
            worker: self.worker.clone(),
            dp_rank: self.rank,
            position: Some(self.position.clone().into()),
            predicted_tokens: self.predicted,
            cached_tokens: self.reused,
            trust: self.trust as i32,
        }
    }
}

/// A prompt that was sent to a dp rank, which is expected to store its whole blocks soon.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    /// The worker that computes the prompt.
    pub worker: String,
    /// The dp rank that computes it.
    pub rank: u32,
    /// The prompt, by tokens or tokens hashes. Its model is that of the worker.
    pub prompt: Prompt,
    /// How long the blocks are expected, unless the engine's events tell before that they are stored: at most a minute; zero:
    /// 2 s.
    pub ttl: Duration,
}

impl Routed {
    pub(crate) fn to_proto(&self) -> proto::RoutedPrompt {
        proto::RoutedPrompt {
            worker: self.worker.clone(),
            dp_rank: self.rank,
            prompt: Some(self.prompt.to_proto()),
            ttl_nano: nanoseconds(self.ttl),
        }
    }
}

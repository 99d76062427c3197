use std::time::Duration;

use crate::proto::{self, DegradedReason, Tier, Trust};
use crate::{Error, Position, Prompt};

/// The number of tiers that this version knows.
pub(crate) const NUM_TIERS: usize = 4;

/// Asks a server which dp ranks hold prefixes of prompts.
#[derive(Clone, Debug, Default)]
pub struct MatchRequest {
    prompts: Vec<Prompt>,
    workers: Vec<String>,
    limit: u32,
    after: Option<Position>,
    max_wait: Duration,
    max_block_hashes: u32,
}

impl MatchRequest {
    /// Returns a request for 1 to 64 prompts, all with the same model.
    pub fn new(prompts: impl Into<Vec<Prompt>>) -> Self {
        Self { prompts: prompts.into(), ..Self::default() }
    }

    /// Restricts the match to workers. By default, all are matched.
    pub fn workers(mut self, names: impl Into<Vec<String>>) -> Self {
        self.workers = names.into();
        self
    }

    /// Sets the maximum number of matches for each prompt. 0: all.
    pub fn limit(mut self, limit: u32) -> Self {
        self.limit = limit;
        self
    }

    /// The answer must include the entries up to a position: the server waits until it has applied them, at most `max_wait`,
    /// which is up to 10 s; zero: 1 s.
    pub fn after(mut self, position: Position, max_wait: Duration) -> Self {
        (self.after, self.max_wait) = (Some(position), max_wait);
        self
    }

    /// Sets the maximum number of [`Match::block_hashes`] of each match. A server refuses it unless it keeps them
    /// (`retain_block_hashes`).
    pub fn max_block_hashes(mut self, max: u32) -> Self {
        self.max_block_hashes = max;
        self
    }

    pub(crate) fn into_proto(self) -> Result<proto::MatchPrefixRequest, Error> {
        let model = self.prompts.first().map(|p| p.model.clone()).unwrap_or_default();
        if let Some((i, other)) = self.prompts.iter().enumerate().find(|(_, p)| p.model != model) {
            let problem = format!("is {:?}: want {model:?}, the model of the first prompt", other.model);
            return Err(Error::config(format!("prompts[{i}].model"), problem));
        }
        Ok(proto::MatchPrefixRequest {
            model,
            prompts: self.prompts.iter().map(Prompt::to_proto).collect(),
            workers: self.workers,
            limit: self.limit,
            after: self.after.map(Into::into),
            max_wait_nano: nanoseconds(self.max_wait),
            max_block_hashes: self.max_block_hashes,
        })
    }
}

pub(crate) fn nanoseconds(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// A server's answer to a [`MatchRequest`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct MatchResult {
    /// The position at which the answer is exact.
    pub position: Position,
    /// The matches of each prompt of the request, the best first.
    pub matches: Vec<Vec<Match>>,
}

impl MatchResult {
    pub(crate) fn from_proto(model: &str, response: proto::MatchPrefixResponse) -> Self {
        let matches = response.prompts.into_iter();
        Self {
            position: response.position.unwrap_or_default().into(),
            matches: matches.map(|p| p.matches.into_iter().map(|m| Match::from_proto(model, m)).collect()).collect(),
        }
    }
}

/// The longest prefix of a prompt that one dp rank of a worker holds.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Match {
    /// The worker's name.
    pub worker: String,
    /// The worker's model.
    pub model: String,
    /// The configured address for requests.
    pub endpoint: String,
    /// The dp rank.
    pub rank: u32,
    /// The number of blocks in the longest prefix. Each is held in at least one tier.
    pub blocks: u32,
    /// The number of tokens in the prefix; 0 if the worker's block size is unknown. With several attention groups, a prefix
    /// may end within a block, so that there are more tokens than in `blocks`.
    pub tokens: u32,
    /// The longest prefix in each tier that holds the first block, the nearest tier first. An engine need not load the blocks
    /// of [`Tier::Device`].
    pub tiers: Vec<TierPrefix>,
    /// How far the match can be trusted, in the tier that can be trusted least.
    pub trust: Trust,
    /// Why the trust is [`Trust::Degraded`], ascending. [`DegradedReason::Unspecified`] is a reason that this version does not
    /// know.
    pub reasons: Vec<DegradedReason>,
    /// How long a source of the rank has had no connection. Only the server knows it.
    pub down: Duration,
    /// The time since the rank was known to be up to date with its engine. The server reports it; for a
    /// [`View`](crate::View) it is the time for which its state was not kept current.
    pub age: Duration,
    /// The number of blocks that the rank is expected to hold soon, because prompts were routed to it, if that is more than
    /// `blocks`; else 0. Only the server knows it: see [`Client::note_routed`](crate::Client::note_routed).
    pub expected_blocks: u32,
    /// The number of tokens in `expected_blocks`; 0 if the block size is unknown.
    pub expected_tokens: u32,
    /// The engine's own hashes of the first blocks of the prefix, see [`MatchRequest::max_block_hashes`].
    pub block_hashes: Vec<u64>,
    /// The address from which other engines can fetch its blocks; empty if it is not known.
    pub fetch_endpoint: String,
    /// The longest prefixes in the pools from which the worker can load blocks. Only the server reports them.
    pub pools: Vec<PoolPrefix>,
}

/// The longest prefix of a prompt that a dp rank holds in one tier.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TierPrefix {
    /// The tier.
    pub tier: Tier,
    /// The number of blocks.
    pub blocks: u32,
    /// The number of tokens in them; 0 if the block size is unknown.
    pub tokens: u32,
    /// How far the prefix can be trusted.
    pub trust: Trust,
    /// The attention group because of which the prefix is not longer. Only the server reports it.
    pub ended_by_group: Option<u32>,
}

/// The longest prefix of a prompt that a pool holds: a store from which several workers load blocks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PoolPrefix {
    /// The pool's name.
    pub pool: String,
    /// The number of tokens in the prefix.
    pub tokens: u32,
    /// The number of the pool's blocks in the prefix, which may have another size than the worker's.
    pub blocks: u32,
    /// How far the prefix can be trusted.
    pub trust: Trust,
    /// Why the trust is [`Trust::Degraded`], ascending.
    pub reasons: Vec<DegradedReason>,
}

impl Match {
    /// Returns the prefix in a tier; None if the tier does not hold the first block.
    pub fn tier(&self, tier: Tier) -> Option<&TierPrefix> {
        self.tiers.iter().find(|t| t.tier == tier)
    }

    fn from_proto(model: &str, m: proto::PrefixMatch) -> Self {
        let trust = known_trust(m.trust);
        let tiers = m.tiers.iter().filter_map(|t| {
            let tier = Tier::try_from(t.tier).ok().filter(|&tier| tier != Tier::Unspecified)?;
            let of_tier = if t.trust == Trust::Unspecified as i32 { trust } else { known_trust(t.trust) };
            Some(TierPrefix { tier, blocks: t.blocks, tokens: t.tokens, trust: of_tier, ended_by_group: t.ended_by_group })
        });
        Self {
            tiers: tiers.collect(),
            model: if model.is_empty() { m.model } else { model.to_owned() },
            worker: m.worker,
            endpoint: m.endpoint,
            rank: m.dp_rank,
            blocks: m.blocks,
            tokens: m.tokens,
            trust,
            reasons: known_reasons(&m.reasons),
            down: Duration::from_nanos(m.down_nano),
            age: Duration::from_nanos(m.age_nano),
            expected_blocks: m.expected_blocks,
            expected_tokens: m.expected_tokens,
            block_hashes: m.block_hashes,
            fetch_endpoint: m.fetch_endpoint,
            pools: m.pools.into_iter().map(PoolPrefix::from_proto).collect(),
        }
    }
}

impl PoolPrefix {
    fn from_proto(p: proto::PoolPrefix) -> Self {
        let (trust, reasons) = (known_trust(p.trust), known_reasons(&p.reasons));
        Self { pool: p.pool, tokens: p.tokens, blocks: p.blocks, trust, reasons }
    }
}

/// Returns a trust; one that this version does not know is DEGRADED.
fn known_trust(trust: i32) -> Trust {
    Trust::try_from(trust).unwrap_or(Trust::Degraded)
}

fn known_reasons(reasons: &[i32]) -> Vec<DegradedReason> {
    reasons.iter().map(|&r| DegradedReason::try_from(r).unwrap_or(DegradedReason::Unspecified)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_one_model() {
        let prompt = Prompt::tokens([1]).model("m");
        assert!(MatchRequest::new([prompt.clone(), prompt.clone()]).into_proto().is_ok());
        let error = MatchRequest::new([prompt, Prompt::tokens([1])]).into_proto().unwrap_err();
        assert!(matches!(error, Error::Config { field, .. } if field == "prompts[1].model"));
    }

    #[test]
    fn what_is_not_known_is_not_exact() {
        let tier = |tier, trust| proto::TierPrefix { tier, blocks: 1, trust, ..Default::default() };
        let m = proto::PrefixMatch { trust: 9, reasons: vec![2, 99], tiers: vec![tier(1, 0), tier(7, 1)], ..Default::default() };
        let m = Match::from_proto("m", m);
        assert_eq!(m.trust, Trust::Degraded);
        assert_eq!(m.reasons, [DegradedReason::Gap, DegradedReason::Unspecified]);
        assert_eq!(m.tiers.len(), 1);
        assert_eq!(m.tier(Tier::Device).unwrap().trust, Trust::Degraded);
    }
}

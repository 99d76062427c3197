//! The indexes that apply events on the caller's thread.

use std::time::Duration;

use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData,
    LocalBlockHash, RouterEvent,
};
use dynamo_kv_router::RadixTree;
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

use crate::workload::{Phase, Prompt, WORKERS};
use crate::{own_cpu, Index};

/// SMG's ChainIndex.
pub struct Chain {
    index: ChainIndex,
    workers: Vec<(u32, ChainBlockMap)>,
}

pub enum ChainEvent {
    Stored { worker: usize, parent: Option<SequenceHash>, blocks: Vec<StoredBlock> },
    Removed { worker: usize, blocks: Vec<SequenceHash> },
}

impl Chain {
    pub fn new() -> Self {
        let index = ChainIndex::new();
        let workers = (0..WORKERS)
            .map(|i| (index.intern_worker(&format!("worker-{i}")).expect("a worker id"), ChainBlockMap::new()))
            .collect();
        Self { index, workers }
    }
}

impl Index for Chain {
    type Events = Vec<ChainEvent>;
    type Prompt = Vec<ContentHash>;

    fn convert(phase: &Phase) -> Self::Events {
        let event = |e: crate::workload::Event| match e.tokens {
            None => ChainEvent::Removed { worker: e.worker, blocks: e.blocks.iter().map(|b| SequenceHash(*b)).collect() },
            Some(tokens) => ChainEvent::Stored {
                worker: e.worker,
                parent: e.parent.map(SequenceHash),
                blocks: std::iter::zip(e.blocks, tokens)
                    .map(|(b, t)| StoredBlock { seq_hash: SequenceHash(*b), content_hash: ContentHash(*t) })
                    .collect(),
            },
        };
        phase.events().map(event).collect()
    }

    fn prompt(prompt: &Prompt) -> Self::Prompt {
        prompt.tokens.iter().map(|t| ContentHash(*t)).collect()
    }

    fn apply(&mut self, events: Self::Events) -> Duration {
        let began = own_cpu();
        for e in &events {
            match e {
                ChainEvent::Stored { worker, parent, blocks } => {
                    let (id, map) = &mut self.workers[*worker];
                    self.index.apply_stored(*id, blocks, *parent, map).expect("a known parent");
                }
                ChainEvent::Removed { worker, blocks } => {
                    let (id, map) = &mut self.workers[*worker];
                    self.index.apply_removed(*id, blocks, map);
                }
            }
        }
        own_cpu() - began
    }

    fn matches(&self, prompt: Self::Prompt) -> (usize, usize) {
        let (mut workers, mut blocks) = (0, 0);
        self.index.score_into(&prompt, |t| t.0, false, |_, n| {
            workers += 1;
            blocks += n as usize;
        });
        (workers, blocks)
    }

    fn copy(prompt: &Self::Prompt) -> Self::Prompt {
        prompt.clone()
    }
}

/// Dynamo's RadixTree.
pub struct Radix(RadixTree);

impl Radix {
    pub fn new() -> Self {
        Self(RadixTree::new())
    }
}

/// The events of a phase as Dynamo's.
pub fn router_events(phase: &Phase) -> Vec<RouterEvent> {
    let hashes = |blocks: &[u64]| blocks.iter().map(|b| ExternalSequenceBlockHash(*b)).collect();
    let event = |(id, e): (usize, crate::workload::Event)| {
        let data = match e.tokens {
            None => KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: hashes(e.blocks) }),
            Some(tokens) => KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: e.parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: std::iter::zip(e.blocks, tokens)
                    .map(|(b, t)| KvCacheStoredBlockData {
                        block_hash: ExternalSequenceBlockHash(*b),
                        tokens_hash: LocalBlockHash(*t),
                        mm_extra_info: None,
                    })
                    .collect(),
            }),
        };
        RouterEvent::new(e.worker as u64, KvCacheEvent { event_id: id as u64, data, dp_rank: 0 })
    };
    phase.events().enumerate().map(event).collect()
}

pub fn local_hashes(prompt: &Prompt) -> Vec<LocalBlockHash> {
    prompt.tokens.iter().map(|t| LocalBlockHash(*t)).collect()
}

/// The answer in the form of Index::matches.
pub fn summed(scores: &dynamo_kv_router::protocols::OverlapScores) -> (usize, usize) {
    (scores.scores.len(), scores.scores.values().map(|n| *n as usize).sum())
}

impl Index for Radix {
    type Events = Vec<RouterEvent>;
    type Prompt = Vec<LocalBlockHash>;

    fn convert(phase: &Phase) -> Self::Events {
        router_events(phase)
    }

    fn prompt(prompt: &Prompt) -> Self::Prompt {
        local_hashes(prompt)
    }

    fn apply(&mut self, events: Self::Events) -> Duration {
        let began = own_cpu();
        for e in events {
            self.0.apply_event(e).expect("an event that applies");
        }
        own_cpu() - began
    }

    fn matches(&self, prompt: Self::Prompt) -> (usize, usize) {
        summed(&self.0.find_matches(prompt, false))
    }

    fn copy(prompt: &Self::Prompt) -> Self::Prompt {
        prompt.clone()
    }
}

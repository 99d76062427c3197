use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::reasons::Doubts;
use super::tree::{NodeId, RankId, Tree};
use crate::matches::NUM_TIERS;
use crate::proto::Stored;

/// A dp rank: an engine with its own cache.
#[derive(Debug)]
pub(crate) struct RankState {
    pub id: RankId,
    pub worker: Arc<str>,
    pub number: u32,
    pub doubts: Doubts,
    /// The engine caches other attention groups than the main group.
    pub groups: bool,
    pub gaps: u64,
    /// The number of blocks in each tier.
    pub held: [u64; NUM_TIERS],
    root: NodeId,
    /// By block hash.
    blocks: HashMap<u64, Block>,
    /// The blocks whose parent has no place, by the parent's hash.
    orphans: HashMap<u64, BTreeSet<u64>>,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    place: Place,
    tiers: [bool; NUM_TIERS],
}

/// Where a block is among the contents of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The content is unknown.
    Unknown,
    /// The content is known, but not what is before it: the parent has no place.
    Orphan { parent: u64, tokens: u64 },
    /// The block has the content of a node, and what is before it. It keeps its place when the parent is removed.
    At(NodeId),
}

impl RankState {
    pub fn new(id: RankId, worker: Arc<str>, number: u32, root: NodeId) -> Self {
        Self {
            id,
            worker,
            number,
            doubts: Doubts::default(),
            groups: false,
            gaps: 0,
            held: [0; NUM_TIERS],
            root,
            blocks: HashMap::new(),
            orphans: HashMap::new(),
        }
    }

    /// Adds a chain of blocks in a tier.
    pub fn store(&mut self, tree: &mut Tree, tier: usize, s: &Stored) {
        let mut parent = s.parent_hash;
        for (i, &hash) in s.block_hashes.iter().enumerate() {
            let block = self.blocks.entry(hash).or_insert(Block { place: Place::Unknown, tiers: [false; NUM_TIERS] });
            let is_copy = tier > 0 && (block.tiers[0] || !matches!(block.place, Place::Unknown)); // it does not change the content
            if !block.tiers[tier] {
                block.tiers[tier] = true;
                self.held[tier] += 1;
                if let Place::At(node) = block.place {
                    tree.hold(node, self.id, tier);
                }
            }
            if let Some(&tokens) = s.tokens_hashes.get(i).filter(|_| !is_copy) {
                self.place(tree, hash, parent, tokens);
            }
            parent = Some(hash);
        }
    }

    /// Places a block after its parent. Without a place of the parent, the block keeps its own, or becomes an orphan.
    fn place(&mut self, tree: &mut Tree, hash: u64, parent: Option<u64>, tokens: u64) {
        let before = match parent {
            None => Some(self.root),
            Some(parent) => self.blocks.get(&parent).and_then(|b| b.node()),
        };
        let old = self.blocks[&hash].place;
        match (before, parent) {
            (Some(before), _) => {
                let node = tree.child(before, tokens);
                if old != Place::At(node) {
                    self.move_to(tree, hash, node);
                    self.adopt(tree, hash, node);
                }
            }
            (None, Some(parent)) if !matches!(old, Place::At(_)) => {
                self.forget_orphan(hash, old);
                self.set_place(hash, Place::Orphan { parent, tokens });
                self.orphans.entry(parent).or_default().insert(hash);
            }
            _ => {}
        }
    }

    /// Gives a block another place, in all its tiers.
    fn move_to(&mut self, tree: &mut Tree, hash: u64, node: NodeId) {
        let Block { place: old, tiers } = self.blocks[&hash];
        let held = || (0..NUM_TIERS).filter(|&tier| tiers[tier]);
        held().for_each(|tier| tree.hold(node, self.id, tier));
        if let Place::At(old) = old {
            held().for_each(|tier| tree.release(old, self.id, tier));
        }
        self.forget_orphan(hash, old);
        self.set_place(hash, Place::At(node));
    }

    /// Gives places to the orphans that descend from a block.
    fn adopt(&mut self, tree: &mut Tree, hash: u64, node: NodeId) {
        let mut parents = vec![(hash, node)];
        while let Some((parent, before)) = parents.pop() {
            for child in self.orphans.remove(&parent).unwrap_or_default() {
                if let Place::Orphan { tokens, .. } = self.blocks[&child].place {
                    let node = tree.child(before, tokens);
                    self.move_to(tree, child, node);
                    parents.push((child, node));
                }
            }
        }
    }

    fn set_place(&mut self, hash: u64, place: Place) {
        if let Some(block) = self.blocks.get_mut(&hash) {
            block.place = place;
        }
    }

    /// Removes a block from the orphans, if its place is one.
    fn forget_orphan(&mut self, hash: u64, place: Place) {
        if let Place::Orphan { parent, .. } = place {
            if let Some(children) = self.orphans.get_mut(&parent) {
                children.remove(&hash);
                if children.is_empty() {
                    self.orphans.remove(&parent);
                }
            }
        }
    }

    /// Removes blocks from a tier.
    pub fn remove(&mut self, tree: &mut Tree, tier: usize, hashes: &[u64]) {
        for &hash in hashes {
            let Some(block) = self.blocks.get_mut(&hash) else { continue };
            if !std::mem::take(&mut block.tiers[tier]) {
                continue;
            }
            let block = *block;
            self.held[tier] -= 1;
            if let Place::At(node) = block.place {
                tree.release(node, self.id, tier);
            }
            if block.tiers == [false; NUM_TIERS] {
                self.forget_orphan(hash, block.place);
                self.blocks.remove(&hash);
            }
        }
    }

    /// Removes all blocks from a tier.
    pub fn clear_tier(&mut self, tree: &mut Tree, tier: usize) {
        if self.held[tier] > 0 {
            let hashes: Vec<u64> = self.blocks.iter().filter(|(_, b)| b.tiers[tier]).map(|(&hash, _)| hash).collect();
            self.remove(tree, tier, &hashes);
        }
    }

    /// Removes all blocks.
    pub fn clear(&mut self, tree: &mut Tree) {
        (0..NUM_TIERS).for_each(|tier| self.clear_tier(tree, tier));
        (self.blocks, self.orphans) = (HashMap::new(), HashMap::new()); // frees their memory
    }

    /// Returns in which tiers the rank holds a block; None if it does not.
    pub fn tiers(&self, hash: u64) -> Option<[bool; NUM_TIERS]> {
        self.blocks.get(&hash).map(|b| b.tiers)
    }
}

impl Block {
    /// Returns the place among known contents.
    fn node(&self) -> Option<NodeId> {
        match self.place {
            Place::At(node) => Some(node),
            _ => None,
        }
    }
}

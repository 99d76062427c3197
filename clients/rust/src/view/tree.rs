use std::collections::HashMap;

use crate::matches::NUM_TIERS;

/// The number of a dp rank in an index.
pub(crate) type RankId = u32;

/// The number of a node.
pub(crate) type NodeId = u32;

/// No node: the parent of roots.
const NONE: NodeId = NodeId::MAX;

/// The contents of the blocks of all ranks: a node for each block with the blocks before it, which says the ranks that hold
/// it, and in which tiers. A match of a prompt visits its nodes, and of each the ranks that hold all before.
///
/// A node exists while a rank holds it or one after it.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    /// By parent and tokens hash.
    children: HashMap<(NodeId, u64), NodeId>,
}

#[derive(Debug)]
struct Node {
    parent: NodeId,
    tokens: u64,
    children: u32,
    /// By rank, ascending.
    holders: Vec<Holder>,
}

/// A rank that holds a node.
#[derive(Clone, Copy, Debug)]
struct Holder {
    rank: RankId,
    /// The number of its blocks in each tier: blocks with different hashes may have the same contents.
    blocks: [u32; NUM_TIERS],
}

impl Holder {
    /// Returns whether the rank holds the node in each tier.
    fn tiers(&self) -> [bool; NUM_TIERS] {
        self.blocks.map(|n| n > 0)
    }
}

/// The longest prefix that a rank holds, in some tier and in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub rank: RankId,
    pub blocks: u32,
    pub tiers: [u32; NUM_TIERS],
}

impl Prefix {
    pub fn new(rank: RankId) -> Self {
        Self { rank, blocks: 0, tiers: [0; NUM_TIERS] }
    }

    /// Extends the prefix by a block that is held in some tiers.
    pub fn extend(&mut self, held: [bool; NUM_TIERS]) {
        for (blocks, held) in self.tiers.iter_mut().zip(held) {
            if held && *blocks == self.blocks {
                *blocks += 1;
            }
        }
        self.blocks += 1;
    }
}

impl Tree {
    /// Adds a node before all first blocks of prompts.
    pub fn add_root(&mut self) -> NodeId {
        self.add(NONE, 0)
    }

    /// Removes a root that no rank needs any more.
    pub fn remove_root(&mut self, root: NodeId) {
        debug_assert_eq!(self.nodes[root as usize].children, 0);
        self.free.push(root);
    }

    fn add(&mut self, parent: NodeId, tokens: u64) -> NodeId {
        let node = Node { parent, tokens, children: 0, holders: Vec::new() };
        match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId::try_from(self.nodes.len() - 1).expect("there are fewer blocks")
            }
        }
    }

    /// Returns the node of a block after another one, which it adds if there is none. The caller must hold it.
    pub fn child(&mut self, parent: NodeId, tokens: u64) -> NodeId {
        if let Some(&id) = self.children.get(&(parent, tokens)) {
            return id;
        }
        let id = self.add(parent, tokens);
        self.children.insert((parent, tokens), id);
        self.nodes[parent as usize].children += 1;
        id
    }

    /// Adds a block of a rank in a tier.
    pub fn hold(&mut self, id: NodeId, rank: RankId, tier: usize) {
        let holders = &mut self.nodes[id as usize].holders;
        let i = holders.binary_search_by_key(&rank, |h| h.rank).unwrap_or_else(|i| {
            holders.insert(i, Holder { rank, blocks: [0; NUM_TIERS] });
            i
        });
        holders[i].blocks[tier] += 1;
    }

    /// Removes a block of a rank from a tier.
    pub fn release(&mut self, mut id: NodeId, rank: RankId, tier: usize) {
        let holders = &mut self.nodes[id as usize].holders;
        let i = holders.binary_search_by_key(&rank, |h| h.rank).expect("the rank holds the block");
        holders[i].blocks[tier] -= 1;
        if holders[i].blocks == [0; NUM_TIERS] {
            holders.remove(i);
        }
        loop {
            let node = &mut self.nodes[id as usize];
            if !node.holders.is_empty() || node.children > 0 || node.parent == NONE {
                return;
            }
            let parent = node.parent;
            node.holders = Vec::new();
            self.children.remove(&(parent, node.tokens));
            self.free.push(id);
            self.nodes[parent as usize].children -= 1;
            id = parent;
        }
    }

    /// Appends the longest prefixes of a prompt that ranks hold, of those that are selected.
    pub fn find(&self, root: NodeId, tokens: &[u64], selected: impl Fn(RankId) -> bool, found: &mut Vec<Prefix>) {
        let mut at = root;
        let mut live = Vec::new(); // those of found that hold all blocks so far
        for (i, &hash) in tokens.iter().enumerate() {
            let Some(&id) = self.children.get(&(at, hash)) else { return };
            at = id;
            let holders = &self.nodes[id as usize].holders;
            if i == 0 {
                let first = found.len();
                found.extend(holders.iter().filter(|h| selected(h.rank)).map(|h| Prefix::new(h.rank)));
                live.extend(first..found.len());
            }
            live.retain(|&n: &usize| {
                let holder = holders.binary_search_by_key(&found[n].rank, |h| h.rank).map(|i| holders[i]);
                if let Ok(holder) = holder {
                    found[n].extend(holder.tiers());
                }
                holder.is_ok()
            });
            if live.is_empty() {
                return;
            }
        }
    }

    /// Returns the number of nodes.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_exist_while_they_are_needed() {
        let mut t = Tree::default();
        let root = t.add_root();
        let a = t.child(root, 1);
        t.hold(a, 7, 0);
        let b = t.child(a, 2);
        t.hold(b, 7, 1);
        t.hold(b, 3, 0);
        assert_eq!(t.child(root, 1), a);
        t.release(a, 7, 0); // the one after it remains
        assert_eq!(t.len(), 3);
        t.release(b, 7, 1);
        t.release(b, 3, 0);
        assert_eq!((t.len(), t.children.len()), (1, 0));
    }

    #[test]
    fn a_prefix_is_a_chain() {
        let mut t = Tree::default();
        let root = t.add_root();
        let a = t.child(root, 1);
        t.hold(a, 1, 0);
        t.hold(a, 2, 2);
        let b = t.child(a, 2);
        t.hold(b, 2, 0);
        t.hold(b, 3, 0); // without the first block
        let mut found = Vec::new();
        t.find(root, &[1, 2, 3], |_| true, &mut found);
        let prefix = |rank, blocks, tiers| Prefix { rank, blocks, tiers };
        assert_eq!(found, [prefix(1, 1, [1, 0, 0, 0]), prefix(2, 2, [0, 0, 1, 0])]);
    }
}

package pipeline

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// vLLM announces the blocks that a request reuses if the request asks for it (report mode full): with one store of each attention group
// from the prompt's first token on, one right after the other, for the same tokens, and of windows and Mamba also of blocks that it does
// not hold. Of a rank with several groups, these tell more than the stores of a main group alone:
//
//   - If such stores do not follow a store of the main group, or one leaves out blocks, they are no announcement.
//   - If one has more blocks than a group keeps that has left out blocks before, they are.
//   - Otherwise, they may be: a further block is added, and the rank is degraded. It is removed when the engine is found to announce.

// rootStore is the last store of the main group without a parent in the current batch.
type rootStore struct {
	seen bool
	// tokens is the number of its tokens, and held whether device memory had all its blocks.
	tokens int
	held   bool
}

// judgement is the effect of a store of a group.
type judgement struct {
	op copies.Op // on blocks that exist
	// ignoresNew reports whether other blocks are not added, and suspectsNew whether they may be taken back.
	ignoresNew, suspectsNew bool
}

// suspectBlock is a block that a group may not hold.
type suspectBlock struct {
	key  groupKey
	hash uint64
}

// maxSuspects bounds the suspects of a rank. Further ones are not taken back: the rank is degraded anyway.
const maxSuspects = 1 << 14

func (l *Lane) suspect(r *rankState, key groupKey, hash uint64) {
	if len(r.suspects) < maxSuspects {
		r.suspects = append(r.suspects, suspectBlock{key, hash})
	}
}

// judgeRoot returns the effect of a store of the main group without a parent on blocks that exist, in a rank with several groups.
func (l *Lane) judgeRoot(b *feed.Batch, e *wire.Event) copies.Op {
	held := l.engineBlocks.HasAll(e)
	l.rootStore = rootStore{true, len(e.Tokens), held}
	if !held {
		return copies.AddUnsure
	}
	switch l.siblings(b, len(e.Tokens)) {
	case storesCopies:
		return copies.Add
	case storesAgain:
		l.announcements.SetAnnounces(b.Rank, b.Source)
		return copies.AddNothing
	default:
		return copies.AddUnsure
	}
}

// storesOf is what the stores of all groups of a rank are.
type storesOf uint8

const (
	storesUnsure storesOf = iota
	storesCopies
	storesAgain // announcements
)

// siblings judges by the stores that follow the current one whether these are of all groups for a number of tokens.
func (l *Lane) siblings(b *feed.Batch, tokens int) (all storesOf) {
	r, next := l.rank(b.Rank), b.Events[l.eventIndex+1:]
	for _, g := range b.Groups.GetGroups() {
		if g.GetMain() {
			continue
		}
		if len(next) == 0 {
			return storesCopies
		}
		e := &next[0]
		next = next[1:]
		size := int(e.BlockSize)
		if e.Kind != wire.KindStored || e.Tier != kvblock.TierDevice || uint32(e.Group) != g.GetIndex()+1 || !rooted(e) || size == 0 ||
			len(e.BlockHashes) < len(e.Tokens)/size || max(tokens, len(e.Tokens))-min(tokens, len(e.Tokens)) >= size {
			return storesCopies
		}
		if r.keepsFewer(g, len(e.BlockHashes)) {
			all = storesAgain
		}
	}
	return all
}

// rooted reports whether a store begins with a prompt's first token. Some engines write 0 for no parent.
func rooted(e *wire.Event) bool { return !e.HasParent || e.Parent == 0 }

// windowBlocks returns the number of blocks that a window needs.
func windowBlocks(g *kvcastv1.AttentionGroup) int {
	size := max(1, int(g.GetBlockSize()))
	return (int(g.GetWindow()) - 1 + size - 1) / size
}

func isWindow(g *kvcastv1.AttentionGroup) bool {
	return g.GetKind() == kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW || g.GetKind() == kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW_MLA
}

// keepsFewer reports whether a group that has left out blocks keeps fewer than n of a prompt: the ends of two windows, of four that are a
// block longer if it drops blocks, or two states.
func (r *rankState) keepsFewer(g *kvcastv1.AttentionGroup, n int) bool {
	if r.sparse&(1<<(g.GetIndex()&63)) == 0 {
		return false
	}
	switch {
	case g.GetKind() == kvcastv1.AttentionGroup_KIND_MAMBA:
		return n > 2
	case isWindow(g) && g.GetDrops():
		return n > 4*(windowBlocks(g)+1)
	default:
		return isWindow(g) && n > 2*windowBlocks(g)
	}
}

// judgeGroup judges a store of another group than the main group.
func (l *Lane) judgeGroup(b *feed.Batch, e *wire.Event) judgement {
	r := l.rank(b.Rank)
	i := slices.IndexFunc(b.Groups.GetGroups(), func(g *kvcastv1.AttentionGroup) bool { return g.GetIndex()+1 == uint32(e.Group) })
	if !copies.Detects(b.CopyRule, e) || !rooted(e) || i < 0 || e.BlockSize == 0 {
		return judgement{op: copies.StoreOp(b.CopyRule, e, false)}
	}
	g, n := b.Groups.GetGroups()[i], len(e.BlockHashes)
	if n < len(e.Tokens)/int(e.BlockSize) {
		r.sparse |= 1 << (g.GetIndex() & 63)
		return judgement{op: copies.Add}
	}
	held := r.groupBlocks(groupKey{e.Group, e.Tier}).has
	need := 0
	switch {
	case isWindow(g):
		need = windowBlocks(g)
	case g.GetKind() == kvcastv1.AttentionGroup_KIND_MAMBA:
		need = 1
	case g.GetChunk() > 0:
		need = len(e.Tokens) % int(g.GetChunk()) / int(e.BlockSize)
	}
	root := l.rootStore
	if !slices.ContainsFunc(b.Groups.GetGroups(), (*kvcastv1.AttentionGroup).GetMain) {
		root = rootStore{true, len(e.Tokens), true}
	}
	tail := e.BlockHashes[n-min(n, need):]
	again := root.seen && root.held && max(root.tokens, len(e.Tokens))-min(root.tokens, len(e.Tokens)) < max(int(e.BlockSize), 64) && allOf(tail, held)
	switch {
	case again && (l.announcements.Announces(b.Rank, b.Source) || r.keepsFewer(g, n)):
		return judgement{op: copies.AddUnsure, ignoresNew: true}
	case again:
		return judgement{op: copies.AddUnsure, suspectsNew: n > need}
	case allOf(e.BlockHashes, held):
		return judgement{op: copies.AddUnsure}
	default:
		return judgement{op: copies.Add}
	}
}

func allOf(hashes []uint64, held func(uint64) bool) bool {
	return !slices.ContainsFunc(hashes, func(hash uint64) bool { return !held(hash) })
}

// takeBack removes the suspects of a rank: its engine has been found to announce blocks, so that its groups may never have held them.
func (l *Lane) takeBack(rank uint32) {
	r := l.rank(rank)
	for _, s := range r.suspects {
		g := r.groupTables[s.key]
		switch {
		case g == nil || !g.has(s.hash): // removed since
		case g.remove(s.hash, copies.RemoveCopy):
			l.tableBlocks.Release(1)
			l.emitGroup(rank, s.key, kvcastv1.RouterEventGroupRemovedField, []uint64{s.hash}, 0)
		default:
			key := runKey{rank: rank, tier: s.key.tier, group: s.key.group}
			l.log.suppress(&key, l.entry.events, copies.RemoveCopy, s.hash)
			l.log.endSuppressed(&key, l.entry.events)
		}
	}
	r.suspects = nil
}

package groups

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

// Root is the last store of the main group without a parent in a batch. The zero value is none.
type Root struct {
	seen bool
	// tokens is the number of its tokens, and held whether device memory had all its blocks.
	tokens int
	held   bool
}

// RootOf returns the Root of a store.
func RootOf(e *wire.Event, held bool) Root { return Root{true, len(e.Tokens), held} }

// Judgement is the effect of a store of a group.
type Judgement struct {
	Op copies.Op // on blocks that exist
	// IgnoresNew reports whether other blocks are not added, and SuspectsNew whether they may be taken back.
	IgnoresNew, SuspectsNew bool
}

// Suspect is a block that a group may not hold.
type Suspect struct {
	Key  Key
	Hash uint64
}

// maxSuspects bounds the suspects of a rank. Further ones are not taken back: the rank is degraded anyway.
const maxSuspects = 1 << 14

// Suspect adds a suspect.
func (r *Rank) Suspect(key Key, hash uint64) {
	if len(r.suspects) < maxSuspects {
		r.suspects = append(r.suspects, Suspect{key, hash})
	}
}

// HasSuspects reports whether there are suspects.
func (r *Rank) HasSuspects() bool { return len(r.suspects) > 0 }

// TakeSuspects returns the suspects, and forgets them.
func (r *Rank) TakeSuspects() []Suspect {
	all := r.suspects
	r.suspects = nil
	return all
}

// Siblings is what the stores of all groups of a rank are.
type Siblings uint8

// What Siblings can be.
const (
	SiblingsUnsure Siblings = iota
	SiblingsOfCopies
	SiblingsAnnounce
)

// SiblingsOf judges a store of the main group without a parent by the events that follow it: whether these are stores of all groups for as
// many tokens.
func (r *Rank) SiblingsOf(e *wire.Event, next []wire.Event, described *kvcastv1.Groups) (all Siblings) {
	for _, g := range described.GetGroups() {
		if g.GetMain() {
			continue
		}
		if len(next) == 0 {
			return SiblingsOfCopies
		}
		s := &next[0]
		next = next[1:]
		size := int(s.BlockSize)
		if s.Kind != wire.KindStored || s.Tier != kvblock.TierDevice || uint32(s.Group) != g.GetIndex()+1 || !rooted(s) || size == 0 ||
			len(s.BlockHashes) < len(s.Tokens)/size || apart(len(e.Tokens), len(s.Tokens)) >= size {
			return SiblingsOfCopies
		}
		if r.keepsFewer(g, len(s.BlockHashes)) {
			all = SiblingsAnnounce
		}
	}
	return all
}

func apart(a, b int) int { return max(a, b) - min(a, b) }

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
func (r *Rank) keepsFewer(g *kvcastv1.AttentionGroup, n int) bool {
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

// needs returns how many of the last blocks of a store a group needs to hold for the prefix to be reused.
func needs(g *kvcastv1.AttentionGroup, e *wire.Event) int {
	switch {
	case isWindow(g):
		return windowBlocks(g)
	case g.GetKind() == kvcastv1.AttentionGroup_KIND_MAMBA:
		return 1
	case g.GetChunk() > 0:
		return len(e.Tokens) % int(g.GetChunk()) / int(e.BlockSize)
	default:
		return 0
	}
}

// Judge judges a store of another group than the main group, which follows root in the batch. announces reports whether the engine is known
// to announce blocks.
func (r *Rank) Judge(b *feed.Batch, e *wire.Event, root Root, announces bool) Judgement {
	described := b.Groups.GetGroups()
	i := slices.IndexFunc(described, func(g *kvcastv1.AttentionGroup) bool { return g.GetIndex()+1 == uint32(e.Group) })
	if !copies.Detects(b.CopyRule, e) || !rooted(e) || i < 0 || e.BlockSize == 0 {
		return Judgement{Op: copies.StoreOp(b.CopyRule, e, false)}
	}
	g, n := described[i], len(e.BlockHashes)
	if n < len(e.Tokens)/int(e.BlockSize) {
		r.sparse |= 1 << (g.GetIndex() & 63)
		return Judgement{Op: copies.Add}
	}
	if !slices.ContainsFunc(described, (*kvcastv1.AttentionGroup).GetMain) {
		root = RootOf(e, true)
	}
	held, need := r.Find(Key{e.Group, e.Tier}), needs(g, e)
	again := root.seen && root.held && apart(root.tokens, len(e.Tokens)) < max(int(e.BlockSize), 64) && held.hasAll(e.BlockHashes[n-min(n, need):])
	switch {
	case again && (announces || r.keepsFewer(g, n)):
		return Judgement{Op: copies.AddUnsure, IgnoresNew: true}
	case again:
		return Judgement{Op: copies.AddUnsure, SuspectsNew: n > need}
	case held.hasAll(e.BlockHashes):
		return Judgement{Op: copies.AddUnsure}
	default:
		return Judgement{Op: copies.Add}
	}
}

func (g *Blocks) hasAll(hashes []uint64) bool {
	return !slices.ContainsFunc(hashes, func(hash uint64) bool { return !g.Has(hash) })
}

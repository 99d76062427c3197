package radix

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// modelRank is a simple reference implementation of Rank. It knows each block's contents from the start of the prompt.
type modelRank struct {
	model  string
	blocks map[uint64]*modelBlock // by block hash
	// hadTwins is set once two block hashes had the same content and prefix at a time: compareNames then expects less.
	hadTwins bool
}

type modelBlock struct {
	tiers          uint8
	path           string // contents from the start of the prompt; "": unknown
	orphan         bool   // tokens and parent are known, the parent's path is not
	tokens, parent uint64
	hasParent      bool
	lora           string
	blockSize      uint32
}

func newModelRank(model string) *modelRank {
	return &modelRank{model: model, blocks: make(map[uint64]*modelBlock)}
}

func (m *modelRank) store(tier int, s Stored) {
	parent, hasParent := s.Parent, s.HasParent
	for i, h := range s.Blocks {
		b := m.blocks[h]
		existed := b != nil
		if !existed {
			b = new(modelBlock)
			m.blocks[h] = b
		}
		told := i < len(s.Tokens) && (tier == 0 || b.tiers&1 == 0 && b.path == "" && !b.orphan) // else a copy
		if !existed || told {
			b.lora, b.blockSize = s.LoRA, s.BlockSize
		}
		b.tiers |= 1 << tier
		if told {
			before, known := "", !hasParent
			if p := m.blocks[parent]; hasParent && p != nil && p.path != "" {
				before, known = p.path, true
			}
			switch {
			case known:
				b.path, b.orphan = before+string(rune(s.Tokens[i])), false
			case b.path == "":
				b.orphan = true
			}
			if known || b.path == "" {
				b.tokens, b.parent, b.hasParent = s.Tokens[i], parent, hasParent
			}
		} else if !existed {
			b.parent, b.hasParent = parent, hasParent
		}
		m.adopt()
		if _, unique := m.hashes(""); !unique {
			m.hadTwins = true
		}
		parent, hasParent = h, true
	}
}

func (m *modelRank) adopt() {
	for again := true; again; {
		again = false
		for _, b := range m.blocks {
			if p := m.blocks[b.parent]; b.orphan && p != nil && p.path != "" {
				b.path, b.orphan, again = p.path+string(rune(b.tokens)), false, true
			}
		}
	}
}

func (m *modelRank) remove(tier int, hashes []uint64) {
	for _, h := range hashes {
		if b := m.blocks[h]; b != nil {
			if b.tiers &^= 1 << tier; b.tiers == 0 {
				delete(m.blocks, h)
			}
		}
	}
}

func (m *modelRank) clearTier(tier int) {
	for h := range m.blocks {
		m.remove(tier, []uint64{h})
	}
}

// match returns the longest prefix in some tiers.
func (m *modelRank) match(tiers uint8, tokens []uint64) int {
	paths := make(map[string]bool)
	for _, b := range m.blocks {
		if b.tiers&tiers != 0 && b.path != "" {
			paths[b.path] = true
		}
	}
	path := ""
	for i, c := range tokens {
		if path += string(rune(c)); !paths[path] {
			return i
		}
	}
	return len(tokens)
}

// state returns the number and digest of the blocks in a tier.
func (m *modelRank) state(tier int) (n, digest uint64) {
	for h, b := range m.blocks {
		if b.tiers&(1<<tier) != 0 {
			n, digest = n+1, digest^kvblock.Digest(h)
		}
	}
	return n, digest
}

func (b *modelBlock) block(hash uint64) Block {
	want := Block{Hash: hash, Tiers: b.tiers, LoRA: b.lora, BlockSize: b.blockSize}
	if b.path != "" || b.orphan {
		want.Tokens, want.HasTokens = b.tokens, true
	}
	if b.hasParent {
		want.Parent, want.HasParent = b.parent, true
	}
	return want
}

// pair is a rank and its model.
type pair struct {
	rank  *Rank
	model *modelRank
}

// compareMatch returns an error that describes how a match differs from the models'. If shorter is set, prefixes
// may be shorter.
func compareMatch(x *Index, pairs []pair, m *Matcher, modelName string, tokens []uint64, shorter bool) error {
	for _, m.Group = range []bool{true, false} {
		x.Match(modelName, tokens, m)
		found := slices.Clone(m.Found)
		for _, g := range m.Groups {
			for number := range g.Numbers() {
				found = append(found, g.MatchOf(x.Rank(number)))
			}
		}
		if err := compareFound(found, pairs, modelName, tokens, shorter); err != nil {
			return fmt.Errorf("groups %t: %w", m.Group, err)
		}
	}
	return nil
}

func compareFound(found []Match, pairs []pair, modelName string, tokens []uint64, shorter bool) error {
	got := make(map[*Rank]Match)
	for _, f := range found {
		if _, ok := got[f.Rank]; ok || f.Blocks == 0 {
			return fmt.Errorf("rank %d is found twice or without blocks: %+v", f.Rank.number, found)
		}
		got[f.Rank] = f
	}
	for _, p := range pairs {
		want := Match{}
		if p.model.model == modelName || modelName == "" {
			want.Blocks = p.model.match(allTiers, tokens)
			for tier := range NumTiers {
				want.TierBlocks[tier] = p.model.match(1<<tier, tokens)
			}
		}
		f := got[p.rank]
		delete(got, p.rank)
		f.Rank = nil
		if f == want {
			continue
		}
		for tier := range NumTiers {
			shorter = shorter && f.TierBlocks[tier] <= want.TierBlocks[tier]
		}
		if !shorter || f.Blocks > want.Blocks {
			return fmt.Errorf("match of %v in rank %d: %+v, want %+v", tokens, p.rank.number, f, want)
		}
	}
	if len(got) > 0 {
		return fmt.Errorf("match of %v found unknown ranks: %+v", tokens, got)
	}
	return nil
}

// compare returns an error that describes how the blocks of a rank differ from the model's.
func (p pair) compare(x *Index) error {
	for tier := range NumTiers {
		n, digest := p.model.state(tier)
		if gotN, gotDigest := p.rank.Digest(tier); gotN != n || gotDigest != digest {
			return fmt.Errorf("tier %d: %d blocks, digest %x, want %d, %x", tier, gotN, gotDigest, n, digest)
		}
	}
	scanned := make(map[uint64]Block)
	for from := uint64(0); ; {
		var blocks []Block
		blocks, from = x.Scan(p.rank, from, nil)
		for _, b := range blocks {
			if _, ok := scanned[b.Hash]; ok {
				return fmt.Errorf("the block %+v is scanned twice", b)
			}
			if s, _ := p.rank.table.Get(b.Hash); s.tag.isPlaced() != (b.Place != 0) {
				return fmt.Errorf("the block %+v has place %t", b, s.tag.isPlaced())
			}
			b.Place = 0 // depends on the history
			scanned[b.Hash] = b
		}
		if from == 0 {
			break
		}
	}
	want := make(map[uint64]Block)
	for h, b := range p.model.blocks {
		want[h] = b.block(h)
		got, ok := x.Find(p.rank, h)
		if got.Place = 0; !ok || got != want[h] || p.rank.Tiers(h) != b.tiers {
			return fmt.Errorf("found %+v %t, want %+v", got, ok, want[h])
		}
	}
	if !maps.Equal(scanned, want) {
		return fmt.Errorf("scanned %+v, want %+v", scanned, want)
	}
	for h, b := range p.model.blocks {
		s, _ := p.rank.table.Get(h)
		t := s.tag
		if t.isPlaced() != (b.path != "") || (t&tagOrphan != 0) != b.orphan {
			return fmt.Errorf("block %d has tag %x, want %+v", h, t, b)
		}
		if !t.isPlaced() {
			continue
		}
		path := pathOf(&x.tree, t.place())
		if x.tree.limits.unheld < 0 && strings.HasSuffix(b.path, path) {
			continue // the blocks before may be forgotten
		}
		if path != b.path {
			return fmt.Errorf("block %d has contents %q, want %q", h, path, b.path)
		}
	}
	return nil
}

// pathOf returns the contents from the start of the prompt to a block.
func pathOf(t *tree, p position) string {
	var path []rune
	for t.run(p.run).after.run != 0 {
		r := t.run(p.run)
		for i := int(p.offset); i >= 0; i-- {
			path = append(path, rune(r.tokens[i]))
		}
		p = r.after
	}
	slices.Reverse(path)
	return string(path)
}

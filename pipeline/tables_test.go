package pipeline

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Place is a tier of a rank.
type Place struct {
	Worker string
	Rank   uint32
	Tier   kvcastv1.Tier
}

// Tables returns the blocks in the tables; a place without blocks is absent.
func (p *Pipeline) Tables() map[Place]map[uint64]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[Place]map[uint64]bool)
	for name, l := range p.lanes {
		l.mu.Lock()
		l.checkLower()
		for number, r := range l.ranks {
			for tier, t := range r.tables {
				if t == nil || t.blocks.table.Len() == 0 {
					continue
				}
				at := Place{name, number, kvcastv1.Tier(tier)}
				all[at] = make(map[uint64]bool)
				t.blocks.all(func(b *slot) { all[at][b.Key()] = true })
			}
		}
		l.mu.Unlock()
	}
	return all
}

// checkLower panics if the number of blocks in lower tiers is wrong. The lane must be locked.
func (l *Lane) checkLower() {
	n := 0
	for _, r := range l.ranks {
		n += r.lower()
	}
	if got := l.lower.Load(); got != int64(n) {
		panic(fmt.Sprintf("blocks of %s in lower tiers: got %d, want %d", l.worker, got, n))
	}
}

// LowerBlocks returns the number of blocks in lower tiers of all lanes.
func (p *Pipeline) LowerBlocks() int64 { return p.holders.blocks.Load() }

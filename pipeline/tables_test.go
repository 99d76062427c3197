package pipeline

import kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"

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
		for number, r := range l.ranks {
			for tier, t := range r.tables {
				if t == nil || t.blocks.len() == 0 {
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

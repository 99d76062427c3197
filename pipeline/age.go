package pipeline

// age tells the blocks of a table that were stored since the last gap from
// those that were not, which are stale: the engine may have let go of them
// unheard. Each block has the generation in which it was last stored, and a gap
// begins a new one: it makes all blocks stale at once, and looks at none.
type age struct {
	generation uint32
	// blocks is how many are stale.
	blocks int
	// No block is stale whose mixed hash is below from, where a segment begins;
	// slot is where in that segment to look first. Since no block gets stale but
	// by a gap, which starts from 0 again, all searches between two gaps look at
	// each segment once.
	from uint64
	slot int
}

// maxGeneration is the last that the bits beside the flags can hold.
const maxGeneration = 1<<(32-generationShift) - 1

// mark is the present generation, as a block has it.
func (a *age) mark() blockFlags { return blockFlags(a.generation << generationShift) }

// stale tells whether a block that is held is from before the last gap.
func (a *age) stale(b *block) bool { return uint32(b.flags)>>generationShift != a.generation }

// gap makes every block stale. It is false, and does nothing, where there is no
// further generation.
func (t *blocks) gap() bool {
	if t.age.generation == maxGeneration {
		return false
	}
	t.age = age{generation: t.age.generation + 1, blocks: t.n}
	return true
}

// refresh makes a stale block stale no longer. It is seldom needed, and inlined it
// would slow down put.
//
//go:noinline
func (t *blocks) refresh(s *segment, i int) {
	s.reach(t.age.generation)
	b := &s.slots[i]
	b.flags = b.flags&(1<<generationShift-1) | t.age.mark()
	s.stale--
	t.age.blocks--
}

// reach brings the segment's count of stale blocks to a generation. A gap does
// not look at segments: whatever was in one that has not changed since is stale.
func (s *segment) reach(generation uint32) {
	if s.generation != generation {
		s.generation, s.stale = generation, uint32(s.n)
	}
}

// nextStale returns where a stale block is; there must be one.
func (t *blocks) nextStale() (s *segment, i int) {
	for {
		s = t.segment(t.age.from)
		if s.reach(t.age.generation); s.stale > 0 {
			break
		}
		t.age.from, t.age.slot = s.after(t.age.from), 0
	}
	// Blocks may have moved within the segment since slot was noted, so the search
	// goes round.
	for i = t.age.slot; ; i++ {
		if i >= len(s.slots) {
			i = 0
		}
		if b := &s.slots[i]; b.flags&flagHeld != 0 && t.age.stale(b) {
			t.age.slot = i
			return s, i
		}
	}
}

package hybrid

// spec is a set of groups that are equal but for their index: a block counts if all of them hold it.
type spec struct {
	key    Group // without index and drop
	groups []int // the indexes
	block  int
	align  int // Rule.align
	// step is the number of tokens between two positions that Mamba groups hold: the block, or the unit if there are partial hits.
	step int
	// need is the number of blocks that a window needs before the end of a prefix.
	need int
	// drop reports whether the spec drops a part of what it finds; margin is the number of tokens by which it looks further.
	drop   bool
	margin int
}

func newSpec(g Group, r *Rule) spec {
	s := spec{key: g, block: g.BlockSize, align: r.align, step: g.BlockSize, margin: g.BlockSize}
	partial := r.align < g.BlockSize
	if partial {
		s.step = r.unit
	}
	switch {
	case g.Kind.IsFull():
		s.margin = s.step
	case g.Kind.IsWindow():
		s.need = (g.Window - 1 + g.BlockSize - 1) / g.BlockSize
	case g.Kind == Mamba:
		s.margin = 0 // nothing is dropped
	}
	return s
}

// lower returns the longest prefix up to limit that the spec serves. If drop is set, it looks further than limit by a margin,
// unless the group is alone, and drops a part of what it finds.
func (s *spec) lower(p *prompt, limit int, drop, alone bool) int {
	if drop && !alone {
		limit = min(limit+s.margin, p.hashed)
	}
	switch kind := s.key.Kind; {
	case kind.IsFull():
		return s.lowerFull(p, limit, drop)
	case kind.IsWindow():
		return s.lowerWindow(p, limit, drop)
	case kind == Mamba:
		return s.lowerMamba(p, limit)
	default:
		return s.lowerChunked(p, limit)
	}
}

// lowerFull returns the longest run of blocks from the prompt's first token on. With partial hits, the run continues to
// the last position within the next block that is held.
func (s *spec) lowerFull(p *prompt, limit int, drop bool) int {
	blocks := s.scan(p, s.block)
	n := blocks.runFrom(0, limit/s.block) * s.block
	if s.align < s.block {
		units := s.scan(p, s.align)
		from, to := n/s.align, min(n+s.block-s.align, limit)/s.align
		if last := units.lastIn(from, to); last > from {
			n = last * s.align
		}
	}
	if drop && n > 0 {
		n -= min(s.align, s.block)
	}
	return n - n%s.align
}

// lowerWindow returns the longest prefix before whose end the group holds all blocks that the window needs. If the prefix
// is shorter than that, it holds all its blocks. If drop is set, it also holds the block after the prefix.
func (s *spec) lowerWindow(p *prompt, limit int, drop bool) int {
	need, dropped := s.need, 0
	if drop {
		need, dropped = s.need+1, 1
	}
	blocks := s.scan(p, s.block)
	for end := s.alignEnd(limit/s.block, dropped); end > dropped; {
		run := blocks.runBefore(end, need)
		if run == need {
			return (end - dropped) * s.block
		}
		if run == end {
			return s.alignStart(end, dropped)
		}
		// The block before the run is not held: the next candidate ends before it.
		end = s.alignEnd(blocks.lastIn(0, end-run-1), dropped)
	}
	return 0
}

// alignEnd returns the last block up to end with which a run can end, so that the prefix without the dropped blocks is
// aligned; 0 if there is none.
func (s *spec) alignEnd(end, dropped int) int {
	if end < dropped || s.block == s.align {
		return max(end, 0)
	}
	return (end-dropped)*s.block/s.align*s.align/s.block + dropped
}

// alignStart returns the prefix for a run that begins with the prompt and is shorter than the window needs. vLLM aligns it
// before and after it drops a block, so that more is dropped if the block is smaller than the alignment.
func (s *spec) alignStart(end, dropped int) int {
	n := end * s.block
	n -= n % s.align
	if n > 0 {
		n -= dropped * s.block
	}
	return n - n%s.align
}

// lowerMamba returns the last position with a state.
func (s *spec) lowerMamba(p *prompt, limit int) int {
	states := s.scan(p, s.step)
	for end := limit / s.step; end > 0; {
		last := states.lastIn(0, end)
		if n := last * s.step; n%s.align == 0 {
			return n
		}
		end = last * s.step / s.align * s.align / s.step
	}
	return 0
}

// lowerChunked returns the longest run of blocks from the first token of the limit's chunk on. All blocks before count as held.
func (s *spec) lowerChunked(p *prompt, limit int) int {
	from := limit / s.key.Chunk * s.key.Chunk / s.block
	blocks := s.scan(p, s.block)
	return (from + blocks.runFrom(from, limit/s.block)) * s.block
}

package hybrid

import "math/bits"

// Holder tells which prefixes of a prompt each attention group holds.
type Holder interface {
	// Held returns as bits 0 to n-1 whether a group, by its index, holds the prefixes of from+step, from+2*step up to from+n*step
	// tokens. A group holds a prefix if it holds the block that ends with the prefix, for Mamba the state at the end of it. n is 1
	// to 64; further bits are ignored. step is the group's block size, or Rule.Unit in groups of full attention and Mamba with
	// larger blocks, if there are partial hits; from is a multiple of it.
	Held(group, from, step, n int) uint64
}

// Runner is a Holder that knows how many prefixes a group holds one after another, such as those of a main group.
type Runner interface {
	// Run returns how many of the prefixes that Held is asked for are held one after another, from the first. n may be greater than 64. If ok
	// is false, Held is asked.
	Run(group, from, step, n int) (run int, ok bool)
}

// prompt is what a Rule is applied to: the tokens of a prompt from start on. All other positions count from there.
type prompt struct {
	holder Holder
	start  int
	hashed int
}

// scan reads which blocks the groups of a spec hold. Block i ends with (i+1)*step tokens.
type scan struct {
	prompt *prompt
	groups []int
	step   int
	// word has the blocks from low up to high, the first in bit 0.
	word      uint64
	low, high int
}

func (s *spec) scan(p *prompt, step int) scan { return scan{prompt: p, groups: s.groups, step: step} }

// load loads the blocks from low up to high: 1 to 64 blocks.
func (c *scan) load(low, high int) {
	c.low, c.high = low, high
	c.word = ^uint64(0) >> (64 - (high - low))
	from := c.prompt.start + low*c.step
	for _, g := range c.groups {
		if c.word &= c.prompt.holder.Held(g, from, c.step, high-low); c.word == 0 {
			return
		}
	}
}

// upTo returns the blocks up to end, the last in bit 63, and their number. end is above low and at most high.
func (c *scan) upTo(end int) (word uint64, n int) {
	n = end - c.low
	return c.word << (64 - n), n
}

// runFrom returns how many blocks are held one after another from first on, up to end.
func (c *scan) runFrom(first, end int) int {
	if r, ok := c.prompt.holder.(Runner); ok && len(c.groups) == 1 {
		if run, ok := r.Run(c.groups[0], c.prompt.start+first*c.step, c.step, end-first); ok {
			return run
		}
	}
	for i := first; i < end; i = c.high {
		c.load(i, min(i+64, end))
		if run := bits.TrailingZeros64(^c.word); run < c.high-i {
			return i + run - first
		}
	}
	return max(end-first, 0)
}

// runBefore returns how many blocks are held one after another before end, up to maxRun.
func (c *scan) runBefore(end, maxRun int) (run int) {
	for i := end; i > 0 && run < maxRun; i = c.low {
		if i > c.high || i <= c.low {
			c.load(max(i-min(maxRun-run, 64), 0), i)
		}
		word, n := c.upTo(i)
		held := bits.LeadingZeros64(^word)
		run += held
		if held < n {
			break
		}
	}
	return min(run, maxRun)
}

// lastIn returns the end of the last block that is held among those from first up to end; first if there is none.
func (c *scan) lastIn(first, end int) int {
	// Most often it is one of the last blocks: a Holder may take time for each.
	for i, n := end, 4; i > first; i, n = c.low, min(2*n, 64) {
		if i > c.high || i <= c.low {
			c.load(max(i-n, first), i)
		}
		if word, _ := c.upTo(i); word != 0 {
			return max(i-bits.LeadingZeros64(word), first)
		}
	}
	return first
}

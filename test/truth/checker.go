package truth

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// Checker knows what engines had cached after each batch, and where their batches are in the stream. It is safe for concurrent
// use.
type Checker struct {
	keep state

	mu      sync.Mutex // guards all below
	engines map[Rank]*history
	ranks   []Rank             // of engines
	streams map[string]*stream // by epoch
	counts  Counts
}

// New returns a Checker that remembers a number of batches of each engine.
func New(batches int) *Checker {
	return &Checker{keep: state(batches), engines: make(map[Rank]*history), streams: make(map[string]*stream)}
}

// AddEngine adds an engine, and returns what simulator.Config.Observe must be.
func (c *Checker) AddEngine(r Rank, pool blockpool.Config) (observe func(simulator.Change)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := newHistory(pool, c.keep)
	c.engines[r], c.ranks = h, append(c.ranks, r)
	return func(change simulator.Change) {
		c.mu.Lock()
		defer c.mu.Unlock()
		h.apply(change)
	}
}

// GroupsOf returns the model of a worker, given its number in a fleet: the attention groups that it has beside full attention, and whether
// kvcast can compute its block hashes. Half of the workers have hybrid models.
func GroupsOf(worker int) (groups []blockpool.Group, vllmHashes bool) {
	switch worker % 4 {
	case 1:
		return []blockpool.Group{{Window: 128}}, false
	case 3:
		return []blockpool.Group{{Window: 64}, {}}, true
	}
	return nil, false
}

// Receive takes an entry that a router has received. Routers without a filter may pass the same entries.
func (c *Checker) Receive(epoch string, e *kvcastv1.Entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[epoch]
	if s == nil {
		s = newStream()
		c.streams[epoch] = s
	}
	r := Rank{Worker: e.GetWorker()}
	if events := e.GetEvents(); len(events) > 0 {
		r.DPRank = events[0].GetDpRank()
	}
	var began state
	isBatch := false
	if h := c.engines[r]; h != nil && e.GetEngineTimeUnixNano() != 0 {
		began, isBatch = h.after(e.GetEngineTimeUnixNano())
	}
	s.receive(time.Now(), e.GetSeq(), r, began, isBatch)
}

// Counts returns what was checked.
func (c *Checker) Counts() Counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts
}

func (c *Checker) failed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts.Failures++
}

// Bounds are how old an answer may be.
type Bounds struct {
	// Delivered is what the server has delivered before the request: each answer has it. nil: it is not known.
	Delivered *kvcastv1.Position
	// MaxAge is the age beyond which an entry that any router has received must be part of an answer that is not degraded; 0: an
	// answer may be of any age, as those of a server that is cut off from the journal.
	MaxAge time.Duration
}

// Question is a request, and what the answer must be.
type Question struct {
	Request *kvcastv1.MatchPrefixRequest
	prompts []prompt
	bounds  Bounds
	asked   time.Time
}

// prompt is a prompt of a question.
type prompt struct {
	rank   Rank // of the engine that has stored it
	tokens []uint32
	// byHash reports that it is asked for by the engine's block hashes.
	byHash bool
	// foreign reports that it has an adapter or a salt that no engine has seen.
	foreign bool
}

// Draw returns a question about prompts that an engine has stored, has or has evicted, and others like them. It returns false if no engine has stored
// any. The first prompt was stored last, so that some answer shows the trust of the rank.
func (c *Checker) Draw(rng *rand.Rand, prompts int, bounds Bounds) (q Question, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ranks) == 0 {
		return q, false
	}
	q = Question{Request: &kvcastv1.MatchPrefixRequest{}, bounds: bounds, asked: time.Now()}
	r := c.ranks[rng.IntN(len(c.ranks))]
	for i := range prompts {
		p := prompt{rank: r, tokens: c.engines[r].newestPrompt()}
		if i > 0 {
			p.tokens = c.engines[r].draw(rng)
		}
		if p.tokens == nil {
			continue
		}
		asked := &kvcastv1.Prompt{TokenIds: p.tokens}
		if i > 0 {
			switch rng.IntN(8) {
			case 0:
				p.byHash = true
				asked = &kvcastv1.Prompt{BlockHashes: c.hashes(r, p)}
			case 1:
				p.foreign = true
				asked.CacheSalt = "another tenant"
			case 2:
				p.foreign = true
				asked.LoraName = "another adapter"
			case 3: // it leaves the prompt somewhere
				p.tokens = slices.Clone(p.tokens)
				p.tokens[rng.IntN(len(p.tokens))]++
				asked.TokenIds = p.tokens
			}
		}
		q.prompts, q.Request.Prompts = append(q.prompts, p), append(q.Request.Prompts, asked)
	}
	return q, len(q.prompts) > 0
}

// hashes returns the block hashes that an engine gives to the blocks of a prompt.
func (c *Checker) hashes(r Rank, p prompt) []uint64 {
	if p.foreign {
		return nil
	}
	if p.byHash {
		r = p.rank
	}
	return c.engines[r].pool.Hashes(p.tokens)
}

// Check checks an answer as soon as it has come. It returns an error if it is wrong.
func (c *Checker) Check(q Question, got *kvcastv1.MatchPrefixResponse) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts.Requests++
	if len(got.GetPrompts()) != len(q.prompts) {
		return fmt.Errorf("answers to %d prompts, want %d", len(got.GetPrompts()), len(q.prompts))
	}
	a := answer{position: got.GetPosition(), stream: c.streams[got.GetPosition().GetEpoch()]}
	if a.stream == nil {
		a.stream = newStream() // no router has received an entry of this epoch
	}
	if d := q.bounds.Delivered; d.GetEpoch() == a.position.GetEpoch() && d.GetSeq() > a.position.GetSeq() {
		return fmt.Errorf("answer at entry %d, the server had delivered entry %d before", a.position.GetSeq(), d.GetSeq())
	}
	if q.bounds.MaxAge > 0 {
		a.least = a.stream.before(q.asked.Add(-q.bounds.MaxAge))
	}
	var errs []error
	trusts := make(map[Rank]kvcastv1.Trust) // of the device tier: it is the same for all prompts
	for _, all := range got.GetPrompts() {
		for _, m := range all.GetMatches() {
			trusts[rankOf(m)], _ = device(m)
		}
	}
	for i, all := range got.GetPrompts() {
		matches := make(map[Rank]*kvcastv1.PrefixMatch)
		for _, m := range all.GetMatches() {
			matches[rankOf(m)] = m
		}
		for r, trust := range trusts {
			if c.engines[r] == nil {
				continue
			}
			if err := c.check(q.prompts[i], r, trust, matches[r], a); err != nil {
				c.counts.Wrong++
				errs = append(errs, &checker.Violation{Property: checker.True, Detail: fmt.Sprintf(
					"%s, rank %d, entry %d, prompt %d of %d: %v; prompts were stored by %s, rank %d",
					r.Worker, r.DPRank, a.position.GetSeq(), i, len(q.prompts), err, q.prompts[i].rank.Worker, q.prompts[i].rank.DPRank)})
			}
		}
	}
	return errors.Join(errs...)
}

func rankOf(m *kvcastv1.PrefixMatch) Rank { return Rank{m.GetWorker(), m.GetDpRank()} }

// device returns the trust and the blocks in the device tier.
func device(m *kvcastv1.PrefixMatch) (kvcastv1.Trust, int) {
	trust, blocks := m.GetTrust(), 0
	for _, t := range m.GetTiers() {
		if t.GetTier() == kvcastv1.Tier_TIER_DEVICE {
			blocks = int(t.GetBlocks())
			if t.GetTrust() != kvcastv1.Trust_TRUST_UNSPECIFIED {
				trust = t.GetTrust()
			}
		}
	}
	return trust, blocks
}

// answer is where an answer is in the stream.
type answer struct {
	position *kvcastv1.Position
	stream   *stream
	least    uint64 // the least seq of an answer that is not degraded
}

// check checks the match of a prompt and a rank, which is nil if the rank holds nothing of the prompt.
func (c *Checker) check(p prompt, r Rank, trust kvcastv1.Trust, m *kvcastv1.PrefixMatch, a answer) error {
	if trust == kvcastv1.Trust_TRUST_DEGRADED {
		c.counts.Degraded++
		return nil
	}
	_, got := device(m)
	h, hashes := c.engines[r], c.hashes(r, p)
	w := a.stream.window(r, a.position.GetSeq(), h.newest)
	isForgotten := w.first < h.oldest()
	w.first = min(max(w.first, h.oldest()), h.newest)
	w.last = max(w.first, w.last)
	possible := h.prefixes(hashes, w)
	if trust == kvcastv1.Trust_TRUST_EXACT {
		c.counts.exact(got, len(hashes), len(possible))
	} else {
		c.counts.UpperBound++
	}
	switch {
	case a.position.GetSeq() < a.least:
		return fmt.Errorf("%v, though a router had received entry %d long before the request", trust, a.least)
	case trust == kvcastv1.Trust_TRUST_EXACT && m.GetTrust() == trust && int(m.GetBlocks()) != got:
		return fmt.Errorf("%v: %d blocks in all tiers, and %d in device memory; the engine has no other tier", trust, m.GetBlocks(), got)
	case judge(trust, got, possible):
		return nil
	case isForgotten:
		c.counts.Forgotten++
		return nil
	}
	return fmt.Errorf("%v: got %d blocks of %d, the engine had %v after batches and restarts %d to %d of %d",
		trust, got, len(hashes), possible, w.first, w.last, h.newest)
}

// judge reports whether an answer may be given if the lengths of the prefix in the states that it may show are possible, in ascending
// order.
func judge(trust kvcastv1.Trust, got int, possible []int) bool {
	switch trust {
	case kvcastv1.Trust_TRUST_EXACT:
		return slices.Contains(possible, got)
	case kvcastv1.Trust_TRUST_UPPER_BOUND:
		return got >= possible[0]
	default:
		return false // no server sends it
	}
}

func (c *Counts) exact(got, all, possible int) {
	c.Exact++
	if got > 0 {
		c.Held++
	}
	if got < all {
		c.Partial++
	}
	if possible > 1 {
		c.InFlight++
	}
}

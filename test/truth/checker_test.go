package truth_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/truth"
)

const (
	exact    = kvcastv1.Trust_TRUST_EXACT
	upper    = kvcastv1.Trust_TRUST_UPPER_BOUND
	degraded = kvcastv1.Trust_TRUST_DEGRADED
	device   = kvcastv1.Tier_TIER_DEVICE
	pinned   = kvcastv1.Tier_TIER_HOST_PINNED
)

// scene is an engine that has stored a prompt of four blocks in two batches, and has evicted the last two in a third one: it held
// 2, 4 and then 2. Entries 1 to 3 are its batches, and entry 4 is another worker's.
type scene struct {
	*truth.Checker
	observe func(simulator.Change)
	batch   int
}

func newScene() *scene {
	pool := blockpool.Config{BlockSize: 1}
	s := &scene{Checker: truth.New(100)}
	s.observe = s.AddEngine(truth.Rank{Worker: "w"}, pool)
	hashes := pool.Hashes([]uint32{1, 2, 3, 4})
	s.publish(wire.Event{Kind: wire.KindStored, BlockHashes: hashes[:2], BlockSize: 1, Tokens: []uint32{1, 2}})
	s.publish(wire.Event{Kind: wire.KindStored, BlockHashes: hashes[2:], BlockSize: 1, Tokens: []uint32{3, 4}, HasParent: true, Parent: hashes[1]})
	s.publish(wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hashes[3]}}, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hashes[2]}})
	s.Receive("e", &kvcastv1.Entry{Seq: 4, Worker: "x"})
	return s
}

// publish publishes a batch, whose entry a router receives.
func (s *scene) publish(events ...wire.Event) {
	s.batch++
	at := time.UnixMicro(1_000_000 + int64(s.batch))
	s.observe(simulator.Change{Time: at, Events: events})
	s.Receive("e", &kvcastv1.Entry{
		Seq: uint64(s.batch), Worker: "w", EngineTimeUnixNano: at.UnixNano(), Events: []*kvcastv1.RouterEvent{{}},
	})
}

// match returns a match of rank 0 of a worker, with one trust for all tiers.
func match(worker string, trust kvcastv1.Trust, blocks uint32) *kvcastv1.PrefixMatch {
	return &kvcastv1.PrefixMatch{
		Worker: worker, Trust: trust, Blocks: blocks, Tiers: []*kvcastv1.TierPrefix{{Tier: device, Blocks: blocks}},
	}
}

// TestWrongAnswersAreFound checks answers to the prompt of four blocks.
func TestWrongAnswersAreFound(t *testing.T) {
	hostToo := match("w", exact, 4)
	hostToo.Tiers = []*kvcastv1.TierPrefix{{Tier: device, Blocks: 2}, {Tier: pinned, Blocks: 4}}
	byTier := match("w", degraded, 4)
	byTier.Tiers = []*kvcastv1.TierPrefix{{Tier: device, Blocks: 2, Trust: exact}, {Tier: pinned, Blocks: 4, Trust: degraded}}
	wrongByTier := match("w", degraded, 4)
	wrongByTier.Tiers = []*kvcastv1.TierPrefix{{Tier: device, Blocks: 4, Trust: exact}, {Tier: pinned, Blocks: 4, Trust: degraded}}
	short, never := truth.Bounds{MaxAge: time.Nanosecond}, truth.Bounds{MaxAge: time.Hour}
	delivered := truth.Bounds{Delivered: &kvcastv1.Position{Epoch: "e", Seq: 3}}
	for _, tt := range []struct {
		name   string
		at     uint64
		match  *kvcastv1.PrefixMatch
		bounds truth.Bounds
		wrong  bool
	}{
		{"the first batch", 1, match("w", exact, 2), truth.Bounds{}, false},
		{"the first batch, with blocks of the second", 1, match("w", exact, 4), truth.Bounds{}, true},
		{"half a batch", 1, match("w", exact, 1), truth.Bounds{}, true},
		{"the second batch", 2, match("w", exact, 4), truth.Bounds{}, false},
		{"the second batch, with blocks missing", 2, match("w", exact, 3), truth.Bounds{}, true},
		{"the newest batch", 3, match("w", exact, 2), truth.Bounds{}, false},
		{"the newest batch, with evicted blocks", 3, match("w", exact, 4), truth.Bounds{}, true},
		{"after another worker's entry", 4, match("w", exact, 2), truth.Bounds{}, false},
		{"after another worker's entry, with evicted blocks", 4, match("w", exact, 3), truth.Bounds{}, true},
		{"an upper bound above", 3, match("w", upper, 4), truth.Bounds{}, false},
		{"an upper bound below", 2, match("w", upper, 3), truth.Bounds{}, true},
		{"degraded", 3, match("w", degraded, 4), truth.Bounds{}, false},
		{"no trust", 3, match("w", kvcastv1.Trust_TRUST_UNSPECIFIED, 2), truth.Bounds{}, true},
		{"blocks in a tier that the engine does not have", 3, hostToo, truth.Bounds{}, true},
		{"a tier that is exact", 3, byTier, truth.Bounds{}, false},
		{"a tier that is exact and wrong", 3, wrongByTier, truth.Bounds{}, true},
		{"an unknown worker", 3, match("y", exact, 4), truth.Bounds{}, false},
		{"old", 2, match("w", exact, 4), never, false},
		{"too old", 2, match("w", exact, 4), short, true},
		{"too old, degraded", 2, match("w", degraded, 4), short, false},
		{"as old as what was delivered", 3, match("w", exact, 2), delivered, false},
		{"older than what was delivered", 2, match("w", exact, 4), delivered, true},
		{"older than what was delivered, degraded", 2, match("w", degraded, 4), delivered, true},
	} {
		s := newScene()
		q, ok := s.Draw(rand.New(rand.NewPCG(1, 1)), 1, tt.bounds)
		if got := q.Request.GetPrompts(); !ok || len(got) != 1 || len(got[0].GetTokenIds()) != 4 {
			t.Fatalf("drew %v", got)
		}
		answer := &kvcastv1.MatchPrefixResponse{
			Position: &kvcastv1.Position{Epoch: "e", Seq: tt.at},
			Prompts:  []*kvcastv1.PromptMatches{{Matches: []*kvcastv1.PrefixMatch{tt.match}}},
		}
		if err := s.Check(q, answer); (err != nil) != tt.wrong {
			t.Errorf("%s: got error %v, want one: %v", tt.name, err, tt.wrong)
		}
	}
}

// TestEveryFormOfPromptIsChecked answers a request of many prompts: right, with one of them wrong, and with one of them missing.
func TestEveryFormOfPromptIsChecked(t *testing.T) {
	const prompts = 100
	s := newScene()
	q, _ := s.Draw(rand.New(rand.NewPCG(1, 1)), prompts, truth.Bounds{})
	forms := make(map[string]int)
	answer := &kvcastv1.MatchPrefixResponse{Position: &kvcastv1.Position{Epoch: "e", Seq: 2}}
	for _, p := range q.Request.GetPrompts() {
		held := uint32(0)
		switch {
		case len(p.GetBlockHashes()) > 0:
			forms["hashes"]++
			held = uint32(len(p.GetBlockHashes()))
		case p.GetCacheSalt() != "":
			forms["salt"]++
		case p.GetLoraName() != "":
			forms["adapter"]++
		default:
			for int(held) < len(p.GetTokenIds()) && p.GetTokenIds()[held] == held+1 {
				held++
			}
			if int(held) < len(p.GetTokenIds()) {
				forms["changed"]++
			} else {
				forms["stored"]++
			}
		}
		matches := &kvcastv1.PromptMatches{}
		if held > 0 {
			matches.Matches = []*kvcastv1.PrefixMatch{match("w", exact, held)}
		}
		answer.Prompts = append(answer.Prompts, matches)
	}
	if len(q.Request.GetPrompts()) != prompts || len(forms) != 5 {
		t.Fatalf("drew prompts of the forms %v", forms)
	}
	if err := s.Check(q, answer); err != nil {
		t.Error(err)
	}
	if got := s.Counts(); got.Exact != prompts || got.Wrong != 0 {
		t.Errorf("got %v", got)
	}
	for i, p := range answer.Prompts {
		right := p.Matches
		wrong := [][]*kvcastv1.PrefixMatch{{match("w", exact, 1)}}
		if len(right) > 0 {
			wrong = [][]*kvcastv1.PrefixMatch{{match("w", exact, right[0].GetBlocks()-1)}, {match("w", exact, right[0].GetBlocks()+1)}, nil}
		}
		for _, p.Matches = range wrong {
			if err := s.Check(q, answer); err == nil {
				t.Errorf("prompt %d, %v: matches %v are not found to be wrong", i, q.Request.Prompts[i], p.Matches)
			}
		}
		p.Matches = right
	}
	answer.Prompts = answer.Prompts[1:]
	if err := s.Check(q, answer); err == nil {
		t.Error("an answer to fewer prompts is not found to be wrong")
	}
}

// TestStatesThatAreForgottenAreNotChecked answers at a position that is older than what the checker remembers.
func TestStatesThatAreForgottenAreNotChecked(t *testing.T) {
	s := newScene()
	q, _ := s.Draw(rand.New(rand.NewPCG(1, 1)), 1, truth.Bounds{})
	for range 200 {
		s.observe(simulator.Change{})
	}
	answer := &kvcastv1.MatchPrefixResponse{
		Position: &kvcastv1.Position{Epoch: "e", Seq: 2}, Prompts: []*kvcastv1.PromptMatches{{Matches: []*kvcastv1.PrefixMatch{match("w", exact, 4)}}},
	}
	if err := s.Check(q, answer); err != nil || s.Counts().Forgotten != 1 {
		t.Errorf("got %v, %v", err, s.Counts())
	}
}

func TestFewExactAnswersMeanNothing(t *testing.T) {
	good := truth.Counts{Exact: 1000, Held: 800, Partial: 300, Degraded: 1000, Forgotten: 10}
	for name, change := range map[string]func(*truth.Counts){
		"none":                      func(c *truth.Counts) { c.Exact, c.Held, c.Partial, c.Forgotten = 0, 0, 0, 0 },
		"few":                       func(c *truth.Counts) { c.Exact, c.Held, c.Partial, c.Degraded, c.Forgotten = 90, 90, 90, 0, 0 },
		"a small share":             func(c *truth.Counts) { c.UpperBound = 9000 },
		"hardly any with blocks":    func(c *truth.Counts) { c.Held = 9 },
		"hardly any evicted":        func(c *truth.Counts) { c.Partial = 9 },
		"many that are not checked": func(c *truth.Counts) { c.Forgotten = 900 },
	} {
		c := good
		change(&c)
		if c.Meaningful() == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := good.Meaningful(); err != nil {
		t.Error(err)
	}
}

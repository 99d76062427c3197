package vllm_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// scenario is a row of the table.
type scenario struct {
	t      *testing.T
	name   string
	engine subject
	relay  *relay
	// want is the trust of each answer.
	want []kvcastv1.Trust
	// all is the row of the answers about all tiers; nil where there is device memory only.
	all *scenario

	requests, exact, over, under int
	reused                       int // requests of which the engine has reused blocks
	pools, poolsEqual            int
	late                         int // pools that were equal some moments later
	trust                        map[string]int
	note                         string
}

// table collects what has run.
var table struct {
	mu     sync.Mutex
	rows   []*scenario
	routed []*routed
}

// newScenario begins a scenario, whose answers must all be EXACT unless want says otherwise.
func newScenario(t *testing.T, name string, e subject, k *relay, want ...kvcastv1.Trust) *scenario {
	t.Helper()
	if trust := whole(e); len(want) == 0 || trust != exact {
		want = []kvcastv1.Trust{trust}
	}
	s := &scenario{t: t, name: name, engine: e, relay: k, want: want, trust: make(map[string]int)}
	table.mu.Lock()
	defer table.mu.Unlock()
	if n := len(table.rows); n > 0 {
		t.Logf("done: %s", strings.Join(table.rows[n-1].columns(), " | "))
	}
	table.rows = append(table.rows, s)
	return s
}

// request asks kvcast for a prompt, sends it to the engine, and compares. It returns the tokens that the engine has generated.
func (s *scenario) request(p prompt) []uint32 {
	s.t.Helper()
	device, all := s.relay.match(s.relay.await(s.engine), p)
	out := s.engine.generate(p)[0]
	switch {
	case s.all == nil:
		s.compare(p, device, out.Cached)
	case len(p.Tokens)%blockSize == 0: // a connector loads the block of the last token, if it has it
		s.compare(p, device, out.Device)
	default:
		s.compare(p, device, out.Device)
		s.all.compare(p, all, out.Cached)
	}
	s.comparePool()
	return out.Tokens
}

// compare counts an answer. One that says EXACT and is not, and one of another trust than expected, are errors.
func (s *scenario) compare(p prompt, predicted prediction, cached int) {
	s.t.Helper()
	s.requests++
	s.trust[predicted.String()]++
	if cached > 0 {
		s.reused++
	}
	switch {
	case predicted.tokens == cached:
		s.exact++
	case predicted.tokens > cached:
		s.over++
	default:
		s.under++
	}
	if predicted.trust == kvcastv1.Trust_TRUST_EXACT && predicted.tokens != cached {
		s.t.Errorf("%s: request %d (%d tokens, adapter %q, salt %q): kvcast said %d tokens, EXACT; the engine has reused %d",
			s.name, s.requests, len(p.Tokens), p.LoRA, p.Salt, predicted.tokens, cached)
	}
	if !slices.Contains(s.want, predicted.trust) {
		s.t.Errorf("%s: request %d: kvcast said %s; want one of %v", s.name, s.requests, predicted, s.want)
	}
}

// comparePool compares the blocks of kvcast with those of the engine. The status has a batch's seq some moments before the batch's entry is in the journal: unless the
// rank is degraded, they must become equal, and what it took is counted.
func (s *scenario) comparePool() {
	s.t.Helper()
	want := s.engine.hashes()
	device, _ := s.relay.match(s.relay.await(s.engine), prompt{Tokens: []uint32{0, 0}}) // it also waits for the position
	got := s.relay.hashes(kvcastv1.Tier_TIER_DEVICE)
	s.pools++
	if device.trust != kvcastv1.Trust_TRUST_DEGRADED && !slices.Equal(want, got) {
		s.late++
		s.t.Logf("%s: after request %d and batch %d: kvcast (%s) has %d blocks and the engine %d: %s", s.name, s.requests, s.engine.seq(),
			device, len(got), len(want), difference(want, got))
		harness.WaitFor(s.t, func() bool {
			got = s.relay.hashes(kvcastv1.Tier_TIER_DEVICE)
			return slices.Equal(want, got)
		})
	}
	if slices.Equal(want, got) {
		s.poolsEqual++
	}
}

// difference says which blocks are only in one list.
func difference(want, got []uint64) string {
	var missing, extra []string
	for _, h := range want {
		if _, ok := slices.BinarySearch(got, h); !ok {
			missing = append(missing, fmt.Sprintf("%x", h))
		}
	}
	for _, h := range got {
		if _, ok := slices.BinarySearch(want, h); !ok {
			extra = append(extra, fmt.Sprintf("%x", h))
		}
	}
	return fmt.Sprintf("%d missing %v, %d extra %v", len(missing), missing[:min(3, len(missing))], len(extra), extra[:min(3, len(extra))])
}

func (s *scenario) columns() []string {
	var trust []string
	for _, t := range slices.Sorted(maps.Keys(s.trust)) {
		trust = append(trust, fmt.Sprintf("%s %d", t, s.trust[t]))
	}
	if s.note != "" {
		trust = append(trust, s.note)
	}
	pool := "-"
	if s.pools > 0 {
		pool = fmt.Sprintf("%d of %d", s.poolsEqual, s.pools)
	}
	if s.late > 0 {
		pool += fmt.Sprintf(", %d late", s.late)
	}
	return []string{s.name, fmt.Sprint(s.requests), fmt.Sprint(s.exact), fmt.Sprint(s.over), fmt.Sprint(s.under), pool, strings.Join(trust, ", ")}
}

func TestMain(m *testing.M) {
	status := harness.RunTests(m)
	if len(table.rows)+len(table.routed) > 0 {
		if err := writeTable(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = max(status, 1)
		}
	}
	os.Exit(status)
}

// writeTable writes the scenarios and the routing policies to bin/test/vllm.md.
func writeTable() error {
	text := "vLLM " + version + ", " + time.Now().UTC().Format(time.DateOnly) + "\n"
	add := func(columns ...string) { text += "| " + strings.Join(columns, " | ") + " |\n" }
	if len(table.rows) > 0 {
		text += "\n| scenario | requests | exact | over | under | pool equal | trust |\n|---|---|---|---|---|---|---|\n"
		for _, s := range table.rows {
			add(s.columns()...)
		}
	}
	if len(table.routed) > 0 {
		text += "\n| policy | prompt tokens | reused | hit rate | requests of each engine | predictions exact, over, under |\n|---|---|---|---|---|---|\n"
		for _, r := range table.routed {
			add(r.columns()...)
		}
	}
	return os.WriteFile(filepath.Join("../../bin/test", "vllm.md"), []byte(text), 0o600)
}

package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
)

// fetched is what KVCR understands of hints.
type fetched struct {
	Endpoint    string   `json:"endpoint"`
	BlockHashes []uint64 `json:"block_hashes"`
}

// prefix returns the hashes of the first blocks of a path that an engine holds.
func (e *engine) prefix(path uint64) (hashes []uint64) {
	for n := 1; n <= depth; n++ {
		block := path >> (2 * (depth - n))
		if !e.held[block] {
			break
		}
		hashes = append(hashes, e.hash(block))
	}
	return hashes
}

// TestFetchHintsAreReadByVLLMAndKVCR sends requests to one engine, with hints of what the other one holds.
func TestFetchHintsAreReadByVLLMAndKVCR(t *testing.T) {
	testclass.Peers(t)
	need(t, python, kvHints, kvcr)
	w := newWorld(t, "", "--retain-block-hashes")
	reader := startConsumer(t, python, "testdata/hints.py", kvHints, kvcr)
	var c *client.Client
	dial := func() {
		addr, err := w.process.Addr()
		if err != nil {
			t.Fatal(err)
		}
		if c, err = client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			t.Fatal(err)
		}
	}
	hinted := 0
	check := func(when string) {
		t.Helper()
		dial()
		for range 20 {
			path, target := w.engines[0].randomPath(), w.engines[hinted%2]
			source := w.engines[1-hinted%2]
			prompt := promptOf(path)
			want := map[string][]uint64{}
			for _, e := range w.engines {
				if all := e.prefix(path); len(all) > 0 {
					want[e.name] = all
				}
			}
			var matches []client.Match
			await(t, fmt.Sprintf("the matches of %v %s", prompt, when), want, func() map[string][]uint64 {
				res, err := c.MatchPrefix(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{Model: "m", Tokens: prompt}}, BlockHashes: depth})
				if err != nil {
					t.Fatal(err)
				}
				matches = res.Matches[0]
				got := map[string][]uint64{}
				for _, m := range matches {
					got[m.Worker] = m.BlockHashes
				}
				return got
			})
			i := slices.IndexFunc(matches, func(m client.Match) bool { return m.Worker == source.name })
			if i < 0 {
				continue
			}
			held := len(want[target.name])
			hints, ok := client.NewFetchHint("r1", &matches[i], held)
			if ok != (len(want[source.name]) > held) {
				t.Fatalf("%s: a hint: %t, of %d blocks beside %d", when, ok, len(want[source.name]), held)
			}
			if !ok {
				continue
			}
			hinted++
			var got fetched
			reader.ask(hints, &got)
			all := slices.Sorted(slices.Values(want[source.name]))
			if endpoint := fmt.Sprintf("tcp://10.0.0.%d:25000", source.number); got.Endpoint != endpoint || !slices.Equal(got.BlockHashes, all) {
				t.Fatalf("%s: KVCR would fetch %v, want %v from %s", when, got, all, endpoint)
			}
		}
	}
	w.live(func() {}, check)
	if hinted < 10 {
		t.Errorf("%d hints, want more", hinted)
	}
}

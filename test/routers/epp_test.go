package routers_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// TestEndpointPickerScoresByTheEngines runs the scorer of examples/epp, in the endpoint picker's own types.
func TestEndpointPickerScoresByTheEngines(t *testing.T) {
	testclass.Peers(t)
	need(t, epp)
	w := newWorld(t, "")
	type scored struct {
		Tokens []uint32
		Want   map[string]float64
	}
	check := func(when string) {
		t.Helper()
		addr, err := w.process.Addr()
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		var prompts []scored
		for range 20 {
			path := w.engines[0].randomPath()
			s := scored{Tokens: promptOf(path), Want: make(map[string]float64)}
			want := make(map[string]int)
			for _, e := range w.engines {
				// The last token is computed always, so that the last block is not reused.
				if n := min(len(e.prefix(path)), depth-1); n > 0 {
					want[e.name] = n
				}
				s.Want[address(e)] = float64(min(len(e.prefix(path)), depth-1)*blockSize) / float64(len(s.Tokens))
			}
			await(t, "the matches "+when, want, func() map[string]int {
				res, err := c.MatchPrefix(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{Model: "m", Tokens: s.Tokens, ExcludeLastToken: true}}})
				if err != nil {
					t.Fatal(err)
				}
				got := make(map[string]int)
				for _, m := range res.Matches[0] {
					got[m.Worker] = m.Blocks
				}
				return got
			})
			prompts = append(prompts, s)
		}
		text, err := json.Marshal(prompts)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(harness.Context(t), epp, "-test.v", "-test.run", "TestScoresOfAServer")
		cmd.Env = append(os.Environ(), "KVCAST_ADDR="+addr, "KVCAST_SCORES="+string(text))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v:\n%s", when, err, out)
		}
	}
	w.live(func() {}, check)
}

// TestEndpointPickerWithoutAServer runs the other tests of the scorer.
func TestEndpointPickerWithoutAServer(t *testing.T) {
	testclass.Peers(t)
	need(t, epp)
	if out, err := exec.CommandContext(harness.Context(t), epp).CombinedOutput(); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
}

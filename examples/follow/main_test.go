package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// serve starts a server with one worker, which holds two blocks of four tokens.
func serve(t *testing.T) (addr string) {
	t.Helper()
	i := harness.StartInstance(t, harness.InstanceConfig{})
	i.AddWorker(feed.Worker{Name: "vllm-0", Model: "m", BlockSize: 4, Endpoint: "10.0.0.5:8000"})
	i.Batch("vllm-0", wire.Event{
		Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: 4, BlockHashes: []uint64{10, 11},
		TokensHashes: client.TokensHashes([]uint32{1, 2, 3, 4, 5, 6, 7, 8}, 4, "", ""),
	})
	return i.Target
}

func TestFollow(t *testing.T) {
	addr := serve(t)
	for _, tt := range []struct{ model, prompts, want, err string }{
		{"m", "[1,2,3,4,5,6,7,8,9]\n[1,2,3,4]\n[4,3,2,1]", "vllm-0 (10.0.0.5:8000), dp rank 0: 2 blocks, 8 tokens\n" +
			"vllm-0 (10.0.0.5:8000), dp rank 0: 1 blocks, 4 tokens\nno worker has its first block\n", ""},
		{"another", "[1,2,3,4]", "no worker has its first block\n", ""},
		{"", "hello", "", "want a JSON list of token ids"},
	} {
		var out bytes.Buffer
		err := run(t.Context(), addr, tt.model, strings.NewReader(tt.prompts), &out)
		if out.String() != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q for model %q: got %q and error %v, want %q and %q", tt.prompts, tt.model, out.String(), err, tt.want, tt.err)
		}
	}
}

// TestGuideShowsTheProgram compares the program in docs/client.md with main.go.
func TestGuideShowsTheProgram(t *testing.T) {
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile("../../docs/client.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(guide), "```go\n"+string(program)+"```\n") {
		t.Error("the program in docs/client.md differs from main.go")
	}
}

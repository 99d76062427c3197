package main_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMatchCommand(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serverWithGap(t)
	file := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(file, []byte("[1, 2, 3, 4, 5, 6, 7]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args, stdin string
		status      int
		want        string // a pattern of standard output or, with another status than 0, standard error
	}{
		{"--tokens 1,2,3,4,5,6,7", "", 0, `^WORKER +RANK +ENDPOINT +BLOCKS +TOKENS +DEVICE +OTHER TIERS +TRUST\nw +0 +- +3 +6 +3 +- +degraded: gap\n$`},
		{"--tokens-file " + file, "", 0, `\nw +0 +- +3 +6 +3 +-`},
		{"--tokens-file -", "1 2\n3 4", 0, `\nw +0 +- +2 +4 +2 +-`},
		{"--tokens 5,6 --worker w --limit 1", "", 0, `\nw +0 +- +1 +2 +0 +disk 1 +degraded`},
		{"--block-hashes 1,2,0x3,4", "", 0, `\nw +0 +- +3 +6 +3 +-`},
		{"--tokens 1,2 --after :4", "", 0, `\nw `},
		{"--tokens 9,9", "", 0, `^no dp rank of 1 worker has the first block of the prompt\n$`},
		{"--tokens 1,2 --lora l", "", 0, `^no dp rank of 1 worker`},
		{"--tokens 1,2 --eagle", "", 0, `^no dp rank of 1 worker`},
		{"--tokens 1,2 --block-size 3", "", 0, `^no dp rank of 1 worker`},
		{"--tokens 1,2 --model m", "", 1, `^kvcast: no worker has the model "m"; workers: w \(model ""\)\n$`},
		{"--tokens 1,2 --after :9", "", 1, `DEADLINE_EXCEEDED: position 9 is not reached after 1s: the newest entry is 4`},
		{"--tokens 1,2 --after x:1", "", 1, `FAILED_PRECONDITION: `},
		{"--tokens-file -", strings.Repeat("1,", 262_145), 1, `INVALID_ARGUMENT: prompts\[0\]\.token_ids: 262145 elements are too many`},
		{"--tokens-file -", "", 2, `--tokens-file: no number is given`},
	} {
		got := kvcast(t, strings.NewReader(tt.stdin), append([]string{"match", "--addr", s.Address()}, strings.Fields(tt.args)...)...)
		text := got.out
		if tt.status != 0 {
			text = got.err
		}
		if got.status != tt.status || !regexp.MustCompile(tt.want).MatchString(text) {
			t.Errorf("match %s: got status %d, %q and %q, want %d and %s", tt.args, got.status, got.out, got.err, tt.status, tt.want)
		}
		if tt.status == 0 && !regexp.MustCompile(`^at position [0-9a-f]+:4\n$`).MatchString(got.err) {
			t.Errorf("match %s: standard error is %q", tt.args, got.err)
		}
	}
	all := objects(t, kvcast(t, nil, "match", "--addr", s.Address(), "-o", "json", "--tokens", "1,2").out)
	if len(all) != 1 || all[0]["position"].(map[string]any)["seq"] != "4" {
		t.Fatalf("as JSON: got %v", all)
	}
	match := all[0]["prompts"].([]any)[0].(map[string]any)["matches"].([]any)[0].(map[string]any)
	if match["worker"] != "w" || match["trust"] != "TRUST_DEGRADED" {
		t.Errorf("as JSON: got %v", match)
	}
}

// TestMatchReportsThatASourceIsDown ends an engine. Its blocks match until the worker is removed.
func TestMatchReportsThatASourceIsDown(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, Tokens: []uint32{1, 2}, BlockSize: 2})
	s := serve(t, "--worker", "name=w,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint()+",endpoint=10.0.0.5:8000")
	match := func() string { return kvcast(t, nil, "match", "--addr", s.Address(), "--tokens", "1,2").out }
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 1`)
	if got := match(); !strings.HasSuffix(got, " degraded: replay_unproved\n") {
		t.Errorf("after a replay: got %q", got)
	}
	publish(t, p)
	await := func(want string) {
		t.Helper()
		re := regexp.MustCompile(want)
		harness.WaitFor(t, func() bool { return re.MatchString(match()) })
	}
	await(` 10\.0\.0\.5:8000 .* exact\n$`)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	await(`degraded: source_down \d+s\n$`)
}

// TestRankThatBatchesNameIsDownWithItsSource ends an engine of rank 4 whose source was configured without a rank.
func TestRankThatBatchesNameIsDownWithItsSource(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, err := simulator.NewPublisher(simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}, BatchConfig: simulator.BatchConfig{Rank: 4},
	})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, Tokens: []uint32{1, 2}, BlockSize: 2})
	s := serve(t, "--worker", "name=w,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	await := func(want string) {
		t.Helper()
		harness.WaitFor(t, func() bool {
			return strings.HasSuffix(kvcast(t, nil, "match", "--addr", s.Address(), "--tokens", "1,2").out, want)
		})
	}
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 1`)
	publish(t, p)
	await(" exact\n")
	if workers := kvcast(t, nil, "workers", "--addr", s.Address(), "-o", "json").out; !strings.Contains(workers, `"dp_rank":4`) {
		t.Errorf("the source is not of rank 4: %s", workers)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, func() bool {
		return strings.Contains(kvcast(t, nil, "match", "--addr", s.Address(), "--tokens", "1,2").out, "degraded: source_down")
	})
}

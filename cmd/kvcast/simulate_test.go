package main_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
)

func TestSimulateUsageErrors(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.jsonl")
	line := `{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}` + "\n"
	if err := os.WriteFile(bad, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args   string
		status int
		says   string
	}{
		{"--faults bogus=0.1", 2, `--faults: "bogus" is no fault: want one of drop, forget,`},
		{"--faults drop=2", 2, "--faults: drop=2 is not allowed: want a rate of 0 to 1"},
		{"--faults drop", 2, "want NAME=RATE or NAME@BATCH"},
		{"--trace conversation --block-size 48", 2, "want a divisor of 512"},
		{"--trace conversation --rate 3", 2, "--rate and --trace can't be used together"},
		{"--trace conversation --speed=-1", 2, "--speed: -1 is not allowed"},
		{"--trace conversation --speed fast", 2, "see kvcast simulate --help"},
		{"--trace conversation --requests=-1", 2, "--requests: -1 is not allowed"},
		{"--trace conversation --policy best", 2, "see kvcast simulate --help"},
		{"--trace no-such-file", 1, "no-such-file"},
		{"--trace " + bad, 1, "bad.jsonl: line 1: hash_ids: 1 of them for 600 tokens: want 2"},
		{"--speed 2", 2, "give --trace too"},
		{"--requests 2", 2, "give --trace too"},
		{"--policy prefix", 2, "give --trace too"},
		{"--rate=-1", 2, "--rate: -1 is not allowed"},
		{"--rate NaN", 2, "--rate: NaN is not allowed"},
		{"--progress=-1s", 2, "--progress: -1s is not allowed"},
		{"--bind tcp://*:1 --connect tcp://h:1", 2, "--bind and --connect can't be used together"},
		{"--connect localhost:5557", 2, `--connect: "localhost:5557" is not allowed: want tcp://HOST:PORT or ipc://PATH`},
		{"--replay udp://localhost:5557", 2, "--replay:"},
		{"--bind tcp://", 2, "--bind:"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			t.Parallel()
			got := kvcast(t, nil, append([]string{"simulate"}, strings.Fields(tt.args)...)...)
			if got.status != tt.status || !strings.Contains(got.err, tt.says) || strings.Count(got.err, "\n") != 1 {
				t.Errorf("got status %d and %q; want %d and a line that says %q", got.status, got.err, tt.status, tt.says)
			}
		})
	}
}

func TestSimulateHelpNamesEveryFault(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	help := strings.Join(strings.Fields(kvcast(t, nil, "simulate", "--help").out), " ")
	for _, f := range simulator.AllFaults() {
		if !strings.Contains(help, " "+f.String()) {
			t.Errorf("the help does not mention %s", f)
		}
	}
}

// engineEnded is the JSON line of an engine that has finished.
type engineEnded struct {
	Engine       string                     `json:"engine"`
	Engines      int                        `json:"engines"`
	Endpoint     string                     `json:"endpoint"`
	Batches      uint64                     `json:"batches"`
	Stored       uint64                     `json:"stored_blocks"`
	Removed      uint64                     `json:"removed_blocks"`
	Blocks       int                        `json:"blocks"`
	Requests     uint64                     `json:"requests"`
	PromptTokens uint64                     `json:"prompt_tokens"`
	HitTokens    uint64                     `json:"hit_tokens"`
	HitRate      float64                    `json:"hit_rate"`
	Faults       map[simulator.Fault]uint64 `json:"faults"`
}

// simulateJSON runs engines to their end, and returns their final lines.
func simulateJSON(t *testing.T, args ...string) (ended []engineEnded, stderr string) {
	t.Helper()
	got := kvcast(t, nil, append([]string{"simulate", "--bind", "tcp://127.0.0.1:*", "-o", "json"}, args...)...)
	if got.status != 0 {
		t.Fatalf("status %d: %s", got.status, got.err)
	}
	for line := range strings.Lines(got.out) {
		var e engineEnded
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if e.Endpoint == "" {
			ended = append(ended, e)
		}
	}
	return ended, got.err
}

func TestSimulateTrace(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	args := []string{"--trace", "conversation", "--speed", "0", "--requests", "60", "--engines", "2", "--block-size", "64", "--blocks", "4000"}
	got, _ := simulateJSON(t, args...)
	if len(got) != 3 {
		t.Fatalf("got %+v, want two engines and a total", got)
	}
	all := got[2]
	if all.Engines != 2 || all.Requests != 60 || all.Batches != got[0].Batches+got[1].Batches ||
		all.Blocks != got[0].Blocks+got[1].Blocks || got[0].Requests != 30 {
		t.Errorf("got %+v", got)
	}
	// All requests begin with the first block of the trace.
	if all.HitTokens < 58*512 || all.HitRate != float64(all.HitTokens)/float64(all.PromptTokens) {
		t.Errorf("%d of %d prompt tokens hit, a rate of %v", all.HitTokens, all.PromptTokens, all.HitRate)
	}
	if got[0].Stored-got[0].Removed < uint64(got[0].Blocks) || got[0].Removed == 0 {
		t.Errorf("%d stored, %d removed, %d in the cache", got[0].Stored, got[0].Removed, got[0].Blocks)
	}
	again, _ := simulateJSON(t, args...)
	if diff := cmp.Diff(got, again); diff != "" {
		t.Errorf("run again (-first +second):\n%s", diff)
	}
	prefix, _ := simulateJSON(t, append(args, "--policy", "prefix")...)
	if prefix[2].Requests != 60 || prefix[0].Requests == 30 {
		t.Errorf("by prefix: got %+v", prefix)
	}
}

func TestSimulateFaults(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	run := func(seed string) map[simulator.Fault]uint64 {
		got, _ := simulateJSON(t, "--rate", "0", "--batches", "300", "--replay", "tcp://127.0.0.1:*",
			"--faults", "drop=0.1,twice=0.05,restart@100,flap@200", "--fault-seed", seed)
		return got[0].Faults
	}
	got := run("7")
	if got[simulator.FaultRestart] != 1 || got[simulator.FaultFlap] != 1 || got[simulator.FaultDrop] < 10 || got[simulator.FaultDuplicate] == 0 {
		t.Errorf("got %v", got)
	}
	if diff := cmp.Diff(got, run("7")); diff != "" {
		t.Errorf("the same seed (-first +second):\n%s", diff)
	}
	if cmp.Equal(got, run("8")) {
		t.Error("another seed gives the same faults")
	}
	text := kvcast(t, nil, "simulate", "--bind", "tcp://127.0.0.1:*", "--rate", "0", "--batches", "5", "--faults", "drop@1,drop@3,flap@2")
	if !strings.Contains(text.out, "published 5 batches") || !strings.Contains(text.out, "; faults: drop 2, flap 1\n") {
		t.Errorf("got %q", text.out)
	}
	if !strings.Contains(text.out, "hit rate ") {
		t.Errorf("got %q, want a hit rate", text.out)
	}
}

func TestSimulateReportsProgress(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	_, stderr := simulateJSON(t, "--trace", "conversation", "--requests", "4", "--speed", "5", "--progress", "100ms")
	if !strings.Contains(stderr, "% of the trace, ") || !strings.Contains(stderr, " blocks held, ") {
		t.Errorf("got %q", stderr)
	}
	_, stderr = simulateJSON(t, "--batches", "3", "--rate", "0", "--progress", "1h")
	if stderr != "" {
		t.Errorf("got %q, want no progress within the interval", stderr)
	}
}

// TestSimulateHybrid runs an engine of a hybrid model. Subscribers receive the blocks of all groups, and once that routers which know the main
// group alone have an upper bound.
func TestSimulateHybrid(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for _, form := range []string{"array", "map"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			s := serve(t, "--bind", "tcp://127.0.0.1:*")
			got := kvcast(t, nil, "simulate", "--connect", s.Endpoint(), "--wait", "--window", "64", "--mamba", "--form", form, "--rate", "0", "--batches", "100", "-o", "json")
			if got.status != 0 {
				t.Fatalf("status %d: %s", got.status, got.err)
			}
			s.AwaitSample(`kvcast_ingest_batches_total{worker="sim-0"} 100`)
			s.AwaitSample(`kvcast_pipeline_events_total{event="groups_omitted",worker="sim-0"} 1`)
			lines := objects(t, got.out)
			want := fmt.Sprintf("blocks       %v\n", lines[len(lines)-1]["blocks"])
			if status := kvcast(t, nil, "status", "--addr", s.Address()); !strings.Contains(status.out, want) {
				t.Errorf("status: got %q, want %q in it", status.out, want)
			}
			got = kvcast(t, nil, "replay", "--addr", s.Address(), "--tier", "disk", "-o", "json")
			if got, want := kinds(objects(t, got.out)), "accepted worker_added@1 groups_omitted@2 groups@2"; got != want {
				t.Errorf("events without a tier: got %q, want %q", got, want)
			}
			got = kvcast(t, nil, "subscribe", "--addr", s.Address(), "--from", "earliest", "--count", "100")
			if got.status != 0 || strings.Count(got.out, "there are other attention groups") != 1 {
				t.Errorf("as text: got status %d, %q and %q", got.status, got.out, got.err)
			}
		})
	}
}

// TestSimulateStays keeps an engine running after its last batch.
func TestSimulateStays(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	got := kvcast(t, strings.NewReader(""), "--end-with-stdin", "simulate", "--bind", "tcp://127.0.0.1:*",
		"--replay", "tcp://127.0.0.1:*", "--stay", "--batches", "2", "--rate", "0")
	if got.status != 0 || !strings.Contains(got.out, "replay at tcp://127.0.0.1:") {
		t.Errorf("got status %d and %q", got.status, got.out)
	}
}

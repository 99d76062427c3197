package workload_test

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/blockpool/pooltest"
	"github.com/kvcast/kvcast/internal/simulator/workload"
)

const twoRequests = `{"timestamp": 0, "input_length": 513, "output_length": 3, "hash_ids": [7, 8]}

{"timestamp": 1500, "input_length": 512, "output_length": 0, "hash_ids": [7], "more": {}}
`

func TestReadTracePlainAndCompressed(t *testing.T) {
	want := &workload.Trace{Requests: []workload.TraceRequest{
		{Input: 513, Output: 3, IDs: []uint64{7, 8}},
		{At: 1500 * time.Millisecond, Input: 512, IDs: []uint64{7}},
	}}
	var compressed bytes.Buffer
	z := gzip.NewWriter(&compressed)
	if _, err := z.Write([]byte(twoRequests)); err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"plain": []byte(twoRequests), "compressed": compressed.Bytes()} {
		path := filepath.Join(t.TempDir(), "trace")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := workload.OpenTrace(path)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestReadTraceErrorsNameTheLine(t *testing.T) {
	const good = `{"timestamp": 10, "input_length": 5, "output_length": 3, "hash_ids": [7]}` + "\n"
	for content, says := range map[string]string{
		"":                                   "t: it has no request",
		"\n\n":                               "t: it has no request",
		good + "nonsense":                    "t: line 2: no JSON object",
		good + "[1]":                         "t: line 2: a JSON array, want an object",
		good + good[:20]:                     "t: line 2: no JSON object",
		strings.Replace(good, "10", "-1", 1): "t: line 1: timestamp: -1 is not allowed",
		good + strings.Replace(good, "10", "9", 1):        "t: line 2: timestamp: 9 comes before",
		strings.Replace(good, "10", "1e99", 1):            "t: line 1: timestamp: number 1e99 is not allowed",
		strings.Replace(good, `"timestamp": 10, `, "", 1): "t: line 1: timestamp is missing",
		strings.Replace(good, "5", "0", 1):                "t: line 1: input_length: 0 is not allowed",
		strings.Replace(good, "5", "513", 1):              "t: line 1: hash_ids: 1 of them for 513 tokens: want 2",
		strings.Replace(good, "5", `"5"`, 1):              "t: line 1: input_length: string is not allowed",
		strings.Replace(good, "3", "-3", 1):               "t: line 1: output_length: -3 is not allowed",
		strings.Replace(good, "[7]", "[-7]", 1):           "t: line 1: hash_ids: number -7 is not allowed",
		strings.Replace(good, `, "hash_ids": [7]`, "", 1): "t: line 1: hash_ids is missing",
		good + "{" + strings.Repeat(" ", 2<<20):           "t: line 2: ",
		"\x1f\x8bnot gzip at all":                         "t: gzip",
	} {
		_, err := workload.ReadTrace("t", strings.NewReader(content))
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%.60q: got %v, want an error that contains %q", content, err, says)
		}
	}
	if _, err := workload.OpenTrace("no-such-file"); err == nil || !strings.Contains(err.Error(), "no-such-file") {
		t.Errorf("got %v", err)
	}
}

func conversation(t *testing.T, requests int) *workload.Trace {
	t.Helper()
	trace, err := workload.ConversationTrace()
	if err != nil {
		t.Fatal(err)
	}
	return &workload.Trace{Requests: trace.Requests[:requests]}
}

func TestConversationTraceIsComplete(t *testing.T) {
	testclass.WithoutRace(t)
	trace := conversation(t, 12_031)
	input, output := 0, 0
	for _, r := range trace.Requests {
		input, output = input+r.Input, output+r.Output
	}
	last := trace.Requests[len(trace.Requests)-1].At
	if input != 144_793_823 || output != 4_122_048 || last != 3_536_999*time.Millisecond {
		t.Errorf("%d tokens in, %d out, the last at %v", input, output, last)
	}
}

func TestEqualIDsGiveEqualTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.Uint64Range(0, 3), 1, 4)
		draw := func(name string) workload.TraceRequest {
			r := workload.TraceRequest{IDs: ids.Draw(t, name)}
			r.Input = (len(r.IDs)-1)*workload.TraceBlock + rapid.IntRange(1, workload.TraceBlock).Draw(t, name+" rest")
			return r
		}
		a, b := draw("a"), draw("b")
		p, q := a.Prompt(), b.Prompt()
		for i := range min(len(p), len(q)) {
			same := a.IDs[i/workload.TraceBlock] == b.IDs[i/workload.TraceBlock]
			// Different ids share tokens only by chance: compare a few.
			if window := min(i+4, len(p), len(q)); same && p[i] != q[i] ||
				!same && i%workload.TraceBlock == 0 && window == i+4 && cmp.Equal(p[i:window], q[i:window]) {
				t.Fatalf("token %d is %d and %d, of ids %v and %v", i, p[i], q[i], a.IDs, b.IDs)
			}
		}
	})
}

func TestSplitAssignsEachRequestToOneEngine(t *testing.T) {
	testclass.WithoutRace(t)
	trace := conversation(t, 2000)
	for _, policy := range []workload.Policy{workload.PolicyRoundRobin, workload.PolicyPrefix} {
		parts, err := trace.Split(4, policy)
		if err != nil {
			t.Fatal(err)
		}
		total, hits := 0, uint64(0)
		var tokens []int
		for _, part := range parts {
			total += len(part.Requests)
			sum := 0
			for i, r := range part.Requests {
				sum += r.Input
				if i > 0 && r.At < part.Requests[i-1].At {
					t.Error("the times run backwards")
				}
			}
			tokens = append(tokens, sum)
			hits += directHits(part, 512)
		}
		if total != 2000 {
			t.Errorf("policy %d: %d requests of 2000", policy, total)
		}
		t.Logf("policy %d: hits %d, tokens %v", policy, hits, tokens)
		if policy == workload.PolicyPrefix {
			round, _ := trace.Split(4, workload.PolicyRoundRobin)
			lesser := uint64(0)
			for _, part := range round {
				lesser += directHits(part, 512)
			}
			if hits <= lesser*5/4 {
				t.Errorf("prefix gives %d tokens from caches, round robin %d", hits, lesser)
			}
		} else if diff := cmp.Diff(trace.Requests[5], parts[1].Requests[1]); diff != "" {
			t.Errorf("round robin (-want +got):\n%s", diff)
		}
	}
	if _, err := trace.Split(0, workload.PolicyPrefix); err == nil {
		t.Error("split over no engine")
	}
	if _, err := trace.Split(1, 7); err == nil {
		t.Error("split by no policy")
	}
}

// directHits returns the number of prompt tokens that an unbounded cache has, in whole blocks, from
// the ids alone: all but the last token may be cached.
func directHits(trace *workload.Trace, blockSize int) (hits uint64) {
	seen := make(map[uint64]bool)
	for _, r := range trace.Requests {
		n := 0
		for n < len(r.IDs) && seen[r.IDs[n]] {
			n++
		}
		hits += uint64(min(n*workload.TraceBlock, r.Input-1) / blockSize * blockSize)
		for _, id := range r.IDs {
			seen[id] = true
		}
	}
	return hits
}

func TestUnboundedPoolHasTheHitRateOfTheIDs(t *testing.T) {
	testclass.WithoutRace(t)
	for _, tt := range []struct{ blockSize, requests int }{{512, 1200}, {128, 200}, {16, 80}} {
		trace := conversation(t, tt.requests)
		pool := newPool(t, blockpool.Config{Capacity: 20_000_000 / tt.blockSize, BlockSize: tt.blockSize})
		load := newTraceRun(t, trace, pool)
		for more(load) {
			load.Step()
		}
		want := blockpool.Stats{Requests: uint64(tt.requests), HitTokens: directHits(trace, tt.blockSize)}
		for _, r := range trace.Requests {
			want.PromptTokens += uint64(r.Input)
		}
		if diff := cmp.Diff(want, pool.Stats()); diff != "" {
			t.Errorf("block size %d (-ids +pool):\n%s", tt.blockSize, diff)
		}
		if rate := pool.Stats().HitRate(); rate != float64(want.HitTokens)/float64(want.PromptTokens) || rate == 0 {
			t.Errorf("hit rate %v", rate)
		}
	}
	if (blockpool.Stats{}).HitRate() != 0 {
		t.Error("a hit rate of nothing")
	}
}

func newTraceRun(t rapid.TB, trace *workload.Trace, pool *blockpool.Pool) *workload.TraceRun {
	t.Helper()
	load, err := workload.NewTraceRun(trace, pool, 1)
	if err != nil {
		t.Fatal(err)
	}
	return load
}

func more(load *workload.TraceRun) bool {
	_, ok := load.Due()
	return ok
}

func TestReplicaEqualsThePoolOfATrace(t *testing.T) {
	testclass.WithoutRace(t)
	request := rapid.Custom(func(t *rapid.T) workload.TraceRequest {
		r := workload.TraceRequest{
			At:     time.Duration(rapid.IntRange(0, 3000).Draw(t, "at")) * time.Millisecond,
			IDs:    rapid.SliceOfN(rapid.Uint64Range(0, 4), 1, 4).Draw(t, "ids"),
			Output: rapid.IntRange(0, 300).Draw(t, "output"),
		}
		r.Input = (len(r.IDs)-1)*workload.TraceBlock + rapid.IntRange(1, workload.TraceBlock).Draw(t, "rest")
		return r
	})
	rapid.Check(t, func(t *rapid.T) {
		trace := &workload.Trace{Requests: rapid.SliceOfN(request, 1, 12).Draw(t, "requests")}
		for i := range trace.Requests[1:] { // in order
			trace.Requests[i+1].At = max(trace.Requests[i+1].At, trace.Requests[i].At)
		}
		cfg := blockpool.Config{
			Capacity:  rapid.IntRange(1, 40).Draw(t, "capacity"),
			BlockSize: rapid.SampledFrom([]int{64, 128, 512}).Draw(t, "block_size"),
		}
		pool, again := newPool(t, cfg), newPool(t, cfg)
		load, twin := newTraceRun(t, trace, pool), newTraceRun(t, trace, again)
		restart := rapid.IntRange(0, 200).Draw(t, "restart")
		f := pooltest.NewReplica()
		last := time.Duration(-1)
		for step := 0; more(load); step++ {
			due, _ := load.Due()
			if due <= last {
				t.Fatalf("step %d is due at %v, after %v", step, due, last)
			}
			last = due
			if step == restart {
				load.Restart()
				twin.Restart()
				f = pooltest.NewReplica()
			}
			events := load.Step()
			if diff := cmp.Diff(events, twin.Step()); diff != "" {
				t.Fatalf("the same trace gives other events:\n%s", diff)
			}
			f.Apply(t, events)
			f.Check(t, pool)
			if pool.Copies() > cfg.Capacity {
				t.Fatalf("%d blocks in a pool of %d", pool.Copies(), cfg.Capacity)
			}
		}
		refused, cut := load.Lost()
		stats := pool.Stats()
		if stats.Requests+refused != uint64(len(trace.Requests)) || cut > stats.Requests || load.Running() != 0 {
			t.Fatalf("%d requests begun, %d refused, %d cut, %d still running, of %d",
				stats.Requests, refused, cut, load.Running(), len(trace.Requests))
		}
	})
}

func TestTraceRunKeepsTheTimes(t *testing.T) {
	trace := &workload.Trace{Requests: []workload.TraceRequest{
		{At: 0, Input: 512, Output: 1, IDs: []uint64{1}},
		{At: 10 * time.Second, Input: 512, IDs: []uint64{2}},
	}}
	for speed, want := range map[float64][]time.Duration{
		1:  {0, 25 * time.Millisecond, 10 * time.Second, 10025 * time.Millisecond},
		10: {0, 2500 * time.Microsecond, time.Second, 1002500 * time.Microsecond},
		0:  {0, 0, 0, 0},
	} {
		load, err := workload.NewTraceRun(trace, newPool(t, blockpool.Config{BlockSize: 512}), speed)
		if err != nil {
			t.Fatal(err)
		}
		var got []time.Duration
		for {
			due, ok := load.Due()
			if !ok {
				break
			}
			got = append(got, due)
			load.Step()
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("at speed %v (-want +got):\n%s", speed, diff)
		}
	}
}

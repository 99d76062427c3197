package simulator_test

import (
	"bytes"
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// withPorts returns a config whose sockets have ports of their own, which nobody gets while a fault has closed them.
func withPorts(t *testing.T, c simulator.SocketConfig) simulator.SocketConfig {
	t.Helper()
	if c.Endpoint == "" {
		c.Endpoint, c.Mode = "tcp://127.0.0.1:*", simulator.ModeBind
	}
	for _, endpoint := range []*string{&c.Endpoint, &c.Replay, &c.Snapshot} {
		if before, ok := strings.CutSuffix(*endpoint, "*"); ok {
			*endpoint = before + strconv.Itoa(harness.FreePort(t))
		}
	}
	return c
}

func newEngine(t *testing.T, cfg simulator.Config) *simulator.Engine {
	t.Helper()
	cfg.SocketConfig = withPorts(t, cfg.SocketConfig)
	e, err := simulator.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestSubscriberReceivesThePoolsEvents(t *testing.T) {
	t.Parallel()
	const batches = 160
	for _, tt := range []struct {
		name        string
		batch, each wire.Form
		first       uint64
		groups      []blockpool.Group
	}{
		{"vLLM", 0, 0, 0, nil},
		{"vLLM, maps", wire.FormMap, wire.FormMap, 0, nil},
		{"vLLM, hybrid model", 0, 0, 0, []blockpool.Group{{Window: 16}, {}}},
		{"vLLM, hybrid model, maps", wire.FormMap, wire.FormMap, 0, []blockpool.Group{{Window: 16}}},
		{"llm-d-inference-sim", wire.FormArray, wire.FormArray, 1, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := simulator.Config{
				SocketConfig: simulator.SocketConfig{Topic: "kv@10.0.0.5@m"},
				BatchConfig: simulator.BatchConfig{
					Rank: 3, BatchForm: tt.batch, EventForm: tt.each, FirstSeq: tt.first,
				},
				Pool:     blockpool.Config{Capacity: 256, BlockSize: 4, Groups: tt.groups},
				Workload: workload.Config{ResetEvery: 150},
				Seed:     11, Batches: batches, Subscribers: 1,
			}
			e := newEngine(t, cfg)
			sub := subscribe(t, e.Endpoint())
			run(t, e)

			// The same seed produces the same workload.
			pool, err := blockpool.New(cfg.Pool)
			if err != nil {
				t.Fatal(err)
			}
			conversations, err := workload.NewConversations(cfg.Workload, pool, cfg.Seed, 0)
			if err != nil {
				t.Fatal(err)
			}
			want := simulator.Summary{Batches: batches, NextSeq: tt.first + batches}
			rules := wire.NewRules(&wire.BlockSize{})
			last := 0.0
			for i := range uint64(batches) {
				msg := receiveBatch(t, sub)
				if msg.topic != cfg.Topic || msg.seq != tt.first+i {
					t.Fatalf("got batch %d of topic %q, want %d of %q", msg.seq, msg.topic, tt.first+i, cfg.Topic)
				}
				b := decode(t, msg.payload)
				if !b.HasRank || b.Rank != 3 || !b.HasTime || b.Time <= last {
					t.Fatalf("batch %d: rank %d, time %f after %f", msg.seq, b.Rank, b.Time, last)
				}
				last = b.Time
				events := conversations.Step()
				rules.Admit(b, 3, new(wire.Counts)) // leaves the events of the main attention group
				ofOthers := func(ev wire.Event) bool { return ev.GroupIdx > 0 }
				if want := slices.ContainsFunc(events, ofOthers); b.GroupsOmitted != want {
					t.Fatalf("batch %d: GroupsOmitted %v, want %v", msg.seq, b.GroupsOmitted, want)
				}
				count(&want, events)
				events = slices.DeleteFunc(slices.Clone(events), ofOthers)
				if diff := cmp.Diff(plain(events), plain(b.Events)); diff != "" {
					t.Fatalf("batch %d (-pool +received):\n%s", msg.seq, diff)
				}
			}
			finished(t, e)
			want.Blocks, want.Digest, want.Stats = pool.Len(), checker.Digest(pool.Blocks()), pool.Stats()
			if diff := cmp.Diff(want, e.Summary()); diff != "" {
				t.Errorf("Summary (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(pool.Blocks(), e.Snapshot().Blocks); diff != "" {
				t.Errorf("Blocks (-want +got):\n%s", diff)
			}
		})
	}
}

func count(s *simulator.Summary, events []wire.Event) {
	s.Events += uint64(len(events))
	for _, ev := range events {
		switch ev.Kind {
		case wire.KindStored:
			s.Stored += uint64(len(ev.BlockHashes))
		case wire.KindRemoved:
			s.Removed += uint64(len(ev.BlockHashes))
		case wire.KindCleared:
			s.Cleared++
		}
	}
}

func TestEngineServesReplayAfterItsLastBatch(t *testing.T) {
	t.Parallel()
	const batches, limit = 60, 25
	for _, tt := range []struct {
		name      string
		form      simulator.ReplayForm
		topic     string
		frames    int
		endFrames int
	}{
		{"vLLM 0.26", simulator.ReplayTopic, "kv", 4, 4},
		{"before", simulator.ReplayPlain, "", 3, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEngine(t, simulator.Config{
				SocketConfig: simulator.SocketConfig{
					Topic: "kv", Replay: "tcp://127.0.0.1:*", ReplayForm: tt.form, ReplayLimit: limit,
				},
				Pool:    blockpool.Config{Capacity: 256, BlockSize: 4},
				Batches: batches, Subscribers: 1, Linger: true,
			})
			sub := subscribe(t, e.Endpoint())
			run(t, e)
			var live []message
			for range batches {
				live = append(live, receiveBatch(t, sub))
			}
			finished(t, e)

			for i := range live {
				live[i].topic = tt.topic
			}
			for _, from := range []uint64{0, batches - limit, batches - 3, batches} {
				got, frames, endFrames := replay(t, e.ReplayEndpoint(), from)
				want := live[max(from, batches-limit):]
				if diff := cmp.Diff(want, got, cmp.AllowUnexported(message{}), cmp.Comparer(bytes.Equal), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("replay from %d (-sent +replayed):\n%s", from, diff)
				}
				if endFrames != tt.endFrames || (len(got) > 0 && frames != tt.frames) {
					t.Errorf("replay from %d: %d frames and %d at the end, want %d and %d",
						from, frames, endFrames, tt.frames, tt.endFrames)
				}
			}
		})
	}
}

func TestEngineKeepsItsRate(t *testing.T) {
	t.Parallel()
	e := newEngine(t, simulator.Config{Batches: 100, Rate: 500, Pool: blockpool.Config{Capacity: 64}})
	start := time.Now()
	run(t, e)
	finished(t, e)
	// The last of 100 batches is due after 99 intervals of 2 ms.
	if took := time.Since(start); took < 195*time.Millisecond {
		t.Errorf("100 batches at 500 a second took %v, want 198ms", took)
	}
}

func TestContextEndsAnEngineAtOnce(t *testing.T) {
	t.Parallel()
	tests := map[string]simulator.Config{
		"waiting for a subscriber": {Subscribers: 1},
		"publishing":               {},
		"between two batches":      {Rate: 0.001}, // one batch in 1,000 s
		"serving replay":           {Batches: 1, Linger: true, SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}},
	}
	for name, cfg := range tests {
		t.Run(name, func(t *testing.T) {
			cfg.Pool.Capacity = 64
			endsWithItsContext(t, cfg)
		})
	}
}

func endsWithItsContext(t *testing.T, cfg simulator.Config) {
	t.Helper()
	e := newEngine(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	if cfg.Subscribers == 0 {
		subscriber := subscribe(t, e.Endpoint())
		if cfg.Batches == 0 && cfg.Rate == 0 {
			receiveBatch(t, subscriber)
		}
	}
	if cfg.Linger {
		finished(t, e)
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(waitTimeout):
		t.Error("Run continues after its context has ended")
		<-done
	}
}

func TestEngineRunsOnce(t *testing.T) {
	t.Parallel()
	e := newEngine(t, simulator.Config{Batches: 1, Pool: blockpool.Config{Capacity: 64}})
	if err := e.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e.Run(t.Context()) == nil || e.Close() == nil {
		t.Error("a second Run or Close: no error")
	}
	closed := newEngine(t, simulator.Config{})
	if err := closed.Close(); err != nil {
		t.Error(err)
	}
	if closed.Run(t.Context()) == nil {
		t.Error("Run after Close: no error")
	}
}

func TestNewRejectsBadConfigs(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]simulator.Config{
		"pool":     {Pool: blockpool.Config{Capacity: -1}},
		"workload": {Workload: workload.Config{Concurrency: -1}},
		"rate":     {Rate: -1},
		"speed":    {Speed: math.NaN()},
		"faults":   {Faults: simulator.Faults{Rates: map[simulator.Fault]float64{simulator.FaultDrop: 1.5}}},
		"fault":    {Faults: simulator.Faults{At: map[uint64][]simulator.Fault{3: {-1}}}},
		"trace":    {Pool: blockpool.Config{BlockSize: 48}, Trace: &workload.Trace{}},
		"endpoint": {SocketConfig: simulator.SocketConfig{Endpoint: "nowhere"}},
		"replay":   {SocketConfig: simulator.SocketConfig{Replay: "tcp://256.0.0.1:1"}},
	} {
		if e, err := simulator.New(cfg); err == nil {
			t.Errorf("bad %s: no error", name)
			_ = e.Close()
		}
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

func TestEngineRunsATrace(t *testing.T) {
	t.Parallel()
	cfg := faulty(0, nil)
	cfg.Trace, cfg.Pool = conversation(t, 40), blockpool.Config{Capacity: 5000, BlockSize: 64}
	e := newEngine(t, cfg)
	sub := subscribe(t, e.Endpoint())
	run(t, e)
	counts := make(map[uint64]int)
	n := uint64(0)
	for _, m := range receiveUntilFinished(t, e, sub) {
		n++
		applyCounting(counts, decode(t, m.payload).Events)
	}
	for sum := e.Summary(); n < sum.Batches; n++ {
		applyCounting(counts, decode(t, receiveBatch(t, sub).payload).Events)
	}
	present := make(map[uint64]struct{})
	for h := range counts {
		present[h] = struct{}{}
	}
	if diff := cmp.Diff(e.Snapshot().Blocks, present, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-pool +received):\n%s", diff)
	}
	if sum := e.Summary(); sum.Requests != 40 || sum.Removed == 0 {
		t.Errorf("got %+v, want 40 requests that do not all fit", sum)
	}
}

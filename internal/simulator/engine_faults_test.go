package simulator_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
)

// faulty returns a small engine that buffers all batches for replay.
func faulty(batches uint64, at map[uint64][]simulator.Fault) simulator.Config {
	return simulator.Config{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"},
		Pool:         blockpool.Config{Capacity: 256, BlockSize: 4},
		Faults:       simulator.Faults{At: at, Span: 4, Delay: 2, Late: 3, Flap: 2},
		Batches:      batches, Subscribers: 1, Linger: true,
	}
}

func seqsOf(messages []message) (seqs []uint64) {
	for _, m := range messages {
		seqs = append(seqs, m.seq)
	}
	return seqs
}

// upTo returns the seqs from first to last, except the excluded seqs.
func upTo(first, last uint64, but ...uint64) (seqs []uint64) {
	for seq := first; seq <= last; seq++ {
		if !slices.Contains(but, seq) {
			seqs = append(seqs, seq)
		}
	}
	return seqs
}

// TestFaultsOfBatches covers the faults that keep the sockets open, with which the messages that a
// subscriber receives are deterministic.
func TestFaultsOfBatches(t *testing.T) {
	t.Parallel()
	const batches = 20
	for _, tt := range []struct {
		fault  simulator.Fault
		at     uint64
		live   []uint64
		replay []uint64
	}{
		{simulator.FaultDrop, 5, upTo(0, 19, 5), upTo(0, 19)},
		{simulator.FaultLose, 5, upTo(0, 19, 5), upTo(0, 19, 5)},
		{simulator.FaultDuplicate, 5, slices.Concat(upTo(0, 5), upTo(5, 19)), upTo(0, 19)},
		{simulator.FaultDelay, 5, slices.Concat(upTo(0, 4), upTo(6, 7), upTo(5, 5), upTo(8, 19)), upTo(0, 19)},
		{simulator.FaultTruncate, 5, upTo(0, 19), upTo(0, 19)},
		{simulator.FaultClearReplay, 5, upTo(0, 19), upTo(5, 19)},
		{simulator.FaultSilent, 5, slices.Concat(upTo(0, 4), upTo(9, 19)), upTo(0, 19)},
		{simulator.FaultUnresponsive, 5, slices.Concat(upTo(0, 4), upTo(9, 19)), upTo(0, 19)},
		{simulator.FaultRestartInPlace, 5, slices.Concat(upTo(0, 4), upTo(0, 14)), upTo(0, 14)},
		// The last batch is always sent live.
		{simulator.FaultDrop, 19, upTo(0, 19), upTo(0, 19)},
		{simulator.FaultLose, 19, upTo(0, 19), upTo(0, 18)},
		{simulator.FaultDelay, 18, slices.Concat(upTo(0, 17), upTo(19, 19), upTo(18, 18)), upTo(0, 19)},
		{simulator.FaultDelay, 19, upTo(0, 19), upTo(0, 19)},
		{simulator.FaultSilent, 17, slices.Concat(upTo(0, 16), upTo(19, 19)), upTo(0, 19)},
		{simulator.FaultNoReplay, 18, upTo(0, 19), upTo(0, 19)},
		{simulator.FaultReplayWithoutEnd, 18, upTo(0, 19), upTo(0, 19)},
		{simulator.FaultPartialReplay, 18, upTo(0, 19), upTo(0, 19)},
	} {
		t.Run(tt.fault.String(), func(t *testing.T) {
			e := newEngine(t, faulty(batches, map[uint64][]simulator.Fault{tt.at: {tt.fault}}))
			sub := subscribe(t, e.Endpoint())
			run(t, e)
			var live []message
			for range tt.live {
				live = append(live, receiveBatch(t, sub))
			}
			finished(t, e)
			if diff := cmp.Diff(tt.live, seqsOf(live)); diff != "" {
				t.Errorf("live (-want +got):\n%s", diff)
			}
			replayed, _, _ := replay(t, e.ReplayEndpoint(), 0)
			if diff := cmp.Diff(tt.replay, seqsOf(replayed)); diff != "" {
				t.Errorf("replayed (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(map[simulator.Fault]uint64{tt.fault: 1}, e.Summary().Faults); diff != "" {
				t.Errorf("counted (-want +got):\n%s", diff)
			}
			for i, m := range live {
				cut := tt.fault == simulator.FaultTruncate && m.seq == tt.at
				if _, err := decodable(m.payload); (err != nil) != cut {
					t.Errorf("message %d, seq %d: %v", i, m.seq, err)
				}
			}
			for _, m := range replayed {
				decode(t, m.payload)
			}
			select {
			case frames := <-sub.messages:
				t.Errorf("received one more: %x", frames)
			default:
			}
		})
	}
}

// TestFaultsOfEngines checks that the batches that a new incarnation has buffered produce the
// contents of its pool, and that its seqs begin at the right number.
func TestFaultsOfEngines(t *testing.T) {
	t.Parallel()
	const batches = 120
	for _, tt := range []struct {
		fault       simulator.Fault
		at          uint64
		first, next uint64 // first buffered seq, and next seq after the last batch
		lossless    bool
	}{
		{simulator.FaultRestart, 20, 0, 100, true},
		{simulator.FaultRestartInPlace, 20, 0, 100, true},
		{simulator.FaultRestartLate, 20, 3, 100, false},
		{simulator.FaultRestartAhead, 20, 3, 103, true},
		{simulator.FaultRestartPassed, 20, 0, 100, true},
		{simulator.FaultRestartPassed, 60, 10, 70, true},
		{simulator.FaultFlap, 20, 0, 120, true},
		{simulator.FaultFlap, 119, 0, 120, true},
		{simulator.FaultRestart, 119, 0, 1, true},
	} {
		t.Run(tt.fault.String(), func(t *testing.T) {
			e := newEngine(t, faulty(batches, map[uint64][]simulator.Fault{tt.at: {tt.fault}}))
			endpoint, replayEndpoint := e.Endpoint(), e.ReplayEndpoint()
			sub := subscribe(t, endpoint)
			run(t, e)
			live := seqsOf(receiveUntilFinished(t, e, sub))
			if e.Endpoint() != endpoint || e.ReplayEndpoint() != replayEndpoint {
				t.Errorf("got endpoints %s and %s, want %s and %s", e.Endpoint(), e.ReplayEndpoint(), endpoint, replayEndpoint)
			}
			sum := e.Summary()
			if sum.NextSeq != tt.next || sum.Batches != batches || sum.Faults[tt.fault] != 1 {
				t.Errorf("got %+v, want next seq %d after %d batches", sum, tt.next, batches)
			}
			replayed, _, _ := replay(t, replayEndpoint, 0)
			if diff := cmp.Diff(upTo(tt.first, tt.next-1), seqsOf(replayed)); diff != "" {
				t.Errorf("replayed (-want +got):\n%s", diff)
			}
			if got := blocksAfter(t, replayed); cmp.Equal(got, e.Snapshot().Blocks, cmpopts.EquateEmpty()) != tt.lossless {
				t.Errorf("replay gives %d blocks, the pool has %d; equal: want %t", len(got), len(e.Snapshot().Blocks), tt.lossless)
			}
			// The last batch is sent live after the subscriber has reconnected.
			for len(live) == 0 || live[len(live)-1] != tt.next-1 {
				live = append(live, receiveBatch(t, sub).seq)
			}
		})
	}
}

// receiveUntilFinished returns the messages received until the engine has finished.
func receiveUntilFinished(t *testing.T, e *simulator.Engine, sub *subscriber) (messages []message) {
	t.Helper()
	for timeout := time.After(waitTimeout); ; {
		select {
		case <-e.Finished():
			return messages
		case frames := <-sub.messages:
			messages = append(messages, batchOf(t, frames))
		case <-timeout:
			t.Fatal("the engine does not finish")
		}
	}
}

// blocksAfter returns the blocks present after these batches, counting copies.
func blocksAfter(t *testing.T, messages []message) map[uint64]struct{} {
	t.Helper()
	counts := make(map[uint64]int)
	for _, m := range messages {
		applyCounting(counts, decode(t, m.payload).Events)
	}
	present := make(map[uint64]struct{})
	for h := range counts {
		present[h] = struct{}{}
	}
	return present
}

// TestObserverKnowsTheCache derives the cache from what an engine with restarts and resets tells its observer.
func TestObserverKnowsTheCache(t *testing.T) {
	t.Parallel()
	cfg := faulty(200, map[uint64][]simulator.Fault{
		50: {simulator.FaultLose}, 90: {simulator.FaultRestart}, 140: {simulator.FaultRestartInPlace},
	})
	cfg.Subscribers, cfg.Linger, cfg.Workload.ResetEvery = 0, false, 35
	cache, batches, restarts := make(map[uint64]int), uint64(0), 0
	var last time.Time
	cfg.Observe = func(c simulator.Change) {
		if c.Time.IsZero() {
			clear(cache)
			restarts++
			return
		}
		batches++
		if !c.Time.After(last) || c.Time != c.Time.Truncate(time.Microsecond) {
			t.Errorf("batch at %v after %v", c.Time, last)
		}
		last = c.Time
		for _, e := range c.Events {
			switch e.Kind {
			case wire.KindStored:
				for _, h := range e.BlockHashes {
					cache[h]++
				}
			case wire.KindRemoved:
				if cache[e.BlockHashes[0]]--; cache[e.BlockHashes[0]] == 0 {
					delete(cache, e.BlockHashes[0])
				}
			case wire.KindCleared:
				clear(cache)
			}
		}
	}
	e := newEngine(t, cfg)
	if err := e.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	var digest uint64
	for h := range cache {
		digest ^= blockpool.SplitMix64(h)
	}
	if s := e.Summary(); batches != s.Batches || restarts != 2 || digest != s.Digest || len(cache) != s.Blocks {
		t.Errorf("observed %d batches, %d restarts and %d blocks, digest %x; want 2 restarts and %+v", batches, restarts, len(cache), digest, s)
	}
}

func TestRestartPassedPublishesAboveTheOldSeq(t *testing.T) {
	t.Parallel()
	cfg := faulty(140, map[uint64][]simulator.Fault{60: {simulator.FaultRestartPassed}})
	cfg.Rate = 250 // slow enough for the subscriber to reconnect before the seqs have passed
	e := newEngine(t, cfg)
	sub := subscribe(t, e.Endpoint())
	run(t, e)
	live := seqsOf(receiveUntilFinished(t, e, sub))
	for len(live) == 0 || live[len(live)-1] != 89 {
		live = append(live, receiveBatch(t, sub).seq)
	}
	// 60 batches of the old incarnation, then the new one from 10 on, which is not received before
	// 62: the seq never goes backwards.
	for i, seq := range live {
		if i > 0 && (seq <= live[i-1] || seq > 59 && seq < 62) {
			t.Fatalf("received %v", live)
		}
	}
}

func TestSameSeedSameFaultsAndEvents(t *testing.T) {
	t.Parallel()
	sockets := withPorts(t, simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"})
	rapid.Check(t, func(rt *rapid.T) {
		rates := map[simulator.Fault]float64{}
		for _, f := range simulator.AllFaults() {
			if rapid.Bool().Draw(rt, f.String()) {
				rates[f] = 0.05
			}
		}
		cfg := simulator.Config{
			SocketConfig: sockets,
			Pool:         blockpool.Config{Capacity: 64, BlockSize: 2},
			Seed:         rapid.Uint64().Draw(rt, "seed"),
			Faults:       simulator.Faults{Seed: rapid.Uint64().Draw(rt, "fault_seed"), Rates: rates}, Batches: 60,
		}
		var sums []simulator.Summary
		for range 2 {
			e, err := simulator.New(cfg)
			if err != nil {
				rt.Fatal(err)
			}
			if err := e.Run(context.Background()); err != nil {
				rt.Fatal(err)
			}
			sums = append(sums, e.Summary())
		}
		if diff := cmp.Diff(sums[0], sums[1]); diff != "" {
			rt.Errorf("(-first +second):\n%s", diff)
		}
		want := map[simulator.Fault]uint64{}
		for batch := range cfg.Batches {
			for _, f := range cfg.Faults.OfBatch(batch) {
				want[f]++
			}
		}
		if diff := cmp.Diff(want, sums[0].Faults, cmpopts.EquateEmpty()); diff != "" {
			rt.Errorf("(-plan +occurred):\n%s", diff)
		}
	})
}

func TestPauseReturnsWhatASubscriberCanKnow(t *testing.T) {
	t.Parallel()
	cfg := faulty(0, nil)
	cfg.Rate = 2000
	cfg.Faults.Rates = map[simulator.Fault]float64{
		simulator.FaultDrop: 0.1, simulator.FaultDuplicate: 0.1, simulator.FaultDelay: 0.1, simulator.FaultTruncate: 0.1,
		simulator.FaultNoReplay: 0.02, simulator.FaultPartialReplay: 0.02, simulator.FaultReplayWithoutEnd: 0.02, simulator.FaultSilent: 0.02,
		simulator.FaultRestartInPlace: 0.01,
	}
	e := newEngine(t, cfg)
	sub := subscribe(t, e.Endpoint())
	run(t, e)
	for range 5 {
		for before := e.Summary().Batches; e.Summary().Batches < before+50; {
			sub.receive(t)
		}
		still, err := e.Pause(withTimeout(t))
		if err != nil {
			t.Fatal(err)
		}
		replayed, _, _ := replay(t, e.ReplayEndpoint(), 0)
		if diff := cmp.Diff(upTo(0, still.NextSeq-1), seqsOf(replayed), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("replayed (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(still.Blocks, blocksAfter(t, replayed)); diff != "" {
			t.Fatalf("(-paused +replayed):\n%s", diff)
		}
		if diff := cmp.Diff(still, e.Snapshot()); diff != "" {
			t.Fatalf("the paused engine changed:\n%s", diff)
		}
		e.Resume()
	}
}

func TestPauseWaitsForTheEndOfFaults(t *testing.T) {
	t.Parallel()
	const span = 50
	drops := make(map[uint64][]simulator.Fault)
	for batch := range uint64(span) {
		drops[batch] = []simulator.Fault{simulator.FaultDrop}
	}
	at := func(f simulator.Fault) map[uint64][]simulator.Fault { return map[uint64][]simulator.Fault{0: {f}} }
	for name, plan := range map[string]map[uint64][]simulator.Fault{
		"drop": drops, "delay": at(simulator.FaultDelay), "holes": at(simulator.FaultPartialReplay),
		"endless": at(simulator.FaultReplayWithoutEnd), "mute": at(simulator.FaultNoReplay), "silent": at(simulator.FaultSilent),
		"dead": at(simulator.FaultUnresponsive), "flap": at(simulator.FaultFlap),
	} {
		t.Run(name, func(t *testing.T) {
			cfg := faulty(0, plan)
			cfg.Subscribers, cfg.Rate = 0, 1000
			cfg.Faults.Delay, cfg.Faults.Span, cfg.Faults.Flap = span, span, span
			e := newEngine(t, cfg)
			run(t, e)
			for e.Summary().Batches == 0 { // the engine is quiet before the first batch
				runtime.Gosched()
			}
			still, err := e.Pause(withTimeout(t))
			if err != nil || still.Batches <= span {
				t.Errorf("paused after %d batches (%v), want more than %d", still.Batches, err, span)
			}
		})
	}
}

func TestPublishPausesAfterItsBatches(t *testing.T) {
	t.Parallel()
	e := newEngine(t, simulator.Config{Pool: blockpool.Config{Capacity: 64}, Rate: 1e5})
	run(t, e)
	before, err := e.Pause(withTimeout(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []uint64{1, 0, 20, 1} {
		after, err := e.Publish(withTimeout(t), n)
		if err != nil || after.Batches != before.Batches+n {
			t.Errorf("published %d batches (%v), want %d", after.Batches-before.Batches, err, n)
		}
		before = after
	}
}

func TestPauseIsWithdrawnWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	cfg := faulty(0, nil)
	cfg.Subscribers, cfg.Rate = 0, 500
	cfg.Faults.Rates = map[simulator.Fault]float64{simulator.FaultDrop: 1}
	cfg.Faults.At = map[uint64][]simulator.Fault{}
	e := newEngine(t, cfg)
	run(t, e)
	for e.Summary().Batches == 0 { // the engine is quiet before the first batch
		runtime.Gosched()
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	go func() {
		for e.Summary().Batches < 20 { // the engine continues
			_ = e.Snapshot().Blocks
		}
		cancel(enough)
	}()
	if _, err := e.Pause(ctx); !errors.Is(err, enough) {
		t.Errorf("got %v, want the context's error", err)
	}
}

func TestFinishedEngineIsPaused(t *testing.T) {
	t.Parallel()
	e := newEngine(t, simulator.Config{Pool: blockpool.Config{Capacity: 64}, Batches: 7})
	if err := e.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	still, err := e.Pause(t.Context())
	if err != nil || still.NextSeq != 7 || still.Batches != 7 || !cmp.Equal(still.Blocks, e.Snapshot().Blocks) {
		t.Errorf("got %+v, %v", still, err)
	}
}

package ingest_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// callEngine is an engine that is read by SMG's SubscribeKvEvents.
type callEngine struct {
	t       *testing.T
	address string
	server  *enginetest.CallServer
}

func newCallEngine(t *testing.T) *callEngine {
	t.Helper()
	host, port := newHost()
	e := &callEngine{t: t, address: fmt.Sprintf("%s:%d", host, port)}
	e.start()
	t.Cleanup(func() { e.server.Close() })
	return e
}

func (e *callEngine) start() {
	e.t.Helper()
	var err error
	if e.server, err = enginetest.NewCallServer(e.address, "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"); err != nil {
		e.t.Fatal(err)
	}
}

// restart breaks the calls, and accepts others.
func (e *callEngine) restart() {
	e.t.Helper()
	e.server.Close()
	e.start()
}

// accept waits for a call with a start_sequence_number.
func (e *callEngine) accept(start uint64) engineCall {
	e.t.Helper()
	c, err := e.server.Accept()
	if err != nil {
		e.t.Fatal(err)
	}
	var want []byte
	if start > 0 {
		want = protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), start)
	}
	if string(c.Request) != string(want) {
		e.t.Fatalf("request %x, want %x", c.Request, want)
	}
	return engineCall{c, e.t}
}

type engineCall struct {
	*enginetest.Call
	t *testing.T
}

// batch sends a batch of a rank with a store for each hash, or a clear for hash 0.
func (c engineCall) batch(rank uint32, seq uint64, hashes ...uint64) {
	c.t.Helper()
	m := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), seq)
	m = protowire.AppendFixed64(protowire.AppendTag(m, 2, protowire.Fixed64Type), math.Float64bits(epochSeconds(seq)))
	for _, hash := range hashes {
		event := appendMessage(nil, 4, nil)
		if hash != 0 {
			block := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), hash)
			block = appendMessage(block, 2, make([]byte, blockSize)) // tokens
			block = protowire.AppendVarint(protowire.AppendTag(block, 3, protowire.VarintType), blockSize)
			event = appendMessage(nil, 2, appendMessage(nil, 1, block))
		}
		m = appendMessage(m, 3, event)
	}
	m = protowire.AppendVarint(protowire.AppendTag(m, 4, protowire.VarintType), uint64(rank))
	if err := c.Send(m); err != nil {
		c.t.Fatal(err)
	}
}

func appendMessage(b []byte, field protowire.Number, inner []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), inner)
}

func (c engineCall) end(code codes.Code) {
	c.t.Helper()
	if err := c.End(status.Error(code, "over")); err != nil {
		c.t.Fatal(err)
	}
}

// startCalls reads an engine by gRPC.
func startCalls(t *testing.T, e *callEngine, source config.Source) (r *recorder, stop func()) {
	t.Helper()
	source.Connect = "smg://" + e.address
	r = newRecorder(t)
	_, stop = start(t, worker(source), r)
	return r, stop
}

const added = "add w model m block_size 0 ranks [0]"

// doubtSink passes on the doubts of each batch.
type doubtSink chan []feed.Doubt

func (s doubtSink) AddWorker(feed.Worker) feed.Lane        { return s }
func (s doubtSink) RemoveWorker(string, feed.RemoveReason) {}
func (s doubtSink) Batch(b *feed.Batch)                    { s <- b.Doubts }
func (doubtSink) Gap(feed.Gap)                             {}
func (doubtSink) Restarted(feed.Restart)                   {}

// TestRelayedBatchesAreDoubted reads a relay: each batch has the doubt, since a clear ends those of earlier ones.
func TestRelayedBatchesAreDoubted(t *testing.T) {
	t.Parallel()
	e := newCallEngine(t)
	sink := make(doubtSink, 2)
	start(t, worker(config.Source{Connect: "smg://" + e.address}), sink)
	c := e.accept(0)
	c.batch(0, 0, 1)
	c.batch(0, 1, 0)
	for range 2 {
		select {
		case got := <-sink:
			if d := cmp.Diff([]feed.Doubt{{Reason: feed.GapRelayed, Tiers: kvblock.AllTiers}}, got); d != "" {
				t.Errorf("doubts (-want +got):\n%s", d)
			}
		case <-time.After(harness.Timeout):
			t.Fatal("no batch came")
		}
	}
}

func TestCallThatBreaksIsResumed(t *testing.T) {
	t.Parallel()
	e := newCallEngine(t)
	r, stop := startCalls(t, e, config.Source{})
	c := e.accept(0)
	c.batch(0, 0, 1)
	c.batch(0, 1, 2)
	c.batch(0, 2, 3)
	r.want(added, "w 0/0: batch 0 +[1]", "w 0/0: batch 1 +[2]", "w 0/0: batch 2 +[3]")
	c.end(codes.Unavailable)
	c = e.accept(1) // after which batch 2 comes again
	c.batch(0, 2, 3)
	c.batch(0, 3, 4)
	r.want("w 0/0: batch 3 +[4]")
	e.restart()
	c = e.accept(2)
	c.batch(0, 2, 3) // a server that counts otherwise
	c.batch(0, 3, 4)
	c.batch(0, 4, 5)
	r.want("w 0/0: batch 4 +[5]")
	stop()
	r.wantNone()
}

func TestCallThatCannotBeResumed(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		publish func(engineCall)
		want    []string
	}{
		"with the next batch": {
			func(c engineCall) { c.batch(0, 3, 4) },
			[]string{"w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: batch 3 +[4]"},
		},
		"with a later batch": {
			func(c engineCall) { c.batch(0, 6, 4) },
			[]string{"w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: gap 3-5, 3 missed", "w 0/0: batch 6 +[4]"},
		},
		"after a restart": {
			func(c engineCall) { c.batch(0, 0, 9); c.batch(0, 1, 10) },
			[]string{"w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: restarted", "w 0/0: batch 0 +[9]", "w 0/0: batch 1 +[10]"},
		},
		"with the present state": {
			func(c engineCall) { c.batch(0, 8, 0, 1, 3); c.batch(0, 9, 4) },
			[]string{"w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: gap 3-7, 5 missed", "w 0/0: batch 8 clear +[1] +[3]", "w 0/0: batch 9 +[4]"},
		},
	} {
		for _, code := range []codes.Code{codes.OutOfRange, codes.DataLoss} {
			t.Run(fmt.Sprintf("%s, %v", name, code), func(t *testing.T) {
				e := newCallEngine(t)
				r, stop := startCalls(t, e, config.Source{})
				c := e.accept(0)
				for seq := range uint64(3) {
					c.batch(0, seq, seq+1)
				}
				r.want(added, "w 0/0: batch 0 +[1]", "w 0/0: batch 1 +[2]", "w 0/0: batch 2 +[3]")
				if code == codes.OutOfRange {
					c.end(codes.Unavailable)
					c = e.accept(1)
				}
				c.end(code)
				c = e.accept(0)
				tt.publish(c)
				r.want(tt.want...)
				stop()
				r.wantNone()
			})
		}
	}
}

// An engine that restarted, and has passed the last seq, is noticed by its batch of that seq. Then the call begins anew.
func TestRestartBeforeTheCallIsResumed(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		publish func(engineCall)
		last    uint64 // seq
		want    []string
	}{
		"a server with all batches": {
			func(c engineCall) { c.batch(0, 0, 10); c.batch(0, 1, 11); c.batch(0, 2, 12); c.batch(0, 3, 13) },
			3, []string{"w 0/0: restarted", "w 0/0: batch 0 +[10]", "w 0/0: batch 1 +[11]", "w 0/0: batch 2 +[12]", "w 0/0: batch 3 +[13]"},
		},
		"a server with the present state": {
			func(c engineCall) { c.batch(0, 3, 0, 10, 12); c.batch(0, 4, 14) },
			4, []string{"w 0/0: batch 3 clear +[10] +[12]", "w 0/0: batch 4 +[14]"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newCallEngine(t)
			r, stop := startCalls(t, e, config.Source{})
			c := e.accept(0)
			for seq := range uint64(3) {
				c.batch(0, seq, seq+1)
			}
			r.want(added, "w 0/0: batch 0 +[1]", "w 0/0: batch 1 +[2]", "w 0/0: batch 2 +[3]")
			e.restart()
			c = e.accept(1)
			c.batch(0, 2, 12)
			r.want("w 0/0: restarted", "w 0/0: gap 0-1, 2 missed", "w 0/0: batch 2 +[12]")
			c = e.accept(0)
			if err := c.SendHeader(); err != nil {
				t.Fatal(err)
			}
			r.want("w 0/0: gap possible_restart 0-0, 0 missed")
			tt.publish(c)
			r.want(tt.want...)
			c.end(codes.Unavailable) // from here on it resumes again
			e.accept(tt.last - 1)
			stop()
			r.wantNone()
		})
	}
}

func TestRanksOfOneServer(t *testing.T) {
	t.Parallel()
	e := newCallEngine(t)
	registry := prometheus.NewRegistry()
	c := worker(config.Source{Connect: "smg://" + e.address, DPSize: 2})
	c.Metrics = registry
	r := newRecorder(t)
	start(t, c, r)
	calls := [2]engineCall{e.accept(0), e.accept(0)}
	r.want("add w model m block_size 0 ranks [0 1]")
	for _, c := range calls {
		c.batch(0, 0, 1)
		c.batch(2, 0, 9)
	}
	r.want("w 0/0: batch 0 +[1]")
	for _, c := range calls {
		c.batch(1, 0, 2)
	}
	r.want("w 0/1: batch 0 +[2]")
	for _, c := range calls {
		c.batch(1, 1, 3)
	}
	r.want("w 0/1: batch 1 +[3]")
	harness.WaitFor(t, func() bool {
		return harness.Gather(t, registry).Sum("kvcast_ingest_messages_refused_total", "worker", "w", "reason", "foreign_rank") == 1
	})
}

// After an end of kvcast with a durable journal, the call begins with the last batch that was stored.
func TestCallIsResumedAfterARecovery(t *testing.T) {
	t.Parallel()
	e := newCallEngine(t)
	c := worker(config.Source{Connect: "smg://" + e.address})
	c.Durable = true
	sink := newDurableSink()
	p := feed.Publisher{}
	_, stop := start(t, c, sink)
	call := e.accept(0)
	for seq := range uint64(5) {
		call.batch(0, seq, seq+1)
	}
	sink.await(t, "batch 4", func() bool { return len(sink.ofLocked("w", p)) == 5 })
	stop()
	c.Recovered = sink.recovered(func(n int) int { return n - 1 })
	_, stop = start(t, c, sink)
	call = e.accept(2)
	for seq := uint64(3); seq < 6; seq++ {
		call.batch(0, seq, seq+1)
	}
	sink.await(t, "batch 5", func() bool { return len(sink.ofLocked("w", p)) == 6 })
	stop()
	for seq, stored := range sink.of("w", p) {
		if stored.first != uint64(seq) {
			t.Errorf("call %d is %s", seq, stored.text)
		}
	}
}

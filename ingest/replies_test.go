package ingest_test

import (
	"encoding/binary"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
	"github.com/kvcast/kvcast/test/harness"
)

// newReplier returns the endpoint of a replay socket. It answers a request with the messages that
// script returns for the requested seq.
func newReplier(t *testing.T, ready <-chan struct{}, script func(from uint64) [][]any) string {
	t.Helper()
	ended := make(chan struct{})
	requests := make(chan outbound.Event)
	s, err := outbound.Bind("tcp", "127.0.0.1:0", outbound.Config{
		Type: zmtp.ROUTER, HighWater: math.MaxInt,
		OnEvent: func(e outbound.Event) {
			select {
			case requests <- e:
			case <-ended:
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	group.Go(func() {
		select {
		case <-ready:
		case <-ended:
			return
		}
		for {
			select {
			case e := <-requests:
				if len(e.Frames) != 2 || len(e.Frames[1]) != 8 {
					t.Errorf("request %q", e.Frames)
					continue
				}
				for _, m := range script(binary.BigEndian.Uint64(e.Frames[1])) {
					s.Send(e.Peer, framesOf(m)...)
				}
			case <-ended:
				return
			}
		}
	})
	t.Cleanup(func() {
		close(ended)
		group.Wait()
		s.Close(0)
	})
	return "tcp://" + s.Addr().String()
}

var endOfReplay = []any{"", "", seqFrame(math.MaxUint64), ""}

func reply(seq, hash uint64) []any {
	return []any{"", "topic", seqFrame(seq), payload(seq, stored(hash))}
}

// Whatever a replay socket replies, batches are delivered in order, and losses are reported.
func TestMalformedRepliesKeepTheOrder(t *testing.T) {
	tests := []struct {
		name   string
		script func(from uint64) [][]any
		want   []string
		counts map[string]float64
		logs   string
		// wantNative and thenNative, if set, are of the native transport, which disconnects peers beyond its limits.
		wantNative, thenNative []string
		// missedNative is how many batches it reports as lost at least: those that are lost again after thenNative are counted again.
		missedNative float64
		// then is what follows after a second, when the socket is asked whether it can repair the loss after all.
		then []string
	}{
		{
			name: "in order",
			script: func(from uint64) (all [][]any) {
				for seq := from; seq < 3; seq++ {
					all = append(all, reply(seq, 10+seq))
				}
				return append(all, endOfReplay)
			},
			want:   []string{"batch 0 +[10]", "batch 1 +[11]", "batch 2 +[12]", "batch 3 +[13]"},
			counts: map[string]float64{`replays_done_total{worker="w"}`: 1, `replayed_batches_total{worker="w"}`: 3},
			logs:   `level=INFO msg="replay done" worker=w source=0 rank=0 cause=start batches=3 requests=1 took=`,
		},
		{
			name: "each reply twice",
			script: func(from uint64) (all [][]any) {
				for seq := from; seq < 3; seq++ {
					all = append(all, reply(seq, 10+seq), reply(seq, 10+seq))
				}
				return append(all, endOfReplay)
			},
			want:   []string{"batch 0 +[10]", "batch 1 +[11]", "batch 2 +[12]", "batch 3 +[13]"},
			counts: map[string]float64{`replays_done_total{worker="w"}`: 1},
		},
		{
			name: "descending seqs from the second reply on",
			script: func(from uint64) [][]any {
				all := [][]any{reply(from, 10+from)}
				for seq := uint64(2); seq > from; seq-- {
					all = append(all, reply(seq, 10+seq))
				}
				return append(all, endOfReplay)
			},
			want:   []string{"batch 0 +[10]", "gap replay_incomplete 1-1, 1 missed", "batch 2 +[12]", "batch 3 +[13]"},
			counts: map[string]float64{`missed_batches_total{worker="w"}`: 1},
			logs:   `level=INFO msg="replay has a hole, requesting it again" worker=w source=0 rank=0 last_seq=0 batches=1`,
		},
		{
			name: "seqs before the requested seq",
			script: func(uint64) (all [][]any) {
				for seq := range uint64(3) {
					all = append(all, reply(seq, 10+seq))
				}
				return append(all, endOfReplay)
			},
			want:   []string{"batch 0 +[10]", "batch 1 +[11]", "batch 2 +[12]", "batch 3 +[13]"},
			counts: map[string]float64{`replays_done_total{worker="w"}`: 1},
		},
		{
			name: "too long batch",
			script: func(from uint64) (all [][]any) {
				for seq := from; seq < 3; seq++ {
					m := reply(seq, 10+seq)
					if seq == 1 {
						m[3] = largest(1)
					}
					all = append(all, m)
				}
				return append(all, endOfReplay)
			},
			want:   []string{"batch 0 +[10]", "gap replay_incomplete 1-1, 1 missed", "batch 2 +[12]", "batch 3 +[13]"},
			counts: map[string]float64{`batches_rejected_total{error="message_too_long",worker="w"}`: 1, `missed_batches_total{worker="w"}`: 1},

			wantNative:   []string{"batch 0 +[10]", "gap replay_incomplete 1-2, 2 missed", "batch 3 +[13]"},
			thenNative:   []string{"batch 0 clear", "batch 0 +[10]"},
			missedNative: 2,
		},
		{
			name: "malformed batch",
			script: func(from uint64) (all [][]any) {
				for seq := from; seq < 3; seq++ {
					m := reply(seq, 10+seq)
					if seq == 1 {
						m[3] = garbage
					}
					all = append(all, m)
				}
				return append(all, endOfReplay)
			},
			want:   []string{"batch 0 +[10]", "gap replay_incomplete 1-1, 1 missed", "batch 2 +[12]", "batch 3 +[13]"},
			counts: map[string]float64{`batches_rejected_total{error="bad_code",worker="w"}`: 1, `missed_batches_total{worker="w"}`: 1},
		},
		{
			name:   "malformed reply",
			script: func(uint64) [][]any { return [][]any{{"x"}, {"", "", "", "", "", "", ""}} },
			want:   []string{"gap joined_late 0-2, 0 missed", "batch 3 +[13]"},
			counts: map[string]float64{`replays_failed_total{worker="w"}`: 1},
		},
		{
			name:   "seq of another length",
			script: func(uint64) [][]any { return [][]any{{"", "topic", "seq", payload(0)}, endOfReplay} },
			want:   []string{"gap joined_late 0-2, 0 missed", "batch 3 +[13]"},
			counts: map[string]float64{`replays_failed_total{worker="w"}`: 1},
		},
		{
			name:   "end marker alone",
			script: func(uint64) [][]any { return [][]any{endOfReplay} },
			want:   []string{"gap joined_late 0-2, 0 missed", "batch 3 +[13]"},
			then:   []string{"gap possible_restart 0-0, 0 missed"}, // an engine that did not restart would have batch 3
		},
		{
			name: "the largest seq, and an end with a payload",
			script: func(uint64) [][]any {
				return [][]any{reply(math.MaxUint64-1, 9), reply(math.MaxUint64, 9)}
			},
			// The live batch is stale because it is of another incarnation.
			want:   []string{"gap joined_late 0-18446744073709551613, 0 missed", "batch 18446744073709551614 +[9]"},
			counts: map[string]float64{`stale_batches_total{worker="w"}`: 1},
		},
	}
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		for _, tt := range tests {
			if zmq == config.ZMQNative && tt.wantNative != nil {
				tt.want, tt.then, tt.counts = tt.wantNative, tt.thenNative, nil
			}
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				e := newEngine(t)
				ready := make(chan struct{})
				replay := newReplier(t, ready, tt.script)
				registry := prometheus.NewRegistry()
				c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*"), Replay: replay})
				var log harness.Log
				c.Metrics, c.ReplayTimeout, c.Logger, c.ConnectZMQ = registry, harness.Timeout/2, log.Logger(), zmq
				r := newRecorder(t)
				in, stop := start(t, c, &plain{r})
				// A live batch follows the replay.
				e.awaitSubscriber("")
				e.publish(3, stored(13))
				harness.WaitFor(t, func() bool { return ingest.ReorderBytes(in) > 0 })
				close(ready)
				r.want(append([]string{"add w model m block_size 0 ranks [0]"}, tt.want...)...)
				harness.WaitFor(t, func() bool { return ingest.ReorderBytes(in) == 0 })
				awaitState(t, in, 0, ingest.SourceLive)
				if len(tt.then) > 0 {
					r.want(tt.then...)
				} else {
					r.wantNone()
				}
				wantMetrics(t, registry, tt.counts)
				if n := harness.Gather(t, registry).Sum("kvcast_ingest_missed_batches_total"); zmq == config.ZMQNative && n < tt.missedNative {
					t.Errorf("%v batches are missed, want at least %v", n, tt.missedNative)
				}
				stop()
				if !strings.Contains(log.String(), tt.logs) {
					t.Errorf("did not log %s\nin:\n%s", tt.logs, log.String())
				}
			})
		}
	})
}

// TestStartEndsWhenAllIsRead has a hole in the first replay. The source catches up until the second
// replay is complete.
func TestStartEndsWhenAllIsRead(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	ready := make(chan struct{})
	asked := make(chan uint64, 10)
	more := make(chan struct{})
	replay := newReplier(t, ready, func(from uint64) [][]any {
		asked <- from
		if from == 0 && len(asked) == 1 {
			return [][]any{reply(0, 10), reply(2, 12), endOfReplay}
		}
		<-more
		return [][]any{reply(0, 10), reply(1, 11), reply(2, 12), endOfReplay}
	})
	c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*"), Replay: replay})
	c.ReplayTimeout = harness.Timeout / 2
	r := newRecorder(t)
	in, _ := start(t, c, &plain{r})
	e.awaitSubscriber("")
	close(ready)
	r.want("add w model m block_size 0 ranks [0]", "batch 0 +[10]")
	harness.WaitFor(t, func() bool { return len(asked) == 2 })
	if got := in.Sources()[0].State; got != ingest.SourceCatchingUp {
		t.Errorf("before the second replay it is %v, want %v", got, ingest.SourceCatchingUp)
	}
	close(more)
	r.want("batch 1 +[11]", "batch 2 +[12]")
	awaitState(t, in, 0, ingest.SourceLive)
}

// TestReplayThatStopsIsRequestedAgainSoon has a replay without its end marker, as when a ROUTER's
// queue is full. The timeout for the first reply is an hour.
func TestReplayThatStopsIsRequestedAgainSoon(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	ready := make(chan struct{})
	replay := newReplier(t, ready, func(from uint64) [][]any {
		if from == 0 {
			return [][]any{reply(0, 10), reply(1, 11)}
		}
		return [][]any{reply(1, 11), reply(2, 12), endOfReplay}
	})
	c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*"), Replay: replay})
	c.ReplayTimeout = time.Hour
	r := newRecorder(t)
	in, _ := start(t, c, &plain{r})
	e.awaitSubscriber("")
	close(ready)
	r.want("add w model m block_size 0 ranks [0]", "batch 0 +[10]", "batch 1 +[11]", "batch 2 +[12]")
	awaitState(t, in, 0, ingest.SourceLive)
}

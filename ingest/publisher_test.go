package ingest

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
)

// testTime is the time of all messages.
var testTime = time.Unix(1_800_000_000, 42)

// testPublisher is a publisher of a worker's only source and rank, without a replay
// socket.
type testPublisher struct {
	*publisher
	in *intake
}

func newTestPublisher(l feed.Lane) testPublisher {
	w := newTestWorker(l, slog.New(slog.DiscardHandler))
	return testPublisher{newPublisher(w, 0, SourceStatus{}, nil), w.shared.intake(w)}
}

func newTestWorker(l feed.Lane, log *slog.Logger) *worker {
	c := config.Config{Grace: time.Hour, Logger: log}.WithDefaults()
	c.Silence = 0
	w := newWorker(&shared{metrics: newMetrics(new(sourceList)), budgets: newBudgets(c), config: c}, feed.Worker{Name: "w"})
	w.lane = l
	return w
}

// message passes a live message to the publisher.
func (p testPublisher) message(m *transport.Message) { p.messageAt(testTime, m) }

func (p testPublisher) messageAt(now time.Time, m *transport.Message) {
	if _, ok := p.in.open(*m); ok {
		p.arrive(p.in, now, 1)
	}
}

// testMessage returns a message whose batch removes a block.
func testMessage(topic string, seq, hash uint64) *transport.Message {
	p := msgp.AppendArrayHeader(nil, 2)
	p = msgp.AppendFloat64(p, 1_700_000_000)
	p = msgp.AppendArrayHeader(p, 1)
	p = msgp.AppendArrayHeader(p, 2)
	p = msgp.AppendString(p, "BlockRemoved")
	p = msgp.AppendArrayHeader(p, 1)
	p = msgp.AppendUint64(p, hash)
	return &transport.Message{
		Frames: [][]byte{[]byte(topic), binary.BigEndian.AppendUint64(nil, seq), p},
		Count:  messageFrames,
	}
}

// rawIDLane records raw event ids and ingest times.
type rawIDLane struct {
	quietLane
	rawIDs  []uint64
	reached []uint64 // LastRawID of each batch and gap
	ingests []int64
}

func (l *rawIDLane) Batch(b *feed.Batch) {
	l.ingests = append(l.ingests, b.IngestTime)
	l.reached = append(l.reached, b.LastRawID)
	for _, ev := range b.Events {
		l.rawIDs = append(l.rawIDs, ev.RawID)
	}
}

func (l *rawIDLane) Gap(g feed.Gap) { l.reached = append(l.reached, g.LastRawID) }

// Each batch of this test has one event. A lost batch uses a raw event id, too.
func TestLostBatchesUseRawEventIDs(t *testing.T) {
	t.Parallel()
	l := &rawIDLane{}
	p := newTestPublisher(l)
	for _, seq := range []uint64{0, 1, 4, 5} {
		p.message(testMessage("kv", seq, seq))
	}
	if d := cmp.Diff([]uint64{1, 2, 5, 6}, l.rawIDs); d != "" {
		t.Errorf("raw event ids (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]uint64{1, 2, 4, 5, 6}, l.reached); d != "" {
		t.Errorf("raw event ids reached by each batch and gap (-want +got):\n%s", d)
	}
	for _, at := range l.ingests {
		if at != testTime.UnixNano() {
			t.Errorf("ingest time %d, want %d", at, testTime.UnixNano())
		}
	}
}

func TestRankMismatchIsLoggedOncePerPublisher(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	w := newTestWorker(quietLane{}, slog.New(slog.NewTextHandler(&log, nil)))
	now := testTime
	add := func(source int, rank uint32) testPublisher {
		return testPublisher{newPublisher(w, source, SourceStatus{Rank: rank}, nil), w.shared.intake(w)}
	}
	ranks := []testPublisher{add(0, 0), add(0, 1), add(0, 2)}
	alone := add(1, 0)
	alone.rankMismatchLogged = true
	for seq := range uint64(3) {
		for _, p := range append(ranks, alone) {
			named := testMessage("kv", seq, 1)
			named.Frames[2][0]++ // the array gets a third element, the rank
			named.Frames[2] = msgp.AppendUint32(named.Frames[2], 1)
			p.messageAt(now, named)
		}
		ranks[0].messageAt(now, testMessage("kv", seq, 1)) // has no rank
		now = now.Add(time.Second)
	}
	for _, rank := range []string{"0", "2"} {
		rank := `another dp rank than its endpoint" worker=w source=0 rank=` + rank + " batch_rank=1"
		if n := strings.Count(log.String(), rank); n != 1 {
			t.Errorf("%s logged %d times, want once:\n%s", rank, n, log.String())
		}
	}
	if n := strings.Count(log.String(), "another dp rank"); n != 2 {
		t.Errorf("%d lines of other ranks, want 2:\n%s", n, log.String())
	}
}

// quietLane ignores all calls.
type quietLane struct{}

func (quietLane) Batch(*feed.Batch)      {}
func (quietLane) Gap(feed.Gap)           {}
func (quietLane) Restarted(feed.Restart) {}

func TestRanksOfAWorkerAreBounded(t *testing.T) {
	t.Parallel()
	p := newTestPublisher(quietLane{})
	for r := range uint32(feed.MaxRanks) {
		p.worker.ranks[r] = struct{}{}
	}
	m := testMessage("kv", 0, 1)
	m.Frames[2][0]++ // the array gets a third element, the rank
	m.Frames[2] = msgp.AppendUint32(m.Frames[2], feed.MaxRanks)
	p.message(m)
	if len(p.ranks) != 0 || len(p.worker.ranks) != feed.MaxRanks {
		t.Errorf("ranks %v, and %d of the worker", p.ranks, len(p.worker.ranks))
	}
	p.message(testMessage("kv", 1, 1))
	if d := cmp.Diff([]uint32{0}, p.ranks); d != "" {
		t.Errorf("ranks after a batch that names none (-want +got):\n%s", d)
	}
}

// The number of ranks that are known only from batches is bounded over all workers. A worker that
// is reset releases its ranks.
func TestRanksOfAllWorkersAreBounded(t *testing.T) {
	t.Parallel()
	p := newTestPublisher(quietLane{})
	w := p.worker
	w.budgets.ranks = budget.New("ranks", 3)
	for r := range uint32(10) {
		m := testMessage("kv", uint64(r), 1)
		m.Frames[2][0]++ // the array gets a third element, the rank
		m.Frames[2] = msgp.AppendUint32(m.Frames[2], r)
		p.message(m)
	}
	if len(w.ranks) != 3 || w.budgets.ranks.Used() != 3 {
		t.Errorf("%d ranks, %d in use, want 3", len(w.ranks), w.budgets.ranks.Used())
	}
	w.reset()
	if n := w.budgets.ranks.Used(); n != 0 {
		t.Errorf("%d ranks in use after all were forgotten", n)
	}
}

func TestBatchesAllocateNothing(t *testing.T) {
	testclass.WithoutRace(t)
	p := newTestPublisher(quietLane{})
	m := testMessage("kv", 0, 1)
	seq := uint64(0)
	next := func() {
		binary.BigEndian.PutUint64(m.Frames[1], seq)
		seq++
		p.message(m)
	}
	for range 2048 { // until the history of fingerprints is full
		next()
	}
	if n := testing.AllocsPerRun(100, next); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

func BenchmarkPublisher(b *testing.B) {
	p := newTestPublisher(quietLane{})
	m := testMessage("kv@10.0.0.1@m", 0, 1)
	b.ReportAllocs()
	for seq := uint64(0); b.Loop(); seq++ {
		binary.BigEndian.PutUint64(m.Frames[1], seq)
		p.message(m)
	}
}

func TestUnixNano(t *testing.T) {
	t.Parallel()
	tests := []struct {
		seconds float64
		want    int64
	}{
		{0, 0},
		{1_700_000_000.25, 1_700_000_000_250_000_000},
		{1_795_183_948.9303138, 1_795_183_948_930_313_826},
		{-1.5, -1_500_000_000},
		{1e300, 0},
		{-1e300, 0},
		{9.3e9, 0},
	}
	for _, tt := range tests {
		if got := unixNano(tt.seconds); got != tt.want {
			t.Errorf("unixNano(%v) = %d, want %d", tt.seconds, got, tt.want)
		}
	}
}

// Two publishers of one topic and rank alternate on two connections.
func TestSourcesHaveTheReplayEndpointOfTheLastBatch(t *testing.T) {
	t.Parallel()
	p := newTestPublisher(quietLane{})
	p.worker.spawn = func(func(context.Context)) context.CancelFunc { return func() {} }
	endpoints := []string{"tcp://a:5558", "tcp://b:5558"}
	for i, e := range endpoints {
		p.connect(sequence.Connection{ID: sequence.ConnectionID(i + 1), Replay: e})
	}
	in := &Ingest{shared: p.worker.shared}
	for i := range 6 {
		m := testMessage("kv", uint64(i), 1)
		if _, ok := p.in.open(*m); !ok {
			t.Fatal("the message is refused")
		}
		p.arrive(p.in, testTime, sequence.ConnectionID(i%2+1))
		if got, want := in.Sources()[0].Replay, endpoints[i%2]; got != want {
			t.Errorf("batch %d: replay endpoint %s, want %s", i, got, want)
		}
	}
	p.stop()
}

// TestSourceIsDownWhileItHasNoConnection connects, disconnects and stops a source.
func TestSourceIsDownWhileItHasNoConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		added := time.Now()
		p := newTestPublisher(&rawIDLane{})
		defer p.stop()
		check := func(want time.Time) {
			t.Helper()
			if got := p.status.DownSince; !got.Equal(want) {
				t.Errorf("%v: down since %v, want %v", p.status.State, got, want)
			}
		}
		<-time.After(time.Second)
		check(added)
		p.connect(sequence.Connection{ID: 1})
		check(time.Time{})
		<-time.After(time.Second)
		lost := time.Now()
		p.disconnect(1)
		check(lost)
		<-time.After(time.Second)
		p.stop()
		check(lost)
	})
}

// TestHintWhenTheFirstBatchIsNotReceived checks that only topics of llm-d's form lead to its simulator, whose first batch is 1.
func TestHintWhenTheFirstBatchIsNotReceived(t *testing.T) {
	t.Parallel()
	const (
		simulator = "set engine to llm-d-sim"
		missing   = `hint="batches before this one were not received, and there is no replay socket"`
	)
	for _, c := range []struct {
		topic string
		seq   uint64
		want  string // in the log
		not   string
	}{
		{"", 1, missing, simulator},
		{"kv-events", 1, missing, simulator},
		{"kv@pod@m", 1, simulator, missing},
		{"kv@pod@m", 2, missing, simulator},
		{"kv@pod@m", 0, "incomplete=false", "hint"},
	} {
		var log bytes.Buffer
		w := newTestWorker(quietLane{}, slog.New(slog.NewTextHandler(&log, nil)))
		p := testPublisher{newPublisher(w, 0, SourceStatus{}, nil), w.shared.intake(w)}
		p.message(testMessage(c.topic, c.seq, 1))
		if got := log.String(); !strings.Contains(got, c.want) || strings.Contains(got, c.not) {
			t.Errorf("topic %q, seq %d: want %q and not %q, got:\n%s", c.topic, c.seq, c.want, c.not, got)
		}
	}
}

// TestEngineDelayIsOfLiveBatches checks that a batch read by replay, however old, does not change the delay.
func TestEngineDelayIsOfLiveBatches(t *testing.T) {
	t.Parallel()
	p := newTestPublisher(quietLane{})
	delay := func() (time.Duration, bool) {
		s := (&Ingest{shared: p.worker.shared}).Sources()[0]
		return s.EngineDelay, s.HasEngineDelay
	}
	deliver := func(seq uint64, replayed bool) {
		m := testMessage("kv", seq, seq)
		b := &sequence.Batch{Seq: seq, Payload: m.Frames[2], ReceivedAt: testTime, Replayed: replayed}
		p.deliver(p.in, b)
	}
	deliver(0, true)
	if d, ok := delay(); ok {
		t.Errorf("after a replay: got %v, want none", d)
	}
	deliver(1, false)
	want, ok := delay()
	if !ok || want != testTime.Sub(time.Unix(1_700_000_000, 0)) {
		t.Errorf("after a live batch: got %v, %t", want, ok)
	}
	p.in.decoded = nil
	m := testMessage("kv", 2, 2)
	m.Frames[2][2] ^= 1 // another time
	p.deliver(p.in, &sequence.Batch{Seq: 2, Payload: m.Frames[2], ReceivedAt: testTime, Replayed: true})
	if got, ok := delay(); !ok || got != want {
		t.Errorf("after another replay: got %v, want still %v", got, want)
	}
}

package ingest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/zmqio"
)

// testTime is when everything arrives.
var testTime = time.Unix(1_800_000_000, 42)

// newTestPublisher returns a publisher of a worker's only source and rank.
func newTestPublisher(l feed.Lane) (*publisher, *intake) {
	w := newTestWorker(l, slog.New(slog.DiscardHandler))
	return newPublisher(w, 0, SourceStatus{}), new(intake)
}

func newTestWorker(l feed.Lane, log *slog.Logger) *worker {
	w := newWorker(&shared{metrics: newMetrics(), budgets: newBudgets(config.Config{}.WithDefaults()), log: log, grace: time.Hour}, feed.Worker{Name: "w"})
	w.lane = l
	return w
}

// message takes a live message.
func (p *publisher) message(in *intake, m *zmqio.Message) { p.messageAt(in, testTime, m) }

func (p *publisher) messageAt(in *intake, now time.Time, m *zmqio.Message) {
	a, _, _ := open(&in.decoder, *m)
	p.take(in, now, &a)
}

// testMessage is a message whose batch removes the given block.
func testMessage(topic string, seq, hash uint64) *zmqio.Message {
	p := msgp.AppendArrayHeader(nil, 2)
	p = msgp.AppendFloat64(p, 1_700_000_000)
	p = msgp.AppendArrayHeader(p, 1)
	p = msgp.AppendArrayHeader(p, 2)
	p = msgp.AppendString(p, "BlockRemoved")
	p = msgp.AppendArrayHeader(p, 1)
	p = msgp.AppendUint64(p, hash)
	return &zmqio.Message{
		Frames: [][]byte{[]byte(topic), binary.BigEndian.AppendUint64(nil, seq), p},
		Count:  messageFrames,
	}
}

// account is a lane that checks that each seq is accounted for.
type account struct {
	t interface{ Errorf(string, ...any) }
	// life is how many restarts there were, next the seq that is due.
	life, next uint64
	// begun tells that something came; incomplete that the first seqs of this
	// life were given up.
	begun, incomplete bool
	// rawID is the last raw event id: each batch has one event, and a batch lost
	// uses one up.
	rawID uint64
}

func blockOf(life, seq uint64) uint64 { return life<<32 | seq }

func (a *account) Batch(b *feed.Batch) {
	if !a.begun && a.incomplete {
		a.next = b.Seq
	}
	if b.Seq != a.next {
		a.t.Errorf("life %d: batch %d, want %d", a.life, b.Seq, a.next)
	}
	if h := b.Events[0].BlockHashes[0]; h != blockOf(a.life, b.Seq) {
		a.t.Errorf("life %d: batch %d is that of %d in life %d", a.life, b.Seq, h&(1<<32-1), h>>32)
	}
	a.rawID++
	if id := b.Events[0].RawID; id != a.rawID {
		a.t.Errorf("raw event id %d, want %d", id, a.rawID)
	}
	if b.IngestTime != testTime.UnixNano() {
		a.t.Errorf("ingest time %d", b.IngestTime)
	}
	a.begun = true
	a.next = b.Seq + 1
}

func (a *account) Gap(g feed.Gap) {
	if g.Reason == feed.GapJoinedLate {
		if a.begun {
			a.t.Errorf("life %d: joined late after batch %d", a.life, a.next-1)
		}
		a.incomplete = true
		return
	}
	if !a.begun && a.incomplete {
		a.next = g.FirstSeq
	}
	if g.FirstSeq != a.next || g.Missed != g.LastSeq-g.FirstSeq+1 {
		a.t.Errorf("life %d: gap %+v, want one from %d", a.life, g, a.next)
	}
	a.begun = true
	a.next = g.LastSeq + 1
	a.rawID += g.Missed
}

func (a *account) Restarted(feed.Restart) {
	a.life++
	a.next = 0
	a.begun = true
	a.incomplete = false
}

func TestEverySeqIsAccountedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := &account{t: t}
		p, in := newTestPublisher(a)
		tagged := rapid.Bool().Draw(t, "engine tells its epoch")
		last := uint64(0) // of the life before
		for life := range uint64(rapid.IntRange(1, 5).Draw(t, "lives")) {
			topic := "kv"
			if tagged {
				topic = fmt.Sprintf("kv\x00sgl-kv-epoch=%x", life)
			}
			first := rapid.Uint64Range(0, 20).Draw(t, "first")
			// Without an epoch a restart shows only in a seq that is not above the
			// last, so the first batch must be one, and arrive.
			plain := life > 0 && !tagged
			if plain {
				first = min(first, last)
				if p.rivals.resumes(first) {
					first = 0 // else it could be another publisher that goes on
				}
			}
			seq := first
			var sent []*zmqio.Message
			for range rapid.IntRange(1, 30).Draw(t, "messages") {
				m := testMessage(topic, seq, blockOf(life, seq))
				switch rapid.IntRange(0, 5).Draw(t, "fault") {
				case 0: // lost
					if !plain || len(sent) > 0 {
						seq++
						continue
					}
				case 1: // after one that comes again
					if len(sent) > 0 {
						p.message(in, rapid.SampledFrom(sent).Draw(t, "again"))
					}
				case 2: // does not decode, in a way of its own
					m.Frames[2] = fmt.Appendf(nil, "\xc1 %d %d", life, seq)
				}
				p.message(in, m)
				sent = append(sent, m)
				last = seq
				seq++
			}
			if len(sent) == 0 {
				m := testMessage(topic, first, blockOf(life, first))
				p.message(in, m)
				last = first
			}
			if a.life != life || a.next != last+1 {
				t.Fatalf("life %d up to seq %d, want life %d up to %d", a.life, a.next, life, last+1)
			}
		}
	})
}

// gapLane keeps the gaps and the raw event ids that it is told.
type gapLane struct {
	quietLane
	gaps   []feed.Gap
	rawIDs []uint64
}

func (l *gapLane) Gap(g feed.Gap) { l.gaps = append(l.gaps, g) }
func (l *gapLane) Batch(b *feed.Batch) {
	for _, ev := range b.Events {
		l.rawIDs = append(l.rawIDs, ev.RawID)
	}
}

func TestSeqsThatJumpToTheEnd(t *testing.T) {
	const top = math.MaxUint64
	l := &gapLane{}
	p, in := newTestPublisher(l)
	p.message(in, testMessage("kv", 0, 1))
	p.message(in, testMessage("kv", top, 2))
	p.message(in, testMessage("kv", 0, 3))
	p.message(in, testMessage("kv", top, 4))
	bad := testMessage("kv\x00sgl-kv-epoch=1", top, 5)
	bad.Frames[2] = []byte{0xc1}
	p.message(in, bad)
	p.message(in, testMessage("kv\x00sgl-kv-epoch=1", 0, 6))
	gap := func(first, last, missed uint64) feed.Gap {
		return feed.Gap{Reason: feed.GapReplayUnavailable, FirstSeq: first, LastSeq: last, Missed: missed, At: testTime.UnixNano()}
	}
	// The last is of all seqs, which are one more than can be said.
	if d := cmp.Diff([]feed.Gap{gap(1, top-1, top-1), gap(1, top-1, top-1), gap(0, top, top)}, l.gaps); d != "" {
		t.Errorf("gaps (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]uint64{1, wire.MaxRawID, wire.MaxRawID, wire.MaxRawID, wire.MaxRawID}, l.rawIDs); d != "" {
		t.Errorf("raw event ids (-want +got):\n%s", d)
	}
}

func TestAnotherRankThanTheEndpointsIsLoggedOnceEach(t *testing.T) {
	var log bytes.Buffer
	w := newTestWorker(quietLane{}, slog.New(slog.NewTextHandler(&log, nil)))
	now, in := testTime, new(intake)
	ranks := []*publisher{newPublisher(w, 0, SourceStatus{}), newPublisher(w, 0, SourceStatus{Rank: 1}), newPublisher(w, 0, SourceStatus{Rank: 2})}
	alone := newPublisher(w, 1, SourceStatus{})
	alone.rankTold = true
	for seq := range uint64(3) {
		for _, p := range append(ranks, alone) {
			named := testMessage("kv", seq, 1)
			named.Frames[2][0]++ // an array of three: the rank comes last
			named.Frames[2] = msgp.AppendUint32(named.Frames[2], 1)
			p.messageAt(in, now, named)
		}
		ranks[0].messageAt(in, now, testMessage("kv", seq, 1)) // names none
		now = now.Add(noticeInterval)
	}
	for _, rank := range []string{"rank=0 batch_rank=1", "rank=2 batch_rank=1"} {
		if n := strings.Count(log.String(), rank); n != 1 {
			t.Errorf("%s logged %d times, want once:\n%s", rank, n, log.String())
		}
	}
	if n := strings.Count(log.String(), "another dp rank"); n != 2 {
		t.Errorf("%d lines of other ranks, want 2:\n%s", n, log.String())
	}
}

// quietLane takes everything and does nothing.
type quietLane struct{}

func (quietLane) Batch(*feed.Batch)      {}
func (quietLane) Gap(feed.Gap)           {}
func (quietLane) Restarted(feed.Restart) {}

func TestRanksOfAWorkerAreBounded(t *testing.T) {
	p, in := newTestPublisher(quietLane{})
	for r := range uint32(feed.MaxRanks) {
		p.worker.ranks[r] = struct{}{}
	}
	m := testMessage("kv", 0, 1)
	m.Frames[2][0]++ // an array of three: the rank comes last
	m.Frames[2] = msgp.AppendUint32(m.Frames[2], feed.MaxRanks)
	p.message(in, m)
	if len(p.ranks) != 0 || len(p.worker.ranks) != feed.MaxRanks {
		t.Errorf("ranks %v, and %d of the worker", p.ranks, len(p.worker.ranks))
	}
	p.message(in, testMessage("kv", 1, 1))
	if d := cmp.Diff([]uint32{0}, p.ranks); d != "" {
		t.Errorf("ranks after a batch that names none (-want +got):\n%s", d)
	}
}

// Ranks that batches name are bounded over all workers, and given back with theirs.
func TestRanksOfAllWorkersAreBounded(t *testing.T) {
	p, in := newTestPublisher(quietLane{})
	w := p.worker
	w.shared.budgets.ranks = budget.New("ranks", 3)
	for r := range uint32(10) {
		m := testMessage("kv", uint64(r), 1)
		m.Frames[2][0]++ // an array of three: the rank comes last
		m.Frames[2] = msgp.AppendUint32(m.Frames[2], r)
		p.message(in, m)
	}
	if len(w.ranks) != 3 || w.shared.budgets.ranks.Used() != 3 {
		t.Errorf("%d ranks, %d in use, want 3", len(w.ranks), w.shared.budgets.ranks.Used())
	}
	w.reset()
	if n := w.shared.budgets.ranks.Used(); n != 0 {
		t.Errorf("%d ranks in use after all were forgotten", n)
	}
}

func TestBatchesAllocateNothing(t *testing.T) {
	p, in := newTestPublisher(quietLane{})
	m := testMessage("kv", 0, 1)
	seq := uint64(0)
	next := func() {
		binary.BigEndian.PutUint64(m.Frames[1], seq)
		seq++
		p.message(in, m)
	}
	for range 2 * rememberedBatches {
		next()
	}
	if n := testing.AllocsPerRun(100, next); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

func BenchmarkPublisher(b *testing.B) {
	p, in := newTestPublisher(quietLane{})
	m := testMessage("kv@10.0.0.1@m", 0, 1)
	b.ReportAllocs()
	for seq := uint64(0); b.Loop(); seq++ {
		binary.BigEndian.PutUint64(m.Frames[1], seq)
		p.message(in, m)
	}
}

func TestUnixNano(t *testing.T) {
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

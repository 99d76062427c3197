package ingest

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// newDurablePublisher returns a publisher whose calls carry its state.
func newDurablePublisher(l feed.Lane) testPublisher {
	p := newTestPublisher(l)
	p.worker.shared.config.Durable = true
	p.rules.TrackChanges()
	return p
}

// The encoding by hand equals the generated one.
func TestCursorIsWhatMarshalGives(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64())
		p := newDurablePublisher(quietLane{})
		c := sequence.Cursor{
			Started: true, Seq: number.Draw(t, "seq"), Publisher: rapid.SampledFrom([]string{"", "0123456789abcdef"}).Draw(t, "publisher"),
			Restarted: rapid.Bool().Draw(t, "restarted"), PossibleRestart: rapid.Bool().Draw(t, "possible restart"),
			Conflicted: rapid.Bool().Draw(t, "conflicted"), Restoring: rapid.Bool().Draw(t, "restoring"),
		}
		want := &statev1.IngestCursor{
			Version: 1, Seq: &c.Seq, Restarted: c.Restarted, PossibleRestart: c.PossibleRestart, Conflicted: c.Conflicted, Restoring: c.Restoring,
			Incomplete: rapid.Bool().Draw(t, "incomplete"), RawEventId: number.Draw(t, "raw event id") >> 1,
			BeforeFirst: number.Draw(t, "before first"), BeforeLast: number.Draw(t, "before last"),
			Ranks: rapid.SliceOfN(rapid.Uint32(), 0, 20).Draw(t, "ranks"),
		}
		if c.Publisher != "" {
			want.PublisherId = []byte(c.Publisher)
		}
		if rapid.Bool().Draw(t, "delivered") {
			age := min(c.Seq, number.Draw(t, "age"))
			c.Delivered, c.Batch = true, c.Seq-age
			c.Fingerprint = sequence.Fingerprint{Time: number.Draw(t, "time"), Hash: number.Draw(t, "hash")}
			want.BatchAge, want.BatchTime, want.BatchHash = &age, c.Fingerprint.Time, c.Fingerprint.Hash
		}
		if rapid.Bool().Draw(t, "epoch known") {
			c.EpochKnown, c.Epoch = true, rapid.SampledFrom([]string{"", "epoch"}).Draw(t, "epoch")
			want.Epoch = []byte(c.Epoch)
		}
		p.cursor, p.incomplete, p.ranks = c, want.Incomplete, want.Ranks
		p.before.first, p.before.last = want.BeforeFirst, want.BeforeLast
		p.rules.RestoreRawID(want.RawEventId)
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.appendCursor(nil); !bytes.Equal(got, b) {
			t.Fatalf("cursor (-want +got):\n%s", cmp.Diff(b, got))
		}
		// What is stored is what is resumed.
		var restored recoveredPublisher
		if err := restored.setCursor(want); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(c, restored.cursor); d != "" {
			t.Fatalf("restored cursor (-want +got):\n%s", d)
		}
	})
}

// Stored bytes do not change: later versions read them.
func TestStoredBytes(t *testing.T) {
	t.Parallel()
	const stored = "08011005180021000000000000f03f29070000000000000030093a016542016148015001580160016801720201027803800104"
	seq, age := uint64(5), uint64(0)
	want := &statev1.IngestCursor{
		Version: 1, Seq: &seq, BatchAge: &age, BatchTime: math.Float64bits(1), BatchHash: 7, RawEventId: 9, Epoch: []byte("e"), PublisherId: []byte("a"),
		Restarted: true, PossibleRestart: true, Conflicted: true, HasReplay: true, Incomplete: true,
		Ranks: []uint32{1, 2}, BeforeFirst: 3, BeforeLast: 4,
	}
	b, err := hex.DecodeString(stored)
	if err != nil {
		t.Fatal(err)
	}
	got := new(statev1.IngestCursor)
	if err := proto.Unmarshal(b, got); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("cursor (-want +got):\n%s", d)
	}
}

// cursorLane records the call and the cursor that it stores.
type cursorLane struct {
	t     *testing.T
	lines []string
}

func (l *cursorLane) add(p feed.Progress, format string, args ...any) {
	line := fmt.Sprintf(format, args...) + ":"
	if len(p.Cursor) > 0 {
		var c statev1.IngestCursor
		if err := proto.Unmarshal(p.Cursor, &c); err != nil {
			l.t.Fatal(err)
		}
		line += fmt.Sprintf(" seq %d, raw event id %d, ranks %v", c.GetSeq(), c.RawEventId, c.Ranks)
		if c.Seq == nil {
			line += ", nothing read"
		}
	}
	l.lines = append(l.lines, line)
}

func (l *cursorLane) Batch(b *feed.Batch) { l.add(b.Progress, "batch %d of rank %d", b.Seq, b.Rank) }

func (l *cursorLane) Gap(g feed.Gap) {
	l.add(g.Progress, "%v %d-%d of rank %d", g.Reason, g.FirstSeq, g.LastSeq, g.Rank)
}

func (l *cursorLane) Restarted(r feed.Restart) { l.add(r.Progress, "restart of rank %d", r.Rank) }

// If kvcast ends between calls that belong together, all of them are made again.
func TestCallsThatBelongTogetherAreStoredWithTheLast(t *testing.T) {
	t.Parallel()
	l := &cursorLane{t: t}
	p := newDurablePublisher(l)
	publish := func(seq uint64, rank uint32) {
		p.in.arrive(sequence.Batch{Seq: seq, Payload: rankedPayload(rank, seq)})
		p.arrive(p.in, testTime, 1)
	}
	publish(1, 0) // joins late
	publish(2, 1) // another rank of the same publisher
	publish(5, 0) // after a gap
	p.in.arrive(sequence.Batch{Seq: 6, Payload: []byte{0xc1}})
	p.arrive(p.in, testTime, 1) // malformed: a gap, and no call for the batch
	publish(0, 1)               // of another incarnation
	want := []string{
		"joined_late 0-0 of rank 0:",
		"batch 1 of rank 0: seq 1, raw event id 1, ranks [0]",
		"joined_late 0-0 of rank 1: seq 1, raw event id 1, ranks [0]",
		"batch 2 of rank 1: seq 2, raw event id 2, ranks [0 1]",
		"replay_unavailable 3-4 of rank 0: seq 2, raw event id 2, ranks [0 1]",
		"replay_unavailable 3-4 of rank 1: seq 4, raw event id 4, ranks [0 1]",
		"batch 5 of rank 0: seq 5, raw event id 5, ranks [0 1]",
		"replay_unavailable 6-6 of rank 0: seq 5, raw event id 5, ranks [0 1]",
		"replay_unavailable 6-6 of rank 1: seq 6, raw event id 6, ranks [0 1]",
		"restart of rank 0: seq 6, raw event id 6, ranks [0 1]",
		"restart of rank 1: seq 0, raw event id 6, ranks [0 1], nothing read",
		"batch 0 of rank 1: seq 0, raw event id 7, ranks [0 1]",
	}
	if d := cmp.Diff(want, l.lines); d != "" {
		t.Errorf("calls (-want +got):\n%s", d)
	}
}

// rankedPayload returns a batch of a dp rank that removes a block.
func rankedPayload(rank uint32, seq uint64) []byte {
	p := bytes.Clone(testMessage("", seq, seq).Frames[2])
	p[0]++ // one more element
	return append(p, byte(rank))
}

// learnedLane records what calls add to the state of the worker.
type learnedLane struct {
	quietLane
	t       *testing.T
	learned []*statev1.IngestWorker
}

func (l *learnedLane) Batch(b *feed.Batch) {
	if len(b.Progress.Learned) > 0 {
		m := new(statev1.IngestWorker)
		if err := proto.Unmarshal(b.Progress.Learned, m); err != nil {
			l.t.Fatal(err)
		}
		l.learned = append(l.learned, m)
	}
}

// A publisher of a listener says once where it comes from. Other batches add nothing.
func TestBatchesAddOnlyWhatIsNew(t *testing.T) {
	t.Parallel()
	l := &learnedLane{t: t}
	p := newDurablePublisher(l)
	p.worker.listener, p.topic, p.replayOf = "tcp://*:5557", "kv@p@m", func(*peer) string { return "" }
	for seq := range uint64(3) {
		p.message(testMessage("kv@p@m", seq, seq))
	}
	want := []*statev1.IngestWorker{{
		Version: 1, Listener: "tcp://*:5557", Publishers: []*statev1.IngestPublisher{{Topic: []byte("kv@p@m")}},
	}}
	if d := cmp.Diff(want, l.learned, protocmp.Transform()); d != "" {
		t.Errorf("learned (-want +got):\n%s", d)
	}
}

func TestStateOfABatchAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	p := newDurablePublisher(quietLane{})
	p.message(testMessage("kv", 0, 0))
	if n := testing.AllocsPerRun(100, func() { p.progress(true) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func BenchmarkStateOfABatch(b *testing.B) {
	p := newDurablePublisher(quietLane{})
	p.message(testMessage("kv", 123_456, 0))
	a := sequence.Action{Kind: sequence.Deliver, Batch: &sequence.Batch{
		Seq: 123_457, Fingerprint: sequence.Fingerprint{Time: 1, Hash: 2},
	}}
	b.ReportAllocs()
	for b.Loop() {
		p.cursor.Apply(&a)
		p.progress(true)
	}
	b.ReportMetric(float64(len(p.encoded)), "bytes")
}

package sequence

import (
	"fmt"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// account checks that every seq of a publisher without a replay socket is delivered or reported
// exactly once, in order.
type account struct {
	t interface{ Errorf(string, ...any) }
	// incarnation is the number of restarts, and next the seq that must be next.
	incarnation, next uint64
	begun             bool
}

func (a *account) do(actions []Action) {
	for _, act := range actions {
		switch act.Kind {
		case Deliver:
			a.deliver(act.Batch)
		case ReportBegin:
			if a.begun {
				break
			}
			if a.begun = true; act.FirstContact {
				a.next = act.Seq // kvcast was not connected before
			}
		case ReportGap:
			if act.First != a.next || act.Missed != act.Last-act.First+1 {
				a.t.Errorf("incarnation %d: gap %+v, want one from %d", a.incarnation, act, a.next)
			}
			a.next = act.Last + 1
		case ReportRestart:
			a.incarnation++
			a.next, a.begun = 0, false
		default:
		}
	}
}

func (a *account) deliver(b *Batch) {
	if b.Malformed {
		if b.Seq+1 != a.next {
			a.t.Errorf("incarnation %d: malformed batch %d is not reported as lost", a.incarnation, b.Seq)
		}
		return
	}
	if b.Seq != a.next {
		a.t.Errorf("incarnation %d: batch %d, want %d", a.incarnation, b.Seq, a.next)
	}
	if h := b.Fingerprint.Hash; h != blockOf(a.incarnation, b.Seq) {
		a.t.Errorf("incarnation %d: batch %d is that of %d in incarnation %d", a.incarnation, b.Seq, h&(1<<32-1), h>>32)
	}
	a.next = b.Seq + 1
}

func TestEverySeqIsAccountedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := &account{t: t}
		m := New(Config{})
		arrive := func(b *Batch) { a.do(m.Arrival(testTime, 1, b)) }
		named := rapid.Bool().Draw(t, "engine names its epoch")
		last := uint64(0) // of the previous incarnation
		for incarnation := range uint64(rapid.IntRange(1, 5).Draw(t, "incarnations")) {
			epoch := ""
			if named {
				epoch = fmt.Sprint(incarnation)
			}
			first := rapid.Uint64Range(0, 20).Draw(t, "first")
			// Without an epoch only a seq that is not above the last shows a restart. So the first
			// batch must have such a seq, and must arrive.
			plain := incarnation > 0 && !named
			if plain {
				first = min(first, last)
				if m.former.continuesAt(first) {
					first = 0 // otherwise the batch could be of a second publisher
				}
			}
			seq := first
			var sent []*Batch
			for range rapid.IntRange(1, 30).Draw(t, "batches") {
				b := batchOf(incarnation, seq)
				b.Epoch = []byte(epoch)
				switch rapid.IntRange(0, 5).Draw(t, "fault") {
				case 0: // lost
					if !plain || len(sent) > 0 {
						seq++
						continue
					}
				case 1: // after a duplicate
					if len(sent) > 0 {
						again := *rapid.SampledFrom(sent).Draw(t, "duplicate")
						arrive(&again)
					}
				case 2:
					b.Malformed = true
				}
				arrive(b)
				sent = append(sent, b)
				last = seq
				seq++
			}
			if len(sent) == 0 {
				b := batchOf(incarnation, first)
				b.Epoch = []byte(epoch)
				arrive(b)
				last = first
			}
			if a.incarnation != incarnation || a.next != last+1 {
				t.Fatalf("incarnation %d up to seq %d, want incarnation %d up to %d", a.incarnation, a.next, incarnation, last+1)
			}
		}
	})
}

func TestSeqsThatJumpToTheEnd(t *testing.T) {
	const top = math.MaxUint64
	m := New(Config{})
	type gap struct{ first, last, missed uint64 }
	var gaps []gap
	arrive := func(b *Batch) {
		for _, a := range m.Arrival(testTime, 1, b) {
			if a.Kind == ReportGap {
				gaps = append(gaps, gap{a.First, a.Last, a.Missed})
			}
		}
	}
	arrive(batchOf(0, 0))
	arrive(batchOf(0, top))
	arrive(batchOf(1, 0))
	arrive(batchOf(1, top))
	arrive(&Batch{Seq: top, Epoch: []byte("1"), Malformed: true})
	arrive(&Batch{Seq: 0, Epoch: []byte("1"), Fingerprint: Fingerprint{Hash: 6}})
	// The last gap is of all 2^64 seqs; its count saturates at 2^64-1.
	want := []gap{{1, top - 1, top - 1}, {1, top - 1, top - 1}, {0, top, top}}
	if d := cmp.Diff(want, gaps, cmp.AllowUnexported(gap{})); d != "" {
		t.Errorf("gaps (-want +got):\n%s", d)
	}
}

// below draws a number below n, at most 128, each with about the same probability. Rapid's own numbers
// are mostly small, which makes long paths of the same few steps.
func below(t *rapid.T, n int, label string) (drawn int) {
	for _, bit := range rapid.SliceOfN(rapid.Bool(), 8, 8).Draw(t, label) {
		drawn *= 2
		if bit {
			drawn++
		}
	}
	return drawn % n
}

// TestViewEqualsTheEngineOrTheLossIsReported takes random paths through worlds that are too large to be
// explored.
func TestViewEqualsTheEngineOrTheLossIsReported(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		upTo := func(most int, label string) uint8 {
			// Few kinds of faults at a time, because most permit the report of a loss.
			return uint8(max(0, below(t, 4*most+1, label)-3*most))
		}
		w := newWorld(limits{
			batches: uint8(2 + below(t, 40, "batches")), losses: upTo(6, "losses"), restarts: upTo(3, "restarts"),
			cuts: upTo(3, "cuts"), holes: upTo(3, "holes"), failures: upTo(3, "failures"), forgets: upTo(20, "forgets"),
			silences: upTo(3, "silences"), duplicates: upTo(5, "duplicates"), malformed: upTo(5, "malformed"),
			overruns: upTo(2, "overruns"), unstored: upTo(2, "unstored"), crashes: upTo(2, "crashes"), waits: upTo(2, "waits"),
			rereads: upTo(3, "rereads"),
		}, below(t, 4, "replay") > 0, below(t, 4, "epochs") == 0, rapid.Bool().Draw(t, "listens"))
		if below(t, 3, "snapshots") == 0 {
			w.offers = snapshotsOfPublisher
			if w.epochs {
				w.offers = snapshotsOfEpoch
			}
		}
		for range 10 + below(t, 128, "steps") {
			var next []string
			for i := range steps {
				if steps[i].can(w) {
					next = append(next, steps[i].name)
				}
			}
			if len(next) == 0 {
				break
			}
			name := next[below(t, len(next), "step")]
			t.Log(name)
			stepNamed(name).do(w)
			if w.view.wrong != "" {
				t.Fatal(w.view.wrong)
			}
		}
		if wrong := w.settle(); wrong != "" {
			t.Fatal(wrong)
		}
		if w.m.buffer.bytes != 0 {
			t.Fatalf("%d bytes buffered", w.m.buffer.bytes)
		}
	})
}

package ingest_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// recorder is a Sink that records each call as a line.
type recorder struct {
	t     *testing.T
	calls chan string
	// ended is set once Run has returned: no call may follow.
	ended atomic.Bool
}

func newRecorder(t *testing.T) *recorder {
	return &recorder{t: t, calls: make(chan string, 10_000)}
}

func (r *recorder) write(format string, args ...any) {
	if r.ended.Load() {
		r.t.Errorf("call after Run returned: "+format, args...)
	}
	r.calls <- fmt.Sprintf(format, args...)
}

func (r *recorder) AddWorker(w feed.Worker) feed.Lane {
	r.write("add %s model %s block_size %d ranks %v", w.Name, w.Model, w.BlockSize, w.Ranks)
	return &recordedLane{recorder: r, worker: w.Name}
}

func (r *recorder) RemoveWorker(name string, _ feed.RemoveReason) {
	r.write("remove %s", name)
}

// next waits for the next call.
func (r *recorder) next() string {
	r.t.Helper()
	select {
	case line := <-r.calls:
		return line
	case <-time.After(harness.Timeout):
		r.t.Fatal("calls stopped coming")
		return ""
	}
}

// want waits for these calls, and fails the test at the first difference.
func (r *recorder) want(lines ...string) {
	r.t.Helper()
	got := make([]string, 0, len(lines))
	for i := range lines {
		got = append(got, r.next())
		if got[i] != lines[i] {
			r.t.Fatalf("calls differ (-want +got):\n%s", cmp.Diff(lines[:i+1], got))
		}
	}
}

// wantNone checks that want has compared all calls so far.
func (r *recorder) wantNone() {
	r.t.Helper()
	for {
		select {
		case line := <-r.calls:
			r.t.Errorf("unexpected call: %s", line)
		default:
			return
		}
	}
}

// recordedLane is a Lane that records each call as a line "worker source/rank: event".
type recordedLane struct {
	*recorder
	worker string
	busy   atomic.Bool
}

func (l *recordedLane) write(source int, rank uint32, format string, args ...any) {
	if !l.busy.CompareAndSwap(false, true) {
		l.t.Errorf("calls of the lane of %s overlap", l.worker)
	}
	defer l.busy.Store(false)
	l.recorder.write("%s %d/%d: %s", l.worker, source, rank, fmt.Sprintf(format, args...))
}

// eventsLine returns a batch's events as text.
func eventsLine(b *feed.Batch) string {
	var s strings.Builder
	if b.GroupsOmitted {
		s.WriteString(" groups omitted")
	}
	for _, e := range b.Events {
		if e.Group != 0 {
			fmt.Fprintf(&s, " group %d", e.Group-1)
		}
		switch e.Kind {
		case wire.KindStored:
			fmt.Fprintf(&s, " +%v", e.BlockHashes)
		case wire.KindRemoved:
			fmt.Fprintf(&s, " -%v", e.BlockHashes)
		case wire.KindCleared:
			s.WriteString(" clear")
		}
	}
	return s.String()
}

func (l *recordedLane) Batch(b *feed.Batch) {
	if b.Proved {
		return
	}
	if b.IngestTime == 0 {
		l.t.Errorf("batch %d of %s has no ingest time", b.Seq, l.worker)
	}
	if want := engineTime(b.Seq); b.EngineTime != want {
		l.t.Errorf("batch %d of %s has engine time %d, want %d", b.Seq, l.worker, b.EngineTime, want)
	}
	l.write(b.Source, b.Rank, "batch %d%s", b.Seq, eventsLine(b))
}

func (l *recordedLane) Gap(g feed.Gap) {
	if g.At == 0 {
		l.t.Errorf("gap of %s has no time", l.worker)
	}
	switch g.Reason {
	case feed.GapJoinedLate:
		if g.Missed != 0 {
			l.t.Errorf("%s joined late, and missed %d batches", l.worker, g.Missed)
		}
		l.write(g.Source, g.Rank, "joined late, after %d-%d", g.FirstSeq, g.LastSeq)
		return
	case feed.GapReplayUnavailable:
		l.write(g.Source, g.Rank, "gap %d-%d, %d missed", g.FirstSeq, g.LastSeq, g.Missed)
		return
	default:
	}
	l.write(g.Source, g.Rank, "gap %v %d-%d, %d missed", g.Reason, g.FirstSeq, g.LastSeq, g.Missed)
}

func (l *recordedLane) Restarted(r feed.Restart) {
	if r.At == 0 {
		l.t.Errorf("restart of %s has no time", l.worker)
	}
	l.write(r.Source, r.Rank, "restarted")
}

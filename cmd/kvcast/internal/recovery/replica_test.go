package recovery

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/journal/jetstream"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// followedLog is a log that another process writes. change is called by each Mark.
type followedLog struct {
	*log
	marks  int
	change func(marks int)
}

func (l *followedLog) Mark(context.Context) error {
	l.marks++
	l.change(l.marks)
	return nil
}

func TestReplicateBeginsAnewUntilTheJournalIsConsistent(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(w *world, marks int)
		says   string // "": it succeeds with the third attempt
	}{
		{"entries are removed", func(w *world, marks int) {
			w.log.err = map[bool]error{true: fmt.Errorf("load: %w", jetstream.ErrPurged)}[marks < 3]
		}, ""},
		{"the servers do not answer", func(w *world, marks int) {
			w.log.err = map[bool]error{true: fmt.Errorf("load: %w", context.DeadlineExceeded)}[marks < 3]
		}, ""},
		{"a checkpoint is replaced", func(w *world, marks int) { w.store.damaged[workerPrefix+"a"] = marks < 3 }, ""},
		{"a checkpoint stays damaged", func(w *world, _ int) { w.store.damaged[workerPrefix+"a"] = true }, "the checksum is wrong"},
		{"an entry is unreadable", func(w *world, _ int) { w.log.err = jetstream.ErrUnreadable }, "journal is unreadable"},
		{"entries are lost", func(w *world, _ int) { w.log.entries = w.log.entries[:2]; w.log.newest = 2 }, "a checkpoint has seen entry 3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.checkpoint(t, "a", 3, nil)
				l := &followedLog{log: w.log, change: func(marks int) { tt.change(w, marks) }}
				began := time.Now()
				err := Replicate(t.Context(), l, w.store, w.lines.Logger(), &w.progress, w.index)
				if tt.says != "" {
					if err == nil || !strings.Contains(err.Error(), tt.says) {
						t.Errorf("got %v, want %q", err, tt.says)
					}
					return
				}
				if err != nil || l.marks != 3 || time.Since(began) != 2*replicaWait {
					t.Fatalf("got %v after %d attempts and %v", err, l.marks, time.Since(began))
				}
				w.wantState(t)
				if len(w.store.objects) != 1 {
					t.Errorf("%d objects are stored, want 1 as before", len(w.store.objects))
				}
			})
		})
	}
}

// TestReplicaWithoutCheckpointsJoinsLate has no checkpoints, since their stream was deleted, and a journal that no longer has the entries that have added the workers.
func TestReplicaWithoutCheckpointsJoinsLate(t *testing.T) {
	w := newWorld(t)
	w.log.entries = w.log.entries[2:]
	l := &followedLog{log: w.log, change: func(int) {}}
	if err := Replicate(t.Context(), l, w.store, w.lines.Logger(), &w.progress, w.index); err != nil {
		t.Fatal(err)
	}
	all, _ := w.index.Workers(nil)
	ranks := 0
	for _, a := range all {
		for _, r := range a.Ranks {
			ranks++
			if got := r.Reasons.List(); a.Added != nil || !slices.Equal(got, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE}) {
				t.Errorf("worker %s: added %v, reasons %v", a.Name, a.Added, got)
			}
		}
	}
	if ranks == 0 {
		t.Error("no ranks")
	}
}

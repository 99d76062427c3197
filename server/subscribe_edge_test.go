package server_test

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// The tests in this file are cases with known bugs in other relays and watch services. TestEmptySnapshot is another.

// TestResumeAtBoundaryPositions resumes at the first and last valid positions, and one beyond them, in a journal with
// evicted entries.
func TestResumeAtBoundaryPositions(t *testing.T) {
	t.Parallel()
	edge := overTCP(t, server.Config{}, journal.Config{MaxBytes: 64 << 10})
	edge.addWorker()
	edge.fill(5000)
	b := edge.Journal.Bounds()
	if b.Oldest < 3 || b.Oldest >= b.Newest {
		t.Fatalf("bounds %+v: no entry was evicted, so the test has no effect", b)
	}
	unevicted := overTCP(t, server.Config{}, journal.Config{})
	unevicted.addWorker()
	unevicted.fill(10)
	none := overTCP(t, server.Config{}, journal.Config{})
	for _, tt := range []struct {
		name   string
		h      *fixture
		after  uint64
		code   codes.Code // code of the error; OK: none
		reason string
		first  uint64 // seq of the first entry; 0: there is none
	}{
		{"the newest", edge, b.Newest, codes.OK, "", 0},
		{"one beyond the newest", edge, b.Newest + 1, codes.OutOfRange, "POSITION_AHEAD", 0},
		{"the largest seq", edge, 1<<64 - 1, codes.OutOfRange, "POSITION_AHEAD", 0},
		{"one before the newest", edge, b.Newest - 1, codes.OK, "", b.Newest},
		{"the oldest retained", edge, b.Oldest, codes.OK, "", b.Oldest + 1},
		{"one before the oldest", edge, b.Oldest - 1, codes.OK, "", b.Oldest},
		{"two before the oldest", edge, b.Oldest - 2, codes.OutOfRange, "POSITION_COMPACTED", 0},
		{"zero, first entry evicted", edge, 0, codes.OutOfRange, "POSITION_COMPACTED", 0},
		{"zero, first entry retained", unevicted, 0, codes.OK, "", 1},
		{"zero, empty journal", none, 0, codes.OK, "", 0},
		{"one, empty journal", none, 1, codes.OutOfRange, "POSITION_AHEAD", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := tt.h.subscribe(checker.New(checker.Options{}), orFail(after(&kvcastv1.Position{Epoch: tt.h.Journal.Bounds().Epoch, Seq: tt.after})))
			if tt.code != codes.OK {
				wantStatus(t, s.end(), tt.code, tt.reason)
				return
			}
			m, err := s.next()
			if err != nil || m.GetPosition().GetSeq() != tt.after {
				t.Fatalf("accepted: got %v, %v, want it at %d", m, err, tt.after)
			}
			if tt.first == 0 {
				s.cancel()
				return
			}
			if m, err = s.next(); err != nil || m.GetEntries()[0].GetSeq() != tt.first {
				t.Errorf("got %v, %v, want entry %d first", m, err, tt.first)
			}
		})
	}
}

// TestProgressNeverOvertakesEntries sends Progress every millisecond while entries are appended. The checker rejects a
// Progress whose position is beyond the delivered entries.
func TestProgressNeverOvertakesEntries(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{ProgressInterval: time.Millisecond}}, journal.Config{})
	h.addWorker()
	var reading sync.WaitGroup
	entries := testclass.Size(1500, 5000)
	for _, f := range []*kvcastv1.Filter{
		nil, {Workers: []string{"w"}}, {Workers: []string{"absent"}}, {Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DISK}},
	} {
		for _, req := range []*kvcastv1.SubscribeRequest{earliest(), digested(earliest())} {
			req.Filter = f
			s := h.subscribe(checker.New(checker.Options{}), req)
			reading.Go(func() {
				for s.checker.Position().GetSeq() <= uint64(entries) {
					if _, err := s.next(); err != nil {
						t.Errorf("filter %v: %v", f, err)
						return
					}
				}
			})
		}
	}
	h.fill(entries)
	reading.Wait()
}

// TestCompactionDuringResume evicts the next entries while a stream resumes. With GAP_POLICY_FAIL, the stream ends;
// otherwise it continues with a snapshot.
func TestCompactionDuringResume(t *testing.T) {
	for name, fails := range map[string]bool{"fails": true, "goes on with a snapshot": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := inMemory(t, server.Config{}, journal.Config{MaxBytes: 4 << 20})
				h.addWorker()
				h.load(50)
				req := after(&kvcastv1.Position{Seq: 1})
				if fails {
					orFail(req)
				}
				s := h.subscribe(checker.New(checker.Options{}), req)
				s.until(t, 5)
				synctest.Wait() // the transport's buffers are full
				h.load(200)
				for s.checker.Position().GetSeq() < 251 {
					m, err := s.next()
					if err != nil {
						if !fails {
							t.Fatal(err)
						}
						wantStatus(t, err, codes.OutOfRange, "POSITION_COMPACTED")
						return
					}
					if m.GetSnapshotBegin() != nil && fails {
						t.Fatal("got a snapshot with GAP_POLICY_FAIL")
					}
				}
				if fails {
					t.Error("no entry was evicted, so the test had no effect")
				}
			})
		})
	}
}

// TestSlowSubscriberIsNotStarved has one subscriber read one response per round, while many others read all entries of
// the round.
func TestSlowSubscriberIsNotStarved(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 1 << 30})
	h.addWorker()
	var fast []*subscription
	for range 6 {
		fast = append(fast, h.subscribe(checker.New(checker.Options{}), earliest()))
	}
	slow := h.subscribe(checker.New(checker.Options{}), earliest())
	for round := range uint64(8) {
		h.fill(300)
		newest := h.Journal.Bounds().Newest
		var reading sync.WaitGroup
		errs := make(chan error, len(fast))
		for _, s := range fast {
			reading.Go(func() {
				for s.checker.Position().GetSeq() < newest {
					if _, err := s.next(); err != nil {
						errs <- fmt.Errorf("round %d: %w", round, err)
						return
					}
				}
			})
		}
		if _, err := slow.next(); err != nil {
			t.Fatalf("the slow subscriber, round %d: %v", round, err)
		}
		reading.Wait()
		close(errs)
		for err := range errs {
			t.Fatal(err)
		}
	}
	slow.until(t, h.Journal.Bounds().Newest)
}

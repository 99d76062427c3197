package server_test

import (
	"math"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// TestStreamThatReferencesEvictedEntriesIsEnded has one client that does not read and one that reads, while the
// journal evicts entries. The unread stream ends long before the stall timeout, since MaxEvictedBytes is exceeded.
// The other stream continues.
func TestStreamThatReferencesEvictedEntriesIsEnded(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{StallTimeout: time.Hour, MaxEvictedBytes: 1 << 20}}, journal.Config{MaxBytes: 4 << 20})
	h.addWorker()
	h.load(50) // more than the transport buffers
	reads := h.subscribe(checker.New(checker.Options{}), earliest())
	read := make(chan error, 1)
	last := make(chan uint64, 1)
	go func() {
		for until := uint64(math.MaxUint64); reads.checker.Position().GetSeq() < until; {
			select {
			case until = <-last:
				continue
			default:
			}
			if _, err := reads.next(); err != nil {
				read <- err
				return
			}
		}
		read <- nil
	}()
	var stalls *subscription
	for {
		stalls = h.subscribe(checker.New(checker.Options{}), orFail(latest()))
		if _, err := stalls.next(); err != nil {
			t.Fatal(err)
		}
		// Append until the stream ends.
		for ended := false; !ended; {
			h.load(4)
			ended = h.subscribers(t) == 1
		}
		err := stalls.end()
		if status.Code(err) == codes.OutOfRange {
			continue // the entries were evicted before the stream sent one
		}
		wantStatus(t, err, codes.ResourceExhausted, "SLOW_SUBSCRIBER")
		break
	}
	h.append(1)
	last <- h.Journal.Bounds().Newest
	h.append(2)
	if err := <-read; err != nil {
		t.Fatalf("the subscriber whose client reads: %v", err)
	}
	// The ended subscriber resumes with a snapshot.
	again := h.subscribe(stalls.checker, after(stalls.checker.Position()))
	for again.checker.Position().GetSeq() < h.Journal.Bounds().Newest {
		if _, err := again.next(); err != nil {
			t.Fatal(err)
		}
	}
	if got := again.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got != 3 {
		t.Errorf("got %d blocks, want 3", got)
	}
}

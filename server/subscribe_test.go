package server_test

import (
	"context"
	"fmt"

	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

func TestHeadersAndAcceptedAreSentAtOnce(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	for _, req := range []*kvcastv1.SubscribeRequest{earliest(), latest(), after(&kvcastv1.Position{})} {
		s := h.subscribe(checker.New(checker.Options{}), req)
		if _, err := s.stream.Header(); err != nil {
			t.Fatalf("headers of an empty journal: %v", err)
		}
		m, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		a, b := m.GetAccepted(), h.Journal.Bounds()
		if a.GetEpoch() != b.Epoch || a.GetOldestSeq() != 1 || a.GetNewestSeq() != 0 {
			t.Errorf("accepted: got %v, want epoch %s, oldest 1, newest 0", a, b.Epoch)
		}
	}
}

func TestSubscribeStarts(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.fill(9)
	epoch := h.Journal.Bounds().Epoch
	for _, tt := range []struct {
		name  string
		req   *kvcastv1.SubscribeRequest
		mode  kvcastv1.Accepted_Mode
		start uint64
	}{
		{"earliest", earliest(), kvcastv1.Accepted_MODE_EARLIEST, 0},
		{"latest", latest(), kvcastv1.Accepted_MODE_LATEST, 10},
		{"after, with the epoch", after(&kvcastv1.Position{Epoch: epoch, Seq: 4}), kvcastv1.Accepted_MODE_RESUME, 4},
		{"after, without an epoch", after(&kvcastv1.Position{Seq: 4}), kvcastv1.Accepted_MODE_RESUME, 4},
		{"after the zero position", after(&kvcastv1.Position{}), kvcastv1.Accepted_MODE_RESUME, 0},
		{"after the newest", after(&kvcastv1.Position{Seq: 10}), kvcastv1.Accepted_MODE_RESUME, 10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := h.subscribe(checker.New(checker.Options{}), tt.req)
			m, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			if got := m.GetAccepted().GetMode(); got != tt.mode {
				t.Errorf("mode: got %v, want %v", got, tt.mode)
			}
			if got := m.GetPosition().GetSeq(); got != tt.start {
				t.Errorf("start: got %d, want %d", got, tt.start)
			}
			if tt.start == 10 {
				return
			}
			if m, err = s.next(); err != nil {
				t.Fatal(err)
			}
			if got := m.GetEntries()[0].GetSeq(); got != tt.start+1 {
				t.Errorf("first entry: got %d, want %d", got, tt.start+1)
			}
		})
	}
}

// TestRandomResumesDeliverEveryEntryOnce runs subscribers that disconnect and resume at random while entries are
// appended.
func TestRandomResumesDeliverEveryEntryOnce(t *testing.T) {
	t.Parallel()
	entries := testclass.Size(4000, 20_000)
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	var wg sync.WaitGroup
	for n := range 6 {
		wg.Go(func() {
			c := checker.New(checker.Options{})
			req := earliest()
			for round := 0; c.Position().GetSeq() < uint64(entries); round++ {
				s := h.subscribe(c, req)
				// Disconnect after a different number of messages in each round, in the last round after none.
				for m := 0; c.Position().GetSeq() < uint64(entries) && (round > 20 || m < (n*7+round*3)%11+1); m++ {
					if _, err := s.next(); err != nil {
						t.Errorf("subscriber %d, round %d: %v", n, round, err)
						return
					}
				}
				s.cancel()
				req = after(c.Position())
			}
			if got := c.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got != entries-1 {
				t.Errorf("subscriber %d: got %d blocks, want %d", n, got, entries-1)
			}
		})
	}
	h.fill(entries - 1)
	wg.Wait()
}

func TestResponsesAreBatchedOnlyWhenBehind(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.fill(4999)
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	responses := 0
	for s.checker.Position().GetSeq() < 5000 {
		m, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		if len(m.GetEntries()) > 0 {
			responses++
		}
	}
	if responses > 10 {
		t.Errorf("5,000 entries of some 70 bytes were sent in %d responses, want at most 10", responses)
	}
	for n := range 20 {
		h.append(uint64(10_000 + n))
		m, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		if len(m.GetEntries()) != 1 {
			t.Fatalf("not behind: got %d entries, want the one that was appended", len(m.GetEntries()))
		}
	}
}

func TestIdleStreamGetsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{ProgressInterval: 10 * time.Second}}, journal.Config{})
		h.addWorker()
		s := h.subscribe(checker.New(checker.Options{}), earliest())
		s.until(t, 1)
		for round := range 3 {
			began := time.Now()
			m, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			if idle := time.Since(began); idle < 8*time.Second || idle > 10*time.Second {
				t.Errorf("progress %d came after %v, want 8s to 10s", round, idle)
			}
			if m.GetProgress() == nil || m.GetPosition().GetSeq() != s.checker.Position().GetSeq() {
				t.Errorf("got %v, want Progress at %v", m, s.checker.Position())
			}
		}
		// An entry postpones the next Progress.
		<-time.After(7 * time.Second)
		h.append(1)
		began := time.Now()
		if m, err := s.next(); err != nil || len(m.GetEntries()) != 1 || time.Since(began) != 0 {
			t.Fatalf("got %v, %v after %v; want the entry at once", m, err, time.Since(began))
		}
		if m, err := s.next(); err != nil || m.GetProgress() == nil || time.Since(began) < 8*time.Second {
			t.Errorf("got %v, %v after %v; want Progress at least 8 s after the entry", m, err, time.Since(began))
		}
		s.cancel()
		_, _ = s.stream.Recv()
	})
}

// TestUnreadSubscriberIsEnded has one client that does not read and one that reads.
func TestUnreadSubscriberIsEnded(t *testing.T) {
	const last = 129 // 8 MiB, more than is buffered for a client that does not read
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{StallTimeout: 15 * time.Second}}, journal.Config{MaxBytes: 1 << 30})
		h.addWorker()
		reads := h.subscribe(checker.New(checker.Options{}), earliest())
		stalls := h.subscribe(checker.New(checker.Options{}), earliest())
		stalls.until(t, 1)
		read := make(chan error, 1)
		go func() {
			for reads.checker.Position().GetSeq() < last {
				if _, err := reads.next(); err != nil {
					read <- err
					return
				}
			}
			read <- nil
		}()
		h.load(last - 1)
		if err := <-read; err != nil {
			t.Fatalf("the subscriber whose client reads: %v", err)
		}
		time.Sleep(20 * time.Second)
		if n := h.subscribers(t); n != 1 || reads.stream.Context().Err() != nil {
			t.Errorf("%d subscribers are left, the one whose client reads with %v", n, reads.stream.Context().Err())
		}
		wantStatus(t, stalls.end(), codes.ResourceExhausted, "SLOW_SUBSCRIBER")
		// The ended subscriber resumes after its position.
		at := stalls.checker.Position()
		if at.GetSeq() >= last {
			t.Fatal("all entries were delivered, so the test had no effect")
		}
		again := h.subscribe(stalls.checker, after(at))
		again.until(t, last)
	})
}

func TestSlotOfCanceledSubscriberIsReleased(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSubscribers: 2}}, journal.Config{})
	first := h.subscribe(checker.New(checker.Options{}), earliest())
	second := h.subscribe(checker.New(checker.Options{}), earliest())
	for _, s := range []*subscription{first, second} {
		if _, err := s.next(); err != nil {
			t.Fatal(err)
		}
	}
	first.cancel()
	if _, err := first.stream.Recv(); status.Code(err) != codes.Canceled {
		t.Fatalf("got %v, want the stream cancelled", err)
	}
	// The server releases the slot when it has received the cancellation.
	for {
		s := h.subscribe(checker.New(checker.Options{}), earliest())
		if _, err := s.next(); err == nil {
			return
		} else if status.Code(err) != codes.ResourceExhausted {
			t.Fatal(err)
		}
	}
}

// TestStreamEqualsAppendedEntries compares the entries that a client decodes with the appended entries.
func TestStreamEqualsAppendedEntries(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	rapid.Check(t, func(rt *rapid.T) {
		from := h.Journal.Bounds().Newest
		n := rapid.IntRange(1, 50).Draw(rt, "entries")
		h.fill(n)
		s := h.subscribe(checker.New(checker.Options{}), after(&kvcastv1.Position{Seq: from}))
		defer s.cancel()
		for want := from; want < from+uint64(n); {
			m, err := s.next()
			if err != nil {
				rt.Fatal(err)
			}
			for _, e := range m.GetEntries() {
				want++
				if got := fmt.Sprint(e.GetSeq(), e.GetWorker(), e.GetModel(), e.GetEvents()[0].GetStored().GetBlockHashes()); got != fmt.Sprint(want, "w", "m", []uint64{want - from - 1}) {
					rt.Fatalf("entry %d: got %s", want, got)
				}
			}
		}
	})
}

// BenchmarkDeliver measures the CPU time of the process per entry and subscriber, which includes the clients.
func BenchmarkDeliver(b *testing.B) {
	for _, subscribers := range []int{1, 8} {
		b.Run(fmt.Sprint("subscribers=", subscribers), func(b *testing.B) {
			h := overTCP(b, server.Config{}, journal.Config{MaxBytes: 1 << 30})
			h.addWorker()
			var wg sync.WaitGroup
			for range subscribers {
				ctx, cancel := context.WithCancel(context.Background())
				desc := &grpc.StreamDesc{ServerStreams: true}
				stream, err := h.conn.NewStream(ctx, desc, kvcastv1.RouterEventService_Subscribe_FullMethodName)
				if err != nil {
					b.Fatal(err)
				}
				if err := stream.SendMsg(earliest()); err != nil {
					b.Fatal(err)
				}
				if err := stream.CloseSend(); err != nil {
					b.Fatal(err)
				}
				wg.Go(func() {
					defer cancel()
					for at := uint64(0); at < uint64(b.N); {
						var m kvcastv1.SubscribeResponse
						if err := stream.RecvMsg(&m); err != nil {
							b.Errorf("receive: %v", err)
							return
						}
						at = m.GetPosition().GetSeq()
					}
				})
			}
			b.ResetTimer()
			h.fill(b.N)
			wg.Wait()
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*subscribers), "ns/delivery")
		})
	}
}

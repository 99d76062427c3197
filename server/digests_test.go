package server_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// digested adds progress_digests to a request.
func digested(req *kvcastv1.SubscribeRequest) *kvcastv1.SubscribeRequest {
	req.ProgressDigests = true
	return req
}

// TestDigestsMatchTheView compares all digests with the subscribers' views, while entries of several workers are
// appended and while the engines are idle.
func TestDigestsMatchTheView(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{ProgressInterval: time.Millisecond, MaxSnapshots: 8}}, journal.Config{MaxBytes: 1 << 30})
	engines := make([]*busyEngine, 6)
	add := func(n int) feed.Lane {
		return h.Pipeline.AddWorker(feed.Worker{Name: fmt.Sprintf("w%d", n), Model: fmt.Sprintf("m%d", n%2), Ranks: []uint32{0, 1, 2}})
	}
	for n := range engines {
		engines[n] = &busyEngine{lane: add(n), rng: rand.New(rand.NewPCG(2, uint64(n)))}
	}
	tiers := func(tiers ...kvcastv1.Tier) *kvcastv1.Filter { return &kvcastv1.Filter{Tiers: tiers} }
	var subs []*subscription
	for _, req := range []*kvcastv1.SubscribeRequest{
		earliest(), latest(), fromSnapshot(nil),
		fromSnapshot(&kvcastv1.Filter{Workers: []string{"w1", "w2", "absent"}}),
		fromSnapshot(&kvcastv1.Filter{Models: []string{"m0"}}),
		fromSnapshot(tiers(kvcastv1.Tier_TIER_DISK)),
		fromSnapshot(tiers(kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_EXTERNAL)),
	} {
		subs = append(subs, h.subscribe(checker.New(checker.Options{}), digested(req)))
	}
	between := make([]int, len(subs)) // digests compared while entries were appended, by subscriber
	for round := range 8 {
		var working, reading sync.WaitGroup
		for n, e := range engines {
			working.Go(func() {
				for range 20 {
					e.step()
				}
				switch {
				case n == 2 && round%2 == 1:
					h.Pipeline.RemoveWorker("w2", feed.RemovedDiscovery)
					e.lane, e.blocks = add(n), nil
				case n == round:
					e.lane.Gap(feed.Gap{Rank: 1, Reason: feed.GapReplayUnavailable, FirstSeq: 1, LastSeq: 1, Missed: 1, At: 1})
				case n+1 == round:
					e.lane.Restarted(feed.Restart{At: 1})
				}
			})
		}
		rest := make(chan struct{})
		for i, s := range subs {
			reading.Go(func() {
				for {
					before := s.checker.Compared()
					m, err := s.next()
					if err != nil {
						t.Errorf("subscriber %d: %v", i, err)
						return
					}
					select {
					case <-rest:
						if len(m.GetProgress().GetWorkers()) > 0 && m.GetPosition().GetSeq() == h.Journal.Bounds().Newest {
							return
						}
					default:
						between[i] += s.checker.Compared() - before
					}
				}
			})
		}
		working.Wait()
		close(rest)
		reading.Wait()
	}
	for i, s := range subs {
		// The view of a stream from the latest entry is complete only after each rank was cleared.
		if got, least := s.checker.Compared(), 30; got < least && i != 1 {
			t.Errorf("subscriber %d: compared %d digests, want at least %d", i, got, least)
		}
	}
	t.Logf("digests compared while entries were appended: %v", between)
}

// TestDigestsRevealDifferences makes views wrong: a block is missing, a block is added, or blocks of a cleared tier
// remain.
func TestDigestsRevealDifferences(t *testing.T) {
	stored := func(tier kvcastv1.Tier, hash uint64) *kvcastv1.RouterEvent {
		return &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Tier: tier, Event: &kvcastv1.RouterEvent_Stored{
			Stored: &kvcastv1.Stored{BlockHashes: []uint64{hash}},
		}}
	}
	removed := stored(kvcastv1.Tier_TIER_DEVICE, 0)
	removed.Event = &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: []uint64{2}}}
	for name, inject := range map[string]*kvcastv1.RouterEvent{
		"no difference":             nil,
		"a missing block":           removed,
		"an extra block":            stored(kvcastv1.Tier_TIER_DEVICE, 7),
		"a block in a cleared tier": stored(kvcastv1.Tier_TIER_DISK, 4),
		"a block in an unused tier": stored(kvcastv1.Tier_TIER_EXTERNAL, 4),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := inMemory(t, server.Config{}, journal.Config{})
				h.addWorker()
				h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDisk, BlockHashes: []uint64{4}})
				h.batch(h.lane, wire.Event{Kind: wire.KindCleared})
				h.append(1, 2, 3)
				s := h.subscribe(checker.New(checker.Options{}), digested(earliest()))
				s.until(t, 4)
				if inject != nil {
					s.checker.View().ApplyEvent("w", inject)
				}
				m, err := s.next()
				if inject != nil {
					if err == nil || !strings.Contains(err.Error(), "Convergent") {
						t.Fatalf("got %v, %v, want the difference", m, err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				got := m.GetProgress().GetWorkers()
				if len(got) != 2 || got[0].GetBlocks() != 3 || got[0].GetSeq() != 4 || got[1].GetTier() != kvcastv1.Tier_TIER_DISK || got[1].GetBlocks() != 0 {
					t.Errorf("got %v, want 3 blocks of the device and none of the disk, after entry 4", got)
				}
			})
		})
	}
}

// TestDigestsOfEmptyWorkers expects one digest per rank in the selected tier.
func TestDigestsOfEmptyWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		h.Pipeline.AddWorker(feed.Worker{Name: "a", Ranks: []uint32{3}})
		h.Pipeline.AddWorker(feed.Worker{Name: "b"})
		h.Pipeline.AddWorker(feed.Worker{Name: "removed"})
		h.Pipeline.RemoveWorker("removed", feed.RemovedDiscovery)
		s := h.subscribe(checker.New(checker.Options{}), digested(fromSnapshot(&kvcastv1.Filter{Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DISK}})))
		var m *kvcastv1.SubscribeResponse
		for m.GetProgress() == nil {
			var err error
			if m, err = s.next(); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		for _, d := range m.GetProgress().GetWorkers() {
			got = append(got, fmt.Sprint(d.GetWorker(), d.GetDpRank(), " ", d.GetTier(), d.GetBlocks(), d.GetSeq()))
		}
		if want := "[a3 TIER_DISK 0 1 b0 TIER_DISK 0 2]"; fmt.Sprint(got) != want {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

// TestDigestsAreSplitByWorker requests more digests than fit into a message, with one worker whose digests alone
// exceed a message.
func TestDigestsAreSplitByWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		const workers = 1000
		long := strings.Repeat("n", 200)
		for n := range workers {
			h.Pipeline.AddWorker(feed.Worker{Name: fmt.Sprintf("%s-%d", long, n), Ranks: []uint32{0, 1}})
		}
		large := feed.Worker{Name: "0" + long}
		for n := range uint32(600) {
			large.Ranks = append(large.Ranks, n)
		}
		h.Pipeline.AddWorker(large)
		s := h.subscribe(checker.New(checker.Options{}), digested(earliest()))
		s.until(t, workers+1)
		named := make(map[string]int)
		for digests := 0; digests < 2*workers+600; {
			m, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			got := m.GetProgress().GetWorkers()
			within := make(map[string]bool)
			for _, d := range got {
				if !within[d.GetWorker()] {
					within[d.GetWorker()] = true
					named[d.GetWorker()]++
				}
			}
			if size := proto.Size(m); len(within) > 1 && size > 66<<10 {
				t.Errorf("a message of %d bytes with %d workers", size, len(within))
			}
			if m.GetPosition().GetSeq() != workers+1 {
				t.Errorf("digests at %v, want all at one position", m.GetPosition())
			}
			digests += len(got)
		}
		for name, n := range named {
			if n != 1 {
				t.Errorf("worker %s is in %d messages", name, n)
			}
		}
		if s.checker.Compared() != 2*workers+600 {
			t.Errorf("compared %d digests", s.checker.Compared())
		}
	})
}

package pipeline_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// testBlockSize is the default block size of test events.
const testBlockSize = 16

// store returns a store in the device tier, with tokens hashes.
func store(hashes ...uint64) wire.Event {
	e := wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: testBlockSize, BlockHashes: hashes}
	for _, h := range hashes {
		e.TokensHashes = append(e.TokensHashes, h+1000)
	}
	return e
}

func after(parent uint64, e wire.Event) wire.Event {
	e.HasParent, e.Parent = true, parent
	return e
}

func remove(hashes ...uint64) wire.Event {
	return wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: hashes}
}

func cleared() wire.Event { return wire.Event{Kind: wire.KindCleared} }

func inTier(tier kvblock.Tier, e wire.Event) wire.Event {
	e.Tier = tier
	return e
}

func withLoRA(name string, e wire.Event) wire.Event {
	e.LoRAName = name
	return e
}

func withSalt(salt string, e wire.Event) wire.Event {
	e.CacheSalt = salt
	return e
}

// withNote sets the session of a store, or the reason of a remove.
func withNote(note string, e wire.Event) wire.Event {
	e.Rare = &wire.Rare{Note: note}
	return e
}

func withBlockSize(n uint32, e wire.Event) wire.Event {
	e.BlockSize = n
	return e
}

// withTokens sets n tokens, which repeat 0 to 99.
func withTokens(n int, e wire.Event) wire.Event {
	e.Tokens = make([]uint32, n)
	for i := range e.Tokens {
		e.Tokens[i] = uint32(i % 100)
	}
	return e
}

func hashOnly(e wire.Event) wire.Event {
	e.TokensHashes = nil
	return e
}

const testWorker = "w"

// added returns the call that adds the worker.
func added() call { return call{Worker: testWorker, Add: &feed.Worker{Name: testWorker, Model: "m"}} }

// batch returns a batch of the worker's rank 0.
func batch(events ...wire.Event) call { return rankBatch(0, events...) }

func rankBatch(rank uint32, events ...wire.Event) call {
	return timedBatch(0, rank, events...)
}

// timedBatch returns a batch with an engine time, and an ingest time 1 later.
func timedBatch(engineTime int64, rank uint32, events ...wire.Event) call {
	return call{Worker: testWorker, Batch: &feed.Batch{
		Rank: rank, EngineTime: engineTime, IngestTime: engineTime + 1, Events: events,
	}}
}

// groupsOmitted returns a batch from which events of other attention groups were omitted.
func groupsOmitted(rank uint32, events ...wire.Event) call {
	c := rankBatch(rank, events...)
	c.Batch.GroupsOmitted = true
	return c
}

func gap(rank uint32) call {
	return call{Worker: testWorker, Gap: &feed.Gap{
		Rank: rank, Reason: feed.GapReplayForgotten, FirstSeq: 5, LastSeq: 7, Missed: 3, At: 99,
	}}
}

func restarted(rank uint32) call {
	return call{Worker: testWorker, Restarted: &feed.Restart{Rank: rank, At: 98}}
}

func joinedLate(rank uint32) call {
	return call{Worker: testWorker, Gap: &feed.Gap{Rank: rank, Reason: feed.GapJoinedLate, LastSeq: 4, At: 97}}
}

func removed() call { return call{Worker: testWorker, Remove: feed.RemovedDiscovery} }

// play makes calls on the pipeline, and returns the entries that they appended.
func (s *subject) play(t *testing.T, calls ...call) []*kvcastv1.Entry {
	t.Helper()
	before := len(s.journal.all()[testWorker])
	for _, c := range calls {
		c.on(s)
	}
	if err := s.journal.err(); err != nil {
		t.Fatal(err)
	}
	return s.journal.all()[testWorker][before:]
}

// withWorker runs a test in a synctest bubble, on a pipeline with one worker.
func withWorker(t *testing.T, cfg pipeline.Config, f func(*testing.T, *subject)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, err := newSubject(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.close()
		s.play(t, added())
		f(t, s)
	})
}

// describe formats entries, one string per event. It omits defaults: rank 0, the device
// tier, tokens hashes and testBlockSize.
func describe(entries []*kvcastv1.Entry) [][]string {
	all := make([][]string, len(entries))
	for i, entry := range entries {
		for _, e := range entry.GetEvents() {
			all[i] = append(all[i], textEvent(e))
		}
	}
	return all
}

func textEvent(e *kvcastv1.RouterEvent) string {
	var b strings.Builder
	if e.GetDpRank() != 0 {
		fmt.Fprintf(&b, "rank %d ", e.GetDpRank())
	}
	if e.GetTier() > kvcastv1.Tier_TIER_DEVICE {
		fmt.Fprintf(&b, "%s ", strings.TrimPrefix(e.GetTier().String(), "TIER_"))
	}
	switch e := e.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		s := e.Stored
		fmt.Fprintf(&b, "store %v", s.GetBlockHashes())
		if s.ParentHash != nil {
			fmt.Fprintf(&b, " after %d", s.GetParentHash())
		}
		if s.LoraName != nil {
			fmt.Fprintf(&b, " lora %q", s.GetLoraName())
		}
		if s.GetBlockSize() != testBlockSize {
			fmt.Fprintf(&b, " block size %d", s.GetBlockSize())
		}
		if len(s.GetTokensHashes()) == 0 {
			b.WriteString(" hash only")
		}
		if n := len(s.GetTokenIds()); n > 0 {
			fmt.Fprintf(&b, " %d tokens", n)
		}
		if s.GetSessionId() != "" {
			fmt.Fprintf(&b, " session %q", s.GetSessionId())
		}
	case *kvcastv1.RouterEvent_Removed:
		fmt.Fprintf(&b, "remove %v", e.Removed.GetBlockHashes())
		if e.Removed.GetReason() != "" {
			fmt.Fprintf(&b, " because of %q", e.Removed.GetReason())
		}
	case *kvcastv1.RouterEvent_Cleared:
		fmt.Fprintf(&b, "cleared %v %s", e.Cleared.GetTiers(), strings.TrimPrefix(e.Cleared.GetReason().String(), "REASON_"))
	case *kvcastv1.RouterEvent_Gap:
		fmt.Fprintf(&b, "gap %s %d: %d-%d", strings.TrimPrefix(e.Gap.GetReason().String(), "REASON_"),
			e.Gap.GetMissedBatches(), e.Gap.GetFirstSeq(), e.Gap.GetLastSeq())
	case *kvcastv1.RouterEvent_GroupsOmitted:
		b.WriteString(textGroupsOmitted)
	case *kvcastv1.RouterEvent_WorkerAdded:
		b.WriteString("added")
	case *kvcastv1.RouterEvent_WorkerRemoved:
		fmt.Fprintf(&b, "removed %s", strings.TrimPrefix(e.WorkerRemoved.GetReason().String(), "REASON_"))
	}
	return b.String()
}

// Results of describe for the calls above.
const (
	textGap       = "gap REPLAY_FORGOTTEN 3: 5-7"
	textRestarted = "cleared [] ENGINE_RESTARTED"
	textCleared   = "cleared [] ENGINE_CLEARED"

	textGroupsOmitted = "groups omitted"
)

// times returns the engine and ingest times of entries.
func times(entries []*kvcastv1.Entry) [][2]int64 {
	all := make([][2]int64, len(entries))
	for i, e := range entries {
		all[i] = [2]int64{e.GetEngineTimeUnixNano(), e.GetIngestTimeUnixNano()}
	}
	return all
}

// lengths returns the number of events in each entry.
func lengths(entries []*kvcastv1.Entry) []int {
	all := make([]int, len(entries))
	for i, e := range entries {
		all[i] = len(e.GetEvents())
	}
	return all
}

// eventIDs returns the ids of all events in entries.
func eventIDs(entries []*kvcastv1.Entry) []uint64 {
	var ids []uint64
	for _, entry := range entries {
		for _, e := range entry.GetEvents() {
			ids = append(ids, e.GetEventId())
		}
	}
	return ids
}

// size returns the encoded size of an entry.
func size(e *kvcastv1.Entry) int { return proto.Size(e) }

package client_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

const (
	someWorkers = 3
	someRanks   = 2
	someTiers   = 2
)

// drawHash draws a block hash or tokens hash from 0 to 11, so that equal hashes are frequent.
func drawHash(t *rapid.T, label string) uint64 { return rapid.Uint64Range(0, 11).Draw(t, label) }

func drawTier(t *rapid.T) kvcastv1.Tier {
	return kvcastv1.Tier(rapid.IntRange(1, someTiers).Draw(t, "tier"))
}

// drawEvent draws an event of a rank.
func drawEvent(t *rapid.T) *kvcastv1.RouterEvent {
	ev := &kvcastv1.RouterEvent{DpRank: proto.Uint32(rapid.Uint32Range(0, someRanks-1).Draw(t, "rank"))}
	switch rapid.IntRange(0, 19).Draw(t, "kind") {
	default:
		ev.Tier = drawTier(t)
		s := &kvcastv1.Stored{BlockSize: 16}
		if rapid.Bool().Draw(t, "continues") {
			s.ParentHash = proto.Uint64(drawHash(t, "parent"))
		}
		hashed := rapid.IntRange(0, 4).Draw(t, "hashed") > 0
		for range rapid.IntRange(1, 4).Draw(t, "blocks") {
			s.BlockHashes = append(s.BlockHashes, drawHash(t, "block"))
			if hashed {
				s.TokensHashes = append(s.TokensHashes, drawHash(t, "tokens")%4)
			}
		}
		ev.Event = &kvcastv1.RouterEvent_Stored{Stored: s}
	case 0, 1, 2, 3, 4:
		ev.Tier = drawTier(t)
		ev.Event = &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{
			BlockHashes: rapid.SliceOfN(rapid.Uint64Range(0, 11), 1, 4).Draw(t, "removed"),
		}}
	case 5:
		c := &kvcastv1.Cleared{Reason: kvcastv1.Cleared_Reason(rapid.IntRange(1, 4).Draw(t, "reason"))}
		if rapid.Bool().Draw(t, "some tiers") {
			c.Tiers = []kvcastv1.Tier{drawTier(t)}
		}
		ev.Event = &kvcastv1.RouterEvent_Cleared{Cleared: c}
	case 6:
		ev.Event = &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE}}
	case 7:
		ev.DpRank = nil
		ev.Event = &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{BlockSize: 16}}
	case 8:
		ev.DpRank = nil
		ev.Event = &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{}}
	}
	return ev
}

func drawEntry(t *rapid.T) *kvcastv1.Entry {
	e := &kvcastv1.Entry{Worker: fmt.Sprintf("w%d", rapid.IntRange(0, someWorkers-1).Draw(t, "worker"))}
	for range rapid.IntRange(1, 4).Draw(t, "events") {
		e.Events = append(e.Events, drawEvent(t))
	}
	return e
}

// startedView returns a View whose subscription has started.
func startedView() *client.View {
	v := client.NewView()
	v.Apply(client.Update{Message: &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch: "e", OldestSeq: 1, Mode: kvcastv1.Accepted_MODE_EARLIEST,
	}}})
	return v
}

func entries(e ...*kvcastv1.Entry) client.Update {
	return client.Update{Message: &kvcastv1.SubscribeResponse{Entries: e}}
}

// TestViewEqualsModel applies the same events to a View and a model, and compares their state and matches.
func TestViewEqualsModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v, m := startedView(), newModel()
		for range rapid.IntRange(1, 40).Draw(t, "entries") {
			e := drawEntry(t)
			v.Apply(entries(e))
			m.apply(e)
			if err := m.difference(v); err != nil {
				t.Fatal(err)
			}
			prompt := rapid.SliceOfN(rapid.Uint64Range(0, 3), 1, 6).Draw(t, "prompt")
			if diff := cmp.Diff(m.match(prompt), normal(v.Match(client.Prompt{TokensHashes: prompt}))); diff != "" {
				t.Fatalf("match of %v (-want +got):\n%s", prompt, diff)
			}
		}
	})
}

// normal clears the fields of matches that the model does not have.
func normal(found []client.Match) []client.Match {
	for i := range found {
		found[i].Model, found[i].Endpoint, found[i].Tokens = "", "", 0
		found[i].TierTokens = [5]int{}
		found[i].Reasons = nil
	}
	return found
}

// TestSnapshotRestoresView converts a model to a snapshot, in which children may precede their parents, and compares
// the View of the snapshot with the model.
func TestSnapshotRestoresView(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := newModel()
		for range rapid.IntRange(1, 30).Draw(t, "entries") {
			m.apply(drawEntry(t))
		}
		v := startedView()
		old, was := drawEntry(t), newModel() // the state before the snapshot
		v.Apply(entries(old))
		was.apply(old)
		copied := newModel()
		v.Apply(client.Update{Message: &kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: "e"}}})
		for _, name := range m.view.Workers() {
			w := &kvcastv1.SnapshotWorker{Worker: name, Added: &kvcastv1.WorkerAdded{}, LastEventId: 1}
			for _, rank := range m.view.Ranks(name) {
				if m.view.Incomplete(name, rank) {
					w.IncompleteRanks = append(w.IncompleteRanks, rank)
				}
			}
			copied.view.ApplyWorker(w)
			v.Apply(client.Update{Message: &kvcastv1.SubscribeResponse{SnapshotWorker: w}})
			for _, rank := range m.view.Ranks(name) {
				for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
					for _, ev := range chains(m.view.Contents(name, rank, tier)) {
						ev.DpRank, ev.Tier = proto.Uint32(rank), tier
						b := &kvcastv1.SnapshotBlocks{Worker: name, Events: []*kvcastv1.RouterEvent{ev}}
						v.Apply(client.Update{Message: &kvcastv1.SubscribeResponse{SnapshotBlocks: []*kvcastv1.SnapshotBlocks{b}}})
						copied.apply(&kvcastv1.Entry{Worker: name, Events: b.Events})
					}
				}
			}
		}
		if err := was.difference(v); err != nil {
			t.Fatalf("before SnapshotEnd: %v", err)
		}
		v.Apply(client.Update{Position: client.Position{Epoch: "e", Seq: 9}, Message: &kvcastv1.SubscribeResponse{
			Position: &kvcastv1.Position{Epoch: "e", Seq: 9}, SnapshotEnd: &kvcastv1.SnapshotEnd{},
		}})
		if err := copied.difference(v); err != nil {
			t.Fatal(err)
		}
		prompt := rapid.SliceOfN(rapid.Uint64Range(0, 3), 1, 6).Draw(t, "prompt")
		if diff := cmp.Diff(copied.match(prompt), normal(v.Match(client.Prompt{TokensHashes: prompt}))); diff != "" {
			t.Fatalf("match of %v (-want +got):\n%s", prompt, diff)
		}
	})
}

// chains returns Stored events of one block each.
func chains(blocks map[uint64]checker.Block) []*kvcastv1.RouterEvent {
	var out []*kvcastv1.RouterEvent
	for _, h := range slices.Sorted(maps.Keys(blocks)) {
		b := blocks[h]
		s := &kvcastv1.Stored{BlockHashes: []uint64{h}, BlockSize: b.BlockSize}
		if b.HasParent {
			s.ParentHash = proto.Uint64(b.Parent)
		}
		if b.Hashed {
			s.TokensHashes = []uint64{b.TokensHash}
		}
		out = append(out, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_Stored{Stored: s}})
	}
	return out
}

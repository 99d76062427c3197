package wire_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/wire"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// storedRules are Rules whose state and changes are stored, and the block size.
type storedRules struct {
	t     *rapid.T
	size  wire.BlockSize
	rules *wire.Rules
	limit int
	// stored is the state of a checkpoint, and all changes since then.
	stored [][]byte
}

func newStoredRules(t *rapid.T, limit int) *storedRules {
	s := &storedRules{t: t, limit: limit}
	s.open()
	return s
}

func (s *storedRules) open() {
	s.size = wire.BlockSize{}
	s.rules = wire.NewRules(&s.size)
	s.rules.LimitSaltedBlocks(s.limit)
	s.rules.TrackChanges()
}

func (s *storedRules) add(m *statev1.IngestSource) {
	b, err := proto.Marshal(m)
	if err != nil {
		s.t.Fatal(err)
	}
	s.stored = append(s.stored, b)
}

// checkpoint stores the whole state in place of earlier states.
func (s *storedRules) checkpoint() {
	s.stored = nil
	s.add(s.rules.State())
}

// restart continues with the stored state.
func (s *storedRules) restart() {
	rawID, size := s.rules.RawID(), s.size.State()
	s.open()
	for _, b := range s.stored {
		var m statev1.IngestSource
		if err := proto.Unmarshal(b, &m); err != nil {
			s.t.Fatal(err)
		}
		if err := wire.CheckState(&m); err != nil {
			s.t.Fatal(err)
		}
		s.rules.Restore(&m)
	}
	if s.rules.Changed() {
		s.t.Fatal("a restore is a change")
	}
	s.rules.RestoreRawID(rawID)
	s.size.Restore(size)
}

// drawRuleEvent draws an event over few blocks, groups and salts.
func drawRuleEvent(t *rapid.T) wire.Event {
	ev := wire.Event{
		Kind:   rapid.SampledFrom([]wire.Kind{wire.KindStored, wire.KindStored, wire.KindStored, wire.KindRemoved, wire.KindRemoved, wire.KindCleared}).Draw(t, "kind"),
		Medium: rapid.SampledFrom([]string{"", "", "CPU", "DISK"}).Draw(t, "medium"),
	}
	if rapid.IntRange(0, 2).Draw(t, "grouped") == 0 {
		ev.HasGroupIdx, ev.GroupIdx = true, rapid.Int64Range(-1, 2).Draw(t, "group")
	}
	if ev.Kind == wire.KindCleared {
		return ev
	}
	hash := rapid.Uint64Range(1, 12)
	ev.BlockHashes = rapid.SliceOfNDistinct(hash, 1, 3, func(h uint64) uint64 { return h }).Draw(t, "hashes")
	if ev.Kind == wire.KindRemoved {
		return ev
	}
	if ev.HasGroupIdx {
		ev.SpecKind = rapid.SampledFrom([]string{"", "full_attention", "sliding_window"}).Draw(t, "spec kind")
	}
	ev.BlockSize = rapid.SampledFrom([]uint32{1, 1, 1, 2}).Draw(t, "block size")
	ev.Tokens = make([]uint32, int(ev.BlockSize)*len(ev.BlockHashes))
	if rapid.Bool().Draw(t, "has parent") {
		ev.HasParent, ev.Parent = true, hash.Draw(t, "parent")
	}
	ev.CacheSalt = rapid.SampledFrom([]string{"", "", "a", "b", "not UTF-8: \xff"}).Draw(t, "salt")
	return ev
}

// TestRestoredRulesEqualThoseOfOneRun restarts Rules at random batches, with the state of a checkpoint and the changes
// since then. All results are those of Rules that were never restarted.
func TestRestoredRulesEqualThoseOfOneRun(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.SampledFrom([]int{wire.MaxSaltedBlocks, 2, 5}).Draw(t, "limit")
		s := newStoredRules(t, limit)
		size := wire.BlockSize{}
		r := wire.NewRules(&size)
		r.LimitSaltedBlocks(limit)
		var gotCounts, wantCounts wire.Counts
		for range rapid.IntRange(1, 50).Draw(t, "batches") {
			rank := rapid.SampledFrom([]uint32{0, 5}).Draw(t, "rank")
			switch rapid.SampledFrom([]string{"", "", "", "", "", "checkpoint", "restart", "restart", "engine restart"}).Draw(t, "before") {
			case "checkpoint":
				s.checkpoint()
			case "restart":
				s.restart()
			case "engine restart":
				r.Reset(rank)
				s.rules.Reset(rank)
				size.Forget()
				s.size.Forget()
			}
			events := rapid.SliceOfN(rapid.Custom(drawRuleEvent), 0, 3).Draw(t, "events")
			want, got := wire.Batch{Events: events}, wire.Batch{Events: slices.Clone(events)}
			r.Admit(&want, rank, &wantCounts)
			s.rules.Admit(&got, rank, &gotCounts)
			if d := cmp.Diff(want, got); d != "" || gotCounts != wantCounts {
				t.Fatalf("counts %v, want %v; batch differs (-want +got):\n%s", gotCounts, wantCounts, d)
			}
			if s.rules.Changed() {
				s.add(s.rules.Changes())
			}
			if s.rules.Changed() {
				t.Fatal("changes are returned twice")
			}
			ranks, blocks, salts, bytes := s.rules.Salted()
			if r, b, n, m := r.Salted(); r != ranks || b != blocks || n != salts || m != bytes {
				t.Fatalf("%d ranks, %d blocks, %d salts, %d bytes; want %d, %d, %d, %d", ranks, blocks, salts, bytes, r, b, n, m)
			}
		}
	})
}

// Stores without salts and of known groups are no change, and allocate nothing.
func TestPlainBatchesAreNoChange(t *testing.T) {
	var size wire.BlockSize
	r := wire.NewRules(&size)
	r.TrackChanges()
	var counts wire.Counts
	admit := func(kind string) {
		r.Admit(&wire.Batch{Events: []wire.Event{
			{Kind: wire.KindStored, BlockHashes: []uint64{1}, BlockSize: 1, Tokens: []uint32{1}, SpecKind: kind, HasGroupIdx: kind != ""},
			{Kind: wire.KindRemoved, BlockHashes: []uint64{1}},
			{Kind: wire.KindCleared},
		}}, 0, &counts)
	}
	admit("")
	if r.Changed() {
		t.Error("a store without group is a change")
	}
	admit("full_attention")
	if !r.Changed() {
		t.Error("a new group is no change")
	}
	want := []*statev1.IngestGroup{{Kind: "full_attention", BlockSize: 1}}
	if d := cmp.Diff(want, r.Changes().Ranks[0].Groups, protocmp.Transform()); d != "" {
		t.Errorf("groups (-want +got):\n%s", d)
	}
	admit("full_attention")
	r.Reset(3)
	if r.Changed() {
		t.Error("a known group, or the restart of a rank without groups, is a change")
	}
}

func TestCheckStateRejects(t *testing.T) {
	for name, s := range map[string]*statev1.IngestSource{
		"copies missing":   {Ranks: []*statev1.IngestRank{{SaltedBlocks: []uint64{1}, BlockSalts: []uint32{0}}}},
		"salt missing":     {Ranks: []*statev1.IngestRank{{SaltedBlocks: []uint64{1}, BlockSalts: []uint32{1}, BlockCopies: []uint32{1}}}},
		"salt without end": {Salts: [][]byte{make([]byte, 1025)}},
		"empty salt":       {Salts: [][]byte{nil}},
	} {
		if err := wire.CheckState(s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

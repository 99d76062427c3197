package index_test

import (
	"fmt"
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/index/indextest"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fataler is a *testing.T or a *rapid.T.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

const (
	device = kvcastv1.Tier_TIER_DEVICE
	pinned = kvcastv1.Tier_TIER_HOST_PINNED
	disk   = kvcastv1.Tier_TIER_DISK
)

func tierBit(t kvcastv1.Tier) kvblock.Tiers { return kvblock.TierBit(uint8(t)) }

// Builders of entries.
var (
	entryOf = indextest.EntryOf
	event   = indextest.Event
	stored  = indextest.Stored
	removed = indextest.Removed
)

func inTier(tier kvcastv1.Tier, e *kvcastv1.RouterEvent) *kvcastv1.RouterEvent {
	e.Tier = tier
	return e
}

// parentOf is the only parent that a block with a parent has in random entries, so that block hashes and contents do
// not contradict each other.
func parentOf(hash uint64) uint64 { return hash / 3 }

// drawEntry draws an entry of one of three workers. With anyParent, block hashes may have any parent and content, which
// no engine sends.
func drawEntry(t *rapid.T, seq uint64, anyParent bool) *kvcastv1.Entry {
	e := &kvcastv1.Entry{
		Seq: seq, Worker: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "worker"),
		Model:              rapid.SampledFrom([]string{"", "m", "n"}).Draw(t, "model"),
		EngineTimeUnixNano: rapid.Int64Range(0, 2).Draw(t, "engine time"),
		IngestTimeUnixNano: rapid.Int64Range(-1, 2).Draw(t, "ingest time"),
	}
	for range rapid.IntRange(0, 4).Draw(t, "events") {
		ev := drawEvent(t, anyParent)
		ev.EventId = rapid.Uint64Range(0, 300).Draw(t, "event id")
		e.Events = append(e.Events, ev)
	}
	return e
}

func drawEvent(t *rapid.T, anyParent bool) *kvcastv1.RouterEvent {
	rank := rapid.SampledFrom([]uint32{0, 0, 1, 200}).Draw(t, "rank")
	hash := rapid.Uint64Range(1, 30)
	// Tiers 0 and 5 are unknown.
	tier := kvcastv1.Tier(rapid.SampledFrom([]int32{1, 1, 1, 2, 3, 4, 0, 5}).Draw(t, "tier"))
	switch rapid.IntRange(0, 24).Draw(t, "kind") {
	case 0:
		added := &kvcastv1.WorkerAdded{
			Model: rapid.SampledFrom([]string{"m", "n"}).Draw(t, "new model"), Endpoint: "e",
			BlockSize: rapid.Uint32Range(0, 2).Draw(t, "configured block size"),
		}
		added.Ranks = rapid.SampledFrom([][]uint32{nil, {0}, {1, 0}}).Draw(t, "configured ranks")
		return event(0, added)
	case 1:
		return event(0, &kvcastv1.WorkerRemoved{})
	case 2:
		return event(rank, nil)
	case 3:
		return event(rank, &kvcastv1.GroupsOmitted{})
	case 4, 5:
		return event(rank, &kvcastv1.Gap{
			Reason:        kvcastv1.Gap_Reason(rapid.Int32Range(0, 12).Draw(t, "gap reason")),
			MissedBatches: rapid.SampledFrom([]uint64{0, 1, 1<<64 - 1}).Draw(t, "missed batches"),
		})
	case 6:
		c := &kvcastv1.Cleared{Reason: kvcastv1.Cleared_Reason(rapid.Int32Range(0, 6).Draw(t, "clear reason"))}
		c.Tiers = rapid.SampledFrom([][]kvcastv1.Tier{nil, nil, {device}, {disk, pinned}, {0, 5}}).Draw(t, "cleared tiers")
		return event(rank, c)
	case 7, 8, 9, 10, 11:
		return inTier(tier, event(rank, removed(rapid.SliceOfN(hash, 0, 4).Draw(t, "removed")...)))
	case 12:
		return event(rank, drawGroups(t))
	case 13, 14:
		return inTier(tier, event(rank, &kvcastv1.GroupStored{Group: drawGroup(t), BlockHashes: rapid.SliceOfN(hash, 0, 4).Draw(t, "stored in a group")}))
	case 15:
		return inTier(tier, event(rank, &kvcastv1.GroupRemoved{Group: drawGroup(t), BlockHashes: rapid.SliceOfN(hash, 0, 4).Draw(t, "removed from a group")}))
	}
	return inTier(tier, event(rank, drawStored(t, hash, anyParent)))
}

// drawGroup draws the index of an attention group; 64 is out of range.
func drawGroup(t *rapid.T) uint32 {
	return rapid.SampledFrom([]uint32{0, 1, 2, 63, 64}).Draw(t, "group")
}

func drawGroups(t *rapid.T) *kvcastv1.Groups {
	g := &kvcastv1.Groups{Unit: rapid.Uint32Range(0, 2).Draw(t, "unit")}
	for i := range rapid.Uint32Range(0, 2).Draw(t, "groups") {
		g.Groups = append(g.Groups, &kvcastv1.AttentionGroup{
			Index: i, BlockSize: 2, Kind: rapid.SampledFrom([]kvcastv1.AttentionGroup_Kind{0, 1, 6, 9}).Draw(t, "kind"), Main: rapid.Bool().Draw(t, "main"),
		})
	}
	if rapid.Bool().Draw(t, "hashing") {
		g.Hashing = &kvcastv1.BlockHashing{
			Algorithm: kvcastv1.BlockHashing_Algorithm(rapid.Int32Range(0, 3).Draw(t, "algorithm")), LoraPaths: map[string]string{"a": "/a"},
		}
	}
	return g
}

func drawStored(t *rapid.T, hash *rapid.Generator[uint64], anyParent bool) *kvcastv1.Stored {
	first := hash.Draw(t, "first")
	s := &kvcastv1.Stored{BlockHashes: []uint64{first}, BlockSize: rapid.Uint32Range(0, 2).Draw(t, "block size")}
	if p := parentOf(first); p != 0 {
		s.ParentHash = &p
	}
	for range rapid.IntRange(0, 3).Draw(t, "further blocks") {
		s.BlockHashes = append(s.BlockHashes, 3*s.BlockHashes[len(s.BlockHashes)-1]+1)
	}
	if anyParent {
		s.BlockHashes = rapid.SliceOfN(hash, 0, 4).Draw(t, "stored")
		s.ParentHash = rapid.SampledFrom([]*uint64{nil, &first, proto.Uint64(0)}).Draw(t, "parent")
	}
	if rapid.IntRange(0, 3).Draw(t, "hash only") > 0 {
		for _, h := range s.BlockHashes {
			if anyParent {
				h = hash.Draw(t, "content")
			}
			s.TokensHashes = append(s.TokensHashes, h+1000)
		}
	}
	if lora := rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "lora"); lora != "" {
		s.LoraName = &lora
	}
	if rapid.IntRange(0, 9).Draw(t, "token ids") == 0 {
		s.TokenIds = []uint32{1, 300}
	}
	return s
}

// compare returns how two indexes differ in their workers and blocks; "" if they do not.
func compare(want, got *index.Index, options ...cmp.Option) string {
	all, _ := want.Workers(nil)
	others, _ := got.Workers(nil)
	if diff := cmp.Diff(all, others, append(options, protocmp.Transform())...); diff != "" {
		return "workers (-want +got):\n" + diff
	}
	for i := range all {
		for _, r := range all[i].Ranks {
			name := all[i].Name
			if w, g := want.Blocks(name, r.Rank), got.Blocks(name, r.Rank); !maps.Equal(w, g) { // cmp.Diff is slow
				return fmt.Sprintf("blocks of %s, rank %d (-want +got):\n%s", name, r.Rank, cmp.Diff(w, g))
			}
			if w, g := want.GroupBlocks(name, r.Rank), got.GroupBlocks(name, r.Rank); !maps.Equal(w, g) {
				return fmt.Sprintf("blocks of attention groups of %s, rank %d (-want +got):\n%s", name, r.Rank, cmp.Diff(w, g))
			}
			digests := r.GroupBlocks
			for b, groups := range want.GroupBlocks(name, r.Rank) {
				for group := range uint64(64) {
					if groups&(1<<group) != 0 {
						digests[b.Tier].Blocks--
						digests[b.Tier].XOR ^= kvblock.Digest(b.Hash ^ kvblock.Digest(group))
					}
				}
			}
			for tier, rest := range digests {
				if rest != (index.Digest{}) {
					return fmt.Sprintf("attention groups of %s, rank %d, tier %d: the digest differs from the blocks by %+v", name, r.Rank, tier, rest)
				}
			}
		}
	}
	return ""
}

package wire_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// saltedEngine is an engine with one rank. Blocks with different salts have different hashes.
// The engine sends salts with first blocks only.
type saltedEngine struct {
	rank   uint32
	next   uint64
	blocks map[uint64]*saltedEngineBlock
	// stored are the hashes of the blocks with copies.
	stored []uint64
}

type saltedEngineBlock struct {
	parent uint64 // 0 for a first block
	salt   string
	copies [kvblock.TierEnd]int
}

func (e *saltedEngine) restart() {
	*e = saltedEngine{rank: e.rank, blocks: make(map[uint64]*saltedEngineBlock)}
}

// addCopies adds a copy of each block.
func (e *saltedEngine) addCopies(tier kvblock.Tier, hashes ...uint64) {
	for _, h := range hashes {
		e.blocks[h].copies[tier]++
		if !slices.Contains(e.stored, h) {
			e.stored = append(e.stored, h)
		}
	}
}

// removeCopy removes an existing copy of a block.
func (e *saltedEngine) removeCopy(tier kvblock.Tier, hash uint64) {
	b := e.blocks[hash]
	if b.copies[tier]--; b.copies == [kvblock.TierEnd]int{} {
		e.stored = slices.DeleteFunc(e.stored, func(h uint64) bool { return h == hash })
	}
}

// newBlocks returns n new blocks. Each is the parent of the next.
func (e *saltedEngine) newBlocks(n int, parent uint64, salt string) (hashes []uint64) {
	for range n {
		e.next++
		e.blocks[e.next] = &saltedEngineBlock{parent: parent, salt: salt}
		parent = e.next
		hashes = append(hashes, e.next)
	}
	return hashes
}

// store returns a store of blocks, each of which is the parent of the next. Each block has one
// token, which equals its hash.
func (e *saltedEngine) store(medium string, hashes []uint64) wire.Event {
	first := e.blocks[hashes[0]]
	ev := wire.Event{Kind: wire.KindStored, BlockHashes: hashes, BlockSize: 1, Medium: medium, Parent: first.parent, HasParent: first.parent != 0}
	for _, h := range hashes {
		ev.Tokens = append(ev.Tokens, uint32(h))
	}
	return ev
}

// setSalt sets the salt of a first block, in one of the fields that engines use.
func (e *saltedEngine) setSalt(t *rapid.T, ev *wire.Event, salt string) {
	if salt == "" {
		return
	}
	switch rapid.IntRange(0, 2).Draw(t, "field of the salt") {
	case 0:
		ev.CacheSalt = salt
	case 1:
		ev.Raw = &wire.Raw{ExtraKeys: []byte("\x91\x91\xb3dynamo-cache-salt:" + salt)}
	default:
		ev.Raw = &wire.Raw{ExtraKeys: []byte("\x91\x91\x82\xa4type\xaacache_salt\xa4salt\xa1" + salt)}
	}
}

// TestSaltsEqualTheEnginesModel passes the events of engines to Rules. The test knows the salt
// of every block. Salts and tokens hashes must be correct, and they must be set if the events
// determine the salt.
func TestSaltsEqualTheEnginesModel(t *testing.T) {
	media := map[string]kvblock.Tier{"GPU": kvblock.TierDevice, "cpu": kvblock.TierHostPinned, "DISK": kvblock.TierDisk, "REMOTE": kvblock.TierExternal}
	anyMedium := rapid.SampledFrom([]string{"GPU", "GPU", "cpu", "DISK", "REMOTE"})
	rapid.Check(t, func(t *rapid.T) {
		var (
			size   = wire.BlockSize{Tokens: 1}
			counts wire.Counts
		)
		r := wire.NewRules(&size)
		limit := rapid.SampledFrom([]int{wire.MaxSaltedBlocks, wire.MaxSaltedBlocks, 1, 3, 8}).Draw(t, "limit")
		r.LimitSaltedBlocks(limit)
		engines := []*saltedEngine{{rank: 0}, {rank: 5}}
		for _, e := range engines {
			e.restart()
		}
		// admit checks the salt and the tokens hashes of an event of e.
		admit := func(e *saltedEngine, ev wire.Event) {
			salt := ""
			if ev.Kind == wire.KindStored {
				salt = e.blocks[ev.BlockHashes[0]].salt
			}
			b := &wire.Batch{Events: []wire.Event{ev}}
			r.Admit(b, e.rank, &counts)
			if len(b.Events) == 0 || ev.Kind != wire.KindStored {
				return
			}
			got := b.Events[0]
			if len(got.TokensHashes) > 0 {
				want := kvblock.AppendTokensHashes(nil, got.Tokens, 1, kvblock.Seed("", salt), false, nil)
				if diff := cmp.Diff(want, got.TokensHashes); diff != "" || got.CacheSalt != salt {
					t.Fatalf("got salt %q, want %q; tokens hashes differ (-want +got):\n%s", got.CacheSalt, salt, diff)
				}
			} else if limit == wire.MaxSaltedBlocks && got.Tier == kvblock.TierDevice && len(got.Tokens) > 0 {
				t.Fatalf("no tokens hashes of blocks %v with salt %q", got.BlockHashes, salt)
			}
		}
		anySalt := rapid.SampledFrom([]string{"", "", "a", "b", "c"})
		step := func(e *saltedEngine) {
			n := rapid.IntRange(1, 3).Draw(t, "blocks")
			do := rapid.SampledFrom([]string{"request", "request", "continue", "continue", "continue", "again", "copy", "hash only", "remove", "remove",
				"short", "ignored", "clear", "restart"}).Draw(t, "do")
			if len(e.stored) == 0 && do != "clear" && do != "restart" {
				do = "request"
			}
			var at uint64
			if len(e.stored) > 0 {
				at = e.stored[rapid.IntRange(0, len(e.stored)-1).Draw(t, "at")]
			}
			switch do {
			case "request":
				salt := anySalt.Draw(t, "salt")
				hashes := e.newBlocks(n, 0, salt)
				ev := e.store("GPU", hashes)
				e.setSalt(t, &ev, salt)
				e.addCopies(kvblock.TierDevice, hashes...)
				admit(e, ev)
			case "continue", "short":
				hashes := e.newBlocks(n, at, e.blocks[at].salt)
				ev := e.store("GPU", hashes)
				if do == "short" {
					ev.Tokens = ev.Tokens[:rapid.IntRange(0, n-1).Draw(t, "tokens")]
				}
				e.addCopies(kvblock.TierDevice, hashes...)
				admit(e, ev)
			case "again": // a second copy in device memory
				ev := e.store("GPU", []uint64{at})
				if !ev.HasParent {
					e.setSalt(t, &ev, e.blocks[at].salt)
				} else if e.blocks[ev.Parent].copies == [kvblock.TierEnd]int{} {
					return // no engine stores a block whose parent was evicted
				}
				e.addCopies(kvblock.TierDevice, at)
				admit(e, ev)
			case "copy", "hash only":
				medium := anyMedium.Filter(func(m string) bool { return m != "GPU" }).Draw(t, "medium")
				ev := e.store(medium, []uint64{at})
				if ev.HasParent && e.blocks[ev.Parent].copies == [kvblock.TierEnd]int{} {
					return
				}
				if do == "hash only" {
					ev.Tokens, ev.BlockSize, ev.HasParent, ev.Parent = nil, 0, false, 0
				}
				e.addCopies(media[medium], at)
				admit(e, ev)
			case "remove":
				medium := anyMedium.Draw(t, "medium")
				if e.blocks[at].copies[media[medium]] > 0 {
					e.removeCopy(media[medium], at)
					admit(e, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{at}, Medium: medium})
				}
			case "ignored":
				admit(e, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{at}, GroupIdx: 3, HasGroupIdx: true})
				admit(e, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{at}, Rare: &wire.Rare{Locality: "REMOTE"}})
			case "clear":
				e.restart()
				admit(e, wire.Event{Kind: wire.KindCleared})
			default:
				e.restart()
				r.Reset(e.rank)
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			step(rapid.SampledFrom(engines).Draw(t, "engine"))
		}
		for _, e := range engines {
			for _, h := range slices.Clone(e.stored) {
				for medium, tier := range media {
					for range e.blocks[h].copies[tier] {
						admit(e, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{h}, Medium: medium})
					}
				}
			}
		}
		if _, blocks, salts, bytes := r.Salted(); blocks+salts+bytes != 0 {
			t.Fatalf("after all blocks were removed, %d are recorded, with %d salts of %d bytes", blocks, salts, bytes)
		}
	})
}

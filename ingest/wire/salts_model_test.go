package wire_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/wire"
)

// saltedEngine is an engine of one rank, whose hashes differ by salt, and which sends
// salts with first blocks only.
type saltedEngine struct {
	rank   uint32
	next   uint64
	blocks map[uint64]*saltedEngineBlock
	// held are the hashes of the blocks with copies.
	held []uint64
}

type saltedEngineBlock struct {
	parent uint64 // 0 for a first one
	salt   string
	copies [wire.NumTiers]int
}

func (e *saltedEngine) restart() {
	*e = saltedEngine{rank: e.rank, blocks: make(map[uint64]*saltedEngineBlock)}
}

// hold counts copies.
func (e *saltedEngine) hold(tier wire.Tier, hashes ...uint64) {
	for _, h := range hashes {
		e.blocks[h].copies[tier]++
		if !slices.Contains(e.held, h) {
			e.held = append(e.held, h)
		}
	}
}

// drop removes an existing copy.
func (e *saltedEngine) drop(tier wire.Tier, hash uint64) {
	b := e.blocks[hash]
	if b.copies[tier]--; b.copies == [wire.NumTiers]int{} {
		e.held = slices.DeleteFunc(e.held, func(h uint64) bool { return h == hash })
	}
}

// make makes n new blocks, each the parent of the next.
func (e *saltedEngine) make(n int, parent uint64, salt string) (hashes []uint64) {
	for range n {
		e.next++
		e.blocks[e.next] = &saltedEngineBlock{parent: parent, salt: salt}
		parent = e.next
		hashes = append(hashes, e.next)
	}
	return hashes
}

// event stores blocks that continue one another; their tokens are their hashes.
func (e *saltedEngine) event(medium string, hashes []uint64) wire.Event {
	first := e.blocks[hashes[0]]
	ev := wire.Event{Kind: wire.KindStored, BlockHashes: hashes, BlockSize: 1, Medium: medium, Parent: first.parent, HasParent: first.parent != 0}
	for _, h := range hashes {
		ev.Tokens = append(ev.Tokens, uint32(h))
	}
	return ev
}

// name sets the salt of a first block in a field that the engine may use.
func (e *saltedEngine) name(t *rapid.T, ev *wire.Event, salt string) {
	if salt == "" {
		return
	}
	switch rapid.IntRange(0, 2).Draw(t, "salt is told by") {
	case 0:
		ev.CacheSalt = salt
	case 1:
		ev.Raw = &wire.Raw{ExtraKeys: []byte("\x91\x91\xb3dynamo-cache-salt:" + salt)}
	default:
		ev.Raw = &wire.Raw{ExtraKeys: []byte("\x91\x91\x82\xa4type\xaacache_salt\xa4salt\xa1" + salt)}
	}
}

// TestSaltsEqualTheEnginesModel drives Rules with the events of engines whose every
// block's salt is known. A store's salt and tokens hashes must be right, and they must
// be present where the salt can be known.
func TestSaltsEqualTheEnginesModel(t *testing.T) {
	media := map[string]wire.Tier{"GPU": wire.TierDevice, "cpu": wire.TierHostPinned, "DISK": wire.TierDisk, "REMOTE": wire.TierExternal}
	anyMedium := rapid.SampledFrom([]string{"GPU", "GPU", "cpu", "DISK", "REMOTE"})
	rapid.Check(t, func(t *rapid.T) {
		var (
			size   = wire.BlockSize{Tokens: 1}
			counts wire.Counts
		)
		r := wire.NewRules(&size)
		limit := rapid.SampledFrom([]int{0, 0, 1, 3, 8}).Draw(t, "limit")
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
				want := wire.AppendTokensHashes(nil, got.Tokens, 1, wire.BlockSeed("", salt), false, nil)
				if diff := cmp.Diff(want, got.TokensHashes); diff != "" || got.CacheSalt != salt {
					t.Fatalf("told of salt %q, is of %q; tokens hashes differ (-want +got):\n%s", got.CacheSalt, salt, diff)
				}
			} else if limit == 0 && got.Tier == wire.TierDevice && len(got.Tokens) > 0 {
				t.Fatalf("nothing is told of the contents of %v, which are of salt %q", got.BlockHashes, salt)
			}
		}
		anySalt := rapid.SampledFrom([]string{"", "", "a", "b", "c"})
		step := func(e *saltedEngine) {
			n := rapid.IntRange(1, 3).Draw(t, "blocks")
			do := rapid.SampledFrom([]string{"request", "request", "continue", "continue", "continue", "again", "copy", "hash only", "remove", "remove",
				"short", "ignored", "clear", "restart"}).Draw(t, "do")
			if len(e.held) == 0 && do != "clear" && do != "restart" {
				do = "request"
			}
			var at uint64
			if len(e.held) > 0 {
				at = e.held[rapid.IntRange(0, len(e.held)-1).Draw(t, "at")]
			}
			switch do {
			case "request":
				salt := anySalt.Draw(t, "salt")
				hashes := e.make(n, 0, salt)
				ev := e.event("GPU", hashes)
				e.name(t, &ev, salt)
				e.hold(wire.TierDevice, hashes...)
				admit(e, ev)
			case "continue", "short":
				hashes := e.make(n, at, e.blocks[at].salt)
				ev := e.event("GPU", hashes)
				if do == "short" {
					ev.Tokens = ev.Tokens[:rapid.IntRange(0, n-1).Draw(t, "tokens")]
				}
				e.hold(wire.TierDevice, hashes...)
				admit(e, ev)
			case "again": // in another slot of the device
				ev := e.event("GPU", []uint64{at})
				if !ev.HasParent {
					e.name(t, &ev, e.blocks[at].salt)
				} else if e.blocks[ev.Parent].copies == [wire.NumTiers]int{} {
					return // its parent was evicted: no engine computes it
				}
				e.hold(wire.TierDevice, at)
				admit(e, ev)
			case "copy", "hash only":
				medium := anyMedium.Filter(func(m string) bool { return m != "GPU" }).Draw(t, "medium")
				ev := e.event(medium, []uint64{at})
				if ev.HasParent && e.blocks[ev.Parent].copies == [wire.NumTiers]int{} {
					return
				}
				if do == "hash only" {
					ev.Tokens, ev.BlockSize, ev.HasParent, ev.Parent = nil, 0, false, 0
				}
				e.hold(media[medium], at)
				admit(e, ev)
			case "remove":
				medium := anyMedium.Draw(t, "medium")
				if e.blocks[at].copies[media[medium]] > 0 {
					e.drop(media[medium], at)
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
			for _, h := range slices.Clone(e.held) {
				for medium, tier := range media {
					for range e.blocks[h].copies[tier] {
						admit(e, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{h}, Medium: medium})
					}
				}
			}
		}
		if _, blocks, salts, bytes := r.Salted(); blocks+salts+bytes != 0 {
			t.Fatalf("of blocks that are gone, %d are remembered, with %d salts of %d bytes", blocks, salts, bytes)
		}
	})
}

package wire

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// TestCopiesHaveTheSaltOfTheirHash has an engine whose hashes tell the salt, as those of vLLM do. It names a salt with the first block of a prompt, and none
// with copies in lower tiers, which come while the block is in device memory or up to copyBatches batches later. A copy has the salt of its block, or an
// unknown one if more blocks were forgotten than are remembered, memory is short, or the state was restored.
func TestCopiesHaveTheSaltOfTheirHash(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const room = 4
		limit := budget.New("test", rapid.SampledFrom([]int64{0, 0, 900}).Draw(t, "limit"))
		var rules *Rules
		begin := func() {
			rules = NewRules(new(BlockSize))
			rules.SetBudget(limit)
			rules.IsVLLM, rules.ClearsDevice, rules.scopes.former.max = true, true, room
		}
		begin()
		mayBeUnknown, others := limit.Limit() > 0, int64(0)
		// A block is hash 100*salt + 10*prompt + n, of which n is 1 to 3. Salt 0 is none.
		salts := []string{"", "s", "t"}
		device, copied, host := make(map[uint64]bool), make(map[uint64]bool), make(map[uint64]bool)
		batches, gone := 0, make(map[uint64]int) // by block, the batch that has evicted or cleared it last
		var all []int                            // those batches, one for each block
		parent := func(hash uint64) (uint64, bool) { return hash - 1, hash%10 > 1 }
		hash := func(t *rapid.T) uint64 {
			return 100*rapid.Uint64Range(0, 2).Draw(t, "salt") + 10*rapid.Uint64Range(1, 3).Draw(t, "prompt") + rapid.Uint64Range(1, 3).Draw(t, "n")
		}
		admit := func(e Event) *Event {
			batches++
			e.BlockSize, e.Tokens = 1, nil
			for _, h := range e.BlockHashes {
				e.Tokens = append(e.Tokens, uint32(h%100))
			}
			b := &Batch{Events: []Event{e}}
			rules.Admit(b, 0, new(Counts))
			if len(b.Events) != 1 {
				t.Fatalf("%+v was left out", e)
			}
			return &b.Events[0]
		}
		store := func(h uint64, medium, salt string) *Event {
			e := Event{Kind: KindStored, BlockHashes: []uint64{h}, Medium: medium, CacheSalt: salt}
			e.Parent, e.HasParent = parent(h)
			return admit(e)
		}
		want := func(t *rapid.T, h uint64, e *Event) {
			salt := salts[h/100]
			hashes := kvblock.AppendTokensHashes(nil, e.Tokens, 1, kvblock.Seed("", salt), false, nil)
			isUnknown := len(e.TokensHashes) == 0
			if !isUnknown && (e.CacheSalt != salt || !slices.Equal(e.TokensHashes, hashes)) || isUnknown && !mayBeUnknown {
				t.Fatalf("block %d has the salt %q and the hashes %v, want %q", h, e.CacheSalt, e.TokensHashes, salt)
			}
		}
		// forget records that blocks have left device memory with the next batch.
		forget := func(blocks ...uint64) {
			for _, h := range blocks {
				gone[h] = batches + 1
				all = append(all, batches+1)
			}
			all = slices.DeleteFunc(all, func(at int) bool { return batches-at > copyBatches+1 })
			mayBeUnknown = mayBeUnknown || len(all) > room
		}
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				h := hash(t)
				for n := h/10*10 + 1; n <= h; n++ {
					if device[n] {
						continue
					}
					salt := ""
					if n%10 == 1 {
						salt = salts[n/100]
					}
					device[n] = true
					want(t, n, store(n, "GPU", salt))
				}
			},
			"evict": func(t *rapid.T) {
				h := hash(t)
				if !device[h] || device[h+1] && h%10 < 3 {
					t.Skip()
				}
				delete(device, h)
				forget(h)
				admit(Event{Kind: KindRemoved, BlockHashes: []uint64{h}, Medium: "GPU"})
			},
			"copy": func(t *rapid.T) {
				h := hash(t)
				if at, ok := gone[h]; copied[h] || !device[h] && (!ok || batches-at >= copyBatches) {
					t.Skip()
				}
				medium := rapid.SampledFrom([]string{"CPU", "STORAGE"}).Draw(t, "medium")
				copied[h], host[h] = true, medium == "CPU"
				want(t, h, store(h, medium, ""))
			},
			"clear": func(*rapid.T) {
				forget(slices.Collect(maps.Keys(device))...)
				clear(device)
				admit(Event{Kind: KindCleared})
			},
			"restore": func(t *rapid.T) {
				state := rules.State()
				rules.Close()
				begin()
				if err := CheckState(state); err != nil {
					t.Fatal(err)
				}
				rules.Restore(state)
				mayBeUnknown = mayBeUnknown || len(gone) > 0
			},
			"others take memory": func(t *rapid.T) {
				if n := int64(64 * rapid.IntRange(1, 6).Draw(t, "blocks")); limit.Limit() > 0 && limit.Reserve(n) {
					others += n
				}
			},
			"others give memory back": func(*rapid.T) {
				limit.Release(others)
				others = 0
			},
			"": func(t *rapid.T) {
				for h := range copied { // what is in storage for ever is not recorded for ever
					if r := rules.scopes.ranks[0]; r != nil && !device[h] && !host[h] && !mayBeUnknown {
						if _, ok := r.blocks[h]; ok {
							t.Fatalf("block %d is recorded", h)
						}
					}
				}
				names := 0
				for _, n := range rules.scopes.names {
					if n.blocks > 0 {
						names += n.scope.bytes()
					}
				}
				bytes := int64(scopedBlockCost*(rules.scopes.blocks+len(rules.scopes.former.ring)) + names)
				if limit.Used() != bytes+others || len(rules.scopes.former.ring) > room || len(rules.scopes.former.blocks) > len(rules.scopes.former.ring) {
					t.Fatalf("%d bytes are reserved, want %d and %d of others", limit.Used(), bytes, others)
				}
			},
		})
		rules.Close()
		if limit.Release(others); limit.Used() != 0 {
			t.Fatalf("%d bytes are not released", limit.Used())
		}
	})
}

// TestDeviceMemoryTellsTheSaltOfACopy has a copy of unknown salt after a restart of kvcast, and then the block in device memory, of which the engine tells the
// salt, and its child.
func TestDeviceMemoryTellsTheSaltOfACopy(t *testing.T) {
	t.Parallel()
	for _, salt := range []string{"", "s"} {
		rules := NewRules(new(BlockSize))
		rules.IsVLLM, rules.ClearsDevice = true, true
		admit := func(e Event) Event {
			e.BlockSize = 1
			for _, h := range e.BlockHashes {
				e.Tokens = append(e.Tokens, uint32(h))
			}
			b := &Batch{Events: []Event{e}}
			rules.Admit(b, 0, new(Counts))
			return b.Events[0]
		}
		admit(Event{Kind: KindStored, BlockHashes: []uint64{50}, CacheSalt: "x", Medium: "GPU"})
		admit(Event{Kind: KindStored, BlockHashes: []uint64{1}, CacheSalt: salt, Medium: "GPU"})
		admit(Event{Kind: KindRemoved, BlockHashes: []uint64{50}, Medium: "GPU"})
		if salt != "" {
			admit(Event{Kind: KindRemoved, BlockHashes: []uint64{1}, Medium: "GPU"})
		}
		state := rules.State()
		rules = NewRules(new(BlockSize))
		rules.IsVLLM, rules.ClearsDevice = true, true
		rules.Restore(state)
		if e := admit(Event{Kind: KindStored, BlockHashes: []uint64{1}, Medium: "CPU"}); len(e.TokensHashes) > 0 {
			t.Errorf("salt %q: a copy after a restart has known content", salt)
		}
		admit(Event{Kind: KindRemoved, BlockHashes: []uint64{1}, Medium: "GPU"})
		for range 100 {
			admit(Event{Kind: KindStored, BlockHashes: []uint64{77}, Medium: "GPU"})
		}
		for _, e := range []Event{
			{Kind: KindStored, BlockHashes: []uint64{1}, CacheSalt: salt, Medium: "GPU"},
			{Kind: KindStored, BlockHashes: []uint64{2}, HasParent: true, Parent: 1, Medium: "GPU"},
			{Kind: KindStored, BlockHashes: []uint64{1}, Medium: "CPU"},
		} {
			got := admit(e)
			want := kvblock.AppendTokensHashes(nil, got.Tokens, 1, kvblock.Seed("", salt), false, nil)
			if diff := cmp.Diff(want, got.TokensHashes); diff != "" || got.CacheSalt != salt {
				t.Errorf("salt %q: %d has the salt %q, tokens hashes (-want +got):\n%s", salt, e.BlockHashes, got.CacheSalt, diff)
			}
		}
	}
}

package wire

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// TestCopiesHaveTheSaltOfTheirHash has an engine whose hashes tell the salt, as those of vLLM do. It names a salt with the first block of a prompt, and none
// with copies in lower tiers, which come while the block is in device memory or up to a number of evictions later. A copy has the salt of its block, or
// an unknown one after a clear of more blocks than are remembered.
func TestCopiesHaveTheSaltOfTheirHash(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := budget.New("test", rapid.SampledFrom([]int64{0, 0, 2000}).Draw(t, "limit"))
		rules := NewRules(new(BlockSize))
		rules.SetBudget(limit)
		rules.IsVLLM, rules.ClearsDevice, rules.scopes.former.max = true, true, 4
		// A block is hash 100*salt + 10*prompt + n, of which n is 1 to 3. Salt 0 is none.
		salts := []string{"", "s", "t"}
		device, copied, host := make(map[uint64]bool), make(map[uint64]bool), make(map[uint64]bool)
		var gone [][]uint64 // from device memory at once, the last ones last
		// isLate reports whether a block is gone for too long to be copied.
		isLate := func(h uint64) bool {
			room := 4
			for _, blocks := range slices.Backward(gone) {
				if room -= len(blocks); room < 0 {
					return true
				}
				if slices.Contains(blocks, h) {
					return false
				}
			}
			return true
		}
		parent := func(hash uint64) (uint64, bool) { return hash - 1, hash%10 > 1 }
		hash := func(t *rapid.T) uint64 {
			return 100*rapid.Uint64Range(0, 2).Draw(t, "salt") + 10*rapid.Uint64Range(1, 3).Draw(t, "prompt") + rapid.Uint64Range(1, 3).Draw(t, "n")
		}
		admit := func(e Event) *Event {
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
		want := func(t *rapid.T, h uint64, mayBeUnknown bool, e *Event) {
			salt := salts[h/100]
			hashes := kvblock.AppendTokensHashes(nil, e.Tokens, 1, kvblock.Seed("", salt), false, nil)
			if isUnknown := len(e.TokensHashes) == 0; isUnknown != (e.CacheSalt != salt || !slices.Equal(e.TokensHashes, hashes)) || isUnknown && !mayBeUnknown {
				t.Fatalf("block %d has the salt %q and the hashes %v, want %q", h, e.CacheSalt, e.TokensHashes, salt)
			}
		}
		mayBeUnknown := limit.Limit() > 0
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
					want(t, n, mayBeUnknown, store(n, "GPU", salt))
				}
			},
			"evict": func(t *rapid.T) {
				h := hash(t)
				if !device[h] || device[h+1] && h%10 < 3 {
					t.Skip()
				}
				delete(device, h)
				gone = append(gone, []uint64{h})
				admit(Event{Kind: KindRemoved, BlockHashes: []uint64{h}, Medium: "GPU"})
			},
			"copy": func(t *rapid.T) {
				h := hash(t)
				if copied[h] || !device[h] && isLate(h) {
					t.Skip()
				}
				medium := rapid.SampledFrom([]string{"CPU", "STORAGE"}).Draw(t, "medium")
				copied[h], host[h] = true, medium == "CPU"
				want(t, h, mayBeUnknown, store(h, medium, ""))
			},
			"clear": func(*rapid.T) {
				var blocks []uint64
				for _, h := range slices.Sorted(maps.Keys(device)) {
					if !host[h] && (h >= 100 || mayBeUnknown) { // others are not recorded
						blocks = append(blocks, h)
					}
				}
				gone = append(gone, blocks)
				mayBeUnknown = mayBeUnknown || len(blocks) > 4
				clear(device)
				admit(Event{Kind: KindCleared})
			},
		})
		for h := range copied { // in storage for ever
			if r := rules.scopes.ranks[0]; r != nil && !device[h] && !host[h] && !mayBeUnknown {
				if _, ok := r.blocks[h]; ok {
					t.Fatalf("block %d is recorded", h)
				}
			}
		}
		if rules.Close(); limit.Used() != 0 {
			t.Fatalf("%d bytes are not released", limit.Used())
		}
	})
}

package workers

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
)

// TestBlocksEqualAModel compares blocks with a list of what was announced of each hash since it was last removed or too old.
func TestBlocksEqualAModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const maxAge = 10 * time.Second
		limit := budget.New("test", 0)
		b, now := newBlocks(maxAge, limit), time.Unix(1000, 0)
		type announced struct {
			contents []feed.Content
			last     time.Time
		}
		model := make(map[uint64]announced)
		isHeld := func(hash uint64) bool { return len(model[hash].contents) == 1 }
		hash := rapid.Uint64Range(1, 4)
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				c := feed.Content{Hash: hash.Draw(t, "hash"), TokensHash: rapid.Uint64Range(1, 2).Draw(t, "tokens"), LoRA: rapid.SampledFrom([]string{"", "a"}).Draw(t, "lora")}
				before, at := isHeld(c.Hash), model[c.Hash]
				if at.last = now; !slices.Contains(at.contents, c) {
					at.contents = append(at.contents, c)
				}
				model[c.Hash] = at
				isNew, gone := b.store(c, now)
				if isNew != (isHeld(c.Hash) && !before) || slices.Contains(gone, c.Hash) != (before && !isHeld(c.Hash)) || len(gone) > 1 {
					t.Fatalf("new %v, gone %v; held before %v, now %v", isNew, gone, before, isHeld(c.Hash))
				}
			},
			"remove": func(t *rapid.T) {
				h := hash.Draw(t, "hash")
				want := isHeld(h)
				if delete(model, h); b.remove(h) != want {
					t.Fatalf("block %d: got %v", h, !want)
				}
			},
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 6).Draw(t, "seconds")) * time.Second)
				var want []uint64
				for h, at := range model {
					if now.Sub(at.last) > maxAge {
						if isHeld(h) {
							want = append(want, h)
						}
						delete(model, h)
					}
				}
				got := b.expire(now)
				if slices.Sort(want); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
					t.Fatalf("got %v, want %v", got, want)
				}
			},
			"": func(t *rapid.T) {
				got, bytes := make(map[uint64]bool), int64(0)
				for _, c := range b.held() {
					got[c.Hash] = true
				}
				for h, at := range model {
					if got[h] != isHeld(h) {
						t.Fatalf("block %d is held: %v, after %+v", h, got[h], at)
					}
					bytes += int64(blockBytes + len(at.contents[0].LoRA))
				}
				if limit.Used() != bytes || len(b.all) != len(model) || b.byAge.Len() != len(model) {
					t.Fatalf("%d bytes, %d and %d blocks, want %d and %d", limit.Used(), len(b.all), b.byAge.Len(), bytes, len(model))
				}
			},
		})
		if b.close(); limit.Used() != 0 {
			t.Fatalf("%d bytes are not released", limit.Used())
		}
	})
}

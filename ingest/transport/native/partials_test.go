package native

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestOldestPartialsAreEvicted compares partials with a plain list: while connections that are not
// evicted exceed the limit, the one whose message is incomplete for the longest time is evicted.
func TestOldestPartialsAreEvicted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit = 100
		p := newPartials(limit)
		all := make([]partial, 5)
		evicted := make([]bool, len(all))
		for i := range all {
			all[i].evict = func() {
				if evicted[i] {
					t.Errorf("connection %d is evicted twice", i)
				}
				evicted[i] = true
			}
		}
		var order []int // connections with incomplete messages, the oldest first
		want := make([]bool, len(all))
		t.Repeat(map[string]func(*rapid.T){
			"resize": func(t *rapid.T) {
				i := rapid.IntRange(0, len(all)-1).Draw(t, "connection")
				bytes := rapid.Int64Range(0, 60).Draw(t, "bytes")
				unchanged := bytes == all[i].bytes
				p.resize(&all[i], bytes)
				switch at := slices.Index(order, i); {
				case unchanged:
					return
				case bytes == 0:
					order = slices.Delete(order, at, at+1)
					return
				case at < 0:
					order = append(order, i)
				}
				excess := -int64(limit)
				for _, i := range order {
					excess += all[i].bytes
				}
				for _, i := range order {
					if excess > 0 {
						want[i] = true
						excess -= all[i].bytes
					}
				}
			},
			"": func(t *rapid.T) {
				if !slices.Equal(evicted, want) {
					t.Fatalf("evicted %v, want %v", evicted, want)
				}
				var used int64
				for i := range all {
					used += all[i].bytes
				}
				if p.used != used || p.order.Len() != len(order) {
					t.Fatalf("%d bytes of %d connections, want %d of %d", p.used, p.order.Len(), used, len(order))
				}
			},
		})
	})
}

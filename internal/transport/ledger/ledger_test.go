package ledger

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestLedger makes, completes and releases claims at random, and checks after each step that memory
// is bounded, that no claim waits for memory that is free, and that no message is evicted whose
// address uses no more than its share.
func TestLedger(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit = 100
		l := New(limit)
		var granted, waiting, incomplete, evicted []*Claim
		draw := func(t *rapid.T, from []*Claim) *Claim {
			if len(from) == 0 {
				t.Skip("no claim")
			}
			return rapid.SampledFrom(from).Draw(t, "claim")
		}
		without := func(all []*Claim, c *Claim) []*Claim {
			return slices.DeleteFunc(all, func(other *Claim) bool { return other == c })
		}
		used := func(address netip.Prefix) (n int64) {
			for _, c := range granted {
				if c.address == address {
					n += c.bytes
				}
			}
			return n
		}
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) {
				c := &Claim{
					address: netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(rapid.IntRange(0, 2).Draw(t, "address"))}), 32),
					bytes:   rapid.Int64Range(1, 60).Draw(t, "bytes"), granted: make(chan struct{}),
				}
				c.evict = func() {
					switch {
					case !slices.Contains(incomplete, c) && !slices.Contains(waiting, c):
						t.Errorf("a claim is evicted that has no incomplete message")
					case slices.Contains(evicted, c):
						t.Errorf("a claim is evicted twice")
					case l.owners[c.address].used <= limit/4:
						t.Errorf("a claim of an address is evicted that uses %d of %d", l.owners[c.address].used, limit)
					}
					evicted = append(evicted, c)
				}
				waiting = append(waiting, c)
				l.Request(c)
			},
			"extend": func(t *rapid.T) {
				c := draw(t, granted)
				bytes, before := rapid.Int64Range(1, 120).Draw(t, "bytes"), l.used-c.bytes
				if ok := l.Extend(c, bytes); ok != (bytes <= c.bytes || before == 0 || before+bytes <= limit) {
					t.Fatalf("extension to %d bytes beside %d: %v", bytes, before, ok)
				}
			},
			"shrink": func(t *rapid.T) {
				c := draw(t, granted)
				bytes := rapid.Int64Range(1, 60).Draw(t, "bytes")
				want := min(c.bytes, bytes)
				if l.Shrink(c, bytes); c.bytes != want {
					t.Fatalf("%d bytes after shrinking to %d, want %d", c.bytes, bytes, want)
				}
			},
			"complete": func(t *rapid.T) {
				c := draw(t, incomplete)
				incomplete = without(incomplete, c)
				l.Complete(c)
			},
			"release": func(t *rapid.T) {
				c := draw(t, slices.Concat(granted, waiting))
				granted, waiting, incomplete, evicted = without(granted, c), without(waiting, c), without(incomplete, c), without(evicted, c)
				l.Release(c)
			},
			"": func(t *rapid.T) {
				for _, c := range slices.Clone(waiting) {
					select {
					case <-c.granted:
						waiting, granted, incomplete = without(waiting, c), append(granted, c), append(incomplete, c)
					default:
					}
				}
				var sum int64
				for _, c := range granted {
					sum += c.bytes
				}
				if sum > limit && len(granted) > 1 || l.used != sum {
					t.Fatalf("%d bytes are granted, counted %d", sum, l.used)
				}
				least := int64(limit)
				for _, c := range waiting {
					least = min(least, used(c.address))
				}
				for _, c := range waiting {
					if used(c.address) == least && sum+c.bytes <= limit && c == firstOf(waiting, least, used) {
						t.Fatalf("a claim of %d bytes waits while %d of %d are in use", c.bytes, sum, limit)
					}
				}
				if len(granted)+len(waiting) == 0 && len(l.owners) > 0 {
					t.Fatalf("%d addresses without claims", len(l.owners))
				}
			},
		})
	})
}

// firstOf returns the first claim of an address that uses so many bytes.
func firstOf(waiting []*Claim, bytes int64, used func(netip.Prefix) int64) *Claim {
	i := slices.IndexFunc(waiting, func(c *Claim) bool { return used(c.address) == bytes })
	return waiting[i]
}

// TestLedgerEvictsTheLargestUser checks that the oldest incomplete message is evicted of the address
// that uses the most, if that is more than the share of the one that waits, and otherwise after a time.
func TestLedgerEvictsTheLargestUser(t *testing.T) {
	l := New(100)
	var evicted []string
	request := func(name string, address byte, bytes int64) *Claim {
		c := &Claim{address: netip.PrefixFrom(netip.AddrFrom4([4]byte{address}), 32), bytes: bytes, granted: make(chan struct{})}
		c.evict = func() { evicted = append(evicted, name) }
		l.Request(c)
		return c
	}
	want := func(names ...string) {
		t.Helper()
		if !slices.Equal(evicted, names) {
			t.Fatalf("evicted %v, want %v", evicted, names)
		}
	}
	complete := request("complete", 1, 20)
	l.Complete(complete)
	first := request("first", 1, 30)
	request("second", 1, 30)
	request("other", 2, 20)
	want()
	waits := request("waits", 3, 20)
	want("first")
	request("waits too", 3, 10)
	want("first") // whose memory is enough for both
	l.Release(first)
	<-waits.granted
	request("large", 4, 60) // as much as address 1 uses
	want("first")
	l.EvictSince(time.Time{})
	want("first")
	l.EvictSince(time.Now().Add(time.Second))
	want("first", "second")
}

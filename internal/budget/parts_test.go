package budget_test

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
)

// TestAddressesLeaveRoomForOthers compares parts with what is written of them. Peers without an address may use the whole budget.
func TestLastEighthIsForAddressesThatUseLess(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.SampledFrom([]int64{0, 1, 8, 100}).Draw(t, "limit")
		total := budget.New("units", limit)
		parts := budget.NewParts(total)
		peers := []netip.Addr{{}, netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")}
		owners := []int{0, 1, 2, 3, 3} // a /64 is one address
		var of [5]*budget.Budget
		for i, p := range peers {
			of[i] = parts.Open(p)
		}
		var used [4]int64
		all := func() (n int64) {
			for _, u := range used {
				n += u
			}
			return n
		}
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			i := rapid.IntRange(0, len(peers)-1).Draw(t, "peer")
			b, own := of[i], &used[owners[i]]
			n := rapid.Int64Range(0, 20).Draw(t, "units")
			most := limit
			if owners[i] != 0 {
				most = max(1, limit-(*own+n)/7)
			}
			switch rapid.SampledFrom([]string{"reserve", "release", "adjust", "move"}).Draw(t, "action") {
			case "reserve":
				want := limit == 0 || all()+n <= most
				if got := b.Reserve(n); got != want {
					t.Fatalf("reserve %d: got %t, want %t: %v of %d", n, got, want, used, limit)
				} else if got {
					*own += n
				}
			case "release":
				n = min(n, *own)
				b.Release(n)
				*own -= n
			case "adjust":
				b.Adjust(n)
				*own += n
			case "move":
				n = min(n, *own)
				to := rapid.IntRange(0, len(peers)-1).Draw(t, "to")
				b.MoveTo(of[to], n)
				*own -= n
				used[owners[to]] += n
			}
			if total.Used() != all() {
				t.Fatalf("%d units are reserved, want %d", total.Used(), all())
			}
			for i, b := range of {
				if owners[i] != 0 && b.Used() != used[owners[i]] {
					t.Fatalf("peer %d uses %d units, want %d", i, b.Used(), used[owners[i]])
				}
				if excess := max(0, all()-limit); limit > 0 && b.Excess() != excess || b.Limit() != limit {
					t.Fatalf("peer %d: excess %d of %d, want %d", i, b.Excess(), b.Limit(), excess)
				}
				if room := b.Room(); b.Full() != (room == 0) || room > 0 && room < 1<<60 && !b.Reserve(1) {
					t.Fatalf("peer %d: no unit can be reserved with room for %d", i, room)
				} else if room > 0 && room < 1<<60 {
					b.Release(1)
				} else if room == 0 && b.Reserve(1) {
					t.Fatalf("peer %d: a unit can be reserved without room", i)
				}
			}
		}
	})
}

// TestFewAddressesCannotUseUpABudget has addresses take all that they get, and then one that has nothing yet.
func TestFewAddressesCannotUseUpABudget(t *testing.T) {
	const limit = 29_000
	for addresses := range 8 {
		total := budget.New("units", limit)
		parts := budget.NewParts(total)
		var greedy []*budget.Budget
		for i := range addresses {
			greedy = append(greedy, parts.Open(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})))
		}
		for range limit {
			for _, b := range greedy {
				b.Reserve(1)
			}
		}
		left := limit - total.Used()
		if want := int64(limit / (1 + 7*addresses)); left < want || left > want+int64(addresses)+1 {
			t.Errorf("%d addresses leave %d units, want %d", addresses, left, want)
		}
		if !parts.Open(netip.MustParseAddr("198.51.100.1")).Reserve(left / 2) {
			t.Errorf("%d addresses leave nothing to another", addresses)
		}
	}
}

func TestPartsAreForgotten(t *testing.T) {
	parts := budget.NewParts(budget.New("units", 80))
	peer := netip.MustParseAddr("192.0.2.1")
	first, second := parts.Open(peer), parts.Open(peer)
	if first != second {
		t.Error("an address has two parts")
	}
	parts.Close(peer)
	if parts.Open(peer) != first {
		t.Error("a part that is used is forgotten")
	}
	parts.Close(peer)
	parts.Close(peer)
	if parts.Open(peer) == first {
		t.Error("a part that is not used is kept")
	}
}

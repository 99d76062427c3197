package truth

import "testing"

// TestWindowIsThatOfThePosition asks for the states that an answer may show at each entry.
func TestWindowIsThatOfThePosition(t *testing.T) {
	r, other := Rank{Worker: "w"}, Rank{Worker: "w", DPRank: 1}
	s := newStream()
	const newest = 30
	for seq, e := range []struct {
		rank  Rank
		state state // 0: it has no batch
	}{
		1: {}, 2: {r, 5}, 3: {other, 9}, 4: {r, 8}, 5: {r, 0}, 6: {r, 9}, 7: {r, 2}, 8: {other, 10},
	} {
		s.receive(at(seq), uint64(seq), e.rank, e.state, e.state > 0)
		s.receive(at(100), uint64(seq), r, 20, true) // another router has received it before
	}
	for seq, want := range []window{
		1: {0, 4},
		2: {5, 7}, 3: {5, 7},
		4: {8, 8}, 5: {8, 8},
		6: {9, 9},                                      // the worker was added again after it, and repeats batches
		7: {2, newest}, 8: {2, newest}, 9: {2, newest}, // no later entry is known
	} {
		if got := s.window(r, uint64(seq), newest); seq > 0 && got != want {
			t.Errorf("entry %d: got %+v, want %+v", seq, got, want)
		}
	}
	if got := s.window(Rank{Worker: "x"}, 5, newest); got != (window{0, newest}) {
		t.Errorf("a rank without entries: got %+v", got)
	}
	for _, tt := range []struct {
		at   int
		want uint64
	}{{0, 0}, {1, 1}, {4, 4}, {8, 8}, {99, 8}} {
		if got := s.before(at(tt.at)); got != tt.want {
			t.Errorf("before %d: got entry %d, want %d", tt.at, got, tt.want)
		}
	}
}

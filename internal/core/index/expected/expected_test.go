package expected_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index/expected"
)

// noted is a note of the model.
type noted struct {
	caller string
	rank   int
	start  uint64
	prompt []uint64
	until  int
}

// model is what the package comment says, without any data structure.
type model struct {
	limits expected.Limits
	notes  []noted
}

// cost returns the blocks of some notes, and 9 more for each.
func (m *model) cost(of func(noted) bool) (cost int) {
	for _, n := range m.notes {
		if of(n) {
			cost += len(n.prompt) + 9
		}
	}
	return cost
}

func (m *model) all() int { return m.cost(func(noted) bool { return true }) }

func (m *model) note(n noted) bool {
	for i := range m.notes {
		if o := &m.notes[i]; o.rank == n.rank && o.start == n.start && slices.Equal(o.prompt, n.prompt) {
			o.until = max(o.until, n.until)
			return true
		}
	}
	ofRank := m.cost(func(o noted) bool { return o.rank == n.rank })
	ofCaller := m.cost(func(o noted) bool { return o.caller == n.caller })
	if cost := len(n.prompt) + 9; m.all()+cost > m.limits.All || ofRank+cost > m.limits.Rank || ofCaller+cost > m.limits.Caller {
		return false
	}
	m.notes = append(m.notes, n)
	return true
}

func (m *model) end(ends func(noted) bool) { m.notes = slices.DeleteFunc(m.notes, ends) }

func (m *model) match(start uint64, prompt []uint64) map[int]int {
	longest := make(map[int]int)
	for _, n := range m.notes {
		length := 0
		for n.start == start && length < min(len(prompt), len(n.prompt)) && prompt[length] == n.prompt[length] {
			length++
		}
		if length > longest[n.rank] {
			longest[n.rank] = length
		}
	}
	return longest
}

func at(seconds int) time.Time { return time.Unix(int64(seconds), 0) }

func TestEqualsTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := expected.Limits{
			All: rapid.IntRange(1, 200).Draw(t, "all"), Rank: rapid.IntRange(1, 90).Draw(t, "of a rank"), Caller: rapid.IntRange(1, 90).Draw(t, "of a caller"),
		}
		s, m := expected.New[int](limits), model{limits: limits}
		hashes, starts, ranks := rapid.Uint64Range(1, 3), rapid.Uint64Range(0, 1), rapid.IntRange(0, 3)
		prompts := rapid.SliceOfN(hashes, 1, 6)
		now := 0
		t.Repeat(map[string]func(*rapid.T){
			"note": func(t *rapid.T) {
				n := noted{rapid.SampledFrom([]string{"a", "b"}).Draw(t, "caller"), ranks.Draw(t, "rank"), starts.Draw(t, "start"), prompts.Draw(t, "prompt"), now + rapid.IntRange(1, 9).Draw(t, "seconds")}
				if got, want := s.Note(n.caller, n.rank, n.start, n.prompt, at(n.until)), m.note(n); got != want {
					t.Fatalf("noted: %v, want %v", got, want)
				}
			},
			"stored": func(t *rapid.T) {
				rank, stored := ranks.Draw(t, "rank"), rapid.SliceOfN(hashes, 0, 2).Draw(t, "hashes")
				s.Stored(rank, stored)
				m.end(func(n noted) bool { return n.rank == rank && slices.Contains(stored, n.prompt[len(n.prompt)-1]) })
			},
			"drop": func(t *rapid.T) {
				rank := ranks.Draw(t, "rank")
				s.Drop(rank)
				m.end(func(n noted) bool { return n.rank == rank })
			},
			"advance": func(t *rapid.T) {
				now += rapid.IntRange(0, 5).Draw(t, "seconds")
				s.Advance(at(now))
				m.end(func(n noted) bool { return n.until <= now })
			},
			"": func(t *rapid.T) {
				start, prompt := starts.Draw(t, "start"), prompts.Draw(t, "prompt")
				got := make(map[int]int)
				s.Match(start, prompt, func(rank, blocks int) {
					if _, again := got[rank]; again {
						t.Fatalf("rank %d again, after %v", rank, got)
					}
					got[rank] = blocks
				})
				if want := m.match(start, prompt); !maps.Equal(got, want) {
					t.Fatalf("got %v, want %v of %+v", got, want, m.notes)
				}
				if want := m.all() - 9*len(m.notes); s.Blocks() != want {
					t.Fatalf("%d blocks, want %d", s.Blocks(), want)
				}
			},
		})
	})
}

// TestEmptySetKeepsNothing ends all notes in each way.
func TestEmptySetKeepsNothing(t *testing.T) {
	for name, end := range map[string]func(*expected.Set[int]){
		"stored": func(s *expected.Set[int]) { s.Stored(1, []uint64{5}) },
		"drop":   func(s *expected.Set[int]) { s.Drop(1) },
		"time":   func(s *expected.Set[int]) { s.Advance(at(3)) },
	} {
		s := expected.New[int](expected.Limits{All: 100, Rank: 100, Caller: 100})
		if !s.Note("a", 1, 0, []uint64{1, 2, 5}, at(3)) || !s.Note("b", 1, 0, []uint64{1, 5}, at(2)) {
			t.Fatal("not noted")
		}
		if end(s); s.Size() != 0 || s.Blocks() != 0 {
			t.Errorf("%s: %d blocks, and %d elements of maps and slices", name, s.Blocks(), s.Size())
		}
	}
}

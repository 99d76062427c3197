package hashtable

import (
	"fmt"
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

type entry struct {
	value uint64
	tag   uint8
}

// check compares a table with a map, by each way to read it, and checks its segments.
func check(t interface{ Fatalf(string, ...any) }, got *Table[uint64, uint8], want map[uint64]entry) {
	if got.Len() != len(want) {
		t.Fatalf("length: got %d, want %d", got.Len(), len(want))
	}
	for key, e := range want {
		if value, tag, ok := got.Get(key); !ok || (entry{value, tag}) != e {
			t.Fatalf("key %d: got %d, %d, %v, want %v", key, value, tag, ok, e)
		}
	}
	all, at := make(map[uint64]entry), uint64(0)
	for s := range got.Segments() {
		if same, next := got.SegmentAt(at); same != s {
			t.Fatalf("segment at %x is not the next one", at)
		} else {
			at = next
		}
		n := 0
		for i := range s.Slots {
			b := &s.Slots[i]
			if !b.Used() {
				continue
			}
			n++
			if _, twice := all[b.Key()]; twice {
				t.Fatalf("key %d is there twice", b.Key())
			}
			all[b.Key()] = entry{b.Value, s.Tags[i]}
		}
		if s.n != n || s.n > len(s.Slots)-len(s.Slots)/4 {
			t.Fatalf("segment: %d keys, counted %d, in %d slots", n, s.n, len(s.Slots))
		}
	}
	if at != 0 {
		t.Fatalf("the last segment is followed by one at %x", at)
	}
	if !maps.Equal(want, all) {
		t.Fatalf("entries (-want +got):\n%s", cmp.Diff(want, all, cmp.AllowUnexported(entry{})))
	}
	if len(got.dir) != 1<<got.depth {
		t.Fatalf("directory: %d entries at depth %d", len(got.dir), got.depth)
	}
	for i, s := range got.dir {
		if first := i >> (got.depth - s.depth) << (got.depth - s.depth); got.dir[first] != s {
			t.Fatalf("directory entry %d: not the segment of its first %d bits", i, s.depth)
		}
	}
}

func put(t *Table[uint64, uint8], key uint64, e entry) (existed bool) {
	s, i, existed := t.Put(key)
	s.Slots[i].Value, s.Tags[i] = e.value, e.tag
	return existed
}

func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		got, want := New[uint64, uint8](), make(map[uint64]entry)
		// Few keys, so that they are deleted and put again, or so many that segments split.
		keys := rapid.Uint64Range(0, rapid.SampledFrom([]uint64{10, 300, 5000}).Draw(t, "keys"))
		for step := range rapid.IntRange(0, 30).Draw(t, "steps") {
			first, n := keys.Draw(t, "key"), rapid.Uint64Range(1, 4000).Draw(t, "run")
			remove := rapid.Bool().Draw(t, "remove")
			for key := first; key < first+n; key++ {
				if remove {
					got.Remove(key)
					delete(want, key)
					continue
				}
				e := entry{uint64(step), uint8(key)}
				_, ok := want[key]
				if existed := put(&got, key, e); ok != existed {
					t.Fatalf("put %d: got existed %v, want %v", key, existed, ok)
				}
				want[key] = e
			}
			check(t, &got, want)
		}
	})
}

// TestTableSplitsManyTimes grows a table far beyond one segment, and deletes most of it.
func TestTableSplitsManyTimes(t *testing.T) {
	const n = 100_000
	got, want := New[uint64, uint8](), make(map[uint64]entry)
	for key := range uint64(n) {
		e := entry{key, uint8(key)}
		put(&got, key<<40, e)
		want[key<<40] = e
	}
	check(t, &got, want)
	slots := func() (slots int) {
		for s := range got.Segments() {
			slots += len(s.Slots)
		}
		return slots
	}
	if got.depth < 5 {
		t.Errorf("depth: got %d, want some splits", got.depth)
	}
	if load := float64(n) / float64(slots()); load < 0.6 {
		t.Errorf("load: got %.2f, want at least 0.6", load)
	}
	for key := range uint64(n) {
		if key%10 != 0 {
			s, i, _ := got.Find(key << 40)
			got.Delete(s, i)
			delete(want, key<<40)
		}
	}
	check(t, &got, want)
	if load := float64(n/10) / float64(slots()); load < 0.2 {
		t.Errorf("load after deletions: got %.2f, want at least 0.2", load)
	}
}

// TestSegmentOfGreatestDepthGrows fills a segment that cannot split.
func TestSegmentOfGreatestDepthGrows(t *testing.T) {
	got := New[uint64, uint8]()
	got.dir[0].depth = maxDepth
	const keys = 3 * SegmentBytes / 16
	for key := range uint64(keys) {
		got.Put(key)
	}
	if len(got.dir) != 1 || got.Len() != keys {
		t.Fatalf("got %d segments with %d keys", len(got.dir), got.Len())
	}
	for key := range uint64(keys) {
		if _, _, ok := got.Find(key); !ok {
			t.Fatalf("key %d is lost", key)
		}
	}
}

func TestClearedTableIsEmpty(t *testing.T) {
	for _, keys := range []uint64{0, 1, 5, 10_000} {
		got := New[uint64, uint8]()
		for range 2 {
			for key := range keys {
				put(&got, key, entry{key, 1})
			}
			got.Clear()
			check(t, &got, nil)
		}
	}
}

func TestHashIsOneToOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key := rapid.Uint64().Draw(t, "key")
		if got := unhash(Hash(key)); got != key {
			t.Errorf("got key %d, want %d", got, key)
		}
	})
}

func BenchmarkTable(b *testing.B) {
	type value [3]uint64
	for _, n := range []uint64{10_000, 3_000_000} {
		t := New[value, struct{}]()
		for key := range n {
			t.Put(key * 0x9e3779b97f4a7c15)
		}
		b.Run(fmt.Sprintf("Find/keys=%d", n), func(b *testing.B) {
			key := uint64(0)
			for b.Loop() {
				key = (key + 7919) % n
				t.Find(key * 0x9e3779b97f4a7c15)
			}
		})
		b.Run(fmt.Sprintf("PutDelete/keys=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			key := n
			for b.Loop() {
				t.Put(key * 0x9e3779b97f4a7c15)
				s, i, _ := t.Find((key - n) * 0x9e3779b97f4a7c15)
				t.Delete(s, i)
				key++
			}
		})
	}
}

package hashtable

import (
	"fmt"
	"maps"
	"testing"
	"unsafe"

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
		same, next := got.SegmentAt(at)
		if same != s {
			t.Fatalf("segment at %x is not the next one", at)
		}
		for i := range s.Slots {
			b := &s.Slots[i]
			if c := uint8(s.controls[i/8] >> (i % 8 * 8)); b.Used() != (s.used>>i&1 == 1) || b.Used() != (c != 0) || b.Used() && uint64(c) != control(b.hash) {
				t.Fatalf("slot %d: used %v, control %x, mask %x", i, b.Used(), c, s.used)
			}
			if !b.Used() {
				if (entry{b.Value, s.Tags[i]}) != (entry{}) {
					t.Fatalf("an empty slot has %d, %d", b.Value, s.Tags[i])
				}
				continue
			}
			if c := b.Cursor(); c < at || next != 0 && c >= next {
				t.Fatalf("the segment from %x to %x has cursor %x", at, next, c)
			}
			all[b.Key()] = entry{b.Value, s.Tags[i]}
		}
		at = next
	}
	if at != 0 {
		t.Fatalf("the last segment is followed by one at %x", at)
	}
	if !maps.Equal(want, all) {
		t.Fatalf("entries (-want +got):\n%s", cmp.Diff(want, all, cmp.AllowUnexported(entry{})))
	}
	checkDirectory(t, got)
}

func checkDirectory[V, T any](t interface{ Fatalf(string, ...any) }, got *Table[V, T]) {
	deepest := 0
	for i, s := range got.dir {
		shared := got.base + got.depth - uint(s.depth)
		if got.dir[i>>shared<<shared] != s {
			t.Fatalf("directory entry %d: not the segment of its first %d bits", i, s.depth)
		}
		if shared == 0 {
			deepest++
		}
	}
	if len(got.dir) != 1<<got.depth || deepest != got.deepest {
		t.Fatalf("directory: %d entries at depth %d, %d of them deepest, want %d", len(got.dir), got.depth, got.deepest, deepest)
	}
	for _, n := range got.nested {
		checkDirectory(t, n)
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
			got.Prefetch([]uint64{first, first + n})
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

// TestCursorSeesEachKeyOnce visits a table in steps, between which it grows and shrinks.
func TestCursorSeesEachKeyOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := New[struct{}, struct{}]()
		const stay = 200 // these keys stay
		for key := range uint64(stay) {
			table.Put(key)
		}
		added, seen := uint64(stay), make(map[uint64]int)
		for at, steps := uint64(0), 0; ; steps++ {
			if steps > 2000 {
				t.Fatalf("the cursor has not come to an end after %d steps", steps)
			}
			for range rapid.IntRange(0, 2).Draw(t, "changes") {
				n := rapid.Uint64Range(0, 500).Draw(t, "keys")
				if rapid.Bool().Draw(t, "add") && added < 20_000 {
					for range n {
						table.Put(added)
						added++
					}
				} else {
					for range min(n, added-stay) {
						added--
						table.Remove(added)
					}
				}
			}
			s, next := table.SegmentAt(at)
			for i := range s.Slots {
				if b := &s.Slots[i]; b.Used() && b.Cursor() >= at {
					seen[b.Key()]++
				}
			}
			if at = next; at == 0 {
				break
			}
		}
		for key := range uint64(stay) {
			if seen[key] != 1 {
				t.Fatalf("key %d: seen %d times", key, seen[key])
			}
		}
	})
}

// TestShrunkTableIsSmall deletes most of a table.
func TestShrunkTableIsSmall(t *testing.T) {
	const n, rest = 100_000, 10_000
	got, want := New[uint64, uint8](), make(map[uint64]entry)
	for key := range uint64(n) {
		put(&got, key<<40, entry{key, uint8(key)})
	}
	for key := range uint64(n) {
		if key%(n/rest) != 0 {
			got.Remove(key << 40)
		} else {
			want[key<<40] = entry{key, uint8(key)}
		}
	}
	check(t, &got, want)
	segments := 0
	for range got.Segments() {
		segments++
	}
	if load := float64(rest) / float64(segments*SegmentSlots); load < 0.5 {
		t.Errorf("load after deletions: got %.2f, want at least 0.5", load)
	}
	for key := range want {
		got.Remove(key)
	}
	check(t, &got, nil)
	if len(got.dir) != 1 {
		t.Errorf("directory of an empty table: got %d entries, want 1", len(got.dir))
	}
}

// TestEqualPrefixesNest puts so many hashes with the same first bits that a directory would be larger
// than the table.
func TestEqualPrefixesNest(t *testing.T) {
	for _, shared := range []int{24, 40, 56} {
		got, want := New[uint64, uint8](), make(map[uint64]entry)
		for i := range uint64(200) {
			e := entry{i, uint8(i)}
			h := 0x1234567887654321>>(64-shared)<<(64-shared) | i<<1 | 1
			s, at, _ := got.put(h)
			s.Slots[at].Value, s.Tags[at] = e.value, e.tag
			want[unhash(h)] = e
			put(&got, i, e)
			want[i] = e
		}
		check(t, &got, want)
		if len(got.nested) == 0 || len(got.dir) > 512 {
			t.Fatalf("%d bits shared: a directory of %d elements, %d nested tables", shared, len(got.dir), len(got.nested))
		}
		for key := range want {
			if key%7 != 0 {
				got.Remove(key)
				delete(want, key)
			}
		}
		check(t, &got, want)
		for key := range want {
			got.Remove(key)
		}
		check(t, &got, nil)
		got.Clear()
		check(t, &got, nil)
	}
}

// TestPrefixesOfDifferentLengthsNest nests the prefixes 000011 and 0000011.
func TestPrefixesOfDifferentLengthsNest(t *testing.T) {
	got, want := New[uint64, uint8](), make(map[uint64]entry)
	for _, prefix := range []uint64{0b000011 << 58, 0b0000011 << 57} { // of cursors
		for i := range uint64(40) {
			e := entry{prefix, uint8(i)}
			h := prefix<<1 | 0x7f<<32 | i<<1
			s, at, _ := got.put(h)
			s.Slots[at].Value, s.Tags[at] = e.value, e.tag
			want[unhash(h)] = e
		}
	}
	check(t, &got, want)
}

// TestReplacedKeysKeepTheDirectory deletes and puts again keys of the segment for which the directory was doubled.
func TestReplacedKeysKeepTheDirectory(t *testing.T) {
	fixSeed(t)
	table := New[struct{}, struct{}]()
	for key, depth := uint64(0), uint(0); key < 100_000; key++ {
		if table.Put(key); table.depth == depth {
			continue
		}
		depth = table.depth
		var keys []uint64
		for s := range table.Segments() {
			for i := range s.Slots {
				if uint(s.depth) == depth && s.Slots[i].Used() {
					keys = append(keys, s.Slots[i].Key())
				}
			}
		}
		before := &table.dir[0]
		for range 2 {
			for _, key := range keys[:5] {
				table.Remove(key)
			}
			for _, key := range keys[:5] {
				table.Put(key)
			}
			if len(table.dir) > minDirectory && &table.dir[0] != before {
				t.Fatalf("the directory of %d elements was replaced, at %d keys", len(table.dir), table.Len())
			}
		}
		checkDirectory(t, &table)
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

// TestGrowthMovesFewEntries counts the entries that each insertion moves.
func TestGrowthMovesFewEntries(t *testing.T) {
	const n = 1_000_000
	table, moves := New[[2]uint64, struct{}](), 0
	type place struct {
		key uint64
		at  *Slot[[2]uint64]
	}
	var full []place
	for key := range uint64(n) {
		full = full[:0]
		if _, s := table.locate(cursor(Hash(key))); s.used == allUsed {
			for i := range s.Slots {
				full = append(full, place{s.Slots[i].Key(), &s.Slots[i]})
			}
		}
		table.Put(key)
		before := moves
		for _, p := range full {
			if s, i, _ := table.Find(p.key); &s.Slots[i] != p.at {
				moves++
			}
		}
		if moved := moves - before; moved > SegmentSlots {
			t.Fatalf("put %d: moved %d entries, want at most %d", key, moved, SegmentSlots)
		}
		if perKey := float64(moves) / float64(key+1); key >= 1000 && perKey > 1.5 {
			t.Fatalf("moves a key after %d insertions: got %.2f, want at most 1.5", key+1, perKey)
		}
	}
	t.Logf("moves a key: %.2f", float64(moves)/n)
}

// segmentBytes is the memory of a segment of 24-byte slots, a size class of Go's allocator.
const segmentBytes = 768

func bytesPerKey(segments, directory, keys int) float64 {
	return float64(segments*segmentBytes+directory*8) / float64(keys)
}

// fixSeed makes the memory of a table the same in each run: that of some thousand keys varies with
// the seed by some percent.
func fixSeed(t *testing.T) {
	before := seed
	t.Cleanup(func() { seed = before })
	seed = 1
}

// TestTableIsSmallAtAnySize checks the memory while a table grows.
func TestTableIsSmallAtAnySize(t *testing.T) {
	fixSeed(t)
	if size := unsafe.Sizeof(Segment[[2]uint64, struct{}]{}); size > segmentBytes {
		t.Errorf("a segment of 24-byte slots has %d bytes, want at most %d", size, segmentBytes)
	}
	table := New[[2]uint64, struct{}]()
	segments, depth, most := 1, uint(0), 0.0
	for key := range 3_000_000 {
		_, s := table.locate(cursor(Hash(uint64(key))))
		before := s.depth
		table.Put(uint64(key))
		segments += int(s.depth - before) // a split deepens a segment by one
		if key < 1000 || key%64 != 0 && table.depth == depth {
			continue
		}
		depth = table.depth
		perKey := bytesPerKey(segments, len(table.dir), key+1)
		if most = max(most, perKey); perKey > 40 {
			t.Fatalf("bytes a key at %d keys: got %.2f, want at most 40", key+1, perKey)
		}
	}
	t.Logf("bytes a key: at most %.2f", most)
	if counted := countSegments(&table); counted < segments { // a split may leave a half empty, and split again
		t.Errorf("counted %d segments, want at least %d", counted, segments)
	}
}

// TestTableStaysSmall replaces all keys of tables several times.
func TestTableStaysSmall(t *testing.T) {
	fixSeed(t)
	for _, n := range []uint64{50_000, 60_000, 70_000} {
		table := New[[2]uint64, struct{}]()
		for key := range 5 * n {
			table.Put(key)
			if key >= n {
				table.Remove(key - n)
			}
		}
		if perKey := bytesPerKey(countSegments(&table), len(table.dir), table.Len()); perKey > 41 {
			t.Errorf("bytes a key of %d keys: got %.2f, want at most 41", n, perKey)
		} else {
			t.Logf("bytes a key of %d keys: %.2f", n, perKey)
		}
	}
}

func countSegments[V, T any](t *Table[V, T]) (n int) {
	for range t.Segments() {
		n++
	}
	return n
}

func BenchmarkTable(b *testing.B) {
	const run = 16
	keyOf := func(i uint64) uint64 { return i * 0x9e3779b97f4a7c15 }
	for _, n := range []uint64{10_000, 3_000_000} {
		t := New[[2]uint64, struct{}]()
		for i := range n {
			t.Put(keyOf(i))
		}
		var keys, old [run]uint64
		at, next := uint64(0), n
		for _, prefetch := range []bool{false, true} {
			name := map[bool]string{false: "single", true: "prefetch"}[prefetch]
			// Each iteration is a run of 16 keys.
			b.Run(fmt.Sprintf("Find16/%s/keys=%d", name, n), func(b *testing.B) {
				for b.Loop() {
					for i := range keys {
						at = (at + 7919) % n
						keys[i] = keyOf(next - 1 - at)
					}
					if prefetch {
						t.Prefetch(keys[:])
					}
					for _, key := range keys {
						if s, i, ok := t.Find(key); !ok || s.Slots[i].Value[0] != 0 {
							b.Fatal("not found")
						}
					}
				}
			})
			b.Run(fmt.Sprintf("PutDelete16/%s/keys=%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					for i := range keys {
						keys[i], old[i] = keyOf(next), keyOf(next-n)
						next++
					}
					if prefetch {
						t.Prefetch(keys[:])
						t.Prefetch(old[:])
					}
					for _, key := range keys {
						t.Put(key)
					}
					for _, key := range old {
						s, i, _ := t.Find(key)
						t.Delete(s, i)
					}
				}
			})
		}
		b.Run(fmt.Sprintf("Grow/keys=%d", n), func(b *testing.B) {
			t, i := New[[2]uint64, struct{}](), uint64(0)
			for b.Loop() {
				if t.Put(keyOf(i)); t.Len() == int(n) {
					t.Clear()
				}
				i++
			}
		})
	}
}

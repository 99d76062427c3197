package hashtable

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// checkTable compares a table with a map, by each way to read it, and checks its segments.
func checkTable(t interface{ Fatalf(string, ...any) }, got *Table[uint64], want map[uint64]uint64) {
	if got.Len() != len(want) {
		t.Fatalf("length: got %d, want %d", got.Len(), len(want))
	}
	for key, value := range want {
		if v, ok := got.Get(key); !ok || v != value {
			t.Fatalf("key %d: got %d, %v, want %d", key, v, ok, value)
		}
	}
	all := make(map[uint64]uint64)
	for s := range got.All() {
		all[s.Key()] = s.Value
	}
	if !maps.Equal(want, all) {
		t.Fatalf("slots (-want +got):\n%s", cmp.Diff(want, all))
	}
	clear(all)
	for at, next := uint64(0), uint64(1); next != 0; at = next {
		var segment Segment[uint64]
		segment, next = got.SegmentAt(at)
		for i := range segment.Len() {
			s := segment.At(i)
			if s == nil {
				continue
			}
			if c := s.Cursor(); c < at || next != 0 && c >= next {
				t.Fatalf("the segment from %x to %x has cursor %x", at, next, c)
			}
			all[s.Key()] = s.Value
		}
	}
	if !maps.Equal(want, all) {
		t.Fatalf("segments (-want +got):\n%s", cmp.Diff(want, all))
	}
	if slots := slotsOf(got); slots > max(minSlots, 4*len(want)) && slots > len(want)+2*chunkSlots {
		t.Fatalf("%d slots for %d keys", slots, len(want))
	}
	checkDirectory(t, &got.dir)
}

func slotsOf[V any](t *Table[V]) (slots int) {
	for _, c := range t.chunks {
		slots += len(c)
	}
	return slots
}

// checkDirectory checks the elements of a directory, and that each entry is where it is searched.
func checkDirectory(t interface{ Fatalf(string, ...any) }, d *directory) {
	deepest, entries := 0, 0
	for i, s := range d.segments {
		depth := uint(d.depths[i])
		shared := d.depth - depth
		first := i >> shared << shared
		if d.segments[first] != s || d.depths[first] != d.depths[i] {
			t.Fatalf("directory element %d: not the segment of its first %d bits", i, depth)
		}
		if shared == 0 {
			deepest++
		}
		if first < i {
			continue
		}
		entries += int(s.len()) + len(d.overflow[s])
		if len(d.overflow[s]) > 0 && s.len() < segmentEntries {
			t.Fatalf("segment %d has %d entries, and others beside it", i, s.len())
		}
		for at := range s {
			b := &s[at]
			for k := range uint(bucketEntries) {
				e := b.entry(k)
				if k >= b.len() {
					if e != (entry{}) {
						t.Fatalf("segment %d: an entry after the last one: %v", i, e)
					}
					continue
				}
				if foundAt, foundK, ok := s.find(e); !ok || foundAt != uint(at) || foundK != k {
					t.Fatalf("segment %d: the entry %v is in bucket %d, and found in %d, %v", i, e, at, foundAt, ok)
				}
				if d.index(cursor(e.hash))>>shared != uint(i)>>shared {
					t.Fatalf("segment %d has an entry of another one: %v", i, e)
				}
			}
		}
	}
	for s, all := range d.overflow {
		if len(all) == 0 || !slices.Contains(d.segments, s) {
			t.Fatalf("%d entries beside a segment that is in use: %v", len(all), slices.Contains(d.segments, s))
		}
	}
	if len(d.segments) != 1<<d.depth || deepest != d.deepest || entries != d.n {
		t.Fatalf("directory: %d elements at depth %d, %d of them deepest, want %d; %d entries, want %d",
			len(d.segments), d.depth, d.deepest, deepest, d.n, entries)
	}
}

func (t *Table[V]) set(hash uint64, v V) (existed bool) {
	s, existed := t.put(hash)
	s.Value = v
	return existed
}

// remove deletes a key, if the table has it.
func (t *Table[V]) remove(key uint64) {
	if s := t.Find(key); s != nil {
		t.Delete(s)
	}
}

func TestTableIsAMap(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		got, want := New[uint64](), make(map[uint64]uint64)
		// Few keys, so that they are deleted and put again, or so many that segments split.
		keys := rapid.Uint64Range(0, rapid.SampledFrom([]uint64{10, 300, 5000}).Draw(t, "keys"))
		for step := range rapid.IntRange(0, 30).Draw(t, "steps") {
			first, n := keys.Draw(t, "key"), rapid.Uint64Range(1, 4000).Draw(t, "run")
			remove := rapid.Bool().Draw(t, "remove")
			got.Prefetch([]uint64{first, first + n})
			if !remove && rapid.Bool().Draw(t, "new ones") {
				putNew(t, &got, want, first, n)
			}
			for key := first; key < first+n; key++ {
				if remove {
					got.remove(key)
					delete(want, key)
					continue
				}
				value := uint64(step)<<32 + key
				_, ok := want[key]
				if existed := got.set(Hash(key), value); ok != existed {
					t.Fatalf("put %d: got existed %v, want %v", key, existed, ok)
				}
				want[key] = value
			}
			checkTable(t, &got, want)
		}
	})
}

// putNew puts keys up to the first that the table has.
func putNew(t *rapid.T, got *Table[uint64], want map[uint64]uint64, first, n uint64) {
	var keys []uint64
	known := -1
	for key := first; key < first+n; key++ {
		if _, ok := want[key]; ok && known < 0 {
			known = len(keys)
		}
		if keys = append(keys, key); known < 0 {
			want[key] = key ^ 1
		}
	}
	if known < 0 {
		known = len(keys)
	}
	if put := got.PutNew(keys, func(i int) uint64 { return keys[i] ^ 1 }); put != known {
		t.Fatalf("put %d new keys, want %d", put, known)
	}
	checkTable(t, got, want)
}

// TestNewKeyHasTheZeroValue puts keys in slots that had other keys.
func TestNewKeyHasTheZeroValue(t *testing.T) {
	table := New[uint64]()
	for key := range uint64(5000) {
		s, existed := table.Put(key)
		if existed || s.Value != 0 || s.Key() != key {
			t.Fatalf("key %d: got key %d, value %d, existed %v", key, s.Key(), s.Value, existed)
		}
		if s.Value = key + 1; key%3 != 0 {
			table.remove(key / 2)
		}
	}
}

// TestAllMayDelete deletes some of the slots that All yields.
func TestAllMayDelete(t *testing.T) {
	got, want := New[uint64](), make(map[uint64]uint64)
	for key := range uint64(10_000) {
		got.set(Hash(key), key)
		want[key] = key
	}
	for key := range uint64(40) { // which leaves holes
		got.remove(5_000 + 3*key)
		delete(want, 5_000+3*key)
	}
	all, seen := len(want), 0
	for s := range got.All() {
		seen++
		if key := s.Key(); key%3 > 0 {
			got.Delete(s)
			delete(want, key)
		}
	}
	if seen != all {
		t.Errorf("saw %d slots, want %d", seen, all)
	}
	checkTable(t, &got, want)
	for key := range want {
		got.remove(key)
	}
	for key := range uint64(2000) {
		got.set(Hash(key), key)
	}
	for key := range uint64(maxHoles) {
		got.remove(key)
	}
	for s := range got.All() {
		got.Delete(s)
	}
	checkTable(t, &got, nil)
}

// TestCursorSeesEachKeyOnce visits a table in steps, between which it grows and shrinks.
func TestCursorSeesEachKeyOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := New[struct{}]()
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
				n := rapid.Uint64Range(0, 1000).Draw(t, "keys")
				if rapid.Bool().Draw(t, "add") && added < 20_000 {
					for range n {
						table.Put(added)
						added++
					}
				} else {
					for range min(n, added-stay) {
						added--
						table.remove(added)
					}
				}
			}
			segment, next := table.SegmentAt(at)
			for i := range segment.Len() {
				if s := segment.At(i); s != nil && s.Cursor() >= at {
					seen[s.Key()]++
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
	got, want := New[uint64](), make(map[uint64]uint64)
	for key := range uint64(n) {
		got.set(Hash(key<<40), key)
	}
	for key := range uint64(n) {
		if key%(n/rest) != 0 {
			got.remove(key << 40)
		} else {
			want[key<<40] = key
		}
	}
	checkTable(t, &got, want)
	if load := float64(rest) / float64(countSegments(&got)*segmentEntries); load < 0.4 {
		t.Errorf("load after deletions: got %.2f, want at least 0.4", load)
	}
	for key := range want {
		got.remove(key)
	}
	checkTable(t, &got, nil)
	if len(got.dir.segments) != 1 || slotsOf(&got) != minSlots {
		t.Errorf("an empty table has a directory of %d elements, and %d slots", len(got.dir.segments), slotsOf(&got))
	}
}

// TestEqualPrefixesDoNotEnlargeTheDirectory puts so many hashes with the same first bits that a directory would be larger
// than the table.
func TestEqualPrefixesDoNotEnlargeTheDirectory(t *testing.T) {
	testclass.WithoutRace(t)
	for _, shared := range []int{16, 24, 32, 40, 56} {
		got, want := New[uint64](), make(map[uint64]uint64)
		for i := range uint64(400) {
			h := 0x1234567887654321>>(64-shared)<<(64-shared) | bits.Reverse64(i)>>shared | 1
			got.set(h, i)
			want[unhash(h)] = i
			got.set(Hash(i), i)
			want[i] = i
		}
		checkTable(t, &got, want)
		if len(got.dir.overflow) == 0 || len(got.dir.segments) > 512 {
			t.Fatalf("%d bits shared: a directory of %d elements, %d full segments", shared, len(got.dir.segments), len(got.dir.overflow))
		}
		for key := range want {
			if key%7 != 0 {
				got.remove(key)
				delete(want, key)
			}
		}
		checkTable(t, &got, want)
		for key := range uint64(20_000) { // the directory may grow again
			got.set(Hash(key), key)
			want[key] = key
		}
		checkTable(t, &got, want)
		for key := range want {
			got.remove(key)
		}
		checkTable(t, &got, nil)
		if len(got.dir.segments) != 1 || len(got.dir.overflow) > 0 {
			t.Fatalf("an empty table has a directory of %d elements, %d full segments", len(got.dir.segments), len(got.dir.overflow))
		}
	}
}

// TestReplacedKeysKeepTheDirectory deletes and puts again keys of the segment for which the directory was doubled.
func TestReplacedKeysKeepTheDirectory(t *testing.T) {
	testclass.WithoutRace(t)
	fixSeed(t)
	table := New[struct{}]()
	for key, depth := uint64(0), uint(0); key < 1_000_000; key++ {
		if table.Put(key); table.dir.depth == depth {
			continue
		}
		depth = table.dir.depth
		var keys []uint64
		for s := range table.All() {
			if uint(table.dir.depths[table.dir.index(uint32(s.Cursor()>>32))]) == depth {
				keys = append(keys, s.Key())
			}
		}
		before := &table.dir.segments[0]
		for range 2 {
			for _, key := range keys {
				table.remove(key)
			}
			for _, key := range keys {
				table.Put(key)
			}
			if len(table.dir.segments) > minDirectory && &table.dir.segments[0] != before {
				t.Fatalf("the directory of %d elements was replaced, at %d keys", len(table.dir.segments), table.Len())
			}
		}
		checkDirectory(t, &table.dir)
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

// TestGrowthMovesFewEntries counts the entries that splits move.
func TestGrowthMovesFewEntries(t *testing.T) {
	testclass.WithoutRace(t)
	const n = 1_000_000
	table, moves := New[[2]uint64](), 0
	for key := range uint64(n) {
		at := cursor(newEntry(Hash(key), 0).hash)
		s := table.dir.segments[table.dir.index(at)]
		before := int(s.len())
		table.Put(key)
		if after := int(s.len()); after < before {
			moves += before - after
		}
		if perKey := float64(moves) / float64(key+1); key >= 1000 && perKey > 1.5 {
			t.Fatalf("moves a key after %d insertions: got %.2f, want at most 1.5", key+1, perKey)
		}
	}
	t.Logf("moves a key: %.2f", float64(moves)/n)
}

// segmentBytes is the memory of a segment, a size class of Go's allocator.
const segmentBytes = 1024

// bytesPerKey returns the memory of a table with slots of 24 bytes.
func bytesPerKey(segments int, t *Table[[2]uint64]) float64 {
	return float64(segments*segmentBytes+9*len(t.dir.segments)+24*slotsOf(t)+24*len(t.chunks)) / float64(t.Len())
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
	testclass.WithoutRace(t)
	fixSeed(t)
	if size := unsafe.Sizeof(segment{}); size != segmentBytes {
		t.Errorf("a segment has %d bytes, want %d", size, segmentBytes)
	}
	table := New[[2]uint64]()
	next, most := 20_000, 0.0
	for key := range 3_000_000 {
		if table.Put(uint64(key)); key < next {
			continue
		}
		next += next / 50
		perKey := bytesPerKey(countSegments(&table), &table)
		if most = max(most, perKey); perKey > 40 {
			t.Fatalf("bytes a key at %d keys: got %.2f, want at most 40", key+1, perKey)
		}
	}
	t.Logf("bytes a key: at most %.2f", most)
}

// TestTableStaysSmall replaces all keys of tables several times.
func TestTableStaysSmall(t *testing.T) {
	testclass.WithoutRace(t)
	fixSeed(t)
	for _, n := range []uint64{50_000, 60_000, 70_000} {
		table := New[[2]uint64]()
		for key := range 5 * n {
			table.Put(key)
			if key >= n {
				table.remove(key - n)
			}
		}
		if perKey := bytesPerKey(countSegments(&table), &table); perKey > 41 {
			t.Errorf("bytes a key of %d keys: got %.2f, want at most 41", n, perKey)
		} else {
			t.Logf("bytes a key of %d keys: %.2f", n, perKey)
		}
	}
}

func countSegments[V any](t *Table[V]) (n int) {
	for at, next := uint64(0), uint64(1); next != 0; at = next {
		_, next = t.SegmentAt(at)
		n++
	}
	return n
}

func BenchmarkTable(b *testing.B) {
	const run = 16
	keyOf := func(i uint64) uint64 { return i * 0x9e3779b97f4a7c15 }
	for _, n := range []uint64{10_000, 3_000_000} {
		t := New[[2]uint64]()
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
						if s := t.Find(key); s == nil || s.Value[0] != 0 {
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
						t.remove(key)
					}
				}
			})
		}
		b.Run(fmt.Sprintf("Grow/keys=%d", n), func(b *testing.B) {
			t, i := New[[2]uint64](), uint64(0)
			for b.Loop() {
				if t.Put(keyOf(i)); t.Len() == int(n) {
					t = New[[2]uint64]()
				}
				i++
			}
		})
	}
}

package mooncake

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
)

// store is a model of a store: which blocks it and the workers have, and what routers know, in terms of sets.
type store struct {
	objects map[string]bool // by key
	told    map[uint64]told
	known   map[uint64]told // that routers know
}

type told struct {
	parent    uint64
	hasParent bool
	tokens    uint64
	content   content
}

// keyOf is vLLM's key of a block's part on a rank, in an attention group.
func keyOf(namespace string, rank, group int, hash uint64) string {
	return fmt.Sprintf("%s@tp_rank:%d@pcp0@dcp0@pp_rank:0@group:%d@%048x%016x", namespace, rank, group, 0, hash)
}

// holds reports whether all parts of a block are there: those on each rank that any object of the group names.
func (s *store) holds(hash uint64, group int) bool {
	any := false
	for rank := range 3 {
		exists := false
		for key := range s.objects {
			exists = exists || strings.Contains(key, fmt.Sprintf("@tp_rank:%d@pcp0@dcp0@pp_rank:0@group:%d@", rank, group))
		}
		if any = any || exists; exists && !s.objects[keyOf("m", rank, group, hash)] {
			return false
		}
	}
	return any
}

// list makes routers know what the store has.
func (s *store) list(group int) {
	for hash := range s.known {
		if !s.holds(hash, group) {
			delete(s.known, hash)
		}
	}
	for more := true; more; {
		more = false
		for hash, is := range s.told {
			_, isKnown := s.known[hash]
			_, parentKnown := s.known[is.parent]
			if !isKnown && s.holds(hash, group) && (!is.hasParent || parentKnown) {
				s.known[hash], more = is, true
			}
		}
	}
}

// TestBlocksEqualTheStore lists a store that changes at random, with workers that tell of blocks in any order, and compares what routers are told.
func TestBlocksEqualTheStore(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := budget.New("test", 1<<20)
		b := newBlocks("", rapid.SampledFrom([]string{"", "m", "org/m", "org/m/"}).Draw(t, "model"), limit)
		s := store{map[string]bool{}, map[uint64]told{}, map[uint64]told{}}
		hash := rapid.Uint64Range(1, 9)
		got := map[uint64]told{}
		t.Repeat(map[string]func(*rapid.T){
			"tell": func(t *rapid.T) {
				of, is := hash.Draw(t, "hash"), told{content: content{size: 16, lora: rapid.SampledFrom([]string{"", "a"}).Draw(t, "lora")}}
				is.tokens = rapid.Uint64Range(1, 2).Draw(t, "tokens")
				is.parent, is.hasParent = rapid.Uint64Range(0, 9).Draw(t, "parent"), rapid.Bool().Draw(t, "has parent")
				b.learn(of, is.parent, is.hasParent, is.tokens, is.content)
				if _, isKnown := s.known[of]; !isKnown { // routers have what they were told first
					s.told[of] = is
				}
			},
			"put": func(t *rapid.T) {
				of := hash.Draw(t, "hash")
				for rank := range rapid.IntRange(1, 3).Draw(t, "ranks") {
					s.objects[keyOf("m", rank, 0, of)] = true
				}
				s.objects["objects of others"] = true
			},
			"evict": func(t *rapid.T) {
				if len(s.objects) > 0 {
					delete(s.objects, rapid.SampledFrom(slices.Sorted(maps.Keys(s.objects))).Draw(t, "key"))
				}
			},
			"list that breaks off": func(t *rapid.T) {
				b.begin()
				for key := range s.objects {
					b.object([]byte(key))
					break
				}
			},
			"list": func(t *rapid.T) {
				b.begin()
				for key := range s.objects {
					b.object([]byte(key))
				}
				problem := b.end(func(at *block) {
					if _, ok := got[at.hash]; ok {
						t.Fatalf("block %d is stored twice", at.hash)
					}
					if _, ok := got[at.parent]; at.hasParent && !ok {
						t.Fatalf("block %d is stored before its parent", at.hash)
					}
					got[at.hash] = told{at.parent, at.hasParent, at.tokens, b.contents[at.content]}
				}, func(at *block) {
					if _, ok := got[at.hash]; !ok {
						t.Fatalf("block %d is removed, and was not stored", at.hash)
					}
					delete(got, at.hash)
				})
				s.list(0)
				if problem != "" || !maps.Equal(got, s.known) {
					t.Fatalf("%v %s; want %v", got, problem, s.known)
				}
			},
		})
		b.close()
		if used := limit.Used(); used != 0 {
			t.Fatalf("%d bytes are still reserved", used)
		}
	})
}

// listed returns the hashes that a list changes to stored, and the problem. Blocks 1 to 4 are a chain.
func listed(t *testing.T, b *blocks, keys ...string) (stored []uint64, problem string) {
	t.Helper()
	for hash := uint64(1); hash <= 4; hash++ {
		b.learn(hash, hash-1, hash > 1, hash, content{size: 16})
	}
	b.begin()
	for _, key := range keys {
		b.object([]byte(key))
	}
	problem = b.end(func(at *block) { stored = append(stored, at.hash) }, func(*block) {})
	return stored, problem
}

func TestNamespaces(t *testing.T) {
	t.Parallel()
	a, b := keyOf("a", 0, 0, 1), keyOf("b", 0, 0, 1)
	page := fmt.Sprintf("%016x%048x_0_k", 1, 0)
	for _, c := range []struct {
		name, prefix, model string
		keys                []string
		stored              int
		problem             string
	}{
		{"one", "", "", []string{a}, 1, ""},
		{"two", "", "", []string{a, b}, 0, `objects are of several models or deployments, ["a" "b"]: choose one with topic, the beginning of its keys`},
		{"two, of which one is the model's", "", "org/b", []string{a, b}, 1, ""},
		{"two, of which one is chosen", "b@", "another", []string{a, b}, 1, ""},
		{"another model's", "", "b", []string{a}, 0, `no object names the model "b", but ["a"]: set topic, the beginning of the keys`},
		{"prefix that none has", "c@", "b", []string{a}, 0, ""},
		{"pages, which name no model", "", "b", []string{page}, 1, ""},
		{"pages with a tag, and without", "", "b", []string{page, "tag_" + page}, 0, `objects are of several models or deployments, ["" "tag"]: choose one with topic, the beginning of its keys`},
		{"pages with a tag", "tag_", "b", []string{page, "tag_" + page}, 1, ""},
		{"nothing", "", "", nil, 0, ""},
	} {
		stored, problem := listed(t, newBlocks(c.prefix, c.model, budget.New("test", 0)), c.keys...)
		if len(stored) != c.stored || problem != c.problem {
			t.Errorf("%s: %v %s; want %d blocks, %s", c.name, stored, problem, c.stored, c.problem)
		}
	}
}

func TestManyNamespacesTakeNoMemory(t *testing.T) {
	t.Parallel()
	var keys []string
	for i := range 1000 {
		keys = append(keys, keyOf(fmt.Sprint("m", i), 0, 0, 1))
	}
	for _, model := range []string{"", "other"} {
		b := newBlocks("", model, budget.New("test", 0))
		if stored, problem := listed(t, b, keys...); stored != nil || problem == "" || len(b.list.namespaces)+len(b.list.others) > maxNamespaces {
			t.Errorf("%d blocks; %d and %d names; %q", len(stored), len(b.list.namespaces), len(b.list.others), problem)
		}
	}
}

// TestGroups has blocks of a hybrid model: group 1 has attention over all tokens, and group 0 a window.
func TestGroups(t *testing.T) {
	t.Parallel()
	var keys []string
	for hash := uint64(1); hash <= 4; hash++ {
		keys = append(keys, keyOf("m", 0, 1, hash), keyOf("m", 1, 1, hash))
	}
	keys = append(keys, keyOf("m", 0, 0, 4), keyOf("m", 1, 0, 4))
	stored, problem := listed(t, newBlocks("", "", budget.New("test", 0)), keys...)
	if want := []uint64{1, 2, 3, 4}; !slices.Equal(stored, want) || problem != "" {
		t.Errorf("%v %s; want %v", stored, problem, want)
	}
}

func TestParts(t *testing.T) {
	t.Parallel()
	other := fmt.Sprintf("%016x%048x", 1, 0)
	var many []string
	for rank := range maxShards {
		many = append(many, keyOf("m", rank, 0, 1))
	}
	for _, c := range []struct {
		name    string
		keys    []string
		stored  int
		problem string
	}{
		{"two ranks", []string{keyOf("m", 0, 0, 1), keyOf("m", 1, 0, 1), keyOf("m", 0, 0, 2), keyOf("m", 1, 0, 2)}, 2, ""},
		{"one rank lacks a block", []string{keyOf("m", 0, 0, 1), keyOf("m", 1, 0, 1), keyOf("m", 0, 0, 2)}, 1, ""},
		{"the first block lacks a part", []string{keyOf("m", 0, 0, 1), keyOf("m", 0, 0, 2), keyOf("m", 1, 0, 2)}, 0, ""},
		{"keys and values", []string{other + "_0_k", other + "_0_v", other + "_0_temporal"}, 1, ""},
		{"keys without values", []string{other + "_0_k", other[:15] + "2" + other[16:] + "_0_v"}, 0, ""},
		{"as many parts as are allowed", many, 1, ""},
		{"one more", append(slices.Clone(many), keyOf("m", maxShards, 0, 1)), 0, "blocks have more than 128 parts"},
	} {
		stored, problem := listed(t, newBlocks("", "", budget.New("test", 0)), c.keys...)
		if len(stored) != c.stored || problem != c.problem {
			t.Errorf("%s: %v %s; want %d blocks, %s", c.name, stored, problem, c.stored, c.problem)
		}
	}
}

// TestMemoryOfBlocks has more blocks than there is room for: those that the store does not hold make room for others.
func TestMemoryOfBlocks(t *testing.T) {
	t.Parallel()
	const room = 10
	limit := budget.New("test", room*blockBytes)
	b := newBlocks("", "", limit)
	next := uint64(0)
	learn := func(n int) {
		for range n {
			next++
			b.learn(next, 0, false, next, content{size: 16})
		}
	}
	list := func(hashes ...uint64) (stored []uint64) {
		b.begin()
		for _, hash := range hashes {
			b.object([]byte(keyOf("m", 0, 0, hash)))
		}
		_ = b.end(func(at *block) { stored = append(stored, at.hash) }, func(*block) {})
		return stored
	}
	learn(room)
	list(1, 2)
	learn(5) // there is no room, so that the next list makes some
	if list(1, 2, 11) != nil {
		t.Error("a block is stored that did not fit")
	}
	list(1, 2)
	learn(room - 2)
	if got := list(1, 2, next); !slices.Equal(got, []uint64{next}) {
		t.Errorf("%v is stored, want %d", got, next)
	}
	if used := limit.Used(); used != room*blockBytes {
		t.Errorf("%d bytes are reserved, want %d", used, room*blockBytes)
	}
	b.close()
	if size := int(unsafe.Sizeof(block{})) + 2*16; limit.Used() != 0 || size > blockBytes {
		t.Errorf("%d bytes are reserved at the end; a block has some %d bytes, and counts as %d", limit.Used(), size, blockBytes)
	}
}

// TestChainsThatEndInNothing has parents in a circle, and a long chain without its beginning.
func TestChainsThatEndInNothing(t *testing.T) {
	t.Parallel()
	const long = 100_000
	b := newBlocks("", "", budget.New("test", 0))
	b.learn(1, 2, true, 1, content{size: 16})
	b.learn(2, 1, true, 1, content{size: 16})
	for hash := uint64(10); hash < 10+long; hash++ {
		b.learn(hash, hash-1, true, 1, content{size: 16})
	}
	for range 2 {
		b.begin()
		for hash := range b.all {
			b.object([]byte(keyOf("m", 0, 0, hash)))
		}
		_ = b.end(func(at *block) { t.Errorf("%d is stored", at.hash) }, func(*block) {})
	}
	b.learn(9, 0, false, 1, content{size: 16})
	stored := 0
	b.begin()
	for hash := range b.all {
		b.object([]byte(keyOf("m", 0, 0, hash)))
	}
	if _ = b.end(func(*block) { stored++ }, func(*block) {}); stored != long+1 {
		t.Errorf("%d blocks are stored, want %d", stored, long+1)
	}
}

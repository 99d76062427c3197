package objects

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
	objects  map[string]bool // by key
	ranks    map[int]bool    // that have been listed
	told     map[uint64]told
	disputed map[uint64]bool
	known    map[uint64]bool // that routers know
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

// holds reports whether all parts of a block are there: those on each rank that any object was ever listed of.
func (s *store) holds(hash uint64) bool {
	for rank := range s.ranks {
		if !s.objects[keyOf("m", rank, 0, hash)] {
			return false
		}
	}
	return len(s.ranks) > 0
}

// list makes routers know what the store has.
func (s *store) list() {
	for rank := range 3 {
		for hash := range uint64(10) {
			if s.objects[keyOf("m", rank, 0, hash)] {
				s.ranks[rank] = true
			}
		}
	}
	for hash := range s.known {
		if !s.holds(hash) || s.disputed[hash] {
			delete(s.known, hash)
		}
	}
	for more := true; more; {
		more = false
		for hash, is := range s.told {
			if !s.known[hash] && s.holds(hash) && !s.disputed[hash] && (!is.hasParent || s.known[is.parent]) {
				s.known[hash], more = true, true
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
		s := store{map[string]bool{}, map[int]bool{}, map[uint64]told{}, map[uint64]bool{}, map[uint64]bool{}}
		hash := rapid.Uint64Range(1, 9)
		got := map[uint64]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"tell": func(t *rapid.T) {
				of, is := hash.Draw(t, "hash"), told{content: content{size: 16, lora: rapid.SampledFrom([]string{"", "a"}).Draw(t, "lora")}}
				is.tokens = rapid.Uint64Range(1, 2).Draw(t, "tokens")
				is.parent, is.hasParent = rapid.Uint64Range(0, 9).Draw(t, "parent"), rapid.Bool().Draw(t, "has parent")
				if before, ok := s.told[of]; ok && rapid.IntRange(0, 3).Draw(t, "again") > 0 {
					is = before
				}
				b.learn(of, is.parent, is.hasParent, is.tokens, is.content)
				before, ok := s.told[of]
				s.disputed[of] = s.disputed[of] || ok && before != is
				if !ok {
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
			"list that breaks off": func(*rapid.T) {
				b.begin()
				for key := range s.objects {
					b.mooncakeObject([]byte(key))
					for rank := range 3 {
						s.ranks[rank] = s.ranks[rank] || strings.Contains(key, fmt.Sprintf("@tp_rank:%d@", rank))
					}
					maps.DeleteFunc(s.ranks, func(_ int, listed bool) bool { return !listed })
					break
				}
			},
			"list": func(t *rapid.T) {
				b.begin()
				for key := range s.objects {
					b.mooncakeObject([]byte(key))
				}
				problem := b.end(false, func(at *block) {
					if is := (told{at.parent, at.hasParent, at.tokens, at.content.Value()}); got[at.hash] || at.hasParent && !got[at.parent] || is != s.told[at.hash] {
						t.Fatalf("block %d is stored twice, before its parent, or as %v; want %v", at.hash, is, s.told[at.hash])
					}
					got[at.hash] = true
				}, func(at *block) {
					if !got[at.hash] {
						t.Fatalf("block %d is removed, and was not stored", at.hash)
					}
					delete(got, at.hash)
				})
				s.list()
				if problem != "" && len(got) > 0 || !maps.Equal(got, s.known) {
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
		b.mooncakeObject([]byte(key))
	}
	problem = b.end(false, func(at *block) { stored = append(stored, at.hash) }, func(*block) {})
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
		{"a deployment's", "", "org/b", []string{"x@y@" + b}, 1, ""},
		{"a deployment's that is named as the model", "", "org/b", []string{"b@" + a}, 0, `no object is of the model "org/b", but of ["b@a"]: set topic, the beginning of the keys`},
		{"for ranks of another number", "", "b", []string{strings.Replace(b, "@tp_rank", "@store_tp:4@store_pp:1@store_format:heads@tp_rank", 1)}, 1, ""},
		{"two, of which one is chosen", "b@", "another", []string{a, b}, 1, ""},
		{"another model's", "", "b", []string{a}, 0, `no object is of the model "b", but of ["a"]: set topic, the beginning of the keys`},
		{"prefix that none has", "c@", "b", []string{a}, 0, "none of 1 objects is a block that vLLM's MooncakeStoreConnector or SGLang's HiCache has stored, with a key that begins with topic"},
		{"pages without a tag", "", "b", []string{page}, 1, ""},
		{"pages of the model", "", "org/b", []string{"org-b_" + page}, 1, ""},
		{"pages of a deployment", "", "org/b", []string{"x_org-b_tp8_dcp4_page64_pp1_cp1_" + page}, 1, ""},
		{"pages of another model", "", "org/b", []string{"org-bb_" + page}, 0, `no object is of the model "org/b", but of ["org-bb"]: set topic, the beginning of the keys`},
		{"other components alone", "", "b", []string{"emb_" + page + "x"}, 0, `no object is of the model "b", but of ["emb"]: set topic, the beginning of the keys`},
		{"other components beside", "", "", []string{a, "emb_" + page + "x"}, 1, ""},
		{"pages with a tag, and without", "", "b", []string{page, "tag_b_" + page}, 0, `objects are of several models or deployments, ["" "tag_b"]: choose one with topic, the beginning of its keys`},
		{"pages with a tag", "tag_", "x", []string{page, "tag_" + page}, 1, ""},
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
		if stored, problem := listed(t, b, keys...); stored != nil || problem == "" || len(b.list.namespaces)+len(b.list.foreign) > maxNamespaces {
			t.Errorf("%d blocks; %d and %d names; %q", len(stored), len(b.list.namespaces), len(b.list.foreign), problem)
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
	for rank := range maxParts {
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
		{"forms that are not read", []string{strings.Replace(keyOf("m", 0, 0, 1), "@pcp0", "@pcp0x", 1), keyOf("m", 0, 0, 2), keyOf("m", 0, 0, 1)}, 2, ""},
		{"keys without values", []string{other + "_0_k", other[:15] + "2" + other[16:] + "_0_v"}, 0, ""},
		{"as many parts as are allowed", many, 1, ""},
		{"one more", append(slices.Clone(many), keyOf("m", maxParts, 0, 1)), 0, "blocks have more than 128 parts"},
	} {
		stored, problem := listed(t, newBlocks("", "", budget.New("test", 0)), c.keys...)
		if len(stored) != c.stored || problem != c.problem {
			t.Errorf("%s: %v %s; want %d blocks, %s", c.name, stored, problem, c.stored, c.problem)
		}
	}
}

// TestPartsAreRemembered has all objects of a rank lost with its memory: no block can be loaded, although each that is listed has the parts of all
// others. Later the engines have one rank.
func TestPartsAreRemembered(t *testing.T) {
	t.Parallel()
	b := newBlocks("", "", budget.New("test", 0))
	both, first := []string{keyOf("m", 0, 0, 1), keyOf("m", 1, 0, 1)}, []string{keyOf("m", 0, 0, 1)}
	if stored, problem := listed(t, b, both...); len(stored) != 1 || problem != "" {
		t.Fatalf("%v %s", stored, problem)
	}
	for range partLists {
		if stored, _ := listed(t, b, first...); stored != nil || b.all[1].held {
			t.Fatalf("%v are stored, held %v", stored, b.all[1].held)
		}
	}
	if stored, problem := listed(t, b, first...); len(stored) != 1 || problem != "" {
		t.Fatalf("%v %s", stored, problem)
	}
}

func TestManyOtherPartsLeaveRoom(t *testing.T) {
	t.Parallel()
	var keys []string
	for i := range 1000 {
		keys = append(keys, fmt.Sprintf("%016x%048x_component%d", 1, 0, i))
	}
	b := newBlocks("", "", budget.New("test", 0))
	stored, problem := listed(t, b, append(keys, keyOf("m", 0, 0, 1), keyOf("m", 0, 0, 2))...)
	if len(stored) != 2 || problem != "" || len(b.list.other) > maxOtherParts {
		t.Errorf("%v %s, %d other parts", stored, problem, len(b.list.other))
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
			b.mooncakeObject([]byte(keyOf("m", 0, 0, hash)))
		}
		_ = b.end(false, func(at *block) { stored = append(stored, at.hash) }, func(*block) {})
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
			b.mooncakeObject([]byte(keyOf("m", 0, 0, hash)))
		}
		_ = b.end(false, func(at *block) { t.Errorf("%d is stored", at.hash) }, func(*block) {})
	}
	b.learn(9, 0, false, 1, content{size: 16})
	stored := 0
	b.begin()
	for hash := range b.all {
		b.mooncakeObject([]byte(keyOf("m", 0, 0, hash)))
	}
	if _ = b.end(false, func(*block) { stored++ }, func(*block) {}); stored != long+1 {
		t.Errorf("%d blocks are stored, want %d", stored, long+1)
	}
}

// TestPartialLists has lists that lack a block, some of them partial.
func TestPartialLists(t *testing.T) {
	t.Parallel()
	b := newBlocks("", "", budget.New("test", 0))
	for hash := uint64(1); hash <= 2; hash++ {
		b.learn(hash, hash-1, hash > 1, hash, content{size: 16})
	}
	held := make(map[uint64]bool)
	list := func(isPartial bool, hashes ...uint64) {
		b.begin()
		for _, hash := range hashes {
			b.mooncakeObject([]byte(keyOf("m", 0, 0, hash)))
		}
		b.end(isPartial, func(at *block) { held[at.hash] = true }, func(at *block) { delete(held, at.hash) })
	}
	for i, c := range []struct {
		isPartial bool
		hashes    []uint64
		want      bool // block 2 is held
	}{
		{true, []uint64{1}, false}, {true, []uint64{1, 2}, true}, {true, []uint64{1}, true}, {true, []uint64{1}, true}, {true, []uint64{1}, false}, {true, []uint64{1}, false},
		{false, []uint64{1, 2}, true}, {true, []uint64{1}, true}, {false, []uint64{1}, false}, {true, []uint64{1}, false}, {true, []uint64{1, 2}, true}, {true, []uint64{1}, true},
		{true, []uint64{1, 2}, true}, {true, []uint64{1}, true}, {true, []uint64{1}, true}, {true, []uint64{1}, false},
	} {
		if list(c.isPartial, c.hashes...); held[2] != c.want || !held[1] {
			t.Errorf("list %d, %+v: %v are held", i, c, held)
		}
	}
}

package wire_test

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// saltKey returns extra keys with a salt for the first block, with Dynamo's prefix. typedSalt
// does the same in the form of vLLM's typed extra keys.
func saltKey(salt string) []any { return []any{[]any{"dynamo-cache-salt:" + salt}} }

func typedSalt(salt any) []any { return []any{[]any{obj{"type": "cache_salt", "salt": salt}}} }

// TestSaltsAreInherited admits batches of one event, of dp rank 0 unless they name another,
// and compares the salt of the last store, and whether it has tokens hashes.
func TestSaltsAreInherited(t *testing.T) {
	salted := stored(obj{"cache_salt": "s"}, 1)
	child := func(fields obj, parent any, hashes ...any) obj {
		ev := stored(fields, hashes...)
		ev["parent_block_hash"] = parent
		return ev
	}
	hashOnly := func(fields obj, hashes ...any) obj {
		ev := obj{"type": "BlockStored", "block_hashes": hashes, "token_ids": []any{}, "block_size": 0}
		for k, v := range fields {
			ev[k] = v
		}
		return ev
	}
	longest := strings.Repeat("s", 1025)
	for _, c := range []struct {
		name   string
		events []any
		want   string
	}{
		{"no salt", []any{stored(nil, 1), child(nil, 1, 2)}, ""},
		{"child", []any{salted, child(nil, 1, 2)}, "s"},
		{"grandchild", []any{salted, child(nil, 1, 2), child(nil, 2, 3), child(nil, 3, 4)}, "s"},
		{"child of the last of several", []any{stored(obj{"cache_salt": "s"}, 1, 2, 3), child(nil, 3, 4)}, "s"},
		{"child by an extra key", []any{stored(obj{"extra_keys": saltKey("s")}, 1), child(nil, 1, 2)}, "s"},
		{"child by a typed extra key", []any{stored(obj{"extra_keys": typedSalt("s")}, 1), child(nil, 1, 2)}, "s"},
		{"child in an array", []any{salted, []any{"BlockStored", []any{2}, 1, []any{7}, 1}}, "s"},
		{"child of a negative hash", []any{stored(obj{"cache_salt": "s"}, -1), child(nil, []byte{255, 255, 255, 255, 255, 255, 255, 255}, 2)}, "s"},
		{"child with an empty salt", []any{salted, child(obj{"cache_salt": ""}, 1, 2)}, "s"},
		{"child with extra keys that are none", []any{salted, child(obj{"extra_keys": []any{nil}}, 1, 2)}, "s"},
		{"salt of the child overrides the parent's", []any{salted, child(obj{"cache_salt": "t"}, 1, 2)}, "t"},
		{"salt in the child's extra keys overrides the parent's", []any{salted, child(obj{"extra_keys": saltKey("t")}, 1, 2)}, "t"},
		{"children inherit the overriding salt", []any{salted, child(obj{"cache_salt": "t"}, 1, 2), child(nil, 2, 3)}, "t"},
		{"child of another", []any{salted, stored(nil, 2), child(nil, 2, 3)}, ""},
		{"sibling", []any{salted, stored(nil, 2)}, ""},
		{"parent 0 that is no block", []any{salted, child(nil, 0, 2)}, ""},
		{"parent 0 that is one", []any{stored(obj{"cache_salt": "s"}, 0), child(nil, 0, 2)}, "s"},

		{"parent removed", []any{salted, removed(nil, 1), child(nil, 1, 2)}, ""},
		{"parent removed once of twice", []any{salted, salted, removed(nil, 1), child(nil, 1, 2)}, "s"},
		{"parent removed twice of twice", []any{salted, salted, removed(nil, 1, 1), child(nil, 1, 2)}, ""},
		{"parent removed from another tier", []any{salted, removed(obj{"medium": "CPU"}, 1), child(nil, 1, 2)}, "s"},
		{"parent copied, and removed from the device", []any{salted, hashOnly(obj{"medium": "CPU"}, 1), removed(nil, 1), child(nil, 1, 2)}, "s"},
		{"parent removed everywhere", []any{salted, hashOnly(obj{"medium": "CPU"}, 1), removed(nil, 1), removed(obj{"medium": "CPU"}, 1), child(nil, 1, 2)}, ""},
		{"an extra remove in one tier removes no copy in another tier", []any{salted, hashOnly(obj{"medium": "DISK"}, 1), removed(nil, 1, 1, 1), child(nil, 1, 2)}, "s"},
		{"cleared", []any{salted, obj{"type": "AllBlocksCleared"}, child(nil, 1, 2)}, ""},

		{"child of a hash-only store with a salt", []any{hashOnly(obj{"cache_salt": "s"}, 1), child(nil, 1, 2)}, "s"},
		{"child of a hash-only store that continues a salted one", []any{salted, hashOnly(obj{"parent_block_hash": 1}, 2), child(nil, 2, 3)}, "s"},
		{"hash-only copies leave the salt", []any{salted, hashOnly(nil, 1), hashOnly(obj{"medium": "DISK"}, 1), child(nil, 1, 2)}, "s"},

		{"remote stores teach nothing", []any{stored(obj{"cache_salt": "s", "locality": "REMOTE"}, 1), child(nil, 1, 2)}, ""},
		{"removes of a remote locality remove no copy", []any{salted, removed(obj{"locality": "REMOTE"}, 1), child(nil, 1, 2)}, "s"},
		{"removes of other groups remove no copy", []any{salted,
			stored(obj{"cache_salt": "t", "kv_cache_spec_kind": "mamba", "group_idx": 1}, 1), removed(obj{"group_idx": 1}, 1), child(nil, 1, 2)}, "s"},
		{"unknown media teach nothing", []any{stored(obj{"cache_salt": "s", "medium": "TAPE"}, 1), child(nil, 1, 2)}, ""},
		{"child of a block that was cut off", []any{stored(obj{"cache_salt": "s", "token_ids": []any{1}}, 1, 2), child(nil, 2, 3)}, "s"},
		{"child of a store dropped for its tokens", []any{stored(obj{"cache_salt": "s", "token_ids": []any{}}, 1), child(nil, 1, 2)}, "s"},
		{"child of a store dropped for its hashes", []any{stored(obj{"cache_salt": "s"}, 1, 1), child(nil, 1, 2)}, "s"},
		{"child of a store dropped for its block size", []any{stored(nil, 9), stored(obj{"cache_salt": "s", "block_size": 2}, 1), child(nil, 1, 2)}, "s"},
		{"child of a salt too long", []any{stored(obj{"cache_salt": longest}, 1), child(nil, 1, 2)}, unknown},
		{"child of a salt too long among extra keys", []any{stored(obj{"extra_keys": saltKey(longest)}, 1), child(nil, 1, 2)}, unknown},
		{"child of a child of a salt too long", []any{stored(obj{"cache_salt": longest}, 1), child(nil, 1, 2), child(nil, 2, 3)}, unknown},
		{"opaque parent", []any{stored(obj{"cache_salt": "s", "token_ids": []any{"x"}}, 1), child(nil, 1, 2)}, "s"},

		{"two salts of a block", []any{salted, stored(obj{"cache_salt": "t"}, 1), child(nil, 1, 2)}, unknown},
		{"two salts of a block, own salt", []any{salted, stored(obj{"cache_salt": "t"}, 1), child(obj{"cache_salt": "t"}, 1, 2)}, "t"},
		{"child of a child of two salts", []any{salted, stored(obj{"cache_salt": "t"}, 1), child(nil, 1, 2), child(nil, 2, 3)}, unknown},
		{"salted block stored without", []any{salted, stored(nil, 1)}, unknown},
		{"salted block among those stored without", []any{salted, stored(nil, 2, 3, 1)}, unknown},
		{"child of a salted block stored without", []any{salted, stored(nil, 1), child(nil, 1, 2)}, unknown},
		{"child of one stored with such", []any{salted, stored(nil, 1, 2), child(nil, 2, 3)}, unknown},
		{"copy in host memory without salt", []any{salted, stored(obj{"medium": "CPU"}, 1)}, unknown},
		{"child of a block copied without salt", []any{salted, stored(obj{"medium": "CPU"}, 1), child(nil, 1, 2)}, "s"},
		{"copy in host memory by its parent", []any{salted, child(nil, 1, 2), child(obj{"medium": "CPU"}, 1, 2)}, "s"},
		{"copy with another salt", []any{salted, stored(obj{"medium": "CPU", "cache_salt": "t"}, 1), child(nil, 1, 2)}, unknown},
		{"unknown until cleared", []any{salted, stored(nil, 1), obj{"type": "AllBlocksCleared"}, salted, child(nil, 1, 2)}, "s"},
	} {
		t.Run(c.name, func(t *testing.T) { wantSalt(t, wire.NewRules(new(wire.BlockSize)), c.events, c.want) })
	}
}

// unknown is the salt of a store whose content cannot be told, so that it has no tokens hashes.
const unknown = "unknown"

// wantSalt compares the salt and the tokens hashes of the last of some events.
func wantSalt(t *testing.T, r *wire.Rules, events []any, want string) {
	t.Helper()
	var (
		counts wire.Counts
		last   wire.Event
	)
	for _, ev := range events {
		b := decodeOf(t, ev)
		r.Admit(b, 0, &counts)
		if len(b.Events) == 1 {
			last = b.Events[0]
		}
	}
	hashes := kvblock.AppendTokensHashes(nil, last.Tokens, 1, kvblock.Seed(last.LoRAName, want), false, nil)
	if want == unknown {
		hashes, want = nil, ""
	}
	if diff := cmp.Diff(hashes, last.TokensHashes, cmpopts.EquateEmpty()); diff != "" || last.CacheSalt != want || len(last.Tokens) == 0 {
		t.Errorf("salt %q, want %q; tokens hashes differ (-want +got):\n%s", last.CacheSalt, want, diff)
	}
}

// TestSaltsOfCopies has the copies of vLLM's offloading connector in lower tiers, which name no salt: the hash of a block tells it.
func TestSaltsOfCopies(t *testing.T) {
	salted := stored(obj{"cache_salt": "s"}, 1)
	child := stored(obj{"parent_block_hash": 1}, 2)
	host := func(hashes ...any) obj { return stored(obj{"medium": "CPU"}, hashes...) }
	for name, c := range map[string]struct {
		events []any
		want   string
	}{
		"of a block with a salt":             {[]any{salted, host(1)}, "s"},
		"of several blocks":                  {[]any{salted, child, host(1, 2)}, "s"},
		"of a copy":                          {[]any{salted, host(1), removed(nil, 1), stored(obj{"medium": "STORAGE"}, 1)}, "s"},
		"of one with an adapter":             {[]any{stored(obj{"cache_salt": "s", "lora_name": "a"}, 1), stored(obj{"medium": "CPU", "lora_name": "a"}, 1)}, "s"},
		"of a block without":                 {[]any{salted, stored(nil, 3), host(3)}, ""},
		"of one that was evicted":            {[]any{salted, removed(nil, 1), host(1)}, "s"},
		"of one that was cleared":            {[]any{salted, obj{"type": "AllBlocksCleared"}, host(1)}, "s"},
		"of the child of one that was":       {[]any{salted, child, obj{"type": "AllBlocksCleared"}, stored(obj{"medium": "CPU", "parent_block_hash": 1}, 2)}, "s"},
		"of a block with two salts":          {[]any{salted, stored(obj{"cache_salt": "t"}, 1), host(1)}, unknown},
		"of one with a salt and without":     {[]any{salted, stored(nil, 1), host(1)}, unknown},
		"in device memory, where none is":    {[]any{salted, stored(nil, 1)}, unknown},
		"a child of a copy in device memory": {[]any{salted, host(1), child}, "s"},
	} {
		t.Run(name, func(t *testing.T) {
			r := wire.NewRules(new(wire.BlockSize))
			r.IsVLLM = true
			wantSalt(t, r, c.events, c.want)
		})
	}
}

// TestSaltsArePerRank checks that equal hashes of two ranks are two blocks, and that clears
// and restarts affect one rank.
func TestSaltsArePerRank(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
		got    []string
	)
	r := wire.NewRules(&size)
	admit := func(rank uint32, ev obj) string {
		b := decodeOf(t, ev)
		r.Admit(b, rank, &counts)
		return b.Events[0].CacheSalt
	}
	child := stored(obj{"parent_block_hash": 1}, 2)
	record := func() { got = append(got, admit(0, child)+admit(1, child)) }
	record()
	admit(0, stored(obj{"cache_salt": "s"}, 1))
	record()
	admit(1, stored(obj{"cache_salt": "t"}, 1))
	admit(1, obj{"type": "AllBlocksCleared"})
	admit(1, stored(obj{"cache_salt": "t"}, 1))
	record()
	admit(1, removed(nil, 1))
	r.Reset(2)
	record()
	r.Reset(0)
	record()
	if diff := cmp.Diff([]string{"", "s", "st", "s", ""}, got); diff != "" {
		t.Errorf("salts differ (-want +got):\n%s", diff)
	}
	r.Reset(1)
	if ranks, blocks, salts, bytes := r.Salted(); ranks+blocks+salts+bytes != 0 {
		t.Errorf("%d ranks, %d blocks, %d salts of %d bytes are left", ranks, blocks, salts, bytes)
	}
}

// TestUnsaltedSourcesUseNoMemory checks that traffic without salts uses no memory, with
// or without extra keys.
func TestUnsaltedSourcesUseNoMemory(t *testing.T) {
	testclass.WithoutRace(t)
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	r.Admit(decodeOf(t, stored(nil, 1), stored(obj{"parent_block_hash": 1, "extra_keys": []any{[]any{"x"}}}, 2),
		removed(nil, 1), obj{"type": "AllBlocksCleared"}, stored(obj{"cache_salt": "s"})), 0, &counts)
	if ranks, blocks, salts, bytes := r.Salted(); ranks+blocks+salts+bytes != 0 {
		t.Errorf("%d ranks, %d blocks, %d salts of %d bytes are recorded", ranks, blocks, salts, bytes)
	}
}

// TestSaltsAreRemovedWithTheirBlocks checks that nothing is left when all blocks are removed.
func TestSaltsAreRemovedWithTheirBlocks(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	for k := range 100 {
		r.Admit(decodeOf(t, stored(obj{"cache_salt": strconv.Itoa(k)}, k, k+1000)), uint32(k%3), &counts)
	}
	if ranks, blocks, salts, _ := r.Salted(); ranks != 3 || blocks != 200 || salts != 100 {
		t.Errorf("%d ranks, %d blocks, %d salts; want 3, 200, 100", ranks, blocks, salts)
	}
	for k := range 100 {
		r.Admit(decodeOf(t, removed(nil, k+1000, k)), uint32(k%3), &counts)
	}
	if ranks, blocks, salts, bytes := r.Salted(); ranks+blocks+salts+bytes != 0 {
		t.Errorf("%d ranks, %d blocks, %d salts of %d bytes are left", ranks, blocks, salts, bytes)
	}
}

// TestBlocksOfManyCopiesAreKeptUntilCleared checks that a block with more copies than are counted is kept
// until its rank is cleared.
func TestBlocksOfManyCopiesAreKeptUntilCleared(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	for range 300 {
		r.Admit(decodeOf(t, stored(obj{"cache_salt": "s"}, 1)), 0, &counts)
	}
	for range 299 {
		r.Admit(decodeOf(t, removed(nil, 1)), 0, &counts)
	}
	b := decodeOf(t, stored(obj{"parent_block_hash": 1}, 2))
	r.Admit(b, 0, &counts)
	if got := b.Events[0].CacheSalt; got != "s" {
		t.Errorf("salt %q, want s", got)
	}
}

// TestSaltedBlocksBeyondTheLimitAreUnknown checks the salts in a rank with more salted
// blocks than the limit, and that the rank is complete after a clear.
func TestSaltedBlocksBeyondTheLimitAreUnknown(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	r.LimitSaltedBlocks(2)
	saltIn := func(rank uint32, ev obj) string {
		b := decodeOf(t, ev)
		r.Admit(b, rank, &counts)
		last := b.Events[0]
		if len(last.TokensHashes) == 0 {
			return unknown
		}
		return last.CacheSalt
	}
	child := func(parent any) obj { return stored(obj{"parent_block_hash": parent}, 9) }
	for k, c := range []struct {
		rank uint32
		ev   obj
		want string
	}{
		{0, stored(obj{"cache_salt": "s"}, 1, 2), "s"},
		{0, child(3), ""},
		{0, stored(obj{"cache_salt": "s"}, 3), "s"}, // not recorded
		{0, child(3), unknown},
		{0, child(2), "s"},
		{0, child(7), unknown}, // may continue a block that is not recorded
		{0, stored(obj{"parent_block_hash": 7, "cache_salt": "t"}, 8), "t"},
		{0, stored(nil, 20), ""},                         // no parent
		{0, stored(obj{"parent_block_hash": 0}, 21), ""}, // no parent
		{0, stored(obj{"medium": "CPU"}, 22), unknown},   // may be a copy
		{1, child(3), ""},                                // another rank
		{1, stored(obj{"cache_salt": "s"}, 1), "s"},      // no room in this rank either
		{1, child(7), unknown},
	} {
		if got := saltIn(c.rank, c.ev); got != c.want {
			t.Errorf("event %d: %q, want %q", k, got, c.want)
		}
	}
	r.Admit(decodeOf(t, obj{"type": "AllBlocksCleared"}), 0, &counts)
	r.Reset(1)
	for rank := range uint32(2) {
		if got := saltIn(rank, child(7)); got != "" {
			t.Errorf("rank %d after a clear: %q, want none", rank, got)
		}
	}
}

// TestSaltBytesAreBounded checks that memory is bounded for any number of salts, and that
// salts beyond the bound count as unknown, not as absent.
func TestSaltBytesAreBounded(t *testing.T) {
	var (
		size   = wire.BlockSize{Tokens: 1}
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	const blocks = 10_000
	for k := range uint64(blocks) {
		r.Admit(&wire.Batch{Events: []wire.Event{{
			Kind: wire.KindStored, BlockHashes: []uint64{k + 1}, Tokens: []uint32{1}, BlockSize: 1,
			CacheSalt: strconv.FormatUint(k, 10) + strings.Repeat("s", 1000),
		}}}, 0, &counts)
	}
	_, kept, _, bytes := r.Salted()
	if kept != blocks || bytes > 4<<20 || bytes < 3<<20 {
		t.Errorf("%d blocks are recorded, with salts of %d bytes", kept, bytes)
	}
	b := decodeOf(t, stored(obj{"parent_block_hash": 1}, 2<<20), stored(obj{"parent_block_hash": blocks}, 2<<20+1))
	r.Admit(b, 0, &counts)
	if first, last := b.Events[0], b.Events[1]; first.CacheSalt == "" || len(first.TokensHashes) != 1 || len(last.TokensHashes) != 0 {
		t.Errorf("a child of the first has salt %.10q and hashes %v, one of the last has hashes %v",
			first.CacheSalt, first.TokensHashes, last.TokensHashes)
	}
}

// TestSaltedBlocksAreBounded fills a source's memory of salted blocks and measures it.
func TestSaltedBlocksAreBounded(t *testing.T) {
	testclass.WithoutRace(t)
	var (
		size   = wire.BlockSize{Tokens: 1}
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	before := heapBytes()
	next := uint64(1)
	for range 1100 {
		ev := wire.Event{Kind: wire.KindStored, CacheSalt: "s", BlockHashes: make([]uint64, 1000), BlockSize: 0}
		for k := range ev.BlockHashes {
			ev.BlockHashes[k] = next * 0x9e3779b97f4a7c15
			next++
		}
		r.Admit(&wire.Batch{Events: []wire.Event{ev}}, uint32(next%4), &counts)
	}
	if _, blocks, _, _ := r.Salted(); blocks != wire.MaxSaltedBlocks {
		t.Errorf("%d blocks are recorded, want %d", blocks, wire.MaxSaltedBlocks)
	}
	if grown := heapBytes() - before; grown > 60<<20 {
		t.Errorf("%d MiB are in use, want some 55", grown>>20)
	}
	runtime.KeepAlive(r)
}

func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Several Rules share a budget for salts and groups. Removes, a reset and Close release it.
func TestRulesShareABudget(t *testing.T) {
	b := budget.New("test", 10_000)
	var size wire.BlockSize
	salted := func(r *wire.Rules, rank uint32, salt string, hash uint64) *wire.Event {
		t.Helper()
		batch := &wire.Batch{Events: []wire.Event{{
			Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{1, 2}, BlockSize: 2, CacheSalt: salt,
			SpecKind: "full_attention", HasGroupIdx: true, GroupIdx: int64(hash),
		}}}
		r.Admit(batch, rank, new(wire.Counts))
		return &batch.Events[0]
	}
	one, two := wire.NewRules(&size), wire.NewRules(&size)
	one.SetBudget(b)
	two.SetBudget(b)
	for i := range uint64(1000) {
		if e := salted(one, 0, fmt.Sprint("salt-", i), i+1); len(e.TokensHashes) != 1 {
			t.Fatalf("block %d with a salt of its own has tokens hashes %v", i, e.TokensHashes)
		}
	}
	used := b.Used()
	if used > b.Limit() || used < b.Limit()*9/10 {
		t.Errorf("%d bytes in use of %d", used, b.Limit())
	}
	salted(two, 0, "another", 1)
	continued := &wire.Batch{Events: []wire.Event{{
		Kind: wire.KindStored, BlockHashes: []uint64{2}, HasParent: true, Parent: 1, Tokens: []uint32{1, 2}, BlockSize: 2,
	}}}
	two.Admit(continued, 0, new(wire.Counts))
	if e := continued.Events[0]; len(e.TokensHashes) != 0 {
		t.Errorf("a block that may continue a salted one has tokens hashes %v", e.TokensHashes)
	}
	one.Reset(0)
	if n := b.Used(); n > 500 {
		t.Errorf("%d bytes in use after a reset", n)
	}
	salted(one, 0, "again", 7)
	one.Close()
	two.Close()
	if n := b.Used(); n != 0 {
		t.Errorf("%d bytes in use after all were closed", n)
	}
}

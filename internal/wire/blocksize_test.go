package wire_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// sized returns a store of blocks of a size by a main attention group.
func sized(size int, fields obj, hashes ...any) obj {
	tokens := make([]any, size*len(hashes))
	for k := range tokens {
		tokens[k] = k
	}
	ev := stored(obj{"block_size": size, "token_ids": tokens, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}, hashes...)
	for k, v := range fields {
		ev[k] = v
	}
	return ev
}

func without(ev obj, keys ...string) obj {
	for _, k := range keys {
		delete(ev, k)
	}
	return ev
}

// TestBlockSize checks which stores of several sizes are admitted, and which stores replace the
// learned size.
func TestBlockSize(t *testing.T) {
	group := []string{"group_idx", "kv_cache_spec_kind"}
	for _, c := range []struct {
		name   string
		size   wire.BlockSize
		events []any
		// admitted are the first blocks of the admitted stores, replaced the first blocks of the
		// stores that replace the size.
		admitted, replaced []uint64
		want               wire.BlockSize
	}{
		{"learned from the root", wire.BlockSize{}, []any{sized(4, nil, 1)}, []uint64{1}, nil, wire.BlockSize{Tokens: 4}},
		{"learned from several blocks", wire.BlockSize{}, []any{sized(4, obj{"parent_block_hash": 9}, 1, 2)}, []uint64{1}, nil, wire.BlockSize{Tokens: 4}},
		{"learned where the parent is 0", wire.BlockSize{}, []any{sized(4, obj{"parent_block_hash": 0}, 1)}, []uint64{1}, nil, wire.BlockSize{Tokens: 4}},
		{
			"learned from an engine without partial blocks", wire.BlockSize{}, []any{without(sized(4, obj{"parent_block_hash": 9}, 1), group...)},
			[]uint64{1}, nil, wire.BlockSize{Tokens: 4},
		},
		{
			"not learned from a single block that may be partial", wire.BlockSize{},
			[]any{sized(4, obj{"parent_block_hash": 9}, 1), sized(16, nil, 2), sized(4, obj{"parent_block_hash": 2}, 3)},
			[]uint64{2}, nil, wire.BlockSize{Tokens: 16},
		},
		{
			"a larger multiple replaces", wire.BlockSize{}, []any{sized(4, nil, 1), sized(16, nil, 2), sized(4, nil, 3), sized(16, nil, 4)},
			[]uint64{1, 2, 4}, []uint64{2}, wire.BlockSize{Tokens: 16},
		},
		{
			"a larger multiple of a kind that the event names", wire.BlockSize{Tokens: 4}, []any{without(sized(16, nil, 2), "group_idx")},
			[]uint64{2}, []uint64{2}, wire.BlockSize{Tokens: 16},
		},
		{
			"a larger multiple of a group that was learned", wire.BlockSize{}, []any{sized(4, nil, 1), without(sized(16, nil, 2), "kv_cache_spec_kind")},
			[]uint64{1, 2}, []uint64{2}, wire.BlockSize{Tokens: 16},
		},
		{
			"a larger multiple without a group does not replace", wire.BlockSize{Tokens: 4}, []any{without(sized(16, nil, 2), group...)},
			nil, nil, wire.BlockSize{Tokens: 4},
		},
		{
			"a larger multiple of an unknown group does not replace", wire.BlockSize{Tokens: 4}, []any{without(sized(16, nil, 2), "kv_cache_spec_kind")},
			nil, nil, wire.BlockSize{Tokens: 4},
		},
		{
			"a larger multiple of a group without main attention does not replace", wire.BlockSize{Tokens: 4}, []any{sized(16, obj{"kv_cache_spec_kind": "mamba"}, 2)},
			nil, nil, wire.BlockSize{Tokens: 4},
		},
		{
			"a larger multiple in another tier does not replace: it is a chunk", wire.BlockSize{Tokens: 4}, []any{sized(8, obj{"medium": "CPU"}, 2)},
			[]uint64{wire.PartBefore(2)}, nil, wire.BlockSize{Tokens: 4},
		},
		{
			"any size in device memory replaces a size from another tier", wire.BlockSize{},
			[]any{sized(8, obj{"medium": "CPU"}, 1), without(sized(4, nil, 2), group...), sized(8, obj{"medium": "CPU"}, 3), without(sized(8, nil, 4), group...)},
			[]uint64{1, 2, wire.PartBefore(3)}, []uint64{2}, wire.BlockSize{Tokens: 4},
		},
		{
			"a size from another tier is not replaced by another size of that tier", wire.BlockSize{}, []any{sized(4, obj{"medium": "CPU"}, 1), sized(8, obj{"medium": "CPU"}, 2)},
			[]uint64{1}, nil, wire.BlockSize{Tokens: 4},
		},
		{"a size that is not a multiple does not replace", wire.BlockSize{Tokens: 4}, []any{sized(6, nil, 2)}, nil, nil, wire.BlockSize{Tokens: 4}},
		{"a smaller size does not replace", wire.BlockSize{Tokens: 4}, []any{sized(2, nil, 2)}, nil, nil, wire.BlockSize{Tokens: 4}},
		{
			"a configured size is never replaced", wire.BlockSize{Tokens: 4, Configured: true}, []any{sized(16, nil, 2), sized(4, nil, 3)},
			[]uint64{3}, nil, wire.BlockSize{Tokens: 4, Configured: true},
		},
		{
			"a dropped store replaces nothing", wire.BlockSize{Tokens: 4}, []any{sized(16, nil, 2, 2), sized(4, nil, 3)},
			[]uint64{3}, nil, wire.BlockSize{Tokens: 4},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			size := c.size
			b := decodeOf(t, c.events...)
			wire.NewRules(&size).Admit(b, 0, new(wire.Counts))
			var admitted, replaced []uint64
			for _, ev := range b.Events {
				admitted = append(admitted, ev.BlockHashes[0])
				if ev.ReplacesBlockSize {
					replaced = append(replaced, ev.BlockHashes[0])
				}
			}
			if diff := cmp.Diff(c.admitted, admitted); diff != "" {
				t.Errorf("admitted (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.replaced, replaced); diff != "" {
				t.Errorf("replacing (-want +got):\n%s", diff)
			}
			if size.Tokens != c.want.Tokens || size.Configured != c.want.Configured {
				t.Errorf("block size: got %+v, want %+v", size, c.want)
			}
		})
	}
}

// TestStoresOfTooLargeBlocksAreDropped checks that the block size of such a store is not learned, and does not replace a
// learned one.
func TestStoresOfTooLargeBlocksAreDropped(t *testing.T) {
	testclass.WithoutRace(t)
	const tooLarge = wire.MaxBlockSize + 1
	for name, c := range map[string]struct {
		known   uint32
		event   obj
		want    uint32 // the size afterwards
		dropped uint64
	}{
		"largest":                          {0, sized(wire.MaxBlockSize, nil, 1), wire.MaxBlockSize, 0},
		"too large":                        {0, sized(tooLarge, nil, 1), 0, 1},
		"too large, without tokens":        {0, stored(obj{"block_size": tooLarge}, 1), 0, 1},
		"too large, a multiple":            {1, sized(tooLarge, nil, 1), 1, 1},
		"too large, and already the known": {tooLarge, sized(tooLarge, nil, 1), tooLarge, 1},
	} {
		t.Run(name, func(t *testing.T) {
			size := wire.BlockSize{Tokens: c.known}
			b := decodeOf(t, c.event)
			var counts wire.Counts
			wire.NewRules(&size).Admit(b, 0, &counts)
			if got := counts[wire.ReasonBlockSizeMismatch]; got != c.dropped || len(b.Events) != 1-int(c.dropped) {
				t.Errorf("got %d dropped and %d admitted, want %d dropped", got, len(b.Events), c.dropped)
			}
			if size.Tokens != c.want {
				t.Errorf("block size: got %d, want %d", size.Tokens, c.want)
			}
		})
	}
}

// TestRestoredBlockSizeIsBounded restores sizes that an earlier version learned.
func TestRestoredBlockSizeIsBounded(t *testing.T) {
	for tokens, want := range map[uint32]uint32{wire.MaxBlockSize: wire.MaxBlockSize, wire.MaxBlockSize + 1: 0} {
		var size wire.BlockSize
		size.Restore(&statev1.IngestBlockSize{Tokens: tokens})
		if size.Tokens != want {
			t.Errorf("restored %d: got %d, want %d", tokens, size.Tokens, want)
		}
	}
}

// TestForeignBlockSize checks which dropped stores set the fields.
func TestForeignBlockSize(t *testing.T) {
	size := wire.BlockSize{Tokens: 4}
	r := wire.NewRules(&size)
	for name, c := range map[string]struct {
		event any
		want  uint32
		tier  kvblock.Tier
	}{
		"on the device":  {sized(7, nil, 1), 7, kvblock.TierDevice},
		"in host memory": {sized(6, obj{"medium": "CPU"}, 1), 6, kvblock.TierHostPinned},
		"of the size":    {sized(4, obj{"medium": "CPU"}, 1), 0, 0},
	} {
		r.Admit(decodeOf(t, c.event), 0, new(wire.Counts))
		if r.ForeignBlockSize != c.want || r.ForeignTier != c.tier {
			t.Errorf("%s: got %d in tier %d, want %d in tier %d", name, r.ForeignBlockSize, r.ForeignTier, c.want, c.tier)
		}
	}
}

func TestForgetResetsALearnedBlockSize(t *testing.T) {
	for size, want := range map[wire.BlockSize]*statev1.IngestBlockSize{
		{}:                            {},
		{Tokens: 4}:                   {Former: 4},
		{Tokens: 4, Configured: true}: {Tokens: 4},
	} {
		got := size
		if got.Forget(); !proto.Equal(got.State(), want) || got.Configured != size.Configured {
			t.Errorf("%+v forgotten: got %v, want %v", size, got.State(), want)
		}
	}
}

// TestBlocksOfTheFormerSizeAreWhole forgets the size, as when a dp rank restarts. The other ranks go on with stores that extend prefixes by
// one block: a whole one of the former size, or a part of one.
func TestBlocksOfTheFormerSizeAreWhole(t *testing.T) {
	root := sized(4, nil, 1)
	inHost := sized(4, obj{"medium": "CPU"}, 1)
	whole, part := sized(4, obj{"parent_block_hash": 1}, 2), sized(2, obj{"parent_block_hash": 1}, 2)
	for name, c := range map[string]struct {
		first   []any // before the size is forgotten
		again   bool  // forgotten twice
		restore bool  // from the stored state
		event   any
		want    bool // taken for a whole block
	}{
		"whole":                         {first: []any{root}, event: whole, want: true},
		"whole, forgotten twice":        {first: []any{root}, again: true, event: whole, want: true},
		"whole, restored":               {first: []any{root}, restore: true, event: whole, want: true},
		"whole, also in host memory":    {first: []any{root, inHost}, event: whole, want: true},
		"replaced by a larger multiple": {first: []any{sized(2, nil, 1), root}, event: whole, want: true},
		"part":                          {first: []any{root}, event: part},
		"never known":                   {event: whole},
		"known in host memory alone":    {first: []any{inHost}, event: whole},
	} {
		t.Run(name, func(t *testing.T) {
			var size wire.BlockSize
			rules := wire.NewRules(&size)
			var counts wire.Counts
			for _, e := range c.first {
				rules.Admit(decodeOf(t, e), 0, &counts)
			}
			size.Forget()
			if c.again {
				size.Forget()
			}
			if c.restore {
				state := size.State()
				size = wire.BlockSize{}
				size.Restore(state)
			}
			rules.Admit(decodeOf(t, c.event), 0, &counts)
			if got := counts[wire.ReasonPartialBlock] == 0; got != c.want {
				t.Errorf("taken for a whole block: got %v, want %v; counts %v", got, c.want, counts)
			}
		})
	}
}

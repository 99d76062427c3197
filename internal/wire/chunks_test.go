package wire_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// TestChunksAreBlocksOfTheWorker admits a store of chunks of 4 tokens of a worker with blocks of 2.
func TestChunksAreBlocksOfTheWorker(t *testing.T) {
	before := wire.PartBefore
	chunk := func(fields obj, hashes ...any) obj {
		all := obj{"medium": "CPU", "parent_block_hash": 9}
		for k, v := range fields {
			all[k] = v
		}
		return sized(4, all, hashes...)
	}
	for name, c := range map[string]struct {
		event  any
		hashes []uint64 // nil: it is skipped
		known  int      // blocks with tokens hashes
		counts wire.Counts
	}{
		"a chunk":                       {chunk(nil, 1), []uint64{before(1), 1}, 2, counted(wire.ReasonChunks)},
		"two chunks":                    {chunk(nil, 1, 2), []uint64{before(1), 1, before(2), 2}, 4, counted(wire.ReasonChunks)},
		"three blocks":                  {sized(6, obj{"medium": "CPU"}, 1), []uint64{before(before(1)), before(1), 1}, 3, counted(wire.ReasonChunks)},
		"on disk":                       {chunk(obj{"medium": "disk"}, 1), []uint64{before(1), 1}, 2, counted(wire.ReasonChunks)},
		"nil extra keys":                {chunk(obj{"extra_keys": []any{nil}}, 1), []uint64{before(1), 1}, 2, counted(wire.ReasonChunks)},
		"a last chunk of a block":       {chunk(obj{"token_ids": []any{0, 1, 2, 3, 4, 5}}, 1, 2), []uint64{before(1), 1, 2}, 3, counted(wire.ReasonChunks)},
		"a last chunk of three tokens":  {chunk(obj{"token_ids": []any{0, 1, 2}}, 1), []uint64{1}, 1, counted(wire.ReasonChunks)},
		"a last chunk without a block":  {chunk(obj{"token_ids": []any{0, 1, 2, 3, 4}}, 1, 2), []uint64{before(1), 1}, 2, counted(wire.ReasonChunks, wire.ReasonTokensShort)},
		"tokens of more chunks":         {chunk(obj{"token_ids": []any{0, 1, 2, 3, 4, 5}}, 1), []uint64{before(1), 1}, 0, counted(wire.ReasonChunks, wire.ReasonUnknownContent)},
		"an adapter without a name":     {chunk(obj{"lora_id": 3}, 1), []uint64{before(1), 1}, 0, counted(wire.ReasonChunks, wire.ReasonUnknownContent)},
		"hashes alone":                  {chunk(obj{"token_ids": []any{}}, 1, 2), []uint64{1, 2}, 0, wire.Counts{}},
		"extra keys":                    {chunk(obj{"extra_keys": []any{[]any{"s"}}}, 1), nil, 0, counted(wire.ReasonBlockSizeMismatch)},
		"no multiple":                   {sized(5, obj{"medium": "CPU"}, 1), nil, 0, counted(wire.ReasonBlockSizeMismatch)},
		"smaller than a block":          {sized(1, obj{"medium": "CPU"}, 1), nil, 0, counted(wire.ReasonBlockSizeMismatch)},
		"on the device":                 {stored(obj{"block_size": 4, "token_ids": []any{0, 1, 2, 3}}, 1), nil, 0, counted(wire.ReasonBlockSizeMismatch)},
		"larger than any block":         {sized(2*wire.MaxBlockSize, obj{"medium": "CPU"}, 1), nil, 0, counted(wire.ReasonBlockSizeMismatch)},
		"a hash of a part of the other": {chunk(nil, 1, before(1)), nil, 0, counted(wire.ReasonChunks, wire.ReasonRepeatedHash)},
	} {
		t.Run(name, func(t *testing.T) {
			var counts wire.Counts
			b := decodeOf(t, c.event)
			wire.NewRules(&wire.BlockSize{Tokens: 2}).Admit(b, 0, &counts)
			if counts != c.counts {
				t.Errorf("counts: got %v, want %v", counts, c.counts)
			}
			if len(b.Events) == 0 {
				if c.hashes != nil {
					t.Error("it is skipped")
				}
				return
			}
			e := b.Events[0]
			if diff := cmp.Diff(c.hashes, e.BlockHashes); diff != "" {
				t.Errorf("hashes (-want +got):\n%s", diff)
			}
			tokens := make([]uint32, 2*c.known)
			for i := range tokens {
				tokens[i] = uint32(i)
			}
			if c.known > 0 {
				want := kvblock.AppendTokensHashes(nil, tokens, 2, kvblock.Seed("", ""), false, nil)
				if diff := cmp.Diff(want, e.TokensHashes); diff != "" || e.BlockSize != 2 {
					t.Errorf("block size %d, tokens hashes (-want +got):\n%s", e.BlockSize, diff)
				}
			} else if len(e.TokensHashes) > 0 {
				t.Errorf("tokens hashes of unknown content: %x", e.TokensHashes)
			}
		})
	}
}

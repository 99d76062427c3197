package vllm_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestConsumersHoldTheBlocksOfTheIndex changes the blocks of an engine at random. One consumer has all batches from the
// first on; others begin with a state at random times, which is built from an index that is ahead of the stream. When the
// stream has applied everything, all hold exactly the blocks of the index.
func TestConsumersHoldTheBlocksOfTheIndex(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := newEngine(t, rapid.Uint64Range(0, 3).Draw(t, "first seq"))
		routers := []*router{newRouter(t)}
		deliver := func(all []vllm.Batch) {
			for _, b := range all {
				for _, r := range routers {
					r.apply(b)
				}
			}
		}
		deliver(e.publish(1))
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0:
				from := rapid.Uint64Range(0, e.stream.Next()-1).Draw(t, "asked for")
				late := newRouter(t)
				late.late = true
				state := e.state(from, rapid.Bool().Draw(t, "fill"))
				for _, b := range state {
					late.apply(b)
				}
				if first := state[0].Seq; first < from || late.last != e.stream.Next()-1 {
					t.Fatalf("a state from %d has the batches %d to %d, want the last one to be %d", from, first, late.last, e.stream.Next()-1)
				}
				routers = append(routers, late)
			case 1, 2:
				deliver(e.publish(rapid.IntRange(1, 9).Draw(t, "entries")))
			default:
				e.change(true)
			}
		}
		deliver(e.publish(len(e.pending)))
		want := e.blocks()
		for i, r := range routers {
			if diff := cmp.Diff(want.String(), r.held().String()); diff != "" {
				t.Fatalf("consumer %d (-index +consumer):\n%s", i, diff)
			}
		}
	})
}

// TestConsumersHoldNoOtherBlocks removes parents before their children, too, and stores blocks whose content is more than
// their tokens. Consumers then may lack blocks, but have no others, and can place each.
func TestConsumersHoldNoOtherBlocks(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := newEngine(t, 0)
		r := newRouter(t)
		for range rapid.IntRange(1, 60).Draw(t, "changes") {
			e.change(false)
			if rapid.IntRange(0, 9).Draw(t, "salted") == 0 {
				_, hashes := e.path()
				s := &kvcastv1.Stored{BlockHashes: hashes, BlockSize: 2, TokenIds: make([]uint32, 2*len(hashes))}
				s.TokensHashes = kvblock.AppendTokensHashes(nil, s.GetTokenIds(), 2, kvblock.Seed("", "salt"), false, nil)
				e.apply(&kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Tier: 1, Event: &kvcastv1.RouterEvent_Stored{Stored: s}})
			}
		}
		for _, b := range e.publish(len(e.pending)) {
			r.apply(b)
		}
		want := e.blocks()
		for hash, tiers := range r.held() {
			if tiers&^want[hash] != 0 {
				t.Fatalf("block %d is held in %b, want %b", hash, tiers, want[hash])
			}
		}
	})
}

// TestOmissions says for each kind of block why it is not published.
func TestOmissions(t *testing.T) {
	t.Parallel()
	salted := kvblock.AppendTokensHashes(nil, []uint32{1, 2}, 2, kvblock.Seed("", "s"), false, nil)
	plain := kvblock.AppendTokensHashes(nil, []uint32{1, 2}, 2, kvblock.Seed("", ""), false, nil)
	for _, tt := range []struct {
		name string
		s    *kvcastv1.Stored
		want map[string]uint64
	}{
		{"no token ids", &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: 2, TokensHashes: plain}, map[string]uint64{"no_token_ids": 1}},
		{"hash only", &kvcastv1.Stored{BlockHashes: []uint64{1}}, map[string]uint64{"no_token_ids": 1}},
		{"too few token ids", &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: 2, TokensHashes: plain, TokenIds: []uint32{1}}, map[string]uint64{"no_token_ids": 1}},
		{"salt", &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: 2, TokensHashes: salted, TokenIds: []uint32{1, 2}}, map[string]uint64{"other_content": 1}},
		{"unknown parent", &kvcastv1.Stored{ParentHash: proto.Uint64(9), BlockHashes: []uint64{1}, BlockSize: 2, TokensHashes: plain, TokenIds: []uint32{1, 2}}, map[string]uint64{"parent": 1}},
		{"none", &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: 2, TokensHashes: plain, TokenIds: []uint32{1, 2}}, map[string]uint64{}},
	} {
		s := vllm.NewStream("w", 0, "t", wire.FormMap, 0)
		s.Apply(&kvcastv1.RouterEvent{Tier: 1, Event: &kvcastv1.RouterEvent_Stored{Stored: tt.s}})
		if diff := cmp.Diff(tt.want, s.Omitted()); diff != "" || (len(s.Held()) == 0) != (len(tt.want) > 0) {
			t.Errorf("%s: %d blocks held (-want +got):\n%s", tt.name, len(s.Held()), diff)
		}
	}
}

// TestBatchesAreThoseOfVLLM compares encoded events with the fields that vLLM 0.33 writes, in both forms.
func TestBatchesAreThoseOfVLLM(t *testing.T) {
	t.Parallel()
	plain := kvblock.AppendTokensHashes(nil, []uint32{1, 2}, 2, kvblock.Seed("l", ""), false, nil)
	for form, want := range map[wire.Form]string{
		wire.FormMap: "\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93" +
			"\x81\xa4type\xb0AllBlocksCleared" +
			"\x88\xa4type\xabBlockStored\xacblock_hashes\x91\x07\xb1parent_block_hash\xc0\xa9token_ids\x92\x01\x02\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xa1l" +
			"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x07\xa6medium\xa3GPU\x03",
		wire.FormArray: "\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93" +
			"\x91\xb0AllBlocksCleared" +
			"\x9c\xabBlockStored\x91\x07\xc0\x92\x01\x02\x02\xc0\xa3GPU\xa1l\xc0\xc0\xc0\xc0" +
			"\x94\xacBlockRemoved\x91\x07\xa3GPU\xc0\x03",
	} {
		s := vllm.NewStream("w", 3, "t", form, 5)
		s.Apply(&kvcastv1.RouterEvent{Tier: 1, Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
			BlockHashes: []uint64{7}, BlockSize: 2, TokensHashes: plain, TokenIds: []uint32{1, 2}, LoraName: proto.String("l"),
		}}})
		s.Apply(&kvcastv1.RouterEvent{Tier: 1, Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: []uint64{7, 8}}}})
		payload, seq := s.Batch(1.5)
		if seq != 5 || string(payload) != want {
			t.Errorf("form %d: seq %d (-want +got):\n%s", form, seq, cmp.Diff(want, string(payload)))
		}
	}
}

// TestCutStateIsFollowedByAnotherState requests what follows the first batches of a state, while the log has the stream's own
// batches with those seqs.
func TestCutStateIsFollowedByAnotherState(t *testing.T) {
	t.Parallel()
	history, s := vllm.NewHistory(3, 1<<30), vllm.NewStream("w", 0, "t", wire.FormMap, 0)
	publish := func() {
		payload, seq := s.Batch(1)
		history.Append(vllm.Batch{Stream: s, Seq: seq, Payload: payload})
	}
	chains := []*kvcastv1.RouterEvent{chain(1, 5000), chain(5001, 10_000), chain(10_001, 15_000)}
	for _, e := range chains {
		s.Apply(e)
		publish()
	}
	for range 3 {
		publish()
	}
	if at, ok := history.Find(s, 5); !ok || at != 5 {
		t.Fatalf("before a state, batch 5 is at %d, %t", at, ok)
	}
	var batches []vllm.Batch
	state := s.State(0, false)
	for _, e := range chains {
		batches = state.Apply(e, 1, batches)
	}
	if batches = state.End(1, batches); len(batches) < 2 {
		t.Fatalf("the state has %d batches", len(batches))
	}
	for _, b := range batches {
		if at, ok := history.Find(s, b.Seq); ok {
			t.Errorf("seq %d of the state is continued by the stream's batch at %d", b.Seq, at)
		}
	}
	publish()
	if at, ok := history.Find(s, 6); !ok || at != 6 {
		t.Errorf("the batch after the state is at %d, %t", at, ok)
	}
}

// TestStateKeepsTheTiersOfTheStream copies a state while the index is ahead: it has the block in a tier of later, into which the
// stream then moves it by its hash alone.
func TestStateKeepsTheTiersOfTheStream(t *testing.T) {
	t.Parallel()
	s := vllm.NewStream("w", 0, "t", wire.FormMap, 0)
	s.Apply(chain(1, 2))
	s.Batch(1)
	state := s.State(0, false)
	moved := chain(1, 2)
	moved.Tier = 2
	batches := state.End(1, state.Apply(moved, 1, nil))
	if len(batches) != 1 {
		t.Fatalf("the state has %d batches", len(batches))
	}
	var d wire.Decoder
	b, err := d.Decode(batches[0].Payload)
	if err != nil || len(b.Events) != 2 {
		t.Fatalf("the batch has %d events, %v", len(b.Events), err)
	}
	if e := b.Events[1]; e.Medium != "GPU" || len(e.BlockHashes) != 2 || len(e.Tokens) != 4 {
		t.Errorf("got the blocks %v in %s with %d tokens, want 1 and 2 in GPU with 4", e.BlockHashes, e.Medium, len(e.Tokens))
	}
}

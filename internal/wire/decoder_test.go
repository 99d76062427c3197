package wire_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

var cleared = []any{"AllBlocksCleared"}

// TestDecodeEvent decodes one event between two clears. It compares the event's JSON, or the
// reason for skipping it. The clears must be decoded as well.
func TestDecodeEvent(t *testing.T) {
	pairs := []any{[]any{1, 2}, []any{2, 3}}
	store := []any{"BlockStored", []any{5}, nil, []any{1, 2}, 2, nil, "GPU", nil, nil}
	with := func(tail ...any) []any { return append(append([]any{}, store...), tail...) }
	const plain = `"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[1,2],"block_size":2`
	for _, c := range []struct {
		name  string
		event any
		want  string
	}{
		{"array stops after block_size", []any{"BlockStored", []any{5}, nil, []any{1, 2}, 2}, plain},
		{"array without block_size", []any{"BlockStored", []any{5}, nil, []any{1, 2}}, "missing_field"},
		{"nil block_size", []any{"BlockStored", []any{5}, nil, []any{1, 2}, nil}, "missing_field"},
		{"nil hashes", []any{"BlockRemoved", nil}, "missing_field"},
		{"remove without hashes", []any{"BlockRemoved"}, "missing_field"},
		{"all twelve", with(3, "full_attention", 128), plain + `,"medium":"GPU","group_idx":3,"spec_kind":"full_attention","sliding_window":128`},
		{"thirteen", with(3, "full_attention", 128, "more"), plain + `,"medium":"GPU","group_idx":3,"spec_kind":"full_attention","sliding_window":128`},
		{"group, nil kind", with(3, nil, 128), plain + `,"medium":"GPU","group_idx":3,"sliding_window":128`},
		{"nil group, kind", with(nil, "mamba", nil), plain + `,"medium":"GPU","spec_kind":"mamba"`},
		{"nil group, nil kind, window", with(nil, nil, 128), plain + `,"medium":"GPU","sliding_window":128`},
		{"mm infos shift", with([]any{nil}, 3, "mamba", 128), plain + `,"medium":"GPU","group_idx":3,"spec_kind":"mamba","sliding_window":128,"block_mm_infos":[null]`},
		{"nil mm infos shift, detected by the group", with(nil, 3, "mamba", 128), plain + `,"medium":"GPU","group_idx":3,"spec_kind":"mamba","sliding_window":128`},
		{"nil mm infos shift, detected by the kind", with(nil, nil, "mamba", 128), plain + `,"medium":"GPU","spec_kind":"mamba","sliding_window":128`},
		{"group is a map", with(obj{}), "bad_type"},
		{"group is a bool", with(true), "bad_type"},
		{"window is a string", with(1, "mamba", "x"), "bad_type"},
		{"metadata for lora_name", []any{"BlockStored", []any{5}, nil, []any{1, 2}, 2, nil, nil, obj{"cache_salt": "s", "session_id": nil, "x": []any{1}}},
			plain + `,"cache_salt":"s"`},
		{"bad metadata", []any{"BlockStored", []any{5}, nil, []any{1, 2}, 2, nil, nil, obj{"cache_salt": 3}}, "bad_type"},
		{"extra keys are no list", []any{"BlockStored", []any{5}, nil, []any{1, 2}, 2, nil, nil, nil, "x"}, "bad_type"},
		{"lora_id is a float", []any{"BlockStored", []any{5}, nil, []any{1, 2}, 2, 1.5}, "bad_type"},
		{"block_size above 32 bits", []any{"BlockStored", []any{5}, nil, []any{1, 2}, uint64(1) << 32}, "bad_type"},
		{"token above 32 bits", []any{"BlockStored", []any{5}, nil, []any{1, uint64(1) << 32}, 2}, "bad_type"},
		{"largest token", []any{"BlockStored", []any{5}, nil, []any{uint64(math.MaxUint32)}, 2},
			`"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[4294967295],"block_size":2`},
		{"tokens under signed codes", []any{"BlockStored", []any{5}, nil, raw{0x92, 0xd0, 0x01, 0xd3, 0, 0, 0, 0, 0, 0, 0, 2}, raw{0xd2, 0, 0, 0, 2}}, plain},
		{"nil token", []any{"BlockStored", []any{5}, nil, []any{1, nil}, 2}, "bad_type"},
		{"tokens are bytes", []any{"BlockStored", []any{5}, nil, []byte{1, 2}, 2}, "bad_type"},
		{"hashes of bytes", []any{"BlockRemoved", []any{[]byte{1}, []byte{1, 2, 3, 4, 5, 6, 7, 8, 9}, []byte{0, 0, 0, 0, 0, 0, 0, 0, 2}}},
			`"kind":"removed","block_hashes":["1","144964032628459529","2"]`},
		{"hash of no bytes", []any{"BlockRemoved", []any{[]byte{}}}, "bad_type"},
		{"nil hash", []any{"BlockRemoved", []any{nil}}, "bad_type"},
		{"hashes are no list", []any{"BlockRemoved", 5}, "bad_type"},
		{"parent is a string", []any{"BlockStored", []any{5}, "x", []any{1, 2}, 2}, "bad_type"},
		{"parent 0", []any{"BlockStored", []any{5}, 0, []any{1, 2}, 2}, `"kind":"stored","block_hashes":["5"],"parent":"0","token_ids":[1,2],"block_size":2`},
		{"pairs", []any{"BlockStored", []any{5}, nil, pairs, 2},
			`"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[1,2,3],"is_eagle":true,"block_size":2`},
		{"pairs in a map", obj{"type": "BlockStored", "block_hashes": []any{5}, "token_ids": pairs, "block_size": 2},
			`"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[1,2,3],"is_eagle":true,"block_size":2`},
		{"triple among pairs", []any{"BlockStored", []any{5}, nil, []any{[]any{1, 2}, []any{1, 2, 3}}, 2}, "bad_type"},
		{"triples", []any{"BlockStored", []any{5}, nil, []any{[]any{1, 2, 3}, []any{1, 2, 3}}, 2}, "bad_type"},
		{"number among pairs", []any{"BlockStored", []any{5}, nil, []any{[]any{1, 2}, 3}, 2}, "bad_type"},
		{"pair among numbers", []any{"BlockStored", []any{5}, nil, []any{3, []any{1, 2}}, 2}, "bad_type"},
		{"negative in a pair", []any{"BlockStored", []any{5}, nil, []any{[]any{1, -2}}, 2}, "bad_type"},
		{"blocks of AIBrix", obj{"type": "BLOCK_STORED", "block_hashes": []any{5, 6}, "token_ids": []any{[]any{1, 2, 3}, []any{4}}},
			`"kind":"stored","block_hashes":["5","6"],"parent":null,"token_ids":[1,2,3,4],"block_size":3`},
		{"two-token blocks of AIBrix are no pairs", obj{"type": "BLOCK_STORED", "block_hashes": []any{5}, "token_ids": []any{[]any{1, 2}}},
			`"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[1,2],"block_size":2`},
		{"ragged blocks of AIBrix", obj{"type": "BLOCK_STORED", "block_hashes": []any{5}, "token_ids": []any{[]any{1, 2}, []any{1}, []any{1, 2}}}, "bad_type"},
		{"longer last block of AIBrix", obj{"type": "BLOCK_STORED", "block_hashes": []any{5}, "token_ids": []any{[]any{1}, []any{1, 2}}}, "bad_type"},
		{"AIBrix without block size", obj{"type": "BLOCK_STORED", "block_hashes": []any{5}, "token_ids": []any{1}}, "missing_field"},
		{"AIBrix in milliseconds", obj{"type": "ALL_BLOCKS_CLEARED", "timestamp": uint64(1757500000250)}, `"kind":"cleared","ts":1757500000.25`},
		{"timestamp NaN", obj{"type": "ALL_BLOCKS_CLEARED", "timestamp": math.NaN()}, `"kind":"cleared"`},
		{"timestamp as MessagePack's extension", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "timestamp": raw("\xd6\xff\x5a\x4a\xf6\xa5")},
			`"kind":"removed","block_hashes":["1"]`},
		{"timestamp as text", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "timestamp": "2026-11-26T12:00:00Z"}, `"kind":"removed","block_hashes":["1"]`},
		{"model of another type", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "model_name": []any{1}}, `"kind":"removed","block_hashes":["1"]`},
		{"session of another type", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "session_id": obj{"id": 5}}, `"kind":"removed","block_hashes":["1"]`},
		{"session in a clear", obj{"type": "AllBlocksCleared", "session_id": 7}, `"kind":"cleared"`},
		{"Mooncake store", obj{"event_type": "stored", "seq_hashes": []any{5}, "block_size": nil, "token_ids": nil, "medium": "cpu"},
			`"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[],"block_size":0,"medium":"cpu"`},
		{"Mooncake remove", obj{"event_type": "removed", "seq_hashes": []any{-1}}, `"kind":"removed","block_hashes":["18446744073709551615"]`},
		{"Mooncake clear", obj{"event_type": "cleared"}, `"kind":"cleared"`},
		{"Mooncake's hashes are strings", obj{"event_type": "removed", "seq_hashes": []any{"x"}}, "bad_type"},
		{"Mooncake's hashes are missing", obj{"event_type": "removed"}, "missing_field"},
		{"seq_hashes mean nothing to vLLM", obj{"type": "BlockRemoved", "block_hashes": []any{5}, "seq_hashes": "x"}, `"kind":"removed","block_hashes":["5"]`},
		{"Mooncake's tag under type", obj{"type": "stored"}, "unknown_tag"},
		{"unknown tag", []any{"BlockMoved", "x"}, "unknown_tag"},
		{"unknown tag, known keys of other types", obj{"block_hashes": "x", "medium": 3, "type": "BlockMoved"}, "unknown_tag"},
		{"tag is bytes", []any{[]byte("BlockRemoved"), []any{5}}, "bad_tag"},
		{"tag is no UTF-8", []any{raw("\xa1\xff"), []any{5}}, "bad_utf8"},
		{"type is an int", obj{"type": 3}, "bad_tag"},
		{"type is nil", obj{"type": nil}, "bad_tag"},
		{"empty map", obj{}, "bad_tag"},
		{"nil", nil, "bad_event_shape"},
		{"string", "AllBlocksCleared", "bad_event_shape"},
		{"key that is no string", raw("\x82\x05\x91\x01\xa4type\xb0AllBlocksCleared"), `"kind":"cleared"`},
		{"type is last", raw("\x82\xacblock_hashes\x91\x05\xa4type\xacBlockRemoved"), `"kind":"removed","block_hashes":["5"]`},
		{"fields of another kind are passed over", obj{"type": "BlockRemoved", "block_hashes": []any{5}, "token_ids": "x", "parent_block_hash": 3, "lora_id": 1},
			`"kind":"removed","block_hashes":["5"]`},
		{"clear with fields", obj{"type": "AllBlocksCleared", "block_hashes": []any{5}, "medium": "CPU"}, `"kind":"cleared","medium":"CPU"`},
		{"first bad field counts", obj{"type": "BlockRemoved", "block_hashes": 1, "medium": raw("\xa1\xff")}, "bad_type"},
		{"bad UTF-8", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "medium": raw("\xa1\xff")}, "bad_utf8"},
		{"bad UTF-8 of the model", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "model_name": raw("\xa1\xff")}, `"kind":"removed","block_hashes":["1"]`},
		{"empty session", obj{"type": "BlockRemoved", "block_hashes": []any{1}, "session_id": ""}, `"kind":"removed","block_hashes":["1"]`},
		{"opaque pairs", []any{"BlockStored", []any{5}, nil, []any{[]any{1, "x"}}, 1},
			`"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[],"is_eagle":true,"opaque_tokens":true,"block_size":1`},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := decodeOf(t, cleared, c.event, cleared)
			want := `{"ts":1.5,"dp_rank":0,"form":"array","events":[{"kind":"cleared"},{` + c.want + `},{"kind":"cleared"}]}`
			if !strings.HasPrefix(c.want, `"`) {
				want = `{"ts":1.5,"dp_rank":0,"form":"array","events":[{"kind":"cleared"},{"kind":"cleared"}],"skipped":[{"index":1,"reason":"` + c.want + `"}]}`
			}
			got := string(b.AppendJSON(nil))
			got = strings.Replace(got, `,"flags":["tokens_mismatch"]`, "", 1)
			if diff := cmp.Diff(parse(t, want), parse(t, got)); diff != "" {
				t.Errorf("batch differs (-want +got):\n%s", diff)
			}
		})
	}
}

func parse(t *testing.T, s string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %s", err, s)
	}
	return v
}

// nested returns n nested arrays.
func nested(n int) raw { return append(bytes.Repeat([]byte{0x91}, n-1), 0x90) }

// TestDecodeBatch decodes unusual and invalid batches.
func TestDecodeBatch(t *testing.T) {
	const clear = `"events":[{"kind":"cleared"}]}`
	for _, c := range []struct {
		name  string
		batch any
		want  string
	}{
		{"no rank", []any{1, []any{cleared}}, `{"ts":1,"dp_rank":null,"form":"array",` + clear},
		{"nil rank", []any{1, []any{cleared}, nil}, `{"ts":1,"dp_rank":null,"form":"array",` + clear},
		{"nil ts", []any{nil, []any{cleared}}, `{"ts":null,"dp_rank":null,"form":"array",` + clear},
		{"milliseconds", []any{uint64(1757500000250), []any{cleared}}, `{"ts":1757500000.25,"dp_rank":null,"form":"array",` + clear},
		{"float32", []any{float32(1.5), []any{cleared}}, `{"ts":1.5,"dp_rank":null,"form":"array",` + clear},
		{"map", obj{"ts": 1, "events": []any{cleared}, "data_parallel_rank": 3, "x": obj{}}, `{"ts":1,"dp_rank":3,"form":"map",` + clear},
		{"SGLang's rank", obj{"events": []any{cleared}, "attn_dp_rank": 3}, `{"ts":null,"dp_rank":3,"form":"map",` + clear},
		{"map16 and wide numbers", raw("\xde\x00\x02\xda\x00\x06events\xdc\x00\x01\x91\xd9\x10AllBlocksCleared\xa2ts\xcf\x00\x00\x00\x00\x00\x00\x00\x01"),
			`{"ts":1,"dp_rank":null,"form":"map",` + clear},
		{"key that is no string", raw("\x82\x05\x05\xa6events\x91\x91\xb0AllBlocksCleared"), `{"ts":null,"dp_rank":null,"form":"map",` + clear},
		{"events twice", raw("\x82\xa6events\x92\x91\xb0AllBlocksCleared\x05\xa6events\x91\x91\xb0AllBlocksCleared"), `{"ts":null,"dp_rank":null,"form":"map",` + clear},
		{"empty array", []any{}, "bad_batch_shape"},
		{"ts alone", []any{1}, "bad_batch_shape"},
		{"map without events", obj{"ts": 1}, "bad_batch_shape"},
		{"string", "x", "bad_batch_shape"},
		{"ts is a map", []any{obj{}, []any{}}, "bad_batch_shape"},
		{"ts is infinite", []any{math.Inf(1), []any{}}, "bad_ts"},
		{"rank is negative", []any{1, []any{}, -1}, "bad_batch_shape"},
		{"rank above 32 bits", []any{1, []any{}, uint64(1) << 32}, "bad_batch_shape"},
		{"rank is a string", []any{1, []any{}, "x"}, "bad_batch_shape"},
		{"trailing", raw("\x92\x01\x90\xc0"), "trailing_bytes"},
		{"truncated header", raw("\xdc\x00"), "truncated"},
		{"truncated string", raw("\x92\x01\x91\x92\xb0AllBlocksCleared\xa5Bloc"), "truncated"},
		{"missing events", raw("\x92\x01\x93\x90"), "truncated"},
		{"missing hashes", raw("\x92\x01\x91\x92\xacBlockRemoved\x93\x01"), "truncated"},
		{"missing tokens", raw("\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0\x93\x01"), "truncated"},
		{"bad event, then truncated", raw("\x92\x01\x92\x05\x92\xb0AllBlocksCleared"), "truncated"},
		{"oversize string", raw("\x92\x01\x91\x91\xd9\xff"), "oversize"},
		{"oversize bytes in a bad event", raw("\x92\x01\x91\x92\x05\xc6\xff\xff\xff\xff"), "oversize"},
		{"oversize tokens", raw("\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0\xdc\xff\xff\x01"), "oversize"},
		{"oversize ext", raw("\x92\xc9\xff\xff\xff\xff\x01\x90"), "oversize"},
		{"oversize map", raw("\xdf\xff\xff\xff\xff"), "oversize"},
		{"reserved code in a skipped value", []any{1, []any{}, 0, raw{0xc1}}, "bad_code"},
		{"reserved code in a bad event", []any{1, []any{[]any{5, raw{0xc1}}}}, "bad_code"},
		{"reserved code among tokens", []any{1, []any{[]any{"BlockStored", []any{1}, nil, []any{raw{0xc1}}, 1}}}, "bad_code"},
		{"sixteen deep", []any{1, []any{}, 0, nested(15)}, `{"ts":1,"dp_rank":0,"form":"array","events":[]}`},
		{"seventeen deep", []any{1, []any{}, 0, nested(16)}, "depth"},
		{"sixteen deep in an event", []any{1, []any{[]any{"AllBlocksCleared", nested(13)}}}, `{"ts":1,"dp_rank":null,"form":"array",` + clear},
		{"seventeen deep in an event", []any{1, []any{[]any{"AllBlocksCleared", nested(14)}}}, "depth"},
		{"seventeen deep in a map event", []any{1, []any{obj{"type": "AllBlocksCleared", "x": nested(14)}}}, "depth"},
		{"seventeen deep in metadata", []any{1, []any{[]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, obj{"x": nested(13)}}}}, "depth"},
		{"seventeen deep in extra keys", []any{1, []any{[]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, nil, nested(14)}}}, "depth"},
		{"seventeen deep among tokens", []any{1, []any{[]any{"BlockStored", []any{1}, nil, nested(14), 1}}}, "depth"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d wire.Decoder
			b, err := d.Decode(pack(t, c.batch))
			if !strings.HasPrefix(c.want, "{") {
				var e wire.Error
				if !errors.As(err, &e) || e.Name() != c.want {
					t.Errorf("error %v, want %s", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(parse(t, c.want), parse(t, string(b.AppendJSON(nil)))); diff != "" {
				t.Errorf("batch differs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestEventsAndBlocksAreBounded decodes the largest batches and larger ones, with a Decoder that has decoded others before.
func TestEventsAndBlocksAreBounded(t *testing.T) {
	testclass.WithoutRace(t)
	remove := func(blocks ...int) any {
		var events []any
		for _, n := range blocks {
			events = append(events, []any{"BlockRemoved", same(n, "\x00")})
		}
		return batchOf(events...)
	}
	var d wire.Decoder
	for _, c := range []struct {
		name            string
		batch           any
		events, skipped int
		want            error
	}{
		{"the most blocks", remove(1, wire.MaxBlocks-1), 2, 0, nil},
		{"too many blocks", remove(1, wire.MaxBlocks), 0, 0, wire.ErrTooManyBlocks},
		{"fewer blocks", remove(1<<19, 1<<18), 2, 0, nil},
		{"too many blocks in memory that is kept", remove(1<<19, 1<<19, 1), 0, 0, wire.ErrTooManyBlocks},
		{"the most events", []any{1, same(wire.MaxEvents, "\x91\xb0AllBlocksCleared")}, wire.MaxEvents, 0, nil},
		{"the most bad events", []any{1, same(wire.MaxEvents, "\x05")}, 0, wire.MaxEvents, nil},
		{"too many events", []any{1, same(wire.MaxEvents+1, "\x05")}, 0, 0, wire.ErrTooManyEvents},
	} {
		b, err := d.Decode(pack(t, c.batch))
		if !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.want)
		} else if err == nil && (len(b.Events) != c.events || len(b.Skipped) != c.skipped) {
			t.Errorf("%s: %d events, %d skipped, want %d and %d", c.name, len(b.Events), len(b.Skipped), c.events, c.skipped)
		}
	}
}

// TestEveryPrefixIsTruncated cuts each valid vector at every byte: every prefix must be
// rejected as truncated.
func TestEveryPrefixIsTruncated(t *testing.T) {
	var d wire.Decoder
	for _, v := range readVectors(t) {
		if v.Error != "" {
			continue
		}
		for n := range v.payload {
			// A length in a prefix may exceed its remaining bytes.
			if _, err := d.Decode(v.payload[:n]); !errors.Is(err, wire.ErrTruncated) && !errors.Is(err, wire.ErrOversize) {
				t.Errorf("%s: %d bytes of %d: error %v, want truncated", v.Name, n, len(v.payload), err)
			}
		}
	}
}

// TestStringsOutliveTheBatch checks that only strings remain valid after the next Decode.
func TestStringsOutliveTheBatch(t *testing.T) {
	var d wire.Decoder
	payload := pack(t, batchOf(obj{"type": "BlockRemoved", "block_hashes": []any{1}, "medium": "CPU", "reason": "one"}))
	b, err := d.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	medium, reason := b.Events[0].Medium, b.Events[0].Rare.Note
	clear(payload)
	for k := range 1000 {
		if _, err := d.Decode(pack(t, batchOf(obj{"type": "BlockRemoved", "block_hashes": []any{1}, "medium": k2s(k), "reason": k2s(k)}))); err != nil {
			t.Fatal(err)
		}
	}
	if medium != "CPU" || reason != "one" {
		t.Errorf("medium %q, reason %q", medium, reason)
	}
}

func k2s(k int) string { return strings.Repeat("x", k%300) + string(rune('a'+k%26)) }

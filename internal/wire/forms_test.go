package wire_test

import (
	"encoding/binary"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// oneEvent decodes a batch of one event; nil if it was skipped.
func oneEvent(tb testing.TB, event any) *wire.Event {
	tb.Helper()
	b := decodeOf(tb, event)
	if len(b.Events) == 0 {
		return nil
	}
	return &b.Events[0]
}

// integers returns all encodings of a number.
func integers(v int64) (all []raw) {
	wide := func(code byte, n int) {
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], uint64(v))
		all = append(all, append(raw{code}, b[8-n:]...))
	}
	if v >= -32 && v <= 127 {
		all = append(all, raw{byte(v)})
	}
	for k, code := range []byte{0xcc, 0xcd, 0xce, 0xcf} {
		if v >= 0 && (k == 3 || v < 1<<(8<<k)) {
			wide(code, 1<<k)
		}
	}
	for k, code := range []byte{0xd0, 0xd1, 0xd2, 0xd3} {
		if most := int64(1) << (8<<k - 1); k == 3 || v < most && v >= -most {
			wide(code, 1<<k)
		}
	}
	return all
}

// TestEveryWidthOfIntegers checks that every encoding of a number decodes to the number, in
// every field. Engines do not always write the shortest encoding.
func TestEveryWidthOfIntegers(t *testing.T) {
	for _, v := range []int64{0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536, math.MaxInt32, math.MaxUint32, math.MaxInt64} {
		for _, code := range integers(v) {
			small := code
			if v > math.MaxUint32 {
				small = raw{7}
			}
			want := &wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{uint64(v)}, Parent: uint64(v), HasParent: true,
				LoRAID: v, HasLoRAID: true, GroupIdx: v, HasGroupIdx: true, Rare: &wire.Rare{SlidingWindow: v, HasSlidingWindow: true},
				Tokens: []uint32{uint32(v)}, BlockSize: uint32(v)}
			if v > math.MaxUint32 {
				want.Tokens, want.BlockSize = []uint32{7}, 7
			}
			got := oneEvent(t, []any{"BlockStored", []any{code}, code, []any{small}, small, code, nil, nil, nil, code, nil, code})
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%x: event differs (-want +got):\n%s", []byte(code), diff)
			}
			b, err := new(wire.Decoder).Decode(pack(t, []any{code, []any{}, small}))
			if wantTime := inSeconds(v); err != nil || b.Time != wantTime || b.Rank != want.BlockSize {
				t.Errorf("%x: batch of time %v, rank %d, error %v; want %v, %d", []byte(code), b.Time, b.Rank, err, wantTime, want.BlockSize)
			}
		}
	}
	for _, v := range []int64{-1, -32, -33, -128, -129, -32768, -32769, math.MinInt32, math.MinInt32 - 1, math.MinInt64} {
		for _, code := range integers(v) {
			ev := oneEvent(t, []any{"BlockRemoved", []any{code}, nil, code})
			if ev == nil || ev.BlockHashes[0] != uint64(v) || ev.GroupIdx != v {
				t.Errorf("%x: event %+v, want hash %d", []byte(code), ev, uint64(v))
			}
			for _, bad := range []any{
				[]any{"BlockStored", []any{1}, nil, []any{code}, 1},
				[]any{"BlockStored", []any{1}, nil, []any{1}, code},
			} {
				if b := decodeOf(t, bad); len(b.Events) != 0 || b.Skipped[0].Reason != wire.ReasonBadType {
					t.Errorf("%x: token or block size was read", []byte(code))
				}
			}
		}
	}
}

func inSeconds(v int64) float64 {
	if v > 1e11 {
		return float64(v) / 1000
	}
	return float64(v)
}

// TestHashesOfBytes checks all lengths up to those of digests, with every code for bytes.
func TestHashesOfBytes(t *testing.T) {
	for n := 1; n <= 40; n++ {
		b := make([]byte, n)
		for k := range b {
			b[k] = byte(0xf0 + k)
		}
		want := uint64(0)
		for _, c := range b[max(0, n-8):] {
			want = want<<8 | uint64(c)
		}
		for _, header := range []string{string([]byte{0xc4, byte(n)}), string([]byte{0xc5, 0, byte(n)}), string([]byte{0xc6, 0, 0, 0, byte(n)})} {
			code := append(raw(header), b...)
			ev := oneEvent(t, []any{"BlockStored", []any{code, code}, code, []any{1}, 1})
			if ev == nil || ev.Parent != want || !slices.Equal(ev.BlockHashes, []uint64{want, want}) {
				t.Errorf("%x: got %+v, want %d", []byte(code), ev, want)
			}
		}
	}
}

// TestInvalidHashesAreBadType checks that other types are errors, as a hash and as a parent.
func TestInvalidHashesAreBadType(t *testing.T) {
	for _, v := range []any{"5", "", 5.0, float32(5), true, []byte{}, []any{}, obj{}, raw("\xd4\x01\x05")} {
		for _, ev := range []any{
			[]any{"BlockRemoved", []any{v}},
			[]any{"BlockStored", []any{1}, v, []any{1}, 1},
			obj{"type": "BlockStored", "block_hashes": []any{1}, "parent_block_hash": v, "token_ids": []any{1}, "block_size": 1},
			obj{"event_type": "removed", "seq_hashes": []any{1, v}},
		} {
			if b := decodeOf(t, ev); len(b.Events) != 0 || b.Skipped[0].Reason != wire.ReasonBadType {
				t.Errorf("%#v passed for a hash in %v", v, ev)
			}
		}
	}
}

// TestTimes checks the time of batches, and the time of events, which AIBrix sends.
func TestTimes(t *testing.T) {
	for _, c := range []struct {
		ts   any
		want float64
		err  string
	}{
		{1757500000.25, 1757500000.25, ""},
		{float32(0.5), 0.5, ""},
		{1757500000, 1757500000, ""},
		{uint64(1757500000250), 1757500000.25, ""},
		{1757500000250.0, 1757500000.25, ""},
		{1e11, 1e11, ""},
		{uint64(1e11) + 1000, 100000001, ""},
		{-5, -5, ""},
		{0, 0, ""},
		{math.NaN(), 0, "bad_ts"},
		{math.Inf(-1), 0, "bad_ts"},
		{"1", 0, "bad_batch_shape"},
		{true, 0, "bad_batch_shape"},
	} {
		for _, batch := range []any{[]any{c.ts, []any{}}, []any{c.ts, []any{}, nil, 1, "x", nil}, obj{"ts": c.ts, "events": []any{}}} {
			b, err := new(wire.Decoder).Decode(pack(t, batch))
			switch {
			case c.err != "":
				if err == nil || err.Error() != "decode batch: "+c.err {
					t.Errorf("%v: error %v, want %s", batch, err, c.err)
				}
			case err != nil || b.Time != c.want || !b.HasTime:
				t.Errorf("%v: error %v, batch %+v, want %v", batch, err, b, c.want)
			}
		}
		ev := oneEvent(t, obj{"type": "ALL_BLOCKS_CLEARED", "timestamp": c.ts})
		// Nothing depends on the time of an event: a value of another type is skipped.
		if ev == nil || c.err != "" && ev.Rare != nil || c.err == "" && (ev.Rare == nil || ev.Rare.Time != c.want || !ev.Rare.HasTime) {
			t.Errorf("event at %v: %+v, want %v %s", c.ts, ev, c.want, c.err)
		}
	}
}

// fullStore has every field of an array store. Older versions have fewer.
var fullStore = []any{"BlockStored", []any{5, 6}, 4, []any{1, 2}, 1, 3, "CPU", "adapter", []any{nil, []any{"x"}}, 2, "full_attention", 128}

// TestArrayEventsMayBeShort checks that an array event may end after any field, and may have
// more elements than are known.
func TestArrayEventsMayBeShort(t *testing.T) {
	whole := &wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{5, 6}, Parent: 4, HasParent: true, Tokens: []uint32{1, 2}, BlockSize: 1,
		LoRAID: 3, HasLoRAID: true, Medium: "CPU", LoRAName: "adapter", Raw: &wire.Raw{ExtraKeys: []byte("\x92\xc0\x91\xa1x")},
		GroupIdx: 2, HasGroupIdx: true, SpecKind: "full_attention", Rare: &wire.Rare{SlidingWindow: 128, HasSlidingWindow: true}}
	for n := range len(fullStore) + 4 {
		event := slices.Clone(fullStore[:min(n, len(fullStore))])
		for k := len(fullStore); k < n; k++ {
			event = append(event, []any{nil, obj{"x": []any{1, "y", 2.5, []byte{1}}}, "x", 7}[k%4])
		}
		want := *whole
		for k, unset := range map[int]func(){
			11: func() { want.Rare = nil },
			10: func() { want.SpecKind = "" },
			9:  func() { want.GroupIdx, want.HasGroupIdx = 0, false },
			8:  func() { want.Raw, want.Inputs = nil, wire.InputsWithoutField },
			7:  func() { want.LoRAName = "" },
			6:  func() { want.Medium = "" },
			5:  func() { want.LoRAID, want.HasLoRAID = 0, false },
		} {
			if n <= k {
				unset()
			}
		}
		got := oneEvent(t, event)
		if n < 5 {
			if got != nil {
				t.Errorf("%d fields passed for a store", n)
			}
			continue
		}
		if diff := cmp.Diff(&want, got); diff != "" {
			t.Errorf("%d fields: event differs (-want +got):\n%s", n, diff)
		}
	}
	for n, want := range []*wire.Event{nil, nil,
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5}},
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5}, Medium: "CPU"},
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5}, Medium: "CPU", GroupIdx: 1, HasGroupIdx: true},
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5}, Medium: "CPU", GroupIdx: 1, HasGroupIdx: true},
	} {
		if diff := cmp.Diff(want, oneEvent(t, []any{"BlockRemoved", []any{5}, "CPU", 1, obj{}}[:n])); diff != "" {
			t.Errorf("remove of %d fields differs (-want +got):\n%s", n, diff)
		}
	}
	if got := oneEvent(t, []any{"AllBlocksCleared", "kvcr", nil, 1}); got == nil || got.Kind != wire.KindCleared {
		t.Errorf("clear with more fields: %+v", got)
	}
}

// TestNilFields sets each field of a store to nil, in both forms: nil means absent, and only
// four fields are required.
func TestNilFields(t *testing.T) {
	names := []string{"", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
	for k := 1; k < len(fullStore); k++ {
		array := slices.Clone(fullStore)
		array[k] = nil
		asMap := obj{"type": "BlockStored"}
		for j, name := range names[1:] {
			asMap[name] = fullStore[j+1]
		}
		absent := maps.Clone(asMap)
		asMap[names[k]] = nil
		delete(absent, names[k])
		want := oneEvent(t, absent)
		for _, ev := range []any{array, asMap} {
			if diff := cmp.Diff(want, oneEvent(t, ev)); diff != "" {
				t.Errorf("%s nil in %T: event differs (-absent +nil):\n%s", names[k], ev, diff)
			}
		}
		if must := k == 1 || k == 3 || k == 4; (want == nil) != must {
			t.Errorf("without %s the event is %+v", names[k], want)
		}
	}
	all := obj{"type": "BlockRemoved", "block_hashes": []any{5}}
	for _, name := range []string{"medium", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership",
		"session_id", "cache_salt", "timestamp", "model_name", "event_type", "seq_hashes", "mm_keys", "block_mm_infos", "event_version", "tenant_id", "origin", "remaining_copy_counts"} {
		all[name] = nil
	}
	if diff := cmp.Diff(&wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{5}}, oneEvent(t, all)); diff != "" {
		t.Errorf("all nil: event differs (-want +got):\n%s", diff)
	}
}

// TestMapsInAnyOrder draws the order of a map's keys, which include unknown keys with nested
// values.
func TestMapsInAnyOrder(t *testing.T) {
	type member struct {
		key   any
		value any
	}
	known := []member{
		{"type", "BlockStored"}, {"block_hashes", []any{5, -6}}, {"parent_block_hash", []byte{0, 0, 0, 0, 0, 0, 0, 0, 4}}, {"token_ids", []any{1, 2}},
		{"block_size", 1}, {"lora_id", 3}, {"medium", "CPU"}, {"lora_name", "adapter"}, {"extra_keys", []any{nil, []any{"x"}}},
		{"group_idx", 2}, {"kv_cache_spec_kind", "full_attention"}, {"kv_cache_spec_sliding_window", 128},
		{"locality", "LOCAL"}, {"ownership", "kvcr"}, {"session_id", "session"}, {"cache_salt", "salt"}, {"model_name", "model"},
		{"timestamp", 1.5}, {"block_mm_infos", []any{nil}}, {"mm_keys", []any{[]any{}}}, {"origin", "REUSED"},
	}
	unknown := []member{
		{"event_version", 1}, {"tenant_id", "default"}, {"backend_id", nil}, {"typed", obj{"type": "BlockRemoved"}}, {7, []any{[]any{1}, obj{"x": obj{}}}},
		{nil, nil}, {"", []byte{1, 2}}, {"block_hash", "x"}, {2.5, raw("\xd6\xff\x00\x00\x00\x01")}, {[]any{1}, true},
		{"lookahead_token_ids", []any{1, 2}}, {"remaining_copy_counts", []any{1, 2}},
	}
	want := &wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{5, math.MaxUint64 - 5}, Parent: 4, HasParent: true, Tokens: []uint32{1, 2}, BlockSize: 1,
		LoRAID: 3, HasLoRAID: true, Medium: "CPU", LoRAName: "adapter", CacheSalt: "salt",
		GroupIdx: 2, HasGroupIdx: true, SpecKind: "full_attention", Origin: wire.OriginReused,
		Raw: &wire.Raw{ExtraKeys: []byte("\x92\xc0\x91\xa1x"), BlockMMInfos: []byte("\x91\xc0"), MMKeys: []byte("\x91\x90")},
		Rare: &wire.Rare{Locality: "LOCAL", Ownership: "kvcr", Note: "session", ModelName: "model", Time: 1.5, HasTime: true,
			SlidingWindow: 128, HasSlidingWindow: true}}
	rapid.Check(t, func(rt *rapid.T) {
		members := append(slices.Clone(known), unknown[:rapid.IntRange(0, len(unknown)).Draw(rt, "unknown keys")]...)
		members = rapid.Permutation(members).Draw(rt, "order")
		b := msgp.AppendArrayHeader(nil, 2)
		b = msgp.AppendNil(b)
		b = msgp.AppendArrayHeader(b, 1)
		b = msgp.AppendMapHeader(b, uint32(len(members)))
		for _, m := range members {
			b = appendValue(t, appendValue(t, b, m.key), m.value)
		}
		got, err := new(wire.Decoder).Decode(b)
		if err != nil || len(got.Events) != 1 {
			rt.Fatalf("error %v, batch %+v", err, got)
		}
		if diff := cmp.Diff(want, &got.Events[0]); diff != "" {
			rt.Fatalf("event differs (-want +got):\n%s", diff)
		}
	})
}

// TestDuplicateKeys checks that the last of two values is used.
func TestDuplicateKeys(t *testing.T) {
	for _, c := range []struct {
		name string
		ev   raw
		want *wire.Event
	}{
		{"medium", raw("\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\x05\xa6medium\xa3GPU\xa6medium\xa3CPU"),
			&wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{5}, Medium: "CPU"}},
		{"type", raw("\x83\xa4type\xabBlockStored\xacblock_hashes\x91\x05\xa4type\xacBlockRemoved"),
			&wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{5}}},
		{"hashes", raw("\x83\xa4type\xacBlockRemoved\xacblock_hashes\x92\x05\x06\xacblock_hashes\x91\x07"),
			&wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{7}}},
		{"tokens", raw("\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x05\xa9token_ids\x91\x92\x01\x02\xa9token_ids\x91\x03\xaablock_size\x01"),
			&wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{5}, Tokens: []uint32{3}, BlockSize: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, oneEvent(t, c.ev)); diff != "" {
				t.Errorf("event differs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMooncake checks Mooncake's events, with and without the keys of vLLM, which Mooncake may
// send as well.
func TestMooncake(t *testing.T) {
	event := func(kind string, more obj) obj {
		ev := obj{"event_id": 1, "timestamp": uint64(1770000000000), "event_type": kind, "model_name": nil, "block_size": nil,
			"additional_salt": nil, "lora_name": nil, "tenant_id": "default", "backend_id": "worker-0", "medium": "cpu", "dp_rank": 0,
			"seq_hashes": []any{42}, "base_block_idx": nil}
		for k, v := range more {
			ev[k] = v
		}
		return ev
	}
	stored := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{42}, Medium: "cpu", Rare: &wire.Rare{Time: 1770000000, HasTime: true}}
	removed := stored
	removed.Kind = wire.KindRemoved
	object := stored
	object.BlockHashes, object.Rare = nil, &wire.Rare{Time: 1770000000, HasTime: true, HasObjectKey: true}
	content := stored
	content.Tokens, content.BlockSize = []uint32{1, 2}, 2
	for _, c := range []struct {
		name string
		ev   obj
		want *wire.Event
	}{
		{"stored", event("stored", obj{"parent_hash": nil, "token_ids": nil}), &stored},
		{"stored, no tokens at all", event("stored", nil), &stored},
		{"stored with the keys of vLLM", event("stored", obj{"type": "BlockStored", "block_hashes": []any{42}, "token_ids": nil, "parent_block_hash": nil}), &stored},
		{"stored with content", event("stored", obj{"token_ids": []any{1, 2}, "block_size": 2}), &content},
		{"removed", event("removed", nil), &removed},
		{"stored, an object's name only", event("stored", obj{"type": "BlockStored", "object_key": "9af1_0_k", "seq_hashes": []any{}, "block_hashes": []any{}}), &object},
		{"removed with the keys of vLLM", event("removed", obj{"type": "BlockRemoved", "block_hashes": []any{42}}), &removed},
		{"both words disagree", event("removed", obj{"type": "BlockStored", "block_hashes": []any{42}}), nil},
		{"other event type beside vLLM's", event("moved", obj{"type": "BlockStored", "block_hashes": []any{42}}), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, oneEvent(t, c.ev)); diff != "" {
				t.Errorf("event differs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMMInfosShiftTheGroup checks that the attention group is found by type if
// block_mm_infos precede it, whichever of the four fields are nil.
func TestMMInfosShiftTheGroup(t *testing.T) {
	for mask := range 16 {
		tail := []any{[]any{nil}, 3, "mamba", 128}
		want := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{5}, Tokens: []uint32{1}, BlockSize: 1}
		if mask&1 == 0 {
			tail[0] = nil
		} else {
			want.Raw = &wire.Raw{BlockMMInfos: []byte("\x91\xc0")}
		}
		if mask&2 == 0 {
			tail[1] = nil
		} else {
			want.GroupIdx, want.HasGroupIdx = 3, true
		}
		if mask&4 == 0 {
			tail[2] = nil
		} else {
			want.SpecKind = "mamba"
		}
		if mask&8 == 0 {
			tail[3] = nil
		} else {
			want.Rare = &wire.Rare{SlidingWindow: 128, HasSlidingWindow: true}
		}
		event := append([]any{"BlockStored", []any{5}, nil, []any{1}, 1, nil, nil, nil, nil}, tail...)
		if diff := cmp.Diff(&want, oneEvent(t, event)); diff != "" {
			t.Errorf("%v: event differs (-want +got):\n%s", tail, diff)
		}
	}
}

// TestKeysInAnyOrder decodes map events with permuted keys and similar unknown keys, using a
// decoder that expects the previous event's order and a fresh one.
func TestKeysInAnyOrder(t *testing.T) {
	testclass.WithoutRace(t)
	fields := []struct {
		key   string
		value any
	}{
		{"type", "BlockStored"},
		{"block_hashes", []any{uint64(1) << 63}},
		{"parent_block_hash", 5},
		{"token_ids", []any{1, 1000}},
		{"block_size", 2},
		{"lora_id", nil},
		{"medium", "GPU"},
		{"lora_name", "adapter"},
		{"extra_keys", []any{nil}},
		{"group_idx", 3},
		{"kv_cache_spec_kind", "full_attention"},
		{"kv_cache_spec_sliding_window", 128},
		{"locality", "LOCAL"},
		{"session_id", "s"},
		{"cache_salt", "salt"},
		{"model_name", "m"},
		{"parent_block_hasi", 6},
		{"parent_block_has", 6},
		{"parent_block_hashes", 6},
		{"kv_cache_spec_kinf", "mamba"},
		{"kv_cache_spec_sliding_windox", 1},
		{"lora_namf", "other"},
		{"typf", "x"},
		{"mediun", "CPU"},
		{strings.Repeat("k", 40), 0},
	}
	r := rand.New(rand.NewPCG(6, 7))
	var known wire.Decoder
	for range 2000 {
		r.Shuffle(r.IntN(len(fields)+1), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
		event := msgp.AppendMapHeader(nil, uint32(len(fields)))
		for _, f := range fields {
			event = msgp.AppendString(event, f.key)
			event = append(event, pack(t, f.value)...)
		}
		payload := pack(t, batchOf(raw(event), raw(event)))
		var fresh wire.Decoder
		for _, d := range []*wire.Decoder{&known, &fresh} {
			b, err := d.Decode(payload)
			if err != nil {
				t.Fatal(err)
			}
			const event = `{"kind":"stored","block_hashes":["9223372036854775808"],"parent":"5","token_ids":[1,1000],"block_size":2,` +
				`"medium":"GPU","lora_name":"adapter","extra_keys":[null],"group_idx":3,"spec_kind":"full_attention","sliding_window":128,` +
				`"locality":"LOCAL","session_id":"s","cache_salt":"salt","model_name":"m"}`
			want := parse(t, `{"ts":1.5,"dp_rank":0,"form":"array","events":[`+event+`,`+event+`]}`)
			if diff := cmp.Diff(want, parse(t, string(b.AppendJSON(nil)))); diff != "" {
				t.Fatalf("batch differs (-want +got):\n%s", diff)
			}
		}
	}
}

// TestKeysOfOtherTypesAreSkipped decodes map events with keys that are not strings, including
// the code 0xc1 that stands for no key internally.
func TestKeysOfOtherTypesAreSkipped(t *testing.T) {
	for name, key := range map[string]string{
		"negative": "\xff", "nil": "\xc0", "false": "\xc2", "list": "\x92\xff\xff", "bytes": "\xc4\x02\xff\xff",
	} {
		pairs := strings.Repeat(key+"\xa1x", 12)
		b := decodeOf(t, raw("\x8d"+pairs+"\xa4type\xb0AllBlocksCleared"), raw("\x8d"+"\xa4type\xb0AllBlocksCleared"+strings.Repeat(key+"\xff", 12)))
		if len(b.Events) != 2 || len(b.Skipped) != 0 {
			t.Errorf("%s: batch is %s", name, b.AppendJSON(nil))
		}
	}
	var d wire.Decoder
	if _, err := d.Decode(pack(t, batchOf(raw("\x82"+strings.Repeat("\xc1", 40))))); !errors.Is(err, wire.ErrBadCode) {
		t.Errorf("error %v, want %v", err, wire.ErrBadCode)
	}
}

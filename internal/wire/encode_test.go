package wire_test

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// drawEvent draws the event of a batch at an index, with fields that the form has.
func drawEvent(t *rapid.T, index int, f engineForm) wire.Event {
	text := rapid.StringN(0, 40, -1)
	hash := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 300), rapid.Uint64Range(1<<63, 1<<63+300))
	number := rapid.OneOf(rapid.Int64(), rapid.Int64Range(-200, 200))
	maybe := func(label string) (int64, bool) {
		if !rapid.Bool().Draw(t, "has "+label) {
			return 0, false
		}
		return number.Draw(t, label), true
	}
	lists := rapid.SampledFrom([]string{"", "\x90", "\x91\xc0", "\x92\xc0\x91\xa1x", "\x91\x91\x92\xa1m\xff",
		"\x91\x91\x82\xa4type\xaacache_salt\xa4salt\xa1s"})
	list := func(label string) []byte {
		if s := lists.Draw(t, label); s != "" {
			return []byte(s)
		}
		return nil
	}
	ev := wire.Event{Index: index, Kind: rapid.SampledFrom([]wire.Kind{wire.KindStored, wire.KindRemoved, wire.KindCleared}).Draw(t, "kind")}
	var (
		raws wire.Raw
		rare wire.Rare
	)
	inMap, isStore := f.inMap(index), ev.Kind == wire.KindStored
	has := func(length int) bool { return f.has(index, length) }
	hasMetadata := f.producer == sglang && !inMap && isStore
	if ev.Kind != wire.KindCleared {
		ev.BlockHashes = rapid.SliceOf(hash).Draw(t, "hashes")
		if has(7) {
			ev.Medium = text.Draw(t, "medium")
		}
		shift := 0
		if isStore && f.producer == dynamo {
			shift = 1
		}
		if has(10+shift) && !hasMetadata {
			ev.GroupIdx, ev.HasGroupIdx = maybe("group")
		}
		if has(11+shift) && !hasMetadata && (isStore || inMap) {
			ev.SpecKind = text.Draw(t, "kind of attention")
		}
		if has(12+shift) && !hasMetadata && (isStore || inMap) {
			rare.SlidingWindow, rare.HasSlidingWindow = maybe("window")
		}
	}
	if isStore {
		if ev.HasParent = rapid.Bool().Draw(t, "has parent"); ev.HasParent {
			ev.Parent = hash.Draw(t, "parent")
		}
		drawContent(t, &ev, f.producer)
		if has(6) {
			ev.LoRAID, ev.HasLoRAID = maybe("lora id")
		}
		if has(8) && !hasMetadata {
			ev.LoRAName = text.Draw(t, "lora name")
		}
		if has(9) && !hasMetadata {
			raws.ExtraKeys = list("extra keys")
		}
		if !has(9) && (!hasMetadata || !has(8)) {
			ev.Inputs = wire.InputsWithoutField
		}
		if inMap || f.producer == dynamo && has(10) {
			raws.BlockMMInfos = list("mm infos")
		}
	}
	if inMap || hasMetadata && has(8) {
		ev.CacheSalt = text.Draw(t, "salt")
		if isStore {
			rare.Note = text.Draw(t, "session")
		}
	}
	if inMap {
		if isStore {
			raws.MMKeys = list("mm keys")
		}
		rare.Locality = text.Draw(t, "locality")
		rare.Ownership = text.Draw(t, "ownership")
		if ev.Kind != wire.KindCleared && len(ev.BlockHashes) > 0 {
			rare.HasObjectKey = rapid.Bool().Draw(t, "object key")
		}
		rare.ModelName = text.Draw(t, "model")
		switch ev.Kind {
		case wire.KindStored:
			ev.Origin = rapid.SampledFrom([]wire.Origin{wire.OriginUnknown, wire.OriginNew, wire.OriginReused}).Draw(t, "origin")
		case wire.KindRemoved:
			rare.Note = text.Draw(t, "reason")
			if n := len(ev.BlockHashes); n > 0 && rapid.Bool().Draw(t, "has remaining copies") {
				rare.RemainingCopies = rapid.SliceOfN(rapid.Uint32(), n, n).Draw(t, "remaining copies")
			}
		case wire.KindCleared:
		}
		if rare.HasTime = rapid.Bool().Draw(t, "has time"); rare.HasTime {
			rare.Time = rapid.Float64Range(-1e11, 1e11).Draw(t, "time")
		}
	}
	if raws.ExtraKeys != nil || raws.BlockMMInfos != nil || raws.MMKeys != nil {
		ev.Raw = &raws
	}
	if !reflect.DeepEqual(rare, wire.Rare{}) {
		ev.Rare = &rare
	}
	return ev
}

// drawContent draws a store's tokens and block size.
func drawContent(t *rapid.T, ev *wire.Event, p producer) {
	token := rapid.OneOf(rapid.Uint32(), rapid.Uint32Range(0, 70_000))
	if p == aibrix {
		// The length of the first block is the block size.
		if ev.Tokens = rapid.SliceOf(token).Draw(t, "tokens"); len(ev.Tokens) > 0 {
			ev.BlockSize = rapid.Uint32Range(1, uint32(len(ev.Tokens))).Draw(t, "block size")
		}
		return
	}
	ev.BlockSize = rapid.OneOf(rapid.Uint32(), rapid.Just(uint32(0))).Draw(t, "block size")
	switch rapid.IntRange(0, 3).Draw(t, "tokens are") {
	case 0:
		ev.OpaqueTokens = true
	case 1:
		ev.Eagle = true
		ev.Tokens = rapid.SliceOfN(token, 2, -1).Draw(t, "tokens")
	default:
		ev.Tokens = rapid.SliceOf(token).Draw(t, "tokens")
	}
}

func drawBatch(t *rapid.T, f engineForm) *wire.Batch {
	b := &wire.Batch{Form: f.batchForm}
	if b.HasTime = rapid.Bool().Draw(t, "has time"); b.HasTime {
		b.Time = rapid.Float64Range(-1e11, 1e11).Draw(t, "time")
	}
	if b.HasRank = rapid.Bool().Draw(t, "has rank"); b.HasRank {
		b.Rank = rapid.Uint32().Draw(t, "rank")
	}
	if rapid.Bool().Draw(t, "has publisher id") {
		b.PublisherID = rapid.SliceOfN(rapid.Byte(), wire.PublisherIDBytes, wire.PublisherIDBytes).Draw(t, "publisher id")
	}
	for k := range rapid.IntRange(0, 20).Draw(t, "events") {
		b.Events = append(b.Events, drawEvent(t, k, f))
	}
	return b
}

// TestDecodeReadsEveryForm draws batches in the forms of all producers.
func TestDecodeReadsEveryForm(t *testing.T) {
	testclass.WithoutRace(t)
	var d wire.Decoder
	rapid.Check(t, func(rt *rapid.T) {
		f := engineForms.Draw(rt, "form")
		want := drawBatch(rt, f)
		got, err := d.Decode(f.encode(t, want))
		if err != nil {
			rt.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			rt.Fatalf("batch differs (-want +got):\n%s", diff)
		}
	})
}

// TestEncodeAppends checks that AppendBatch keeps the existing bytes of dst.
func TestEncodeAppends(t *testing.T) {
	var e wire.Encoder
	got := e.AppendBatch([]byte("before"), store(1))
	if want := append([]byte("before"), e.AppendBatch(nil, store(1))...); !bytes.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// TestEncodeAsEngines compares encoded batches with the batches of engines.
func TestEncodeAsEngines(t *testing.T) {
	b := &wire.Batch{Time: 1.5, HasTime: true, Events: []wire.Event{
		{Kind: wire.KindStored, BlockHashes: []uint64{5}, Tokens: []uint32{1}, BlockSize: 1, Medium: "GPU"},
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5}, Medium: "GPU"},
		{Kind: wire.KindCleared},
	}}
	for _, c := range []struct {
		e    wire.Encoder
		want any
	}{
		{wire.Encoder{}, []any{1.5, []any{
			[]any{"BlockStored", []any{int64(5)}, nil, []any{int64(1)}, int64(1), nil, "GPU", nil, nil, nil, nil, nil},
			[]any{"BlockRemoved", []any{int64(5)}, "GPU", nil},
			[]any{"AllBlocksCleared"},
		}, nil}},
		{wire.Encoder{BatchForm: wire.FormMap, EventForm: wire.FormMap}, map[string]any{"ts": 1.5, "events": []any{
			map[string]any{"type": "BlockStored", "block_hashes": []any{int64(5)}, "parent_block_hash": nil, "token_ids": []any{int64(1)},
				"block_size": int64(1), "lora_id": nil, "medium": "GPU", "lora_name": nil},
			map[string]any{"type": "BlockRemoved", "block_hashes": []any{int64(5)}, "medium": "GPU"},
			map[string]any{"type": "AllBlocksCleared"},
		}}},
	} {
		got, left, err := msgp.ReadIntfBytes(c.e.AppendBatch(nil, b))
		if err != nil || len(left) != 0 {
			t.Fatalf("%d bytes left, error %v", len(left), err)
		}
		if diff := cmp.Diff(c.want, got, cmp.FilterValues(bothInts, cmp.Comparer(sameInt))); diff != "" {
			t.Errorf("batch differs (-want +got):\n%s", diff)
		}
	}
}

// bothInts and sameInt ignore msgp's choice of int64 or uint64.
func bothInts(a, b any) bool {
	_, okA := toInt(a)
	_, okB := toInt(b)
	return okA && okB
}

func sameInt(a, b any) bool {
	x, _ := toInt(a)
	y, _ := toInt(b)
	return x == y
}

func toInt(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case uint64:
		return int64(v), true
	default:
		return 0, false
	}
}

// TestEncodeRoundTrips draws batches, and decodes what they are encoded to.
func TestEncodeRoundTrips(t *testing.T) {
	var d wire.Decoder
	rapid.Check(t, func(t *rapid.T) {
		f := plainForms.Draw(t, "form")
		e := wire.Encoder{BatchForm: f.batchForm, EventForm: f.eventForm}
		b := drawBatch(t, f)
		got, err := d.Decode(e.AppendBatch(nil, b))
		if err != nil {
			t.Fatal(err)
		}
		if b.Form == 0 {
			b.Form = wire.FormArray
		}
		if diff := cmp.Diff(b, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("batch differs (-want +got):\n%s", diff)
		}
	})
}

// TestMapEventOfAllKeys encodes events with every field, in maps with more keys than a
// one-byte header can count.
func TestMapEventOfAllKeys(t *testing.T) {
	list := []byte("\x91\xc0")
	rare := wire.Rare{Locality: "LOCAL", Ownership: "kvcr", Note: "session", ModelName: "model", HasObjectKey: true, Time: 1, HasTime: true,
		SlidingWindow: 1, HasSlidingWindow: true}
	copies := rare
	copies.RemainingCopies = []uint32{1}
	want := &wire.Batch{Form: wire.FormMap, Time: 1.5, HasTime: true, Rank: 1, HasRank: true, PublisherID: publisherID, Events: []wire.Event{
		{Index: 0, Kind: wire.KindStored, BlockHashes: []uint64{1}, Parent: 2, HasParent: true, Tokens: []uint32{3}, BlockSize: 1, LoRAID: 4, HasLoRAID: true,
			LoRAName: "adapter", Medium: "CPU", SpecKind: "kind", CacheSalt: "salt", GroupIdx: 5, HasGroupIdx: true, Origin: wire.OriginReused,
			Raw: &wire.Raw{ExtraKeys: list, BlockMMInfos: list, MMKeys: list}, Rare: &rare},
		{Index: 1, Kind: wire.KindRemoved, BlockHashes: []uint64{1}, Medium: "CPU", SpecKind: "kind", CacheSalt: "salt", GroupIdx: 5, HasGroupIdx: true, Rare: &copies},
	}}
	e := wire.Encoder{BatchForm: wire.FormMap, EventForm: wire.FormMap}
	payload := e.AppendBatch(nil, want)
	if !bytes.Contains(payload, []byte("\xde\x00")) {
		t.Errorf("no map of more than 15 keys in %x", payload)
	}
	got, err := new(wire.Decoder).Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("batch differs (-want +got):\n%s", diff)
	}
}

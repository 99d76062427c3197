package wire_test

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/wire"
)

// drawEvent draws an event that form can carry.
func drawEvent(t *rapid.T, index int, form wire.Form) wire.Event {
	text := rapid.StringN(0, 40, -1)
	hash := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 300))
	number := rapid.OneOf(rapid.Int64(), rapid.Int64Range(-200, 200))
	maybe := func(label string) (int64, bool) {
		if !rapid.Bool().Draw(t, "has "+label) {
			return 0, false
		}
		return number.Draw(t, label), true
	}
	lists := rapid.SampledFrom([]string{"", "\x90", "\x91\xc0", "\x92\xc0\x91\xa1x", "\x91\x91\x92\xa1m\xff"})
	list := func(label string) []byte {
		if s := lists.Draw(t, label); s != "" {
			return []byte(s)
		}
		return nil
	}
	ev := wire.Event{Index: index, Kind: rapid.SampledFrom([]wire.Kind{wire.KindStored, wire.KindRemoved, wire.KindCleared}).Draw(t, "kind")}
	if ev.Kind != wire.KindCleared {
		ev.BlockHashes = rapid.SliceOf(hash).Draw(t, "hashes")
		ev.Medium = text.Draw(t, "medium")
		ev.GroupIdx, ev.HasGroupIdx = maybe("group")
		if form == wire.FormMap || ev.Kind == wire.KindStored {
			ev.SpecKind = text.Draw(t, "kind of attention")
			ev.SlidingWindow, ev.HasSlidingWindow = maybe("window")
		}
	}
	if ev.Kind == wire.KindStored {
		if ev.HasParent = rapid.Bool().Draw(t, "has parent"); ev.HasParent {
			ev.Parent = hash.Draw(t, "parent")
		}
		token := rapid.OneOf(rapid.Uint32(), rapid.Uint32Range(0, 70_000))
		switch rapid.IntRange(0, 3).Draw(t, "tokens are") {
		case 0:
			ev.OpaqueTokens = true
		case 1:
			ev.Eagle = true
			ev.Tokens = rapid.SliceOfN(token, 2, -1).Draw(t, "tokens")
		default:
			ev.Tokens = rapid.SliceOf(token).Draw(t, "tokens")
		}
		ev.BlockSize = rapid.Uint32().Draw(t, "block size")
		ev.LoRAID, ev.HasLoRAID = maybe("lora id")
		ev.LoRAName = text.Draw(t, "lora name")
		ev.ExtraKeys = list("extra keys")
		if form == wire.FormMap {
			ev.BlockMMInfos = list("mm infos")
			ev.MMKeys = list("mm keys")
		}
	}
	if form == wire.FormMap {
		ev.Locality = text.Draw(t, "locality")
		ev.Ownership = text.Draw(t, "ownership")
		ev.CacheSalt = text.Draw(t, "salt")
		ev.SessionID = text.Draw(t, "session")
		ev.ModelName = text.Draw(t, "model")
		if ev.HasTime = rapid.Bool().Draw(t, "has time"); ev.HasTime {
			ev.Time = rapid.Float64Range(-1e11, 1e11).Draw(t, "time")
		}
	}
	return ev
}

func drawBatch(t *rapid.T, batchForm, eventForm wire.Form) *wire.Batch {
	b := &wire.Batch{Form: batchForm}
	if b.HasTime = rapid.Bool().Draw(t, "has time"); b.HasTime {
		b.Time = rapid.Float64Range(-1e11, 1e11).Draw(t, "time")
	}
	if b.HasRank = rapid.Bool().Draw(t, "has rank"); b.HasRank {
		b.Rank = rapid.Uint32().Draw(t, "rank")
	}
	for k := range rapid.IntRange(0, 20).Draw(t, "events") {
		b.Events = append(b.Events, drawEvent(t, k, eventForm))
	}
	return b
}

// TestDecodeIsTheInverseOfEncode draws batches in all forms.
func TestDecodeIsTheInverseOfEncode(t *testing.T) {
	var d wire.Decoder
	forms := rapid.SampledFrom([]wire.Form{wire.FormArray, wire.FormMap})
	rapid.Check(t, func(t *rapid.T) {
		e := wire.Encoder{BatchForm: forms.Draw(t, "batch form"), EventForm: forms.Draw(t, "event form")}
		want := drawBatch(t, e.BatchForm, e.EventForm)
		got, err := d.Decode(e.AppendBatch(nil, want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("batch differs (-want +got):\n%s", diff)
		}
	})
}

// TestEncodeAppends checks that AppendBatch leaves what stands before alone.
func TestEncodeAppends(t *testing.T) {
	var e wire.Encoder
	got := e.AppendBatch([]byte("before"), store(1))
	if want := append([]byte("before"), e.AppendBatch(nil, store(1))...); !bytes.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// TestEncodeAsVLLM compares with the shapes that vLLM gives its structs.
func TestEncodeAsVLLM(t *testing.T) {
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

// bothInts and sameInt make nothing of msgp's choice of int64 or uint64.
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

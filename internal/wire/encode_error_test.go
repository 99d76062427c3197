package wire_test

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/wire"
)

// encode encodes a batch that can be encoded.
func encode(tb interface {
	Helper()
	Fatal(args ...any)
}, e wire.Encoder, b *wire.Batch) []byte {
	tb.Helper()
	payload, err := e.AppendBatch(nil, b)
	if err != nil {
		tb.Fatal(err)
	}
	return payload
}

// TestEncodeRejects checks which batches are rejected, and the reason in the error.
func TestEncodeRejects(t *testing.T) {
	ofMap := wire.Encoder{EventForm: wire.FormMap}
	store := func(change func(ev *wire.Event)) *wire.Batch {
		b := store(1)
		b.Events = append([]wire.Event{{Kind: wire.KindCleared}}, b.Events...)
		change(&b.Events[1])
		return b
	}
	remove := func(change func(ev *wire.Event)) *wire.Batch {
		b := &wire.Batch{Events: []wire.Event{{Kind: wire.KindCleared}, {Kind: wire.KindRemoved, BlockHashes: []uint64{5}}}}
		change(&b.Events[1])
		return b
	}
	for _, c := range []struct {
		name  string
		e     wire.Encoder
		b     *wire.Batch
		event int
		field string
		want  string
	}{
		{"no batch", wire.Encoder{}, nil, -1, "Batch", "is nil"},
		{"batch form", wire.Encoder{BatchForm: 3}, store(func(*wire.Event) {}), -1, "Encoder.BatchForm", "is 3, want FormArray or FormMap"},
		{"event form", wire.Encoder{EventForm: 255}, store(func(*wire.Event) {}), -1, "Encoder.EventForm", "is 255"},
		{"time is no number", wire.Encoder{}, &wire.Batch{HasTime: true, Time: math.NaN()}, -1, "Time", "is NaN"},
		{"time is infinite", wire.Encoder{BatchForm: wire.FormMap}, &wire.Batch{HasTime: true, Time: math.Inf(-1)}, -1, "Time", "is -Inf"},
		{"time in milliseconds", wire.Encoder{}, &wire.Batch{HasTime: true, Time: 1.7e12}, -1, "Time", "is 1.7e+12, want at most 1e+11"},
		{"publisher id too short", wire.Encoder{}, &wire.Batch{PublisherID: make([]byte, 15)}, -1, "PublisherID", "has 15 bytes, want 16"},
		{"publisher id empty", wire.Encoder{}, &wire.Batch{PublisherID: []byte{}}, -1, "PublisherID", "has 0 bytes"},
		{"no kind", wire.Encoder{}, store(func(ev *wire.Event) { ev.Kind = 0 }), 1, "Kind", "is 0"},
		{"no kind in a map", ofMap, store(func(ev *wire.Event) { ev.Kind = 0 }), 1, "Kind", "is 0"},
		{"unknown kind", wire.Encoder{}, store(func(ev *wire.Event) { ev.Kind = 4 }), 1, "Kind", "is 4"},
		{"unknown kind in a map", ofMap, store(func(ev *wire.Event) { ev.Kind = 255 }), 1, "Kind", "is 255"},
		{"bad medium", wire.Encoder{}, store(func(ev *wire.Event) { ev.Medium = "\xff" }), 1, "Medium", "is not UTF-8"},
		{"bad locality", ofMap, remove(func(ev *wire.Event) { ev.Rare = &wire.Rare{Locality: "x\xc3"} }), 1, "Rare.Locality", "is not UTF-8"},
		{"extra keys are no list", wire.Encoder{}, store(func(ev *wire.Event) { ev.Raw = &wire.Raw{ExtraKeys: []byte("\x80")} }), 1, "Raw.ExtraKeys", "is not one MessagePack list"},
		{"extra keys are empty", wire.Encoder{}, store(func(ev *wire.Event) { ev.Raw = &wire.Raw{ExtraKeys: []byte{}} }), 1, "Raw.ExtraKeys", "is not one"},
		{"extra keys are two", wire.Encoder{}, store(func(ev *wire.Event) { ev.Raw = &wire.Raw{ExtraKeys: []byte("\x90\x90")} }), 1, "Raw.ExtraKeys", "is not one"},
		{"mm keys are cut off", ofMap, store(func(ev *wire.Event) { ev.Raw = &wire.Raw{MMKeys: []byte("\x92\xc0")} }), 1, "Raw.MMKeys", "is not one"},
		{"mm infos too deep", ofMap, store(func(ev *wire.Event) {
			ev.Raw = &wire.Raw{BlockMMInfos: []byte(strings.Repeat("\x91", 14) + "\xc0")}
		}), 1, "Raw.BlockMMInfos", "is not one"},
		{"time of an event", ofMap, remove(func(ev *wire.Event) { ev.Rare = &wire.Rare{HasTime: true, Time: math.Inf(1)} }), 1, "Rare.Time", "is +Inf"},
		{"unknown origin", ofMap, store(func(ev *wire.Event) { ev.Origin = 3 }), 1, "Origin", "is 3"},
		{"fewer counts than hashes", ofMap, remove(func(ev *wire.Event) { ev.Rare = &wire.Rare{RemainingCopies: []uint32{}} }), 1, "Rare.RemainingCopies", "has 0 counts for 1 hashes"},
		{"more counts than hashes", ofMap, remove(func(ev *wire.Event) { ev.Rare = &wire.Rare{RemainingCopies: []uint32{1, 2}} }), 1, "Rare.RemainingCopies", "has 2 counts for 1 hashes"},
		{"EAGLE without a pair", wire.Encoder{}, store(func(ev *wire.Event) { ev.Eagle, ev.Tokens = true, ev.Tokens[:1] }), 1, "Tokens", "has 1 tokens, want at least 2 for EAGLE"},
		{"EAGLE and opaque", ofMap, store(func(ev *wire.Event) { ev.Eagle, ev.OpaqueTokens, ev.Tokens = true, true, nil }), 1, "Tokens", "opaque"},
		{"opaque with tokens", ofMap, store(func(ev *wire.Event) { ev.OpaqueTokens = true }), 1, "Tokens", "opaque"},
		{"salt in an array", wire.Encoder{}, store(func(ev *wire.Event) { ev.CacheSalt = "s" }), 1, "CacheSalt", "a stored event in an array has no such field"},
		{"mm infos in an array", wire.Encoder{}, store(func(ev *wire.Event) { ev.Raw = &wire.Raw{BlockMMInfos: []byte("\x90")} }), 1, "Raw.BlockMMInfos", "no such field"},
		{"origin in an array", wire.Encoder{}, store(func(ev *wire.Event) { ev.Origin = wire.OriginNew }), 1, "Origin", "no such field"},
		{"counts in an array", wire.Encoder{}, remove(func(ev *wire.Event) { ev.Rare = &wire.Rare{RemainingCopies: []uint32{1}} }), 1, "Rare.RemainingCopies", "a removed event in an array has no such field"},
		{"counts of a store", ofMap, store(func(ev *wire.Event) { ev.Rare = &wire.Rare{RemainingCopies: []uint32{1}} }), 1, "Rare.RemainingCopies", "a stored event in a map has no such field"},
		{"tokens of a remove", ofMap, remove(func(ev *wire.Event) { ev.Tokens = []uint32{1} }), 1, "Tokens", "a removed event in a map has no such field"},
		{"hashes of a clear", ofMap, remove(func(ev *wire.Event) { ev.Kind = wire.KindCleared }), 1, "BlockHashes", "a cleared event in a map has no such field"},
		{"medium of a clear", wire.Encoder{}, remove(func(ev *wire.Event) { ev.Kind, ev.BlockHashes, ev.Medium = wire.KindCleared, nil, "GPU" }), 1, "Medium", "a cleared event in an array has no such field"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dst := []byte("before and behind")
			got, err := c.e.AppendBatch(dst[:6], c.b)
			if event, field := rejected(err); event != c.event || field != c.field || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one of event %d, field %s: %s", err, c.event, c.field, c.want)
			}
			if string(got) != "before" || string(dst) != "before and behind" {
				t.Errorf("dst is %q of %q", got, dst)
			}
		})
	}
}

// rejected returns the event and the field that the error of an Encoder names. The event is -1 in an error of the batch
// or the Encoder.
func rejected(err error) (event int, field string) {
	text, ok := strings.CutPrefix(fmt.Sprint(err), "encode batch: ")
	if !ok {
		return -1, ""
	}
	event = -1
	if n, err := fmt.Sscanf(text, "event %d:", &event); n == 1 && err == nil {
		_, text, _ = strings.Cut(text, ": ")
	}
	field, _, _ = strings.Cut(text, ": ")
	return event, field
}

// TestEncodeErrorText checks the text of errors.
func TestEncodeErrorText(t *testing.T) {
	var e wire.Encoder
	_, err := e.AppendBatch(nil, &wire.Batch{Events: []wire.Event{{Kind: wire.KindCleared}, {}}})
	want := "encode batch: event 1: Kind: is 0, want KindStored, KindRemoved or KindCleared"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	_, err = e.AppendBatch(nil, nil)
	if want := "encode batch: Batch: is nil"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// changes are edits after which a batch cannot be encoded, or not in every form.
var changes = []func(t *rapid.T, e *wire.Encoder, b *wire.Batch, ev *wire.Event){
	func(t *rapid.T, e *wire.Encoder, _ *wire.Batch, _ *wire.Event) {
		e.BatchForm = wire.Form(rapid.Uint8().Draw(t, "x"))
	},
	func(t *rapid.T, e *wire.Encoder, _ *wire.Batch, _ *wire.Event) {
		e.EventForm = wire.Form(rapid.Uint8Range(0, 3).Draw(t, "x"))
	},
	func(t *rapid.T, _ *wire.Encoder, b *wire.Batch, _ *wire.Event) {
		b.Time, b.HasTime = rapid.Float64().Draw(t, "x"), true
	},
	func(t *rapid.T, _ *wire.Encoder, b *wire.Batch, _ *wire.Event) {
		b.PublisherID = rapid.SliceOfN(rapid.Byte(), 0, 18).Draw(t, "x")
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		ev.Kind = wire.Kind(rapid.Uint8Range(0, 4).Draw(t, "x"))
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		ev.Origin = wire.Origin(rapid.Uint8Range(0, 3).Draw(t, "x"))
	},
	func(_ *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) { ev.Eagle = !ev.Eagle },
	func(_ *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) { ev.OpaqueTokens = !ev.OpaqueTokens },
	func(_ *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		ev.HasParent, ev.HasLoRAID, ev.HasGroupIdx = true, true, true
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		ev.Tokens = rapid.SliceOf(rapid.Uint32()).Draw(t, "x")
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		ev.BlockHashes = rapid.SliceOf(rapid.Uint64()).Draw(t, "x")
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		ev.BlockSize = rapid.Uint32Range(0, 5).Draw(t, "x")
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		*rapid.SampledFrom([]*string{&ev.Medium, &ev.LoRAName, &ev.SpecKind, &ev.CacheSalt}).Draw(t, "x") = drawText(t)
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		rare := &wire.Rare{}
		if ev.Rare != nil {
			*rare = *ev.Rare
		}
		ev.Rare = rare
		switch rapid.IntRange(0, 7).Draw(t, "x") {
		case 0:
			rare.Locality = drawText(t)
		case 1:
			rare.Ownership = drawText(t)
		case 2:
			rare.SessionID = drawText(t)
		case 3:
			rare.ModelName = drawText(t)
		case 4:
			rare.Time, rare.HasTime = rapid.Float64().Draw(t, "time"), true
		case 6:
			rare.HasObjectKey = true
		case 5:
			rare.SlidingWindow, rare.HasSlidingWindow = rapid.Int64().Draw(t, "window"), true
		default:
			rare.RemainingCopies = rapid.SliceOfN(rapid.Uint32(), 0, 3).Draw(t, "copies")
		}
	},
	func(t *rapid.T, _ *wire.Encoder, _ *wire.Batch, ev *wire.Event) {
		raws := &wire.Raw{}
		if ev.Raw != nil {
			*raws = *ev.Raw
		}
		ev.Raw = raws
		*rapid.SampledFrom([]*[]byte{&raws.ExtraKeys, &raws.BlockMMInfos, &raws.MMKeys}).Draw(t, "x") =
			rapid.OneOf(rapid.SliceOf(rapid.Byte()), rapid.Just([]byte("\x91\xc0"))).Draw(t, "raw")
	},
}

func drawText(t *rapid.T) string {
	return rapid.SampledFrom([]string{"", "x", "GPU", "\xff", "ok\xc3"}).Draw(t, "text")
}

// TestEncodeRoundTripsOrNamesTheField draws batches, and changes them so that some cannot be
// encoded: those are rejected with the name of an existing field, all others round-trip.
func TestEncodeRoundTripsOrNamesTheField(t *testing.T) {
	var d wire.Decoder
	rejected, same := 0, 0
	property := func(t *rapid.T) {
		f := plainForms.Draw(t, "form")
		e := wire.Encoder{BatchForm: f.batchForm, EventForm: f.eventForm}
		b := drawBatch(t, f)
		for range rapid.IntRange(0, 3).Draw(t, "changes") {
			ev := new(wire.Event)
			if len(b.Events) > 0 {
				ev = &b.Events[rapid.IntRange(0, len(b.Events)-1).Draw(t, "event")]
			}
			rapid.SampledFrom(changes).Draw(t, "change")(t, &e, b, ev)
		}
		before := []byte("before")
		payload, err := e.AppendBatch(before, b)
		if err != nil {
			rejected++
			checkEncodeError(t, b, err)
			if string(payload) != "before" {
				t.Errorf("dst is %q after an error", payload)
			}
			return
		}
		same++
		got, err := d.Decode(payload[len(before):])
		if err != nil {
			t.Fatalf("%v\n%x", err, payload)
		}
		want := *b
		if want.Form = e.BatchForm; want.Form == 0 {
			want.Form = wire.FormArray
		}
		want.Events = nil
		for _, ev := range b.Events {
			want.Events = append(want.Events, withoutUnset(ev))
		}
		if diff := cmp.Diff(&want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("batch differs (-want +got):\n%s", diff)
		}
	}
	for range 20 { // a few batches may all have the same outcome
		rapid.Check(t, property)
		if rejected > 0 && same > 0 {
			break
		}
	}
	if rejected == 0 || same == 0 {
		t.Errorf("%d batches were rejected, %d were not; want some of both", rejected, same)
	}
}

// checkEncodeError checks that the error names an event of the batch and a field of it,
// or of the batch or encoder.
func checkEncodeError(t *rapid.T, b *wire.Batch, err error) {
	of := reflect.TypeFor[wire.Event]()
	event, name := rejected(err)
	switch rest, ok := strings.CutPrefix(name, "Encoder."); {
	case ok:
		of, name = reflect.TypeFor[wire.Encoder](), rest
	case event < 0:
		of = reflect.TypeFor[wire.Batch]()
	case event >= len(b.Events):
		t.Fatalf("error %v is of an event beyond %d", err, len(b.Events))
	}
	for part := range strings.SplitSeq(name, ".") {
		if of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		field, ok := of.FieldByName(part)
		if !ok {
			t.Fatalf("error %v names no field of %v", err, of)
		}
		of = field.Type
	}
}

// withoutUnset returns the event with the values of unset fields cleared.
func withoutUnset(ev wire.Event) wire.Event {
	ev.Parent = zeroUnless(ev.HasParent, ev.Parent)
	ev.LoRAID = zeroUnless(ev.HasLoRAID, ev.LoRAID)
	ev.GroupIdx = zeroUnless(ev.HasGroupIdx, ev.GroupIdx)
	var (
		raws wire.Raw
		rare wire.Rare
	)
	if ev.Raw != nil {
		raws = *ev.Raw
	}
	if ev.Rare != nil {
		rare = *ev.Rare
	}
	if len(rare.RemainingCopies) == 0 {
		rare.RemainingCopies = nil
	}
	ev.Raw, ev.Rare = nil, nil
	if raws.ExtraKeys != nil || raws.BlockMMInfos != nil || raws.MMKeys != nil {
		ev.Raw = &raws
	}
	if !reflect.DeepEqual(rare, wire.Rare{}) {
		ev.Rare = &rare
	}
	return ev
}

func zeroUnless[T any](has bool, v T) T {
	if has {
		return v
	}
	return *new(T)
}

// TestMapEventOfAllKeys encodes events with every field, in maps with more keys than a
// one-byte header can count.
func TestMapEventOfAllKeys(t *testing.T) {
	list := []byte("\x91\xc0")
	rare := wire.Rare{Locality: "LOCAL", Ownership: "kvcr", SessionID: "session", ModelName: "model", HasObjectKey: true, Time: 1, HasTime: true,
		SlidingWindow: 1, HasSlidingWindow: true}
	copies := rare
	copies.RemainingCopies = []uint32{1}
	want := &wire.Batch{Form: wire.FormMap, Time: 1.5, HasTime: true, Rank: 1, HasRank: true, PublisherID: publisherID, Events: []wire.Event{
		{Index: 0, Kind: wire.KindStored, BlockHashes: []uint64{1}, Parent: 2, HasParent: true, Tokens: []uint32{3}, BlockSize: 1, LoRAID: 4, HasLoRAID: true,
			LoRAName: "adapter", Medium: "CPU", SpecKind: "kind", CacheSalt: "salt", GroupIdx: 5, HasGroupIdx: true, Origin: wire.OriginReused,
			Raw: &wire.Raw{ExtraKeys: list, BlockMMInfos: list, MMKeys: list}, Rare: &rare},
		{Index: 1, Kind: wire.KindRemoved, BlockHashes: []uint64{1}, Medium: "CPU", SpecKind: "kind", CacheSalt: "salt", GroupIdx: 5, HasGroupIdx: true, Rare: &copies},
	}}
	payload := encode(t, wire.Encoder{BatchForm: wire.FormMap, EventForm: wire.FormMap}, want)
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
